"""The ResNet v1.5 family, 18 to 200 layers: classifiers, and backbones for detectors.

Sources: He et al. 2015 (arXiv:1512.03385) for the residual network; Goyal et al. 2017
(arXiv:1706.02677) for the stride on the 3x3 convolution ("v1.5"), gamma = 0 at each block's
end, N(0, 0.01) for the classifier and BatchNorm statistics per device; Ying et al. 2018
(arXiv:1811.06992) for statistics over groups of devices; Google's MLPerf v0.7 entry for the
space-to-depth stem.

Parameters are float32. Convolutions, BatchNorm outputs and activations are in the compute dtype.
BatchNorm statistics, the global average pool, the dense layer and the logits are in float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ops.layers import gram_resnet, space_to_depth
from ops.layers.pairs import Pairs
from ops.layers.pooling import max_pool

# depth: (blocks per stage, bottleneck blocks rather than basic ones)
DEPTHS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
    200: ((3, 24, 36, 3), True),
}
ModuleDef = Callable[..., nn.Module]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: [b, h, w, c] to [b, h / stride, w / stride, filters]."""

    filters: int
    conv: ModuleDef
    norm: ModuleDef
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv(self.filters, (3, 3), self.stride, padding=1, name="conv1")(x)
        y = nn.relu(self.norm(name="bn1")(y))
        y = self.conv(self.filters, (3, 3), padding=1, name="conv2")(y)
        # Zero gamma: every block starts as its shortcut, which eases large-batch training.
        y = self.norm(scale_init=nn.initializers.zeros, name="bn2")(y)
        if self.stride != 1 or x.shape[-1] != self.filters:
            x = self.conv(self.filters, (1, 1), self.stride, name="conv_proj")(x)
            x = self.norm(name="bn_proj")(x)
        return nn.relu(x + y)


class BottleneckBlock(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut: as `BasicBlock`, with 4 * filters channels out."""

    filters: int
    conv: ModuleDef
    norm: ModuleDef
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features = 4 * self.filters
        y = self.conv(self.filters, (1, 1), name="conv1")(x)
        y = nn.relu(self.norm(name="bn1")(y))
        y = self.conv(self.filters, (3, 3), self.stride, padding=1, name="conv2")(y)
        y = nn.relu(self.norm(name="bn2")(y))
        y = self.conv(features, (1, 1), name="conv3")(y)
        y = self.norm(scale_init=nn.initializers.zeros, name="bn3")(y)
        if self.stride != 1 or x.shape[-1] != features:
            x = self.conv(features, (1, 1), self.stride, name="conv_proj")(x)
            x = self.norm(name="bn_proj")(x)
        return nn.relu(x + y)


def stem(images: jax.Array, conv: ModuleDef, norm: ModuleDef, padding: Any) -> jax.Array:
    """Convolution, BatchNorm, ReLU, max-pool: [b, H, W, 3] to [b, H / 4, W / 4, num_filters]."""
    x = conv(name="conv_stem")(images)
    x = nn.relu(norm(name="bn_stem")(x))
    return max_pool(x, padding)


# (batch_norm, bottleneck): (stem, block) in training; all stems, and blocks, compute the same
LAYERS = {
    ("gram", False): (gram_resnet.paired_stem, gram_resnet.BasicBlock),
    ("gram", True): (gram_resnet.stem, gram_resnet.BottleneckBlock),
    ("plain", False): (stem, BasicBlock),
    ("plain", True): (stem, BottleneckBlock),
}
BATCH_NORMS = ("gram", "plain")


class ResNet(nn.Module):
    """Residual network: stem, stages of residual blocks, global average pool, dense `head`.

    Variables: `params` and `batch_stats`, float32. Training needs `mutable=["batch_stats"]`.
    """

    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)  # blocks per stage
    bottleneck: bool = True  # the blocks are `BottleneckBlock` instead of `BasicBlock`
    strides: tuple[int, ...] = (1, 2, 2, 2)  # of each stage's first block; one per stage or more
    num_classes: int = 1000
    num_filters: int = 64  # of the stem and the first stage; each further stage has twice as many
    # With float32, the TPU still multiplies in bfloat16 unless `jax.default_matmul_precision` says
    # otherwise (the head is always exact float32).
    dtype: Any = jnp.bfloat16
    # The mesh axes over which training statistics are averaged, inside `jax.shard_map`; () leaves
    # each device its own. All devices have equal shares of the batch.
    bn_axes: tuple[str, ...] = ()
    bn_momentum: float = 0.9  # weight of the old value in the running statistics
    bn_epsilon: float = 1e-5  # added to the variance
    batch_norm: str = "plain"  # "gram": same function and variables, less memory traffic
    # TensorFlow's weights need "SAME", PyTorch's ((1, 1), (1, 1)).
    max_pool_padding: str | tuple[tuple[int, int], tuple[int, int]] = "SAME"
    # Rearrange images to [b, H/2, W/2, 12] first, so that the stem feeds 12 channels instead of 3
    # to the matrix unit. Its kernel is [4, 4, 12, num_filters] then.
    space_to_depth: bool = False

    def setup(self):
        if self.batch_norm not in BATCH_NORMS:
            raise ValueError(f"batch_norm={self.batch_norm!r}: use 'gram' or 'plain'")
        if len(self.strides) < len(self.stage_sizes):
            raise ValueError(f"strides={self.strides}: {len(self.stage_sizes)} stages need as many")
        self.head = nn.Dense(
            self.num_classes,
            dtype=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,  # by default accelerators round float32 operands
            kernel_init=nn.initializers.normal(0.01),
        )

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns logits, f32[b, num_classes].

        Args:
            images: float[b, H, W, 3], already normalised.
            train: normalise with the batch's statistics and update the running ones, else use
                the running ones.

        Raises:
            ValueError: odd H or W with `space_to_depth`; an attribute with an invalid value.
            NameError: `train` with `bn_axes` outside a `shard_map` over them.
        """
        *_, features = self.endpoints(images, train).values()
        return self.head(jnp.mean(features, axis=(1, 2), dtype=jnp.float32))

    @nn.compact
    def endpoints(self, images: jax.Array, train: bool) -> dict[str, jax.Array]:
        """Returns each stage's output, for detectors.

        Call it inside a module, or use `init` and `apply` with `method="endpoints"`; `init` then
        makes no `head`. Arguments and errors are those of `__call__`.

        Returns:
            `{"C2": ..., "C3": ..., ...}`: one array per stage in the compute dtype, of the
            image's height and width divided by 4 and by the strides so far, rounded up.
        """
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        axis_name: Any = self.bn_axes or None  # flax says str; lax.pmean below it takes a tuple
        norm = partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=self.bn_momentum,
            epsilon=self.bn_epsilon,
            dtype=self.dtype,  # of the output: flax keeps the statistics in float32
            axis_name=axis_name,
        )
        # The padding is explicit because SAME with stride 2 pads unevenly.
        conv_stem = partial(conv, self.num_filters, (7, 7), 2, padding=3)
        if self.space_to_depth:
            images = space_to_depth.rearrange(images)
            conv_stem = partial(conv, self.num_filters, (4, 4), padding=((2, 1), (2, 1)))
            conv_stem = partial(conv_stem, kernel_init=space_to_depth.init_kernel)

        stem, block = LAYERS[self.batch_norm if train else "plain", self.bottleneck]
        x = stem(images, conv_stem, norm, self.max_pool_padding)
        outputs = {}
        for i, size in enumerate(self.stage_sizes):
            for j in range(size):
                stride = self.strides[i] if j == 0 else 1
                name = f"stage{i + 1}_block{j + 1}"
                x = block(self.num_filters * 2**i, conv, norm, stride, name=name)(x)
            outputs[f"C{i + 2}"] = x.unpack() if isinstance(x, Pairs) else x
        return outputs


def resnet(depth: int, **kwargs: Any) -> ResNet:
    """Returns the ResNet of a depth in `DEPTHS`; `kwargs` are attributes and take precedence."""
    if depth not in DEPTHS:
        known = ", ".join(map(str, DEPTHS))
        raise ValueError(f"no ResNet of depth {depth!r}; known depths: {known}")
    stage_sizes, bottleneck = DEPTHS[depth]
    return ResNet(**{"stage_sizes": stage_sizes, "bottleneck": bottleneck, **kwargs})
