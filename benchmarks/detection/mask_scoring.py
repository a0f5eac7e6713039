"""Scores the masks of detections with pycocotools: pastes them into the image as run lengths.

A pixel of the image is of the object if the mask at its centre is at least 0.5. Between the centres
of the mask's cells the values are bilinear, and around the mask there is a border of zeros. This is
Detectron2's rule for boxes in continuous coordinates; docs/mask_rcnn.md compares an older one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.detection import scoring
from benchmarks.detection.scoring import Scorer
from common.progress import Progress

_THRESHOLD = 0.5  # the least value of a mask at an object's pixel


class MaskScorer(Scorer):
    """Scores boxes and outlines; the names of the outlines' scores begin with "mask_"."""

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        columns = self.columns(rows)
        outlined = scoring.quality(self.annotations, columns, "segm").scores
        named = {f"mask_{name}": value for name, value in outlined.items()}
        return self.quality(columns).scores | named

    def make(self, rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The columns of `Scorer`, and "segmentation" object[n], the run lengths of each object."""
        truth, progress, outlines = self.annotations, Progress(len(rows)), []
        size_of = dict(zip(truth.image_ids.tolist(), truth.sizes.tolist(), strict=True))
        for done, row in enumerate(rows, 1):
            for i, k in zip(*np.nonzero(row["score"] > 0), strict=True):
                size = size_of[int(row["image_id"][i])]
                outlines.append(encode_mask(row["masks"][i, k], row["boxes"][i, k], *size))
            progress.log(done, f"outlining objects: {done:,} of {len(rows):,} batches")
        column = np.empty(len(outlines), object)
        column[:] = outlines
        return super().make(rows) | {"segmentation": column}


def encode_mask(
    mask: np.ndarray, box: Sequence[float] | np.ndarray, height: int, width: int
) -> dict[str, Any]:
    """The run lengths of an object, with "counts" as a str, from its mask uint8[S, S]."""
    outline = paste_mask(mask.astype(np.float32) / 255, box, height, width)
    return outline | {"counts": outline["counts"].decode()}


def paste_mask(mask: np.ndarray, box: Sequence[float] | np.ndarray, height: int, width: int) -> Any:
    """The run lengths of an object in an image; no array of the image's size is made.

    `mask` float[S, S] is the probability, 0 to 1, that a cell of the box is the object; `box` is
    (y0, x0, y1, x1) in pixels, finite, and may reach beyond the image. Returns {"size": [height,
    width], "counts": bytes}, compressed as pycocotools does.
    """
    y0, x0, y1, x1 = (float(each) for each in box)
    first_row, y, y_share = _cells(y0, y1, len(mask), height)
    first_column, x, x_share = _cells(x0, x1, len(mask), width)
    padded = np.pad(np.asarray(mask, np.float32), 1).T  # columns first, as COCO's runs go
    lines = padded[:, y] * (1 - y_share) + padded[:, y + 1] * y_share
    values = lines[x] * (1 - x_share)[:, None] + lines[x + 1] * x_share[:, None]
    return _encode(values >= _THRESHOLD, first_row, first_column, height, width)


def _cells(first: float, last: float, side: int, length: int) -> tuple[int, np.ndarray, np.ndarray]:
    """The positions of a box's pixels between the cells of its mask, along an axis of the image.

    `first` and `last` are the box's coordinates, `side` is the number of the mask's cells, `length`
    that of the image's pixels. Returns the first pixel whose centre is in the box (outside of it a
    mask with a border is below 0.5), and for each pixel from there on the cell before its centre,
    int[n], counted with the border, and the weight of the cell after it, float32[n].
    """
    start = max(math.ceil(first - 0.5), 0)
    stop = min(math.floor(last - 0.5) + 1, length) if last > first else start
    centres = np.arange(start, stop) + 0.5
    cells = (centres - first) * (side / (last - first or 1)) + 0.5
    before = np.floor(cells).astype(np.intp).clip(0, side)
    return start, before, (cells - before).astype(np.float32)


def _encode(inside: np.ndarray, first_row: int, first_column: int, height: int, width: int) -> Any:
    """Run lengths from bool[columns, rows], the part of an image that begins at a pixel."""
    from pycocotools import mask as masks

    # A column's first and last pixel have a zero beside them, so that every run has two ends.
    columns, rows = inside.shape
    padded = np.zeros((columns, rows + 2), bool)
    padded[:, 1:-1] = inside
    column, row = np.divmod(np.flatnonzero(padded[:, 1:] != padded[:, :-1]), rows + 1)
    ends = (column + first_column) * height + row + first_row
    # A run that ends at the bottom of a column goes on where the next one begins at the top.
    meets = np.flatnonzero(ends[1:] == ends[:-1])
    ends = np.delete(ends, np.concatenate([meets, meets + 1]))
    counts = np.diff(ends, prepend=0, append=height * width)
    if counts[-1] == 0:  # the last pixel is the object's
        counts = counts[:-1]
    runs: Any = {"size": [height, width], "counts": counts.tolist()}
    return masks.frPyObjects(runs, height, width)
