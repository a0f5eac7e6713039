"""The anchors of the region proposal network, level by level of the feature pyramid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Layout:
    """How anchors lie on the maps of the pyramid; named as the config's keys.

    Attributes:
      pyramid_levels: from the finest to the coarsest; level l has a cell for 2**l x 2**l pixels.
      anchor_scale: the side of a square anchor in cells, such as 8 (arXiv:1612.03144, section 4.1).
      anchor_ratios: height by width of the anchors of a cell, whose areas are equal.
      anchor_grid: "centres" of cells, or "corners": around the first corner of each cell, with half
        sides of whole pixels, as torchvision has them.
    """

    pyramid_levels: Annotated[Sequence[Annotated[int, "[2, 12]"]], "[1, 11]"]
    anchor_scale: Annotated[float, "[0.01, 4096]"]
    anchor_ratios: Annotated[Sequence[Annotated[float, "[0.01, 100]"]], "[1, 100]"]
    anchor_grid: Literal["centres", "corners"] = "centres"

    def __post_init__(self):
        levels = tuple(self.pyramid_levels)
        if levels != tuple(range(levels[0], levels[-1] + 1)):
            raise ConfigError(f"config.pyramid_levels={levels}: must be consecutive numbers")

    def corners(self, height: int, width: int) -> list[np.ndarray]:
        """For each level float32[n, 4]: (y0, x0, y1, x1) in pixels, by row, column and ratio.

        Args:
          height, width: of the padded image, multiples of the coarsest cell; boxes go beyond.
        """
        corners = []
        for (y, shapes), (x, _) in zip(self.grids(height), self.grids(width), strict=True):
            centres = np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1).reshape(-1, 1, 2)
            boxes = np.concatenate([centres - shapes / 2, centres + shapes / 2], axis=-1)
            corners.append(boxes.reshape(-1, 4).astype(np.float32))
        return corners

    def grids(self, side: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """See `benchmarks.detection.survey.Grid`; of each level, for images of `side` pixels."""
        grids, is_centred = [], self.anchor_grid == "centres"
        for level in self.pyramid_levels:
            cell = 2**level
            points = cell * (np.arange(-(-side // cell)) + 0.5 * is_centred)
            scale, ratios = cell * self.anchor_scale, self.anchor_ratios
            shapes = np.array([(scale * math.sqrt(r), scale / math.sqrt(r)) for r in ratios])
            grids.append((points, shapes if is_centred else 2 * np.round(shapes / 2)))
        return grids
