"""Weights that follow from names alone, so that stored results stay comparable for ever."""

import zlib

import numpy as np


def weights(name: str, kind: str, shape: tuple[int, ...], fan_in: int = 1) -> np.ndarray:
    """float32: the array `name` of a network.

    Args:
      kind: "kernel", "scale", "var", or another; kernels keep the size of their input.
      fan_in: of a kernel, the inputs of each of its outputs.
    """
    values = np.random.RandomState(zlib.crc32(name.encode())).random_sample(shape)  # never changes
    if kind == "kernel":
        values = (values - 0.5) * np.sqrt(12 / fan_in)
    elif kind == "var":
        values = 0.5 + values
    elif kind == "scale":
        values = 0.5 + values / 2
    else:
        values = (values - 0.5) / 2
    return values.astype(np.float32)
