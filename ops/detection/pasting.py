"""Pastes predicted masks into images, as run-length encodings that COCO's score reads.

The rule is Detectron's (He et al. 2017), which MLPerf's reference has taken over. A mask gets a
border of one cell of zeros, and its box grows by as much. The corners of the box are cut to whole
pixels, both of which belong to it. The mask is resized to these pixels bilinearly, as
`tf.image.resize` does, and those of at least 0.5 are the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_THRESHOLD = 0.5


def paste(mask: np.ndarray, box: Sequence[float] | np.ndarray, height: int, width: int) -> Any:
    """The run lengths of an object in an image; no array of the image's size is made.

    Args:
      mask: float[S, S], the probability that a cell of the box is the object.
      box: (y0, x0, y1, x1) in pixels, finite; it may reach beyond the image.
      height, width: of the image in pixels.

    Returns:
      {"size": [height, width], "counts": bytes}, compressed as pycocotools does.
    """
    y0, x0, y1, x1 = (float(each) for each in box)
    y_first, y_shares = _resizing(y0, y1, len(mask), height)
    x_first, x_shares = _resizing(x0, x1, len(mask), width)
    inside = x_shares @ np.asarray(mask, np.float32).T @ y_shares.T >= _THRESHOLD
    return _encode(inside, y_first, x_first, height, width)


def _resizing(first: float, last: float, side: int, length: int) -> tuple[int, np.ndarray]:
    """How to resize a mask along an axis of an image.

    Args:
      first, last: the box's coordinates.
      side: S, the number of the mask's cells.
      length: of the image.

    Returns:
      The first pixel of the box in the image, and the shares of the mask's cells in each of its
      pixels from there on, float32[n, S].
    """
    centre, half = (first + last) / 2, (last - first) / 2 * (side + 2) / side
    start, end = int(centre - half), int(centre + half) + 1  # int() cuts towards zero
    count = max(end - start, 1)
    pixels = np.arange(max(start, 0), min(start + count, length))
    cells = (pixels - start + 0.5) * ((side + 2) / count) - 0.5
    cells = np.clip(cells, 0, side + 1) - 1  # the border has the numbers -1 and S
    shares = np.maximum(1 - np.abs(cells[:, None] - np.arange(side)), 0)
    return max(start, 0), shares.astype(np.float32)


def _encode(inside: np.ndarray, y_first: int, x_first: int, height: int, width: int) -> Any:
    """Run lengths from bool[columns, rows], a part of the image that begins at a pixel."""
    from pycocotools import mask as masks

    # Pixels are numbered down the columns. A run of the object begins and ends where a column
    # changes; the zeros around it are the change at its first and last pixel.
    changes = np.diff(np.pad(inside, ((0, 0), (1, 1))).astype(np.int8), axis=1) != 0
    column, row = np.nonzero(changes)
    edges = (column + x_first) * height + row + y_first
    # A run that ends at the bottom of a column goes on where the next one begins at the top.
    meets = np.flatnonzero(edges[1:] == edges[:-1])
    edges = np.delete(edges, np.concatenate([meets, meets + 1]))
    counts = np.diff(np.concatenate([[0], edges, [height * width]]))
    if len(counts) > 1 and counts[-1] == 0:
        counts = counts[:-1]
    runs = {"size": [height, width], "counts": counts.tolist()}
    return masks.frPyObjects(runs, height, width)
