"""BatchNorm of a 1x1 convolution's output, with statistics from the moments of its input.

A 1x1 convolution is linear. Let x be its input at one position (C channels), W its kernel and
z = W^T x its output (D channels). Then mean(z) is W^T mean(x), and var(z) is diag(W^T cov(x) W).
So the statistics need only the C x C second moments of the input, which are one more matrix
product, and scale and bias become part of the convolution's last step. No pass stores z before it
is normalised. That pays where D is larger than C, as at the end of a bottleneck. The backward pass
is derived by hand from Ioffe and Szegedy 2015 (arXiv:1502.03167).

`recompute` makes arrays that the backward pass computes again, so that they need no memory until
then. XLA merges equal computations unless one of them reads its input through an
`optimization_barrier`. `jax.checkpoint` puts the barrier around all inputs and the incoming
gradients. XLA then cannot sum up a gradient in the fusion that makes it. Here fewer have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_HIGHEST = lax.Precision.HIGHEST
_POSITIONS = (0, 1, 2)


class _Saved(NamedTuple):
    """The values that the backward pass of one convolution reads."""

    x: Any
    kernel: Any
    scale: Any
    mean_x: Any  # over all devices of `axis_name`
    sum_x: Any  # over this device's positions
    sum_xx: Any  # of x x^T, over this device's positions
    inverse_std: Any  # 1 / sqrt(var + epsilon)
    is_positive: Any  # var > 0: a variance that was clipped has no gradient


def conv_norm(
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    epsilon: float,
    axis_name: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """1x1 convolution and training-mode BatchNorm in one.

    Args:
        x: [b, h, w, C] in the compute dtype. For a strided convolution, the sampled positions.
        kernel: f32[C, D]; rounded to the compute dtype, as a convolution does.
        scale: f32[D].
        bias: f32[D].
        epsilon: added to the variance.
        axis_name: mesh axis, or tuple of axes, over which moments are averaged; None for none.

    Returns:
        (y, mean, var): the normalised output [b, h, w, D] in the compute dtype, and the mean and
        biased variance of the convolution's output, without gradients, f32[D] (or f64[D], if x is
        float64).
    """
    outputs: Any = _conv_norm(epsilon, axis_name, x, kernel, scale, bias)
    y, mean, var = outputs
    return y, lax.stop_gradient(mean), lax.stop_gradient(var)


def conv_norm_sum(
    branches: Sequence[tuple[jax.Array | Recomputed, jax.Array, jax.Array, jax.Array]],
    *,
    epsilon: float,
    axis_name: Any = None,
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """The sum of several `conv_norm`, as one matrix product over the channels of all inputs.

    The last convolution of a residual block and the projection on its shortcut use it: only the
    sum of their outputs is stored. Here the scales become part of the kernels. The bias is
    computed from the rounded kernels, so that rounding errors are multiplied by x - mean(x) and
    not by x.

    Args:
        branches: (x, kernel, scale, bias) of each convolution, with the same positions and the
            same number of channels out. With `Recomputed` for x, the product reads an array that
            can be freed after the forward pass. `conv_norm` explains the other arguments.

    Returns:
        (y, [(mean, var), ...]): the sum of the outputs, and the moments of each convolution.
    """
    arguments = tuple(
        (x if isinstance(x, Recomputed) else Recomputed(lax.stop_gradient(x), x), *rest)
        for x, *rest in branches
    )
    outputs: Any = _conv_norm_sum(epsilon, axis_name, arguments)
    y, moments = outputs
    return y, [jax.tree.map(lax.stop_gradient, pair) for pair in moments]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conv_norm(epsilon: float, axis_name: Any, x: Any, kernel: Any, scale: Any, bias: Any) -> Any:
    return forward(epsilon, axis_name, x, kernel, scale, bias)[0]


def forward(epsilon: float, axis_name: Any, x: Any, kernel: Any, scale: Any, bias: Any) -> Any:
    saved, mean, var = _statistics(epsilon, axis_name, x, kernel, scale)
    factor = scale * saved.inverse_std
    y = conv_1x1(x, kernel.astype(x.dtype), mean.dtype) * factor + (bias - mean * factor)
    return (y.astype(x.dtype), mean, var), saved


def _statistics(epsilon: float, axis_name: Any, x: Any, kernel: Any, scale: Any) -> Any:
    """Returns `_Saved`, and the mean and variance of a convolution's output."""
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    # The convolution's. Statistics of the unrounded kernel are off by its rounding error * mean(x).
    w = kernel.astype(x.dtype).astype(acc_dtype)
    count = x.shape[0] * x.shape[1] * x.shape[2]
    sum_x, sum_xx = _sum(x, acc_dtype), _sum_of_products(x, x, acc_dtype)
    mean_x, mean_xx = sum_x / count, sum_xx / count
    if axis_name is not None:
        mean_x, mean_xx = lax.pmean((mean_x, mean_xx), axis_name)
    covariance = mean_xx - mean_x[:, None] * mean_x
    mean = _full_matmul(mean_x, w)
    products = _full_matmul(covariance, w)
    if x.dtype == acc_dtype:  # libtpu dies on the fused sum of such products, for v6e and TPU7x
        products = lax.optimization_barrier(products)
    var = jnp.sum(w * products, 0)
    inverse_std = lax.rsqrt(jnp.maximum(var, 0) + epsilon)
    saved = _Saved(x, kernel, scale, mean_x, sum_x, sum_xx, inverse_std, var > 0)
    return saved, mean, jnp.maximum(var, 0)


def pull_back(axis_name: Any, saved: _Saved, dy: Any, sums: Any = None) -> Any:
    """The gradient of z = W^T x is factor * (dy - u - t * (z - mean(z))) [Ioffe and Szegedy].

    `dy`, for y alone, may be None where `sums` has dy (factor W)^T and the sums of x dy^T and dy.
    """
    x, kernel, scale, mean_x, sum_x, sum_xx, inverse_std, is_positive = saved
    acc_dtype = sum_xx.dtype
    w = kernel.astype(x.dtype).astype(acc_dtype)
    factor = scale * inverse_std
    count = jnp.asarray(x.shape[0] * x.shape[1] * x.shape[2], acc_dtype)

    if sums is None:
        sums = None, _sum_of_products(x, dy, acc_dtype), jnp.sum(dy, _POSITIONS, dtype=acc_dtype)
    product, sum_xdy, dbias = sums
    dscale = inverse_std * jnp.sum(w * (sum_xdy - mean_x[:, None] * dbias), 0)
    span_dbias, span_dscale = dbias, dscale
    if axis_name is not None:
        span_dbias, span_dscale, count = lax.psum((dbias, dscale, count), axis_name)
    u = span_dbias / count
    t = jnp.where(is_positive, inverse_std * span_dscale / count, 0)

    # The two products below need no more precision than their results keep.
    centred = sum_xx - sum_x[:, None] * mean_x
    precision = lax.Precision.HIGH if x.dtype == jnp.bfloat16 else _HIGHEST
    spread = jnp.matmul(centred, w * t, precision=precision)
    dkernel = factor * (sum_xdy - sum_x[:, None] * u - spread)
    narrow = (w * (factor * t)).astype(x.dtype), w.T.astype(x.dtype)
    b = -jnp.matmul(*narrow, precision=_precision(x))
    # The constant follows from the rounded b, so that the rounding error is multiplied by
    # x - mean(x) and not by x.
    constant = -_full_matmul(w, factor * u) - _full_matmul(mean_x, b.astype(acc_dtype))
    correction = (conv_1x1(x, b, acc_dtype) + constant).astype(x.dtype)
    if product is None:
        product = conv_1x1(dy, (w * factor).T.astype(x.dtype), acc_dtype)
    dx = product + correction
    return dx.astype(x.dtype), dkernel.astype(kernel.dtype), dscale, dbias


_conv_norm.defvjp(forward, lambda _, axis_name, saved, dy: pull_back(axis_name, saved, dy[0]))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conv_norm_sum(epsilon: float, axis_name: Any, branches: Any) -> Any:
    return sum_forward(epsilon, axis_name, branches)[0]


def sum_forward(epsilon: float, axis_name: Any, branches: Any) -> Any:
    offset: Any = 0.0
    kernels, moments, all_saved = [], [], []
    for (x, x_again), kernel, scale, bias in branches:
        saved, mean, var = _statistics(epsilon, axis_name, x, kernel, scale)
        w = kernel.astype(x.dtype).astype(mean.dtype)
        scaled = (w * (scale * saved.inverse_std)).astype(x.dtype)
        kernels.append(scaled)
        offset += bias - _full_matmul(saved.mean_x, scaled.astype(mean.dtype))
        moments.append((mean, var))
        all_saved.append(saved._replace(x=x_again))
    inputs = jnp.concatenate([x.forward for x, *_ in branches], -1)
    y = conv_1x1(inputs, jnp.concatenate(kernels), offset.dtype) + offset
    return (y.astype(inputs.dtype), moments), all_saved


def _sum_backward(epsilon: float, axis_name: Any, all_saved: Any, gradients: Any) -> Any:
    del epsilon
    dy, _ = gradients
    branches = []
    for saved in all_saved:
        dx, *rest = pull_back(axis_name, saved, dy)
        branches.append((Recomputed(jnp.zeros_like(dx), dx), *rest))
    return (tuple(branches),)


_conv_norm_sum.defvjp(sum_forward, _sum_backward)


def _precision(x: jax.Array) -> lax.Precision | None:
    """The highest precision for float32, which accelerators round to bfloat16 by default.

    Moments of rounded values minus the product of unrounded means are no covariance.
    """
    return None if x.dtype == jnp.bfloat16 else _HIGHEST


def _sum_of_products(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """Sum over positions of x y^T: [b, h, w, C] and [b, h, w, D] to [C, D]."""
    dims = ((_POSITIONS, _POSITIONS), ((), ()))
    return lax.dot_general(x, y, dims, _precision(x), preferred_element_type=dtype)


def _sum(x: jax.Array, dtype: Any) -> jax.Array:
    """Sum over positions of x [b, h, w, C]; of bfloat16 by the matrix units, which are faster.

    On v5e that takes an eighth of the time. XLA turns a product with one row of ones back into a
    sum, hence eight rows.
    """
    if x.dtype != jnp.bfloat16:
        return jnp.sum(x, _POSITIONS, dtype=dtype)
    return _sum_of_products(jnp.ones((*x.shape[:3], 8), x.dtype), x, dtype)[0]


def conv_1x1(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """1x1 convolution of [b, h, w, C] with [C, D], with the result in `dtype`."""
    return lax.dot_general(x, kernel, (((3,), (0,)), ((), ())), preferred_element_type=dtype)


def _full_matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=_HIGHEST)


class Recomputed(NamedTuple):
    """An array that is computed once for each pass, with the same values both times.

    A layer reads `forward` for its output and `backward` for its gradients. So the memory of
    `forward` is free between the passes. Gradients flow to `backward` only.
    """

    forward: jax.Array
    backward: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.forward.shape


def recompute(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> Recomputed:
    """Returns `function(x)`, for a cheap function of an `x` that stays in memory anyway."""
    return Recomputed(lax.stop_gradient(function(lax.optimization_barrier(x))), function(x))
