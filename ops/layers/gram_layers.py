"""What a ResNet's training step with `batch_norm="gram"` has instead of flax's layers.

Modules have the variables of the `nn.Conv` or `nn.BatchNorm` whose place they take, under their
names. They compute in the dtype of x, statistics in float32 (or float64, if x is). Inside
`shard_map` statistics are averaged over `axis_name`; outside it that is a NameError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ops.layers.recompute import Twice, recomputed, twice

conv_init = nn.initializers.lecun_normal()  # scale 1, fan-in, truncated normal


class Kernel(nn.Module):
    """The parameter of an `nn.Conv` without bias, f32[*shape], for one who computes with it."""

    shape: tuple[int, ...]
    init_kernel: Any = conv_init

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("kernel", self.init_kernel, self.shape, jnp.float32)


class _TrainingNorm(nn.Module):
    """Variables of an `nn.BatchNorm` over `features` channels in training, under its names."""

    momentum: float
    epsilon: float
    axis_name: Any
    scale_init: Any = nn.initializers.ones

    def parameters(self, features: int) -> tuple[jax.Array, jax.Array]:
        """Returns scale and bias, f32[features] each."""
        scale = self.param("scale", self.scale_init, (features,), jnp.float32)
        return scale, self.param("bias", nn.initializers.zeros, (features,), jnp.float32)

    def tracker(self, features: int) -> Callable[[jax.Array, jax.Array], None]:
        """What moves the running statistics towards a batch's (mean, var), f32[features] each."""
        running = [
            self.variable("batch_stats", name, make, (features,), jnp.float32)
            for name, make in (("mean", jnp.zeros), ("var", jnp.ones))
        ]
        frozen = self.is_initializing()

        def track(mean: jax.Array, var: jax.Array) -> None:
            for old, value in zip(running, (mean, var), strict=True):
                if not frozen:
                    old.value = self.momentum * old.value + (1 - self.momentum) * value

        return track

    def axes(self) -> Any:
        """The mesh axes; `init` runs outside the mesh."""
        return None if self.is_initializing() else self.axis_name

    def statistics(self, moments: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(mean, var) over the span of BatchNorm from `_moments` of this device's share."""
        mean, square = jax.lax.pmean(moments, self.axes()) if self.axes() else moments
        return mean, jnp.maximum(square - jnp.square(mean), 0)


class NormVariables(_TrainingNorm):
    """A BatchNorm's variables, for one who computes with them."""

    @nn.compact
    def __call__(self, features: int) -> tuple[jax.Array, jax.Array, Callable[..., None]]:
        """(scale, bias, `tracker`'s function)."""
        return *self.parameters(features), self.tracker(features)


class TwiceNorm(_TrainingNorm):
    """relu(BatchNorm(x)), for a layer that needs it in memory only during the forward pass.

    Maps [b, h, w, c] to a `Twice` of the same shape and dtype.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> Twice:
        scale, bias = self.parameters(x.shape[-1])
        mean, var = self.statistics(_moments(x))
        self.tracker(x.shape[-1])(mean, var)
        factor = jax.lax.rsqrt(var + self.epsilon) * scale
        return twice(lambda x: _normalized(x, mean, factor, bias), x)


class PooledNorm(_TrainingNorm):
    """max_pool(relu(BatchNorm(conv(x, kernel)))), in the order conv, pool, BatchNorm, ReLU.

    An increasing map commutes with the maximum, so each pooled value is normalised instead of the
    four times as many that there are before. A channel whose gamma is negative changes its sign
    first, which makes its map increasing. At gamma = 0 the maximum has no gradient in gamma: there
    it is that of the largest x. The convolution's output, a ResNet's largest array, is not kept
    for the backward pass but computed again.
    """

    @nn.compact
    def __call__(
        self, conv: Callable[..., jax.Array], x: jax.Array, kernel: jax.Array
    ) -> jax.Array:
        """Normalises and pools a convolution.

        Args:
            conv: (x, kernel) to [b, h, w, c] in the compute dtype; a pure function.
            x: what `conv` takes.
            kernel: f32[..., c].

        Returns:
            [b, ceil(h / 2), ceil(w / 2), c] in the dtype of conv's output.
        """
        scale, bias = self.parameters(kernel.shape[-1])
        sign = jnp.where(scale < 0, -1, 1).astype(scale.dtype)

        def pooled(x: jax.Array, kernel: jax.Array, sign: jax.Array) -> Any:
            y = conv(x, kernel)
            y = y * sign.astype(y.dtype)
            return max_pool(y), _moments(y)

        y, moments = recomputed(pooled)(x, kernel, sign)
        mean, var = self.statistics(moments)
        self.tracker(kernel.shape[-1])(mean * sign, var)
        return _normalized(y, mean, jax.lax.rsqrt(var + self.epsilon) * scale * sign, bias)


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Means of x [b, h, w, c] and of its square, f32[c] or f64[c]."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.mean(wide, (0, 1, 2)), jnp.mean(jnp.square(wide), (0, 1, 2))


def _normalized(x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    """relu((x - mean) * factor + bias) in the dtype of x, computed in that of the mean."""
    y = (x.astype(mean.dtype) - mean) * factor + bias
    return nn.relu(y.astype(x.dtype))


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
    """ReLU that remembers only its output, which the next layer keeps anyway."""
    return jnp.maximum(x, 0)


def _relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The barrier, because XLA knows that max(x, 0) > 0 is x > 0, and would keep x as well.
    y = jax.lax.optimization_barrier(jnp.maximum(x, 0))
    return y, y


def _relu_backward(y: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return (jnp.where(y > 0, gradient, 0),)


relu.defvjp(_relu_forward, _relu_backward)


def max_pool(x: jax.Array) -> jax.Array:
    """The stem's, in the plain step too: [b, h, w, c] to [b, ceil(h / 2), ceil(w / 2), c]."""
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
