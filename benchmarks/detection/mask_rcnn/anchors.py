"""The anchors of the region proposal network, level by level of the feature pyramid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
    """How anchors lie on the maps of the pyramid: level l has a cell for 2**l x 2**l pixels.

    Attributes:
      levels: from the finest to the coarsest, such as 2 to 6.
      scale: the side of a square anchor in cells, such as 8 (arXiv:1612.03144, section 4.1).
      ratios: height by width of the anchors of a cell, whose areas are equal.
    """

    levels: Sequence[int]
    scale: float
    ratios: Sequence[float]

    def corners(self, height: int, width: int) -> list[np.ndarray]:
        """For each level float32[n, 4]: (y0, x0, y1, x1) in pixels, by row, column and ratio.

        The anchors are around the centres of the cells, and may reach beyond the image.

        Args:
          height, width: of the padded image, multiples of the coarsest cell.
        """
        found = []
        for level in self.levels:
            cell = 2**level
            y = cell * (np.arange(-(-height // cell)) + 0.5)
            x = cell * (np.arange(-(-width // cell)) + 0.5)
            sides = [
                (cell * self.scale * math.sqrt(ratio), cell * self.scale / math.sqrt(ratio))
                for ratio in self.ratios
            ]
            half = np.array(sides) / 2
            centres = np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1).reshape(-1, 1, 2)
            boxes = np.concatenate([centres - half, centres + half], axis=-1)
            found.append(boxes.reshape(-1, 4).astype(np.float32))
        return found
