"""The field `segmentation` of COCO's objects: polygons, or the run lengths of a mask."""

from __future__ import annotations

import array
from typing import Any

import numpy as np

_MOST = 1e9  # of a coordinate in pixels, either way
_EDGE = 1 << 23  # pixels of a polygon's edge, for which pycocotools takes about a gigabyte


def fault(outline: Any, height: int, width: int) -> str:
    """What is wrong with an object's polygons or run-length encoding; '' if nothing is.

    pycocotools takes memory as these numbers say, and its loops end where they say.
    """
    pixels, side = f"{height}x{width} pixels", max(height, width)
    if isinstance(outline, dict):
        if not isinstance(outline.get("counts"), (list, str, bytes)):
            return "has a segmentation without 'counts'"
        if outline.get("size") not in ([height, width], (height, width)):
            return f"has a segmentation of size {outline.get('size')} in {pixels}"
        try:
            runs(outline["counts"], height * width)
        except ValueError as error:
            return f"has a segmentation whose runs are damaged ({error})"
        return ""
    if not isinstance(outline, list) or not outline:
        return "has no segmentation"
    for polygon in outline:
        if not isinstance(polygon, (list, array.array)) or len(polygon) < 6 or len(polygon) % 2:
            return "has a polygon that is not 3 or more points x, y"
        odd = [v for v in polygon if not (is_number(v) and -side <= v <= 2 * side)]
        if odd:
            return f"has a polygon with {odd[0]!r:.30}, no number in or near its {pixels}"
        if len(polygon) * 2 * side > _EDGE:  # no edge is longer than 3 sides
            points = np.reshape(polygon, (-1, 2))
            length = np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum()
            if length > _EDGE:
                return f"has a polygon with an edge of {length:,.0f} pixels in {pixels}"
    return ""


def runs(counts: Any, total: int) -> list[int]:
    """The lengths of runs outside and inside in turn, from a list or from COCO's compressed text.

    Raises:
      ValueError: they are not whole numbers of 0 or more whose sum is `total`.
    """
    lengths = counts if isinstance(counts, list) else _lengths(counts)
    for length in lengths:
        if type(length) is not int or length < 0:
            raise ValueError(f"{length!r} is no length")
    if sum(lengths) != total:
        raise ValueError(f"{sum(lengths)} of {total} pixels")
    return lengths


def _lengths(counts: str | bytes) -> list[int]:
    """The numbers in COCO's compressed text.

    A number has 5 bits per character, the lowest first; the 6th bit says that more follow. From the
    fourth number on, it is the difference to the run before the last.
    """
    lengths: list[int] = []
    value = shift = 0
    for character in counts.encode() if isinstance(counts, str) else counts:
        bits = character - 48
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            if shift > 64:
                raise ValueError("a number has no end")
            continue
        if bits & 16:  # the sign
            value -= 1 << shift
        lengths.append(value + lengths[-2] if len(lengths) > 2 else value)
        value = shift = 0
    return lengths


def is_number(value: Any) -> bool:
    """Whether a value from a JSON file is a number that pixels can have."""
    return type(value) in (int, float) and -_MOST < value < _MOST


def dense(outline: Any) -> Any:
    """Polygons as arrays, which take a quarter of the memory; anything else as it is."""
    try:
        return [array.array("d", polygon) for polygon in outline] if outline else outline
    except (TypeError, ValueError, OverflowError):
        return outline
