"""ResNet's stem and blocks in training, with less memory traffic than flax's layers.

They compute the same functions with the same variables as the stem and blocks of `models.py`,
which evaluation uses:

* The last convolution of a bottleneck and the projections get the statistics of BatchNorm from
  the moments of their inputs, so their outputs are never stored unnormalised (`gram_norm`).
* Where a bottleneck has a projection, the input of its last convolution is computed again in the
  backward pass (`recompute`).
* The stem normalises after the pooling.
* The ReLU at a block's end saves only its output, which the next layer saves anyway.
* Basic blocks of 64 channels convolve two pixels at once (`Pairs`).

Statistics are float32, or float64 if the input is; all else has the dtype of the input.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from common.layers.batch_norm import update_statistics
from common.layers.convolutions import Pairs, device_kind
from common.layers.gram_norm import Recomputed, conv_norm, conv_norm_sum, recompute

ONES, ZEROS = nn.initializers.ones, nn.initializers.zeros
PAIRED = 64  # channels, which fill half of the matrix unit


def compose(model: Any, fast_stem: Any, fast_block: Any, padding: Any) -> Any:
    """`model`, a `models.ResNet`, with these layers in training; in evaluation it stays as it is.

    It stays as it is on CPUs and GPUs, too, where these layers save no time: they take twice as
    long for the digits' ResNet-18 on a CPU, and 3 to 15 % longer for ResNet-50 on an H200, where
    they save a third of the temporaries.

    The model has the stem of v1.5, whose max-pool has this `padding`. `fast_stem` is `stem`, or
    `_basic_stem` before basic blocks; `fast_block` is `BottleneckBlock` or `BasicBlock`.
    """

    def is_fast(norm: Any) -> bool:
        device, is_training = device_kind(), not norm(parent=None).use_running_average
        return is_training and (not device or device.startswith("TPU"))

    def either_stem(images: jax.Array, features: int, conv: Any, norm: Any) -> Any:
        if is_fast(norm):
            return fast_stem(images, features, conv, norm, padding)
        return model.stem(images, features, conv, norm)

    def either_block(filters: int, conv: Any, norm: Any, *others: Any, name: str) -> Any:
        block = fast_block if is_fast(norm) else model.block
        return block(filters, conv, norm, *others, name=name)

    return model.clone(stem=either_stem, block=either_block)


def stem(images: jax.Array, features: int, conv: Any, norm: Any, padding: Any) -> jax.Array:
    """`models.stem` in the order convolution, max-pool, BatchNorm, ReLU.

    An increasing function commutes with the maximum, so only the pooled values, a quarter of all,
    are normalised. A channel with a negative gamma changes its sign first, which makes its
    function increasing. There is one difference: at gamma = 0 the maximum has no gradient in
    gamma. Here that gradient is the one of the largest x.
    """
    conv = partial(conv, features, (7, 7), 2, padding=3)
    pool = partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2), padding=padding)
    return norm_relu(*pooled(images, conv, norm, pool))


def pooled(images: jax.Array, conv: Any, norm: Any, pool: Any) -> Any:
    """The arguments of a stem's `norm_relu`: the output of the pooling, mean, factor and bias."""
    layer = conv(parent=None)  # the convolution without its variable
    kernel = Kernel(conv, name="conv_stem")(images.shape[-1])
    variables = batch_norm(norm, "bn_stem")
    scale, bias = variables(layer.features)
    sign = jnp.where(scale < 0, -1, 1).astype(scale.dtype)

    y = layer.apply({"params": {"kernel": kernel}}, images)
    y = y * sign.astype(y.dtype)
    mean, var = variables.statistics(moments_of(y))
    variables.update(mean * sign, var)
    return pool(y), mean, jax.lax.rsqrt(var + variables.epsilon) * scale * sign, bias


class Block(nn.Module):
    """The attributes of `models.BasicBlock`; `conv` and `norm` make flax's layers."""

    filters: int
    conv: Any
    norm: Any
    stride: int = 1


class BottleneckBlock(Block):
    """`models.BottleneckBlock` in training."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s, features = self.stride, 4 * self.filters
        y = self.conv(self.filters, (1, 1), name="conv1")(x)
        y = nn.relu(self.norm(name="bn1")(y))
        y = self.conv(self.filters, (3, 3), s, padding=1, name="conv2")(y)
        widen = partial(conv_norms, partial(self.conv, features, (1, 1)), self.norm)
        if s == 1 and x.shape[-1] == features:
            y = nn.relu(self.norm(name="bn2")(y))
            return relu(x + widen((y, "3", ZEROS)))
        y = recomputed_norm_relu(batch_norm(self.norm, "bn2"), y)
        return relu(widen((y, "3", ZEROS), (x[:, ::s, ::s], "_proj", ONES)))


def conv_norms(conv: Any, norm: Any, *branches: tuple[Any, str, Any]) -> jax.Array:
    """Sum of one or two 1x1 convolutions [b, h, w, C] to [b, h, w, D], each with its BatchNorm.

    A branch is (input, suffix of the variables' names, initialiser of the scale). The inputs of a
    sum may be `Recomputed`.
    """
    inputs, norms, all_moments = [], [], []
    for x, suffix, scale_init in branches:
        kernel = Kernel(conv, name=f"conv{suffix}")(x.shape[-1])[0, 0]
        norms.append(batch_norm(norm, f"bn{suffix}", scale_init))
        inputs.append((x, kernel, *norms[-1](kernel.shape[-1])))
    settings = {"epsilon": norms[0].epsilon, "axis_name": norms[0].axes()}
    if len(branches) == 1:
        y, *moments = conv_norm(*inputs[0], **settings)
        all_moments.append(moments)
    else:
        y, all_moments = conv_norm_sum(inputs, **settings)
    for variables, moments in zip(norms, all_moments, strict=True):
        variables.update(*moments)
    return y


def batch_norm(norm: Any, name: str, scale_init: Any = ONES) -> _BatchNormVariables:
    """A module with the variables of the `nn.BatchNorm` that `norm` makes."""
    layer = norm(parent=None)
    settings = (layer.momentum, layer.epsilon, layer.axis_name)
    return _BatchNormVariables(*settings, scale_init, name=name)


class Kernel(nn.Module):
    """Returns the kernel of the `nn.Conv` that `conv` makes: f32[..., channels, features]."""

    conv: Any

    @nn.compact
    def __call__(self, channels: int) -> jax.Array:
        layer = self.conv(parent=None)
        shape = (*layer.kernel_size, channels, layer.features)
        return self.param("kernel", layer.kernel_init, shape, jnp.float32)


class _BatchNormVariables(nn.Module):
    """The variables of an `nn.BatchNorm` in training; a call returns scale and bias."""

    momentum: float
    epsilon: float
    axis_name: Any
    scale_init: Any

    @nn.compact
    def __call__(self, features: int) -> tuple[jax.Array, jax.Array]:
        scale = self.param("scale", self.scale_init, (features,), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (features,), jnp.float32)
        self.variable("batch_stats", "mean", jnp.zeros, (features,), jnp.float32)
        self.variable("batch_stats", "var", jnp.ones, (features,), jnp.float32)
        return scale, bias

    def axes(self) -> Any:
        """The mesh axes of the statistics; `init` runs outside the mesh."""
        return None if self.is_initializing() else self.axis_name

    def statistics(self, moments: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns mean and variance over all devices of `axes` from one device's `moments_of`."""
        mean, square = jax.lax.pmean(moments, self.axes()) if self.axes() else moments
        return mean, jnp.maximum(square - jnp.square(mean), 0)

    def update(self, mean: jax.Array, var: jax.Array) -> None:
        """Moves the running statistics towards a batch's mean and variance, f32[F] each."""
        if not self.is_initializing():
            update_statistics(self, mean, var)


def recomputed_norm_relu(variables: _BatchNormVariables, x: jax.Array) -> Recomputed:
    """relu(BatchNorm(x)) of x [b, h, w, c]."""
    scale, bias = variables(x.shape[-1])
    mean, var = variables.statistics(moments_of(x))
    variables.update(mean, var)
    factor = jax.lax.rsqrt(var + variables.epsilon) * scale
    return recompute(lambda x: norm_relu(x, mean, factor, bias), x)


def moments_of(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Means of x [b, h, w, c] and of its square, f32[c] or f64[c]."""
    values = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.mean(values, (0, 1, 2)), jnp.mean(jnp.square(values), (0, 1, 2))


def norm_relu(x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    """relu((x - mean) * factor + bias) in the dtype of x, computed in the dtype of the mean."""
    y = (x.astype(mean.dtype) - mean) * factor + bias
    return nn.relu(y.astype(x.dtype))


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
    """ReLU that saves only its output for the backward pass."""
    return jnp.maximum(x, 0)


def _relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # XLA knows that max(x, 0) > 0 is x > 0. Without the barrier it would save x as well.
    y = jax.lax.optimization_barrier(jnp.maximum(x, 0))
    return y, y


def _relu_backward(y: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return (jnp.where(y > 0, gradient, 0),)


relu.defvjp(_relu_forward, _relu_backward)


def compose_basic(model: Any, padding: Any) -> Any:
    """`model`, a `models.ResNet` of basic blocks, with these layers in training.

    `padding` is the max-pool's.
    """
    return compose(model, _basic_stem, BasicBlock, padding)


def _basic_stem(
    images: jax.Array, features: int, conv: Any, norm: Any, padding: Any
) -> jax.Array | Pairs:
    """`stem` for `BasicBlock`: in pairs, and with the convolution's output saved."""
    conv = partial(conv, features, (7, 7), 2, padding=3)
    is_paired, is_shifted, width = features == PAIRED, False, 0

    def pool(x: jax.Array) -> jax.Array:
        nonlocal is_shifted, width
        sides = padding
        if isinstance(padding, str):
            sides = jax.lax.padtype_to_pads(x.shape[1:3], (3, 3), (2, 2), padding)
        rows, (left, right) = sides
        width = (x.shape[2] + left + right - 3) // 2 + 1
        # An even number of columns can be read as pairs without a copy. The new window, on the
        # right or on the left, must not be empty: its maximum would be infinite.
        if is_paired and width % 2:
            more = 2 if 2 * width - left < x.shape[2] else 0
            is_shifted = not more and not left
            left, right = left + 2 * is_shifted, right + more
        around: Any = rows, (left, right)
        return nn.max_pool(x, (3, 3), (2, 2), around)

    y, *factors = pooled(images, conv, norm, pool)
    if not is_paired or y.shape[2] % 2:
        return norm_relu(y, *factors)
    # Without the barrier XLA converts the pixels to float32 and stores that.
    cells = jax.lax.optimization_barrier(y.reshape(*y.shape[:2], -1, 2 * y.shape[3]))
    pairs = Pairs(cells, width, is_shifted)
    cells = pairs.normalize(*factors).astype(y.dtype)
    return dataclasses.replace(pairs, cells=nn.relu(cells))


class BasicBlock(Block):
    """`models.BasicBlock` in training."""

    @nn.compact
    def __call__(self, x: jax.Array | Pairs) -> jax.Array | Pairs:
        s = self.stride
        channels = x.cells.shape[-1] // 2 if isinstance(x, Pairs) else x.shape[-1]
        if s == 1 and channels == self.filters == PAIRED:
            return self._paired(x if isinstance(x, Pairs) else Pairs.pack(x))
        if isinstance(x, Pairs) and s == 2:
            layer = partial(self.conv, self.filters, (3, 3))
            y, x = x.halve(Kernel(layer, name="conv1")(channels))
        else:
            x = x.unpack() if isinstance(x, Pairs) else x
            y = self.conv(self.filters, (3, 3), s, padding=1, name="conv1")(x)
            x = x[:, ::s, ::s]
        y = nn.relu(self.norm(name="bn1")(y))
        y = self.conv(self.filters, (3, 3), padding=1, name="conv2")(y)
        y = self.norm(scale_init=ZEROS, name="bn2")(y)
        if s != 1 or x.shape[-1] != self.filters:
            conv = partial(self.conv, self.filters, (1, 1))
            x = conv_norms(conv, self.norm, (x, "_proj", ONES))
        return relu(x + y)

    def _paired(self, x: Pairs) -> Pairs:
        """The block without a projection."""

        def conv_norm(y: Pairs, suffix: str, scale_init: Any) -> tuple[Pairs, jax.Array]:
            layer = partial(self.conv, self.filters, (3, 3))
            y = y.conv(Kernel(layer, name=f"conv{suffix}")(self.filters))
            variables = batch_norm(self.norm, f"bn{suffix}", scale_init)
            scale, bias = variables(self.filters)
            mean, var = variables.statistics(y.moments())
            variables.update(mean, var)
            factor = jax.lax.rsqrt(var + variables.epsilon) * scale
            return y, y.normalize(mean, factor, bias)

        dtype = x.cells.dtype
        y, cells = conv_norm(x, "1", ONES)
        y = dataclasses.replace(y, cells=nn.relu(cells.astype(dtype)))
        y, cells = conv_norm(y, "2", ZEROS)
        return dataclasses.replace(y, cells=relu(x.cells + cells.astype(dtype)))
