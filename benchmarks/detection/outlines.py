"""Draws the outlines of objects: the pixels inside of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from errors import one_line


def mask(outline: Any, height: int, width: int) -> np.ndarray:
    """The pixels of an object: uint8[height, width], 1 inside its outline.

    The outline must have no `segmentation.fault`. pycocotools draws the polygons. Its own decoder
    is left out, because it warns with NumPy 2, and because damaged runs can lead it beyond its
    memory.

    Raises:
      ValueError: the runs are damaged.
    """
    from pycocotools import mask as masks

    try:
        counts = outline["counts"] if isinstance(outline, dict) else None
        if counts is None:
            counts = masks.merge(masks.frPyObjects(as_lists(outline), height, width))["counts"]
        runs = counts if isinstance(counts, list) else _runs(counts)
        if sum(runs) != height * width:
            raise ValueError(f"{sum(runs)} of {height * width} pixels")
        inside = np.repeat((np.arange(len(runs)) % 2).astype(np.uint8), runs)
        return inside.reshape(width, height).T  # column by column
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"its segmentation is damaged ({one_line(error)})") from error


def as_lists(outline: Any) -> Any:
    """An outline as pycocotools takes it."""
    return list(map(list, outline)) if isinstance(outline, list) else outline


def _runs(counts: str | bytes) -> list[int]:
    """The lengths of runs outside and inside in turn, from COCO's compressed text.

    A number has 5 bits per character, the lowest first; the 6th bit says that more follow. From the
    fourth number on, it is the difference to the run before the last.
    """
    runs: list[int] = []
    value = shift = 0
    for character in counts.encode() if isinstance(counts, str) else counts:
        bits = character - 48
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:  # the sign
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = shift = 0
    return runs
