"""Layers in the form that is fastest on a CPU, where XLA's own needs copies or a scatter.

* `dot`: for the gradient in the kernel, XLA would copy an x of more than two axes transposed.
* `BatchNorm` is one product and one sum for each value. In flax's form the gradient in the scale
  needs x - mean, which XLA stores: as many bytes as the convolution's output, written and read
  twice.
* `max_pool`: XLA's gradient of a maximum is a select-and-scatter. On a CPU it becomes a scatter
  with indices of all values, which takes 27 ms for [16, 64, 64, 16] on two cores; the sum over the
  nine positions of a window takes 6 ms. Both give the gradient of a window to the first of its
  largest values.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes

from common.layers import device_kind

_SIDE, _STRIDE = 3, 2  # of the max-pool


def dot(x: jax.Array, kernel: jax.Array, _: Any = None, **options: Any) -> jax.Array:
    """The product [..., m] of x [..., n] and kernel [n, m]; for flax, a `dot_general` of these."""
    shape = x.shape
    if device_kind() == "cpu":
        x = x.reshape(-1, shape[-1])
    dimensions = ((x.ndim - 1,), (0,)), ((), ())
    product = jax.lax.dot_general(x, kernel, dimensions, **options)
    return product.reshape(*shape[:-1], kernel.shape[1])


class BatchNorm(nn.BatchNorm):
    """flax's `nn.BatchNorm` of [..., c], in training on CPUs as x * factor + shift.

    factor = scale / sqrt(var + epsilon), and shift = bias - mean * factor.
    """

    @nn.compact
    def __call__(self, x: jax.Array, use_running_average: bool | None = None, **others: Any) -> Any:
        running = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        is_usual = self.axis == -1 and self.use_scale and self.use_bias and not others
        is_training = not (running or self.is_initializing())
        if not (is_usual and is_training and device_kind() == "cpu"):
            return super().__call__(x, use_running_average, **others)
        scale = self.param("scale", self.scale_init, x.shape[-1:], self.param_dtype)
        bias = self.param("bias", self.bias_init, x.shape[-1:], self.param_dtype)
        dtype = dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        values = x.astype(jnp.promote_types(dtype, jnp.float32))
        axes = tuple(range(x.ndim - 1))
        moments = jnp.stack([jnp.mean(values, axes), jnp.mean(jnp.square(values), axes)])
        if self.axis_name:
            moments = jax.lax.pmean(moments, self.axis_name)
        mean, var = moments[0], jnp.maximum(moments[1] - jnp.square(moments[0]), 0)
        for name, value in (("mean", mean), ("var", var)):
            old = self.get_variable("batch_stats", name)
            new = self.momentum * old + (1 - self.momentum) * value
            self.put_variable("batch_stats", name, new)
        factor = jax.lax.rsqrt(var + self.epsilon) * scale
        return (values * factor + (bias - mean * factor)).astype(dtype)


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
