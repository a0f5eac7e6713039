"""Variants of ResNet v1.5: v1, v2, ResNet-D, squeeze-and-excite, blur pool, stochastic depth.

Each `compose_` takes a `models.ResNet` and returns it with other parts. They can be applied to each
other's results. `benchmarks.resnet.architecture` has the recipe's key for each, and refuses
combinations that cannot work. `padding` is the padding of the stem's max-pool.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from common.errors import ConfigError
from common.hashing import hash32
from common.layers import device_kind, gram_resnet
from common.layers.max_pool import max_pool
from models import BasicBlock, Block, ModuleDef, ResNet

MIN_BLUR_CHANNELS = 16  # a convolution of fewer, which is the stem's, is left as it is
BLUR_KERNEL = np.outer((1, 2, 1), (1, 2, 1)) / 16  # the kernel of `blur`
_DROP_PATH_SITE = 0x70617468  # apart from other users of the same seeds
_PALLAS_STAGES = 2  # whose blocks end with a kernel's boundary; arrays of later ones are small
_WITHOUT_PALLAS = ("TPU v2", "TPU v3")  # the kernels' compiler refuses their products


def compose_v1(model: ResNet) -> ResNet:
    """The original: `model` with the stride of each block in `conv1`, as Keras has it.

    In basic blocks it is there anyway. He et al. 2015 (arXiv:1512.03385).
    """

    def block(filters: int, conv: ModuleDef, norm: ModuleDef, stride: int, **others: Any) -> Any:
        strides = {"conv1": stride, "conv2": 1}

        def strided(features: int, size: tuple[int, int], stride: int = 1, **options: Any) -> Any:
            return conv(features, size, strides.get(options["name"], stride), **options)

        return model.block(filters, strided, norm, stride, **others)

    return model.clone(block=block)


def compose_v2(model: ResNet, padding: Any) -> ResNet:
    """Pre-activation: BatchNorm and ReLU come before each convolution, the shortcut is added last.

    `model` has the parts of v1.5. He et al. 2016 (arXiv:1603.05027).
    """

    def stem(images: jax.Array, features: int, conv: ModuleDef, norm: ModuleDef) -> jax.Array:
        del norm  # each block begins with BatchNorm and ReLU
        return max_pool(conv(features, (7, 7), 2, padding=3, name="conv_stem")(images), padding)

    def last(x: jax.Array, norm: ModuleDef) -> jax.Array:
        return nn.relu(norm(name="bn_final")(x))

    block = PreBasicBlock if model.block is BasicBlock else PreBottleneckBlock
    return model.clone(stem=stem, block=block, last=last)


class PreActivation(Block):
    """A block that begins with BatchNorm and ReLU."""

    def convolve(self, x: jax.Array, *layers: tuple[int, int, int]) -> jax.Array:
        """The block with convolutions of (features, side of the kernel, stride)."""
        y, shortcut = x, x
        for i, (features, side, stride) in enumerate(layers, 1):
            y = nn.relu(self.norm(name=f"bn{i}")(y))
            differs = self.stride != 1 or x.shape[-1] != layers[-1][0]
            if i == 1 and (self.projects or differs):
                shortcut = self.conv(layers[-1][0], (1, 1), self.stride, name="conv_proj")(y)
            y = self.conv(features, (side, side), stride, padding=side // 2, name=f"conv{i}")(y)
        return shortcut + self.rescale(y)


class PreBasicBlock(PreActivation):
    """`models.BasicBlock` with pre-activation."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.convolve(x, (self.filters, 3, self.stride), (self.filters, 3, 1))


class PreBottleneckBlock(PreActivation):
    """`models.BottleneckBlock` with pre-activation."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        f = self.filters
        return self.convolve(x, (f, 1, 1), (f, 3, self.stride), (4 * f, 1, 1))


def compose_stage1_projection(model: ResNet) -> ResNet:
    """`model` with a projection in the first block too, where shapes agree.

    Bottlenecks have one there anyway. It is the TPU tutorial's ResNet-18 and 34: tensorflow/tpu,
    models/official/resnet/resnet_model.py.
    """

    def block(*parts: Any, name: str, **others: Any) -> Any:
        return model.block(*parts, name=name, projects=name == "stage1_block1", **others)

    return model.clone(block=block)


def compose_deep_stem(model: ResNet, padding: Any) -> ResNet:
    """ResNet-D: a stem of three convolutions, and shortcuts that take means instead of a stride.

    The means are of 2x2 windows; at odd edges, of the pixels that exist. He et al. 2018
    (arXiv:1812.01187).
    """

    def block(filters: int, conv: ModuleDef, *parts: Any, **others: Any) -> Any:
        def mean_projection(features: int, size: Any, stride: int = 1, **options: Any) -> Any:
            if options["name"] != "conv_proj" or stride != 2:
                return conv(features, size, stride, **options)
            pool = partial(nn.avg_pool, window_shape=(2, 2), strides=(2, 2), padding="SAME")
            return lambda x: conv(features, size, **options)(pool(x, count_include_pad=False))

        return model.block(filters, mean_projection, *parts, **others)

    def stem(images: jax.Array, features: int, conv: ModuleDef, norm: ModuleDef) -> jax.Array:
        return max_pool(_deep_convolutions(images, features, conv, norm), padding)

    return model.clone(stem=stem, block=block)


def _deep_convolutions(
    images: jax.Array, features: int, conv: ModuleDef, norm: ModuleDef
) -> jax.Array:
    """Three 3x3 convolutions before a max-pool: [b, H, W, 3] to [b, H / 2, W / 2, features]."""
    x, half = images, features // 2
    for suffix, width, stride in (("", half, 2), ("2", half, 1), ("3", features, 1)):
        x = conv(width, (3, 3), stride, padding=1, name=f"conv_stem{suffix}")(x)
        x = nn.relu(norm(name=f"bn_stem{suffix}")(x))
    return x


def compose_conv_pool(model: ResNet, deep: bool) -> ResNet:
    """The stem of ResNet-RS: a convolution with a stride takes the place of the max-pool.

    Before it come three convolutions (`deep`) or one. Bello et al. 2021 (arXiv:2103.07579).
    """

    def stem(images: jax.Array, features: int, conv: ModuleDef, norm: ModuleDef) -> jax.Array:
        if deep:
            x = _deep_convolutions(images, features, conv, norm)
        else:
            x = conv(features, (7, 7), 2, padding=3, name="conv_stem")(images)
            x = nn.relu(norm(name="bn_stem")(x))
        x = conv(features, (3, 3), 2, padding=1, name="conv_pool")(x)
        return nn.relu(norm(name="bn_pool")(x))

    return model.clone(stem=stem)


def compose_squeeze_excite(model: ResNet, ratio: float) -> ResNet:
    """`model` with a `squeeze_excite` of this ratio at the end of each branch.

    Hu et al. 2017 (arXiv:1709.01507), with timm's rounding of the width.
    """

    def block(*parts: Any, rescale: Any = lambda y: y, **others: Any) -> Any:
        return model.block(*parts, rescale=lambda y: rescale(squeeze_excite(y, ratio)), **others)

    return model.clone(block=block)


def squeeze_excite(x: jax.Array, ratio: float) -> jax.Array:
    """Scales the channels of x [b, h, w, c] by factors that follow from their means, in float32.

    Called in a block, it makes the layers `se_reduce`, of about `ratio` * c units, and `se_expand`.
    """
    channels = x.shape[-1]

    def dense(features: int, name: str) -> nn.Dense:
        highest = jax.lax.Precision.HIGHEST
        return nn.Dense(features, dtype=jnp.float32, precision=highest, name=name)

    means = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
    y = dense(channels, "se_expand")(
        nn.relu(dense(squeezed_units(channels, ratio), "se_reduce")(means))
    )
    return x * nn.sigmoid(y)[:, None, None].astype(x.dtype)


def squeezed_units(channels: int, ratio: float) -> int:
    """How many units `squeeze_excite` reduces channels to: a multiple of 8, as in timm."""
    return max(8, int(channels * ratio + 4) // 8 * 8)


def compose_blur_pool(model: ResNet) -> ResNet:
    """`model` with a `blur` before the convolutions with a stride, against aliasing.

    Zhang 2019 (arXiv:1904.11486); ffcv-imagenet and Composer for the place of the filter (before
    the convolution instead of behind it) and for the rule which convolutions get it.

    The filter is a few shifts and sums. They are fused with the BatchNorm and the ReLU before them,
    so that the blurred values are stored instead of the sharp ones. Two other forms are dearer: one
    5x5 convolution with both kernels in it has 25 / 9 of the work of the 3x3 one, 15 % more for a
    ResNet-50, and blurs across the edge; a depthwise convolution leaves most of the matrix unit
    idle. Before a 1x1 convolution only the values that its stride meets are computed.
    """

    def conv(features: int, size: tuple[int, int], stride: int = 1, **others: Any) -> ModuleDef:
        def apply(x: jax.Array) -> jax.Array:
            remaining = stride
            if stride > 1 and x.shape[-1] >= MIN_BLUR_CHANNELS:
                x, remaining = (blur(x, stride), 1) if size == (1, 1) else (blur(x), stride)
            return model.conv(features, size, remaining, **others)(x)

        return apply

    return model.clone(conv=conv)


@jax.named_scope("blur")
def blur(x: jax.Array, stride: int = 1) -> jax.Array:
    """Convolves each channel with (1 2 1) / 4 in both directions, with zeros around the image.

    float[b, h, w, c] to [b, ceil(h / stride), ceil(w / stride), c], summed in float32 or wider.
    """
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for axis in (1, 2):
        size = y.shape[axis]
        y = jnp.pad(y, [(1, 1) if i == axis else (0, 0) for i in range(4)])
        first, middle, last = (jax.lax.slice_in_dim(y, i, i + size, stride, axis) for i in range(3))
        y = (first + last) / 4 + middle / 2
    return y.astype(x.dtype)


def compose_stochastic_depth(model: ResNet, last: float, seeds: jax.Array) -> ResNet:
    """Stochastic depth of `model` for training rows with these seeds, int32[b].

    The branch of the last block is dropped with the probability `last`, that of the first block
    never. Huang et al. 2016 (arXiv:1603.09382). As in timm, each row is drawn separately, and
    the kept branches are scaled in training, so that evaluation needs no factor.
    """
    names = _block_names(model)
    numbers = {name: number for number, name in enumerate(names)}

    def block(*parts: Any, name: str, **others: Any) -> Any:
        number = numbers[name]
        if rate := last * number / max(len(names) - 1, 1):
            others["rescale"] = partial(scale_branch, factors=branch_factors(rate, seeds, number))
        return model.block(*parts, name=name, **others)

    return model.clone(block=block)


def branch_factors(rate: float, seeds: jax.Array, block: int) -> jax.Array:
    """f32[b] for seeds int32[b]: 0 with probability `rate`, and 1 / (1 - rate) otherwise."""
    stays = hash32(seeds, _DROP_PATH_SITE, block) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(stays, jnp.float32(1 / (1 - rate)), 0)


@jax.named_scope("drop_path")
def scale_branch(y: jax.Array, factors: jax.Array) -> jax.Array:
    """float[b, h, w, c], each row times its factor f32[b]."""
    # In bfloat16 the factor alone would be wrong by 0.2 %.
    scaled = y.astype(jnp.promote_types(y.dtype, jnp.float32)) * factors[:, None, None, None]
    return scaled.astype(y.dtype)


def compose_pallas(model: ResNet, padding: Any) -> ResNet:
    """config.kernels = "pallas": one kernel per boundary of two bottlenecks in the backward pass.

    Function and variables are the same as with batch_norm="gram". `boundary` has the kernel
    and says what it saves. Where these devices cannot run it, calling the model in training
    raises a ConfigError.
    """
    from benchmarks.resnet import gram_boundary  # imports Pallas, which few runs need

    names = _block_names(model)
    opens = names[: min(sum(model.stage_sizes[:_PALLAS_STAGES]), len(names) - 1)]

    def block(*parts: Any, name: str) -> Any:
        if (device := device_kind()) in _WITHOUT_PALLAS:
            raise ConfigError(
                f"config.kernels='pallas': {device} cannot multiply bfloat16 in a Pallas kernel; "
                "use 'xla'"
            )
        return gram_boundary.BottleneckBlock(*parts, opens=name in opens, name=name)

    return gram_resnet.compose(model, gram_resnet.stem, block, padding)


def _block_names(model: ResNet) -> list[str]:
    """The names of the residual blocks, in the order in which images pass them."""
    sizes = enumerate(model.stage_sizes, 1)
    return [f"stage{i}_block{j}" for i, n in sizes for j in range(1, n + 1)]
