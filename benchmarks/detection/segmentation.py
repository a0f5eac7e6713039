"""The field `segmentation` of COCO's objects: polygons, or the run lengths of a mask."""

from __future__ import annotations

import array
from typing import Any


def fault(outline: Any, height: int, width: int) -> str:
    """What is wrong with an object's polygons or run-length encoding; '' if nothing is."""
    if isinstance(outline, dict):
        if not isinstance(outline.get("counts"), (list, str)):
            return "has a segmentation without 'counts'"
        if list(outline.get("size") or []) != [height, width]:
            return f"has a segmentation of size {outline.get('size')} in {height}x{width} pixels"
        return ""
    if not isinstance(outline, list) or not outline:
        return "has no segmentation"
    for polygon in outline:
        if not isinstance(polygon, (list, array.array)) or len(polygon) < 6 or len(polygon) % 2:
            return "has a polygon that is not 3 or more points x, y"
        if not all(map(is_number, polygon)):
            return "has a polygon with something other than numbers"
    return ""


def is_number(value: Any) -> bool:
    """Whether a value from a JSON file is a finite number."""
    return type(value) in (int, float) and -1e300 < value < 1e300


def dense(outline: Any) -> Any:
    """Polygons as arrays, which take a quarter of the memory; anything else as it is."""
    try:
        return [array.array("d", polygon) for polygon in outline] if outline else outline
    except (TypeError, ValueError, OverflowError):
        return outline
