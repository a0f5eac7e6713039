"""ResNet v1.5 with 10 to 200 layers: classifiers, and backbones for detectors.

Other ResNets have other parts: `benchmarks.resnet.variants` composes them from this one, and
`common.layers.gram_resnet` has a form with less memory traffic.

Sources: He et al. 2015 (arXiv:1512.03385) for the residual network; Goyal et al. 2017
(arXiv:1706.02677) for the stride on the 3x3 convolution ("v1.5"), gamma = 0 at each block's
end, N(0, 0.01) for the classifier and BatchNorm statistics per device; Ying et al. 2018
(arXiv:1811.06992) for statistics over groups of devices.

Parameters are float32. Convolutions, BatchNorm outputs and activations are in the compute dtype.
BatchNorm statistics, the global average pool, the dense layer and the logits are in float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from common.layers import batch_norm, convolutions, max_pool

ModuleDef = Callable[..., Any]

# What makes the layers of a `ResNet` by default. With a mesh axis as `axis_name`, inside
# `jax.shard_map`, BatchNorm's statistics are over all devices of the axis, which have equal shares
# of the batch.
Conv = partial(
    nn.Conv, use_bias=False, conv_general_dilated_cls=lambda: convolutions.conv_general_dilated
)
EPSILON = 1e-5  # added to the variance
BatchNorm = partial(batch_norm.BatchNorm, momentum=0.9, epsilon=EPSILON)


def stem(
    images: jax.Array, features: int, conv: ModuleDef, norm: ModuleDef, padding: Any = "SAME"
) -> jax.Array:
    """Convolution, BatchNorm, ReLU, max-pool: [b, H, W, 3] to [b, H / 4, W / 4, features].

    The padding of the max-pool is "SAME" in TensorFlow's models, ((1, 1), (1, 1)) in PyTorch's.
    """
    # The convolution's padding is explicit because SAME with stride 2 pads unevenly.
    x = conv(features, (7, 7), 2, padding=3, name="conv_stem")(images)
    x = nn.relu(norm(name="bn_stem")(x))
    return max_pool.max_pool(x, padding)


class Block(nn.Module):
    """What basic blocks and bottlenecks share: their attributes and their end."""

    filters: int
    conv: ModuleDef
    norm: ModuleDef
    stride: int = 1
    rescale: Callable[[jax.Array], jax.Array] = lambda y: y  # what the branch ends with
    projects: bool = False  # the shortcut has a projection even where the shapes agree

    def join(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """relu(shortcut of x + y), where the shortcut is a projection if the shapes differ."""
        y = self.rescale(y)
        if self.projects or self.stride != 1 or x.shape[-1] != y.shape[-1]:
            x = self.conv(y.shape[-1], (1, 1), self.stride, name="conv_proj")(x)
            x = self.norm(name="bn_proj")(x)
        return nn.relu(x + y)


class BasicBlock(Block):
    """Two 3x3 convolutions and a shortcut: [b, h, w, c] to [b, h / stride, w / stride, filters]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv(self.filters, (3, 3), self.stride, padding=1, name="conv1")(x)
        y = nn.relu(self.norm(name="bn1")(y))
        y = self.conv(self.filters, (3, 3), padding=1, name="conv2")(y)
        # Zero gamma: every block starts as its shortcut, which eases large-batch training.
        y = self.norm(scale_init=nn.initializers.zeros, name="bn2")(y)
        return self.join(x, y)


class BottleneckBlock(Block):
    """1x1, 3x3, 1x1 convolutions and a shortcut: [b, h, w, c] to [..., 4 * filters]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv(self.filters, (1, 1), name="conv1")(x)
        y = nn.relu(self.norm(name="bn1")(y))
        y = self.conv(self.filters, (3, 3), self.stride, padding=1, name="conv2")(y)
        y = nn.relu(self.norm(name="bn2")(y))
        y = self.conv(4 * self.filters, (1, 1), name="conv3")(y)
        y = self.norm(scale_init=nn.initializers.zeros, name="bn3")(y)
        return self.join(x, y)


# depth: (blocks per stage, their kind)
DEPTHS = {
    10: ((1, 1, 1, 1), BasicBlock),  # Simon et al. 2016, arXiv:1612.01452
    18: ((2, 2, 2, 2), BasicBlock),
    34: ((3, 4, 6, 3), BasicBlock),
    50: ((3, 4, 6, 3), BottleneckBlock),
    101: ((3, 4, 23, 3), BottleneckBlock),
    152: ((3, 8, 36, 3), BottleneckBlock),
    200: ((3, 24, 36, 3), BottleneckBlock),
}


def area_mean(x: jax.Array) -> jax.Array:
    """The global average pool: float[b, h, w, c] to f32[b, c]."""
    return jnp.mean(x, axis=(1, 2), dtype=jnp.float32)


class ResNet(nn.Module):
    """Residual network: stem, stages of residual blocks, global average pool, dense `head`.

    Variables: `params` and, of BatchNorm, `batch_stats`, float32. Training needs
    `mutable=["batch_stats"]`.
    """

    stage_sizes: tuple[int, ...]  # blocks per stage
    block: ModuleDef  # called as `block(filters, conv, norm, stride, name=...)(x)`
    num_classes: int = 1000
    num_filters: int = 64  # of the stem and the first stage; each further stage has twice as many
    strides: tuple[int, ...] = (1, 2, 2, 2)  # of each stage's first block
    # With float32, TPUs multiply in bfloat16 unless `jax.default_matmul_precision` says otherwise.
    dtype: Any = jnp.bfloat16
    stem: Callable[..., Any] = stem
    conv: ModuleDef = Conv
    norm: ModuleDef = BatchNorm
    last: Callable[..., jax.Array] | None = None  # a function of (x, norm) after the last stage

    def setup(self):
        self.head = nn.Dense(
            self.num_classes,
            dtype=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,  # by default accelerators round float32 operands
            kernel_init=nn.initializers.normal(0.01),
        )

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns logits, f32[b, num_classes], of normalised images, float[b, H, W, 3].

        `train` normalises with the batch's statistics and updates the running ones, else the
        running ones are used.
        """
        return self.head(self.features(images, train))

    def features(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns the mean of the last stage over its area, f32[b, channels]; `head` takes it."""
        *_, last = self.endpoints(images, train).values()
        return area_mean(last)

    @nn.compact
    def endpoints(self, images: jax.Array, train: bool) -> dict[str, jax.Array]:
        """Returns each stage's output, for detectors.

        `{"C2": ..., "C3": ..., ...}` has one array per stage in the compute dtype, of the image's
        height and width divided by 4 and by the strides so far, rounded up. Call it inside a
        module, or use `init` and `apply` with `method="endpoints"`; `init` then makes no `head`.
        """
        conv = partial(self.conv, dtype=self.dtype)
        norm = partial(self.norm, use_running_average=not train, dtype=self.dtype)
        x = self.stem(images, self.num_filters, conv, norm)
        outputs = {}
        for i, size in enumerate(self.stage_sizes):
            for j in range(size):
                stride = self.strides[i] if j == 0 else 1
                name = f"stage{i + 1}_block{j + 1}"
                x = self.block(self.num_filters * 2**i, conv, norm, stride, name=name)(x)
            # Blocks may pass on `common.layers.convolutions.Pairs`.
            outputs[f"C{i + 2}"] = jnp.asarray(x)
        if self.last:
            outputs[f"C{len(self.stage_sizes) + 1}"] = self.last(x, norm)
        return outputs


def resnet(depth: int, **attributes: Any) -> ResNet:
    """Returns the ResNet of a depth in `DEPTHS`."""
    return ResNet(*DEPTHS[depth], **attributes)
