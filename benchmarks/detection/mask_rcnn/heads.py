"""What the heads of a Mask R-CNN keep for other classes.

The last layers have features for each class, the background first. The background's stay. The boxes
and masks of a new class begin as the mean of those of the classes before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# By layer: how many features a class has, and whether those of new classes begin as a mean.
_LAYERS = {"box_head/class": (1, False), "box_head/code": (4, True), "mask_head/mask": (1, True)}


def renewed(
    detector: Any, initial: Mapping[str, np.ndarray], loaded: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The arrays of a Mask R-CNN's last layers, by path; see SSD's."""
    del detector
    layers = {}
    for layer, (size, is_mean) in _LAYERS.items():
        for path in (f"{layer}/kernel", f"{layer}/bias"):
            layers[path] = _mixed(initial[path], loaded.get(path), size, is_mean)
    return layers


def _mixed(own: np.ndarray, other: np.ndarray | None, size: int, is_mean: bool) -> np.ndarray:
    """The features of `own` [..., classes * size], with those of `other` that stay."""
    if other is None or other.shape[:-1] != own.shape[:-1]:
        return own
    mine, theirs = (x.reshape(*x.shape[:-1], -1, size) for x in (own, other))
    new = mine[..., 1:, :]
    if is_mean:
        new = np.broadcast_to(theirs[..., 1:, :].mean(-2, keepdims=True), new.shape)
    return np.concatenate([theirs[..., :1, :], new], -2).reshape(own.shape)
