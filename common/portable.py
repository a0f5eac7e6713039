"""A trained model in forms that other programs read; --mode=export writes them.

A `Network` describes a convolutional network as a list of plain steps. The steps are NumPy arrays
and numbers, so that a writer of a format needs neither jax nor the model's code. Shapes are those
of TensorFlow: [b, h, w, c], and [b, c] after `global_mean`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from common.images.input_spec import InputSpec

INPUT = "images"  # the name of the network's input: float32[b, s, s, 3] of pixels in 0..255
Arrays = Mapping[str, Any]
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


@dataclasses.dataclass(frozen=True)
class TorchForm:
    """A classifier in the names and the layout of PyTorch's libraries.

    Attributes:
      arrays: by name; float32, and int64 counters.
      files: {name: JSON} of the files that describe the model to the libraries.
      library: 'timm', whose names are torchvision's too, or 'transformers'.
      architecture: the library's name of the model.
      mismatch: how it differs from the trained model; "" if the libraries compute the same.
      pixels: how the pixels that the libraries prepare differ; "" if they are the model's.
    """

    arrays: Mapping[str, np.ndarray]
    files: Mapping[str, Any]
    library: str
    architecture: str
    mismatch: str
    pixels: str


@dataclasses.dataclass(frozen=True)
class Portable:
    """A trained classifier in the forms that --mode=export writes.

    Attributes:
      spec: how an image becomes the pixels that the model takes.
      network: plain steps from pixels float32[b, s, s, 3] to logits float32[b, K].
      logits: the same from uint8[b, s, s, 3] by jax, jitted, with float32 throughout.
      torch: makes the form of PyTorch's libraries, from the class names; ConfigError if none of
        them has this architecture.
    """

    spec: InputSpec
    network: Network
    logits: Callable[[Any], Any]
    torch: Callable[[tuple[str, ...]], TorchForm]


@dataclasses.dataclass(frozen=True)
class Program:
    """A trained model as a function that jax traces, with its weights inside.

    Attributes:
      task: what it does, as "finds objects".
      compute: the outputs of the inputs, arrays by name.
      inputs: of each input, (its shape, its dtype); a shape as "height, width, 3" has names for the
        sides that may have any length.
      meaning: of each input and output, in one line.
      examples: makes inputs to check what was written with; takes encoded pictures.
      files: what belongs to it besides its weights, by name, such as a vocabulary.
    """

    task: str
    compute: Callable[[Arrays], Arrays]
    inputs: Mapping[str, tuple[str, Any]]
    meaning: Mapping[str, str]
    examples: Callable[[Sequence[bytes]], Sequence[Arrays]]
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleShot:
    """A trained detector of one stage as plain steps and the rules of its suppression.

    N are the default boxes of all maps, in the order map, row, column, shape. Positions are shares
    of the image; a pair is along y and x.

    Attributes:
      network: from pixels float32[b, s, s, 3] of 0..255 to the maps.
      maps: the steps whose results are float32[b, h, w, n * (4 + L)]: of each box its four offsets,
        see `benchmarks.detection.boxes.encode_boxes`, then its logits.
      logits: L; the first is that of no object.
      centres, sides: float32[N, 2], of the default boxes.
      weights: of the offsets.
      largest_log: of the two logarithms among the offsets, after the weights.
      clips: whether boxes end at the borders of the image before the suppression.
      antialias: whether photos are resized with it.
      min_score: detections with this score or a lower one are dropped.
      iou: a box that overlaps a better one of its class so much, or more, is dropped.
      most: detections of a photo, and of a class before the suppression.
    """

    network: Network
    maps: Sequence[str]
    logits: int
    centres: np.ndarray
    sides: np.ndarray
    weights: tuple[float, float, float, float]
    largest_log: float
    clips: bool
    antialias: bool
    min_score: float
    iou: float
    most: int
