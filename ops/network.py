"""Describes a convolutional network as a list of plain steps, for formats of other programs.

The steps are NumPy arrays and numbers, so that a writer of a format needs neither jax nor the
model's code. Shapes are those of TensorFlow: [b, h, w, c], and [b, c] after `global_mean`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

INPUT = "images"  # the name of the network's input: float32[b, s, s, 3] of pixels in 0..255
Padding = tuple[tuple[int, int], tuple[int, int]]  # ((top, bottom), (left, right))
_NONE: Padding = ((0, 0), (0, 0))


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation; its result has the step's name.

    Kinds, with the shapes of their float32 arrays:
      affine: x * scale[c] + bias[c].
      conv: convolution with kernel[h, w, c, f], plus bias[f].
      depthwise: convolution of each channel with a kernel of its own, kernel[h, w, c].
      max_pool: the maximum of windows; padding never wins.
      mean_pool: the mean of windows; padding does not count.
      global_mean: the mean over height and width, [b, c].
      dense: x[b, c] times kernel[c, f], plus bias[f].
      relu, sigmoid, add (of two inputs).
      gate: x[b, h, w, c] * weights[b, c], its two inputs.
    """

    kind: str
    name: str
    inputs: tuple[str, ...]
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    window: int = 1  # the side of a pool's windows
    stride: int = 1
    padding: Padding = _NONE


class Network:
    """Steps in the order of computation; each step reads `INPUT` or results of earlier steps."""

    def __init__(self, size: int):
        self.size = size  # the input is float32[b, size, size, 3]
        self.steps: list[Step] = []

    def add(self, kind: str, name: str, *inputs: str, **values: Any) -> str:
        """Adds a step, see `Step`, and returns its name; arrays become float32.

        Raises:
          ValueError: the name is taken, or an input has no step.
        """
        known = {INPUT, *(step.name for step in self.steps)}
        if name in known or not known.issuperset(inputs):
            raise ValueError(f"step {name!r} of {inputs}: the names are {sorted(known)}")
        arrays = {k: np.asarray(v, np.float32) for k, v in values.pop("arrays", {}).items()}
        self.steps.append(Step(kind, name, inputs, arrays, **values))
        return name

    @property
    def output(self) -> str:
        """The name of the last step."""
        return self.steps[-1].name


def same_padding(size: int, window: int, stride: int) -> Padding:
    """TensorFlow's padding SAME of a square image."""
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    edge = (total // 2, total - total // 2)
    return edge, edge
