"""BatchNorm of a 1x1 convolution's output from the moments of its input.

A 1x1 convolution is linear: with N positions a (C channels) and y = W^T a (D channels), mean(y) is
W^T mean(a) and var(y) is diag(W^T cov(a) W). So statistics need the C x C second moments of the
input, one more matrix product, and scale and bias become part of the convolution's last step: y is
never stored unnormalised, neither for the statistics nor for the backward pass. That pays where D
is larger than C, as at the end of a bottleneck. Normalising by input moments is an old idea; the
backward pass here is derived by hand from Ioffe and Szegedy 2015 (arXiv:1502.03167), with
y = W^T a put in for the convolution's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ops.layers.recompute import Twice

_HIGHEST = lax.Precision.HIGHEST
_POSITIONS = (0, 1, 2)


class _Saved(NamedTuple):
    """What the backward pass of a convolution reads."""

    x: Any
    kernel: Any
    scale: Any
    mean_x: Any  # over the span of BatchNorm
    total: Any  # this device's sum over positions of x,
    gram: Any  # and of x x^T
    r: Any  # 1 / sqrt(var + epsilon)
    varies: Any  # var > 0: where it is clipped it has no gradient


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
        x: [b, h, w, C] in the compute dtype; of a strided convolution, the positions it samples.
        kernel: f32[C, D]; rounded to the compute dtype, as a convolution does.
        scale: f32[D].
        bias: f32[D].
        epsilon: added to the variance.
        axis_name: mesh axis, or tuple of axes, over which moments are averaged; None for none.

    Returns:
        (y, mean, var): the normalised output [b, h, w, D] in the compute dtype, and the f32[D]
        mean and biased variance of the convolution's output, through which no gradient flows.
        float64 arguments give float64 throughout.

    Raises:
        NameError: `axis_name` outside a `shard_map` over it.
    """
    found: Any = _conv_norm(epsilon, axis_name, x, kernel, scale, bias)
    y, mean, var = found
    return y, lax.stop_gradient(mean), lax.stop_gradient(var)


def conv_norm_sum(
    branches: Sequence[tuple[jax.Array | Twice, jax.Array, jax.Array, jax.Array]],
    *,
    epsilon: float,
    axis_name: Any = None,
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """The sum of several `conv_norm`, as one product over the channels of all.

    For the last convolution of a residual block and the one on its shortcut: neither's output is
    stored, only the sum. Here scales become part of the kernels; the bias is made from the kernels
    as they are then rounded, so that rounding is multiplied by x - mean(x) only.

    Args:
        branches: (x, kernel, scale, bias) of each, as for `conv_norm`, with the same positions and
            the same number D of channels out. An x may be `Twice`, so that the array that the
            product reads can be freed after the forward pass.
        epsilon: added to the variances.
        axis_name: as for `conv_norm`.

    Returns:
        (y, [(mean, var), ...]): see `conv_norm`.

    Raises:
        NameError: `axis_name` outside a `shard_map` over it.
    """
    arguments = tuple((_as_twice(x), *rest) for x, *rest in branches)
    found: Any = _conv_norm_sum(epsilon, axis_name, arguments)
    return found[0], [jax.tree.map(lax.stop_gradient, moments) for moments in found[1]]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conv_norm(epsilon: float, axis_name: Any, x: Any, kernel: Any, scale: Any, bias: Any) -> Any:
    return _forward(epsilon, axis_name, x, kernel, scale, bias)[0]


def _forward(epsilon: float, axis_name: Any, x: Any, kernel: Any, scale: Any, bias: Any) -> Any:
    saved, mean, var = _statistics(epsilon, axis_name, x, kernel, scale)
    k = scale * saved.r
    y = _channels(x, kernel.astype(x.dtype), mean.dtype) * k + (bias - mean * k)
    return (y.astype(x.dtype), mean, var), saved


def _statistics(epsilon: float, axis_name: Any, x: Any, kernel: Any, scale: Any) -> Any:
    """(what the backward pass reads, mean, var) of a convolution's output."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    # Statistics of the product that is computed: with the unrounded kernel they would be off by
    # the rounding times the input's mean.
    w = kernel.astype(x.dtype).astype(wide)
    count = x.shape[0] * x.shape[1] * x.shape[2]
    total = jnp.sum(x, _POSITIONS, dtype=wide)
    gram = _over_positions(x, x, wide)
    mean_x, mean_xx = total / count, gram / count
    if axis_name is not None:
        mean_x, mean_xx = lax.pmean((mean_x, mean_xx), axis_name)
    covariance = mean_xx - mean_x[:, None] * mean_x
    mean = _small(mean_x, w)
    var = jnp.sum(w * _small(covariance, w), 0)
    r = lax.rsqrt(jnp.maximum(var, 0) + epsilon)
    saved = _Saved(x, kernel, scale, mean_x, total, gram, r, var > 0)
    return saved, mean, jnp.maximum(var, 0)


def _backward(epsilon: float, axis_name: Any, saved: Any, gradients: Any) -> Any:
    del epsilon
    x, kernel, scale, mean_x, total, gram, r, varies = saved
    dy, _, _ = gradients
    wide = gram.dtype
    w = kernel.astype(x.dtype).astype(wide)
    k = scale * r
    count = jnp.asarray(x.shape[0] * x.shape[1] * x.shape[2], wide)

    product = _over_positions(x, dy, wide)
    dbias = jnp.sum(dy, _POSITIONS, dtype=wide)
    dscale = r * jnp.sum(w * (product - mean_x[:, None] * dbias), 0)
    of_mean, of_var = dbias, dscale
    if axis_name is not None:
        of_mean, of_var, count = lax.psum((dbias, dscale, count), axis_name)
    u = of_mean / count
    t = jnp.where(varies, r * of_var / count, 0)  # a clipped variance is constant

    # These products are as exact as what they are added to or rounded to.
    centred = gram - total[:, None] * mean_x
    precision = lax.Precision.HIGH if x.dtype == jnp.bfloat16 else _HIGHEST
    spread = jnp.matmul(centred, w * t, precision=precision)
    dkernel = k * (product - total[:, None] * u - spread)
    narrow = (w * (k * t)).astype(x.dtype), w.T.astype(x.dtype)
    b = -jnp.matmul(*narrow, precision=_precision(x))
    # With the rounded b, so that its rounding is multiplied by x - mean(x) and not by x.
    c = -_small(w, k * u) - _small(mean_x, b.astype(wide))
    correction = (_channels(x, b, wide) + c).astype(x.dtype)
    dx = _channels(dy, (w * k).T.astype(x.dtype), wide) + correction
    return dx.astype(x.dtype), dkernel.astype(kernel.dtype), dscale, dbias


_conv_norm.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conv_norm_sum(epsilon: float, axis_name: Any, branches: Any) -> Any:
    return _sum_forward(epsilon, axis_name, branches)[0]


def _sum_forward(epsilon: float, axis_name: Any, branches: Any) -> Any:
    offset: Any = 0.0
    kernels, moments, all_saved = [], [], []
    for (x, again), kernel, scale, bias in branches:
        saved, mean, var = _statistics(epsilon, axis_name, x, kernel, scale)
        k = (kernel.astype(x.dtype).astype(mean.dtype) * (scale * saved.r)).astype(x.dtype)
        kernels.append(k)
        offset += bias - _small(saved.mean_x, k.astype(mean.dtype))
        moments.append((mean, var))
        all_saved.append(saved._replace(x=again))
    inputs = jnp.concatenate([x for (x, _), *_ in branches], -1)
    y = _channels(inputs, jnp.concatenate(kernels), offset.dtype) + offset
    return (y.astype(inputs.dtype), moments), all_saved


def _sum_backward(epsilon: float, axis_name: Any, all_saved: Any, gradients: Any) -> Any:
    dy, _ = gradients
    found = []
    for saved in all_saved:
        dx, *rest = _backward(epsilon, axis_name, saved, (dy, None, None))
        found.append((Twice(jnp.zeros_like(dx), dx), *rest))
    return (tuple(found),)


_conv_norm_sum.defvjp(_sum_forward, _sum_backward)


def _as_twice(x: jax.Array | Twice) -> Twice:
    return x if isinstance(x, Twice) else Twice(lax.stop_gradient(x), x)


def _precision(x: jax.Array) -> lax.Precision | None:
    """Exact for float32, which accelerators round to bfloat16 by default.

    Moments of rounded values less the product of unrounded means would be no covariance.
    """
    return None if x.dtype == jnp.bfloat16 else _HIGHEST


def _over_positions(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """Sum over positions of x y^T: [b, h, w, C] and [b, h, w, D] to [C, D]."""
    dims = ((_POSITIONS, _POSITIONS), ((), ()))
    return lax.dot_general(x, y, dims, _precision(x), preferred_element_type=dtype)


def _channels(x: jax.Array, matrix: jax.Array, dtype: Any) -> jax.Array:
    """The 1x1 convolution [b, h, w, C] by [C, D], with the result in `dtype`."""
    return lax.dot_general(x, matrix, (((3,), (0,)), ((), ())), preferred_element_type=dtype)


def _small(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=_HIGHEST)
