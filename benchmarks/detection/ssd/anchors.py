"""SSD's default boxes, from which every detection is an offset.

Each cell of each feature map has a few boxes around its centre: a square of the map's scale, a
square of a size between this scale and the next one's, and for each aspect ratio a a wide box and
a high one of the first square's area (Liu et al. 2016, arXiv:1512.02325, section 2.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
    """The feature maps of a detector and the shapes of their boxes.

    Attributes:
      image_size: side of the square image in pixels.
      feature_sizes: side of each feature map in cells.
      steps: of each map, the distance between the centres of two cells in pixels.
      scales: of each map, the side of its smaller square in pixels; and one more.
      aspect_ratios: of each map, width / height of its wide boxes.
    """

    image_size: int
    feature_sizes: Sequence[int]
    steps: Sequence[float]
    scales: Sequence[float]
    aspect_ratios: Sequence[Sequence[float]]

    @property
    def boxes_per_cell(self) -> tuple[int, ...]:
        """The number of boxes in each cell of each map."""
        return tuple(2 + 2 * len(ratios) for ratios in self.aspect_ratios)

    @property
    def count(self) -> int:
        """The number of boxes of an image."""
        sizes = zip(self.feature_sizes, self.boxes_per_cell, strict=True)
        return sum(size**2 * boxes for size, boxes in sizes)

    @property
    def grids(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """See `benchmarks.detection.survey.Grid`; nothing is larger than the image."""
        grids = []
        for k, (size, step) in enumerate(zip(self.feature_sizes, self.steps, strict=True)):
            shapes = _shapes(self.scales[k], self.scales[k + 1], self.aspect_ratios[k])
            grid = (np.arange(size) + 0.5) * step, np.array(shapes)
            grids.append(tuple(part.clip(0, self.image_size) for part in grid))
        return grids


# 8,732 boxes on 300 x 300 pixels.
SSD300 = Layout(
    image_size=300,
    feature_sizes=(38, 19, 10, 5, 3, 1),
    steps=(8, 16, 32, 64, 100, 300),
    scales=(21, 45, 99, 153, 207, 261, 315),
    aspect_ratios=((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)),
)


def default_boxes(layout: Layout) -> np.ndarray:
    """All default boxes, by map, then row, column and shape.

    A convolution's output [b, rows, columns, boxes_per_cell * c] thus only needs to be reshaped to
    [b, rows * columns * boxes_per_cell, c]. The original puts the shapes before the rows.

    Returns:
        float64[layout.count, 4]: (centre y, centre x, height, width) as shares of the image, each
        of the four clipped to 0 .. 1. The corners may lie outside of the image.
    """
    boxes = []
    for centres, shapes in layout.grids:
        cells = np.zeros((len(centres), len(centres), len(shapes), 4))
        cells[..., 0] = centres[:, None, None]
        cells[..., 1] = centres[:, None]
        cells[..., 2:] = shapes
        boxes.append(cells.reshape(-1, 4))
    return np.concatenate(boxes) / layout.image_size


def corners(boxes: np.ndarray) -> np.ndarray:
    """(centre y, centre x, height, width) [..., 4] as (y0, x0, y1, x1), dtype kept."""
    centres, sides = boxes[..., :2], boxes[..., 2:]
    return np.concatenate([centres - sides / 2, centres + sides / 2], -1)


def _shapes(scale: float, next_scale: float, ratios: Sequence[float]) -> list[tuple[float, float]]:
    """(height, width) of the boxes in one cell, in pixels."""
    between = math.sqrt(scale * next_scale)
    shapes = [(scale, scale), (between, between)]
    for ratio in ratios:
        long, short = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
        shapes += [(short, long), (long, short)]
    return shapes
