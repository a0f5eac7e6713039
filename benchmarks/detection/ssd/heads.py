"""What the heads of an SSD keep for other classes: the boxes, and the background."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_KEPT = 5  # features of a box: its codes and the logit of the background come first


def renewed(
    detector: Any, initial: Mapping[str, np.ndarray], loaded: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The arrays of the heads of an SSD that begins with those of other classes, by path.

    Args:
      detector: the SSD.
      initial: its own initial parameters by path.
      loaded: the other SSD's; heads with other maps or boxes are not used.
    """
    counts = detector.settings.maps.layout.boxes_per_cell
    heads = {}
    for i, count in enumerate(counts, 1):
        for path in (f"head{i}/kernel", f"head{i}/bias"):
            heads[path] = _mixed(initial[path], loaded.get(path), count)
    return heads


def _mixed(own: np.ndarray, other: np.ndarray | None, boxes: int) -> np.ndarray:
    """The features of `own` [..., boxes * n], of which each box's first come from `other`."""
    if other is None or other.shape[:-1] != own.shape[:-1] or other.shape[-1] % boxes:
        return own
    mine, theirs = (x.reshape(*x.shape[:-1], boxes, -1) for x in (own, other))
    columns = [theirs[..., :_KEPT], mine[..., _KEPT:]]
    return np.concatenate(columns, -1).reshape(own.shape)
