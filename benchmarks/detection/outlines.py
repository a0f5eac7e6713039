"""Draws the outlines of objects: the pixels inside of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.detection import segmentation
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
        runs = segmentation.runs(counts, height * width)
        inside = np.repeat((np.arange(len(runs)) % 2).astype(np.uint8), runs)
        return inside.reshape(width, height).T  # column by column
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"its segmentation is damaged ({one_line(error)})") from error


def as_lists(outline: Any) -> Any:
    """An outline as pycocotools takes it."""
    return list(map(list, outline)) if isinstance(outline, list) else outline
