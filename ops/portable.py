"""A trained classifier in forms that other programs read; --mode=export writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ops.images.input_spec import InputSpec
from ops.network import Network


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
