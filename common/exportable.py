"""Trained models in forms that other programs read; --mode=export writes them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from common.images.input_spec import InputSpec
from common.onnx_graph import Ends, Graph

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TorchForm:
    """A classifier in the names and the layout of PyTorch's libraries."""

    arrays: Mapping[str, np.ndarray]  # by name; float32, and int64 counters
    files: Mapping[str, Any]  # JSON files that describe the model to the libraries, by name
    library: str  # "timm", whose names are torchvision's too, or "transformers"
    architecture: str  # the library's name of the model
    mismatch: str  # how it differs from the trained model; "" if the libraries compute the same
    pixels: str  # how the pixels that the libraries prepare differ; "" if they are the model's


@dataclasses.dataclass(frozen=True)
class ExportableClassifier:
    """A trained classifier in the forms that --mode=export writes.

    `torch` makes the form of PyTorch's libraries, from the class names; ConfigError if no library
    has this architecture.
    """

    spec: InputSpec  # how an image becomes the pixels that the model takes
    classes: int  # K
    logits: Callable[[Any], Any]  # f32[b, K] from uint8[b, s, s, 3] by jax, jitted, all in float32
    draw: Callable[[Graph], tuple[Ends, Ends]]  # adds it to a graph; returns inputs and outputs
    torch: Callable[[tuple[str, ...]], TorchForm]
    several: bool = False  # whether a picture has any of the classes: sigmoids instead of softmax


@dataclasses.dataclass(frozen=True)
class ExportableProgram:
    """A trained model as a function that jax traces, with its weights inside."""

    task: str  # what it does: "finds objects"
    compute: Callable[[Arrays], Arrays]  # the outputs of the inputs, arrays by name
    # (shape, dtype) of each input; "height, width, 3" names the sides that may have any length.
    inputs: Mapping[str, tuple[str, Any]]
    meaning: Mapping[str, str]  # of each input and output, in one line
    # Makes inputs for the check of an export from encoded pictures, each with the outputs of
    # predict.py for it, or None where these come from `compute` itself.
    examples: Callable[[Sequence[bytes]], Sequence[tuple[Arrays, Arrays | None]]]
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # such as a vocabulary
    # Adds the model to a graph, and returns its inputs and outputs; None without ONNX.
    draw: Callable[[Graph], tuple[Ends, Ends]] | None = None
    # How far outputs are off the wanted ones, in any order; None where the order counts.
    distance: Callable[[Arrays, Arrays], float] | None = None


class Translated(NamedTuple):
    """A sentence and its best translation by predict.py: texts, and pieces without the end."""

    source: tuple[str, list[str]]
    translation: tuple[str, list[str]]
    score: float
    is_cut: bool  # whether the translation is as long as allowed, and has no end
