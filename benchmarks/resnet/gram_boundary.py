"""Bottlenecks of `gram_resnet` whose boundaries are one Pallas kernel in the backward pass.

They compute the same functions with the same variables. A block that `opens` returns an `Open`, and
the next block closes it, together with its first convolution, BatchNorm and ReLU. `gram_resnet` has
the forward pass, `boundary` the kernel.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.resnet import boundary
from common.layers import gram_norm, gram_resnet
from common.layers.gram_norm import Recomputed
from common.layers.gram_resnet import (
    ONES,
    ZEROS,
    Kernel,
    batch_norm,
    conv_norms,
    norm_relu,
    recomputed_norm_relu,
    relu,
)


class BottleneckBlock(gram_resnet.BottleneckBlock):
    """`gram_resnet.BottleneckBlock`; one that `opens` leaves its end to the next block."""

    opens: bool = False

    @nn.compact
    def __call__(self, x: jax.Array | Open) -> Any:
        s, features = self.stride, 4 * self.filters
        if isinstance(x, Open):
            x, y = x.close(self._product(x.last[1].shape[1], "1", ONES, self.filters), s)
        else:
            y = self.conv(self.filters, (1, 1), name="conv1")(x)
            y = nn.relu(self.norm(name="bn1")(y))
            x = x[:, ::s, ::s]
        y = self.conv(self.filters, (3, 3), s, padding=1, name="conv2")(y)
        if not self.opens:
            return self._end(x, y)
        norm = batch_norm(self.norm, "bn2")
        last = self._product(self.filters, "3", ZEROS, features)
        projection, channels = None, x.shape[-1]
        if s != 1 or channels != features:
            projection = self._product(channels, "_proj", ONES, features)
        return Open(y, (norm, *norm(self.filters)), last, x, projection)

    def _end(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The block's output, or an `Open`; x has the stride, y is the 3x3 convolution's output."""
        s, features = self.stride, 4 * self.filters
        widen = partial(conv_norms, partial(self.conv, features, (1, 1)), self.norm)
        if s == 1 and x.shape[-1] == features:
            y = nn.relu(self.norm(name="bn2")(y))
            return relu(x + widen((y, "3", ZEROS)))
        again = recomputed_norm_relu(batch_norm(self.norm, "bn2"), y)
        return relu(widen((again, "3", ZEROS), (x, "_proj", ONES)))

    def _product(self, channels: int, suffix: str, scale_init: Any, features: int) -> Any:
        """(BatchNorm, kernel, scale, bias) of a 1x1 convolution."""
        kernel = Kernel(partial(self.conv, features, (1, 1)), name=f"conv{suffix}")(channels)
        norm = batch_norm(self.norm, f"bn{suffix}", scale_init)
        return norm, kernel[0, 0], *norm(features)


@dataclasses.dataclass(frozen=True)
class Open:
    """A block without its end.

    A norm is (`gram_resnet.batch_norm`, scale, bias); a product has its kernel, too.
    """

    y: jax.Array  # [b, h, w, C], the output of the 3x3 convolution
    norm: Any  # of y
    last: Any  # the product of relu(BatchNorm(y))
    shortcut: jax.Array  # [b, h, w, D], or the input of its projection
    projection: Any  # a product, or None

    def __jax_array__(self) -> jax.Array:
        """The block's output, as an output of the network; `close` updates the statistics."""
        norm, layers = self.norm[0], (self.norm, self.last, self.projection)
        weights = [one[1:] for one in layers if one]
        return _end(norm.epsilon, norm.axes(), self.y, self.shortcut, weights)[0]

    def close(self, following: Any, stride: int) -> tuple[jax.Array, jax.Array]:
        """The block's output with this stride, and relu(BatchNorm) of a product of all of it."""
        layers = self.norm, self.last, self.projection, following
        norms, weights = zip(*((one[0], one[1:]) for one in layers if one), strict=True)
        arrays: Any = (self.y, self.shortcut, weights)
        # The kernel knows strides that divide the height and the width.
        inner = stride if not any(side % stride for side in self.y.shape[1:3]) else 1
        outputs: Any = _close(norms[0].epsilon, norms[0].axes(), inner, *arrays)
        out, z, all_moments = outputs
        remaining = stride // inner
        out = out[:, ::remaining, ::remaining]
        for norm, moments in zip(norms, all_moments, strict=True):
            norm.update(*map(lax.stop_gradient, moments))
        return out, z


class _Statistics(NamedTuple):
    """BatchNorm of an array, f32[C] each."""

    mean: Any
    var: Any
    inverse_std: Any
    is_positive: Any  # a variance that was clipped has no gradient


class _Saved(NamedTuple):
    """What the backward pass reads."""

    y2: Any
    y1: Any
    out: Any
    weights: Any
    norms: Any  # `_Statistics` of y2 and y1
    widening: Any  # `gram_norm` has it: of the last product, and of the projection


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _close(
    epsilon: float, axis_name: Any, stride: int, y2: Any, shortcut: Any, weights: Any
) -> Any:
    """The arrays of `Open.close`, and the moments of each BatchNorm."""
    return _forward(epsilon, axis_name, stride, y2, shortcut, weights)[0]


def _forward(
    epsilon: float, axis_name: Any, stride: int, y2: Any, shortcut: Any, weights: Any
) -> Any:
    *ending, (kernel1, scale1, bias1) = weights
    out, norm2, moments, widening = _end(epsilon, axis_name, y2, shortcut, ending)
    acc_dtype = norm2.mean.dtype
    y1 = boundary.laid_out(
        gram_norm.conv_1x1(out, kernel1.astype(out.dtype), acc_dtype).astype(out.dtype)
    )
    norm1 = _statistics(epsilon, axis_name, y1)
    z = norm_relu(y1, norm1.mean, norm1.inverse_std * scale1, bias1)
    all_moments = (norm2[:2], *moments, norm1[:2])
    outputs = _sampled(out, stride), z, all_moments
    return outputs, _Saved(y2, y1, out, weights, (norm2, norm1), widening)


def _sampled(x: jax.Array, stride: int) -> jax.Array:
    """Each `stride`-th row and column, by blocks: a slice with strides takes twice the time."""
    b, h, w, c = x.shape
    return x.reshape(b, h // stride, stride, w // stride, stride, c)[:, :, 0, :, 0]


def _end(epsilon: float, axis_name: Any, y2: Any, shortcut: Any, weights: Any) -> Any:
    """The output of a block, and the statistics of its BatchNorms."""
    (scale2, bias2), last, *projection = weights
    norm2 = _statistics(epsilon, axis_name, y2)
    # The backward pass computes `a` again, from y2 without the barrier.
    factor2 = norm2.inverse_std * scale2
    a = norm_relu(lax.optimization_barrier(y2), norm2.mean, factor2, bias2)
    if projection:
        branches = [(Recomputed(x, x), *w) for x, w in ((a, last), (shortcut, *projection))]
        (y, moments), widening = gram_norm.sum_forward(epsilon, axis_name, branches)
    else:
        (y, *one), saved = gram_norm.forward(epsilon, axis_name, a, *last)
        y, moments, widening = shortcut + y, [one], [saved]
    # Without the barrier XLA writes the output twice, once for the kernel.
    out = boundary.laid_out(lax.optimization_barrier(jnp.maximum(y, 0)))
    return out, norm2, moments, [widening[0]._replace(x=None), *widening[1:]]


def _statistics(epsilon: float, axis_name: Any, x: jax.Array) -> _Statistics:
    moments = gram_resnet.moments_of(x)
    mean, square = lax.pmean(moments, axis_name) if axis_name else moments
    var = square - jnp.square(mean)
    inverse_std = lax.rsqrt(jnp.maximum(var, 0) + epsilon)
    return _Statistics(mean, jnp.maximum(var, 0), inverse_std, var > 0)


def _backward(epsilon: float, axis_name: Any, stride: int, saved: _Saved, gradients: Any) -> Any:
    del epsilon, stride
    dout, dz, _ = gradients
    (scale2, bias2), *_, (kernel1, scale1, bias1) = saved.weights
    norm2, norm1 = saved.norms
    dtype, acc_dtype = saved.out.dtype, norm1.mean.dtype

    *terms, dscale1, dbias1 = _norm_terms(axis_name, dz, saved.y1, norm1, scale1, bias1)
    columns2 = norm2.mean, norm2.inverse_std * scale2, bias2
    kernels = [
        (one.kernel.astype(dtype).astype(acc_dtype) * (one.inverse_std * one.scale)).astype(dtype)
        for one in saved.widening
    ]
    last, *projection = saved.widening
    results = boundary.backward(
        boundary.Arguments(
            *(dz, saved.y1, dout, saved.out, saved.y2),
            jnp.stack([norm1.mean, norm1.inverse_std * scale1, bias1, *terms]),
            jnp.stack(columns2),
            *(kernel1.astype(dtype), kernels[0]),
            *([projection[0].x, kernels[1]] if projection else []),
        )
    )

    def pull_back(widening: Any, *products: Any) -> Any:
        return gram_norm.pull_back(axis_name, widening, None, (*products, results.sum_dy))

    a = norm_relu(saved.y2, *columns2)
    da, *dlast = pull_back(last._replace(x=a), results.product, results.sum_ady)
    *terms, dscale2, dbias2 = _norm_terms(axis_name, da, saved.y2, norm2, scale2, bias2)
    dy2 = boundary.norm_gradient(da, saved.y2, *columns2, *terms)
    dweights = [(dscale2, dbias2), tuple(dlast)]
    dshortcut = results.dy
    if projection:
        dshortcut, *of_weights = pull_back(projection[0], results.x_product, results.sum_xdy)
        dweights.append(tuple(of_weights))
    dweights.append((results.dw1.astype(kernel1.dtype), dscale1, dbias1))
    return dy2, dshortcut, tuple(dweights)


def _norm_terms(
    axis_name: Any, dz: jax.Array, y: jax.Array, norm: _Statistics, scale: Any, bias: Any
) -> tuple[jax.Array, ...]:
    """`slope` and `constant` of `boundary.Arguments.norm1`, and the gradients of scale and bias."""
    positions = (0, 1, 2)
    z = norm_relu(y, norm.mean, norm.inverse_std * scale, bias)
    gradient = jnp.where(z > 0, dz.astype(norm.mean.dtype), 0)
    dbias = jnp.sum(gradient, positions)
    dscale = norm.inverse_std * jnp.sum(
        gradient * (y.astype(gradient.dtype) - norm.mean), positions
    )
    span, count = (dscale, dbias), jnp.asarray(y.size // y.shape[-1], dbias.dtype)
    if axis_name:
        span, count = lax.psum((span, count), axis_name)
    factor = norm.inverse_std * scale
    slope = -factor * norm.inverse_std * span[0] / count
    return jnp.where(norm.is_positive, slope, 0), -factor * span[1] / count, dscale, dbias


_close.defvjp(_forward, _backward)
