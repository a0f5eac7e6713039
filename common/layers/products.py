"""Products of features and kernels in the form that is fast on CPUs."""

from __future__ import annotations

from typing import Any

import jax

from common.layers.convolutions import device_kind


def dot(x: jax.Array, kernel: jax.Array, _: Any = None, **how: Any) -> jax.Array:
    """The product [..., m] of x [..., n] and kernel [n, m]; for flax, a `dot_general` of these.

    On CPUs x is a matrix: for the gradient in the kernel, XLA would copy more axes transposed.
    """
    shape = x.shape
    if device_kind() == "cpu":
        x = x.reshape(-1, shape[-1])
    dimensions = ((x.ndim - 1,), (0,)), ((), ())
    return jax.lax.dot_general(x, kernel, dimensions, **how).reshape(*shape[:-1], kernel.shape[1])
