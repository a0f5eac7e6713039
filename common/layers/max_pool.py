"""The max-pool of a ResNet's stem, with the gradient that is fastest on a CPU.

XLA's gradient of a maximum is a select-and-scatter. On a CPU it becomes a scatter with indices of
all values, which takes 27 ms for [16, 64, 64, 16] on two cores; the sum over the nine positions of
a window takes 6 ms. Both give the gradient of a window to the first of its largest values.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

_SIDE, _STRIDE = 3, 2  # of the max-pool


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def max_pool(x: jax.Array, padding: Any) -> jax.Array:
    """The maximum of 3x3 windows at a stride of 2, as in a ResNet's stem.

    float[b, h, w, c] to [b, h', w', c]; `padding` is 'SAME', 'VALID' or ((top, bottom),
    (left, right)).
    """
    return _forward(x, padding=padding)


def _forward(x: jax.Array, *, padding: Any) -> jax.Array:
    return nn.max_pool(x, (_SIDE, _SIDE), (_STRIDE, _STRIDE), padding)


def _save(x: jax.Array, padding: Any) -> tuple[jax.Array, jax.Array]:
    return _forward(x, padding=padding), x


def _backward(padding: Any, x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    sums = functools.partial(_sums, padding=padding)
    scatter = functools.partial(_scatter, padding=padding)
    return (jax.lax.platform_dependent(x, gradient, cpu=sums, default=scatter),)


max_pool.defvjp(_save, _backward)


def _scatter(x: jax.Array, gradient: jax.Array, *, padding: Any) -> jax.Array:
    """The gradient in x as XLA derives it."""
    return jax.vjp(functools.partial(_forward, padding=padding), x)[1](gradient)[0]


def _sums(x: jax.Array, gradient: jax.Array, *, padding: Any) -> jax.Array:
    """The gradient in x as a sum over the positions of a window."""
    shape = x.shape[1:3]
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(shape, (_SIDE,) * 2, (_STRIDE,) * 2, padding)
    largest = _forward(x, padding=padding)
    padded = jnp.pad(x, ((0, 0), *padding, (0, 0)), constant_values=-jnp.inf)
    b, height, width, c = padded.shape
    spans = [_STRIDE * (n - 1) + 1 for n in largest.shape[1:3]]
    total, is_free = jnp.zeros_like(padded), jnp.ones(largest.shape, bool)
    for i in range(_SIDE):
        for j in range(_SIDE):
            ends = (b, i + spans[0], j + spans[1], c)
            window = jax.lax.slice(padded, (0, i, j, 0), ends, (1, _STRIDE, _STRIDE, 1))
            taken = is_free & (window == largest)
            is_free &= ~taken
            around = ((0, 0, 0), (i, height - ends[1], 1), (j, width - ends[2], 1), (0, 0, 0))
            part = jnp.where(taken, gradient, 0)
            total += jax.lax.pad(part, jnp.zeros((), part.dtype), around)
    (top, _), (left, _) = padding
    return total[:, top : top + shape[0], left : left + shape[1]]
