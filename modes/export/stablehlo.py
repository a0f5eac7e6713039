"""Writes a model as StableHLO with `jax.export`: one file for CPUs, TPUs and GPUs, of any batch.

A newer jax of the next six months reads the file as well; an older one does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import export

PLATFORMS = ("cpu", "tpu", "cuda")
_LOCATIONS = "jax_traceback_in_locations_limit"


def write(logits: Any, size: int, path: str) -> None:
    """Writes a jitted function uint8[b, size, size, 3] -> float32[b, K] with its weights."""
    (batch,) = export.symbolic_shape("batch")
    pixels = jax.ShapeDtypeStruct((batch, size, size, 3), np.uint8)
    with no_locations():
        data = export.export(logits, platforms=PLATFORMS)(pixels).serialize()
    with open(path, "wb") as file:
        file.write(data)


@contextlib.contextmanager
def no_locations() -> Iterator[None]:
    """Keeps the paths of our code out of what jax exports."""
    limit = jax.config.values[_LOCATIONS]
    jax.config.update(_LOCATIONS, 0)
    try:
        yield
    finally:
        jax.config.update(_LOCATIONS, limit)


def runner(path: str) -> Callable[[np.ndarray], np.ndarray]:
    """Loads the function that a file holds."""
    with open(path, "rb") as file:
        call = jax.jit(export.deserialize(bytearray(file.read())).call)
    return lambda images: np.asarray(call(images))
