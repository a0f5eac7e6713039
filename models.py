"""The ResNet family, 18 to 200 layers: classifiers, and backbones for detectors.

By default it is v1.5. `ops.layers` has the parts of the others.

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

from ops.layers import blur, drop_path, gram_resnet, group_norm, space_to_depth, strided, variants
from ops.layers.dropout import dropout
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


class Block(nn.Module):
    """What basic blocks and bottlenecks share: their attributes and their end."""

    filters: int
    conv: ModuleDef
    norm: ModuleDef
    stride: int = 1
    stride_in: bool = False  # a bottleneck strides in its first convolution ("v1")
    mean_shortcut: bool = False  # a projection with a stride takes means instead ("D")
    squeeze_excite: float = 0.0  # width of that part, relative to the channels; 0: without ("SE")

    def join(self, x: jax.Array, y: jax.Array, factors: jax.Array | None) -> jax.Array:
        """relu(shortcut of x + y), where the shortcut is a projection if the shapes differ.

        `factors` f32[b], where given, are those of the rows of y.
        """
        stride, features = self.stride, y.shape[-1]
        if self.squeeze_excite:
            y = variants.squeeze_excite(y, self.squeeze_excite)
        y = drop_path.scale(y, factors)
        if stride != 1 or x.shape[-1] != features:
            if self.mean_shortcut and stride == 2:
                x, stride = variants.pooled(x), 1
            x = self.conv(features, (1, 1), stride, name="conv_proj")(x)
            x = self.norm(name="bn_proj")(x)
        return nn.relu(x + y)


class BasicBlock(Block):
    """Two 3x3 convolutions and a shortcut: [b, h, w, c] to [b, h / stride, w / stride, filters]."""

    @nn.compact
    def __call__(self, x: jax.Array, factors: jax.Array | None = None) -> jax.Array:
        y = self.conv(self.filters, (3, 3), self.stride, padding=1, name="conv1")(x)
        y = nn.relu(self.norm(name="bn1")(y))
        y = self.conv(self.filters, (3, 3), padding=1, name="conv2")(y)
        # Zero gamma: every block starts as its shortcut, which eases large-batch training.
        y = self.norm(scale_init=nn.initializers.zeros, name="bn2")(y)
        return self.join(x, y, factors)


class BottleneckBlock(Block):
    """1x1, 3x3, 1x1 convolutions and a shortcut: as `BasicBlock`, with 4 * filters channels out."""

    @nn.compact
    def __call__(self, x: jax.Array, factors: jax.Array | None = None) -> jax.Array:
        strides = (self.stride, 1) if self.stride_in else (1, self.stride)
        y = self.conv(self.filters, (1, 1), strides[0], name="conv1")(x)
        y = nn.relu(self.norm(name="bn1")(y))
        y = self.conv(self.filters, (3, 3), strides[1], padding=1, name="conv2")(y)
        y = nn.relu(self.norm(name="bn2")(y))
        y = self.conv(4 * self.filters, (1, 1), name="conv3")(y)
        y = self.norm(scale_init=nn.initializers.zeros, name="bn3")(y)
        return self.join(x, y, factors)


def stem(images: jax.Array, conv: ModuleDef, norm: ModuleDef, padding: Any) -> jax.Array:
    """Convolution, BatchNorm, ReLU, max-pool: [b, H, W, 3] to [b, H / 4, W / 4, num_filters].

    With the padding None it ends before the max-pool.
    """
    x = conv(name="conv_stem")(images)
    x = nn.relu(norm(name="bn_stem")(x))
    return x if padding is None else max_pool(x, padding)


# (batch_norm, bottleneck): (stem, block) in training; "gram" and "plain" compute the same
LAYERS = {
    ("gram", False): (gram_resnet.paired_stem, gram_resnet.BasicBlock),
    ("gram", True): (gram_resnet.stem, gram_resnet.BottleneckBlock),
    ("plain", False): (stem, BasicBlock),
    ("plain", True): (stem, BottleneckBlock),
    ("v2", False): (variants.bare_stem, variants.PreBasicBlock),
    ("v2", True): (variants.bare_stem, variants.PreBottleneckBlock),
}
BATCH_NORMS = ("gram", "plain")
NORMALIZATIONS = ("batch", "group")
_COLOURS = 3
_DROPOUT = 0x68656164  # the site of the dropout before the head
# "1": bottlenecks stride in the first convolution, as Keras has it; "2": pre-activation
VERSIONS = ("1.5", "1", "2")


class ResNet(nn.Module):
    """Residual network: stem, stages of residual blocks, global average pool, dense `head`.

    Variables: `params` and, of BatchNorm, `batch_stats`, float32. Training needs
    `mutable=["batch_stats"]`.
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
    bn_epsilon: float = 1e-5  # added to the variance, of a group too
    # "gram": the same function and variables with less memory traffic. There is no such form of
    # another `version` or `normalization`, of `deep_stem`, of `squeeze_excite` and of a stem
    # without max-pool: these are "plain" in any case.
    batch_norm: str = "plain"
    # "group": GroupNorm of 32 groups and standardized weights, as in BiT. Its layers are gn1, ...
    # instead of bn1, ..., and what is said of BatchNorm here is said of them.
    normalization: str = "batch"
    version: str = "1.5"  # one of `VERSIONS`
    deep_stem: bool = False  # three 3x3 convolutions, and shortcuts with means: ResNet-D
    squeeze_excite: float = 0.0  # > 0: SE-ResNet, with layers of this share of the channels
    blur_pool: bool = False  # blur before each convolution with a stride but the stem's
    drop_path: float = 0.0  # share of the rows for which the last block is dropped, see `__call__`
    dropout: float = 0.0  # share of what the head takes that is dropped, see `__call__`
    # TensorFlow's weights need "SAME", PyTorch's ((1, 1), (1, 1)). None: a convolution instead of
    # the max-pool, as in ResNet-RS.
    max_pool_padding: str | tuple[tuple[int, int], tuple[int, int]] | None = "SAME"
    head_init_std: float = 0.01  # of the head's initial kernel, whose mean is 0
    # Rearrange images to [b, H/2, W/2, 12] first, so that the stem feeds 12 channels instead of 3
    # to the matrix unit. Its kernel is [4, 4, 12, num_filters] then.
    space_to_depth: bool = False

    def setup(self):
        if self.batch_norm not in BATCH_NORMS:
            raise ValueError(f"batch_norm={self.batch_norm!r}: use 'gram' or 'plain'")
        if self.version not in VERSIONS:
            raise ValueError(f"version={self.version!r}: use '1.5', '1' or '2'")
        if self.normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization={self.normalization!r}: use 'batch' or 'group'")
        has_parts = self.deep_stem or self.squeeze_excite or self.max_pool_padding is None
        if self.version == "2" and has_parts:
            raise ValueError(
                "version='2' has neither a deep stem nor squeeze and excitation, and has a max-pool"
            )
        if self.normalization == "group" and self.space_to_depth:
            raise ValueError("normalization='group' has no standardized kernel for space_to_depth")
        if self.deep_stem and self.space_to_depth:
            raise ValueError("a deep stem has no kernel for space_to_depth")
        if self.batch_norm == "gram" and (self.blur_pool or self.drop_path):
            raise ValueError(
                "batch_norm='gram' has no form with blur_pool or drop_path: use 'plain'"
            )
        if len(self.strides) < len(self.stage_sizes):
            raise ValueError(f"strides={self.strides}: {len(self.stage_sizes)} stages need as many")
        self.head = nn.Dense(
            self.num_classes,
            dtype=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,  # by default accelerators round float32 operands
            kernel_init=nn.initializers.normal(self.head_init_std),
        )

    def __call__(self, images: jax.Array, train: bool, seeds: jax.Array | None = None) -> jax.Array:
        """Returns logits, f32[b, num_classes].

        Args:
            images: float[b, H, W, 3], already normalised; or their 2x2 pixels as channels,
                [b, H/2, W/2, 12], see `space_to_depth.rearrange`.
            train: normalise with the batch's statistics and update the running ones, else use
                the running ones.
            seeds: int32[b], in training: from them `drop_path` draws the rows, none for the first
                block and more for each further one, and `dropout` what the head takes of each row.
                None drops nothing.

        Raises:
            ValueError: odd H or W with `space_to_depth`; images in blocks for a stem that is deep,
                has standardized weights or, in training, is "gram"; an attribute with an invalid
                value.
            NameError: `train` with `bn_axes` outside a `shard_map` over them.
        """
        features = self.features(images, train, seeds)
        return self.head(dropout(features, self.dropout, seeds, _DROPOUT))

    def features(self, images: jax.Array, train: bool, seeds: jax.Array | None = None) -> jax.Array:
        """Returns the mean of the last stage over its area, f32[b, channels].

        `head` takes it, in training after `dropout`.
        """
        *_, last = self.endpoints(images, train, seeds).values()
        return jnp.mean(last, axis=(1, 2), dtype=jnp.float32)

    @nn.compact
    def endpoints(
        self, images: jax.Array, train: bool, seeds: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        """Returns each stage's output, for detectors.

        Call it inside a module, or use `init` and `apply` with `method="endpoints"`; `init` then
        makes no `head`. Arguments and errors are those of `__call__`.

        Returns:
            `{"C2": ..., "C3": ..., ...}`: one array per stage in the compute dtype, of the
            image's height and width divided by 4 and by the strides so far, rounded up. With
            version "2", `bn_final` and a ReLU follow the last stage.
        """
        conv, norm = self._makers(train)
        # The padding is explicit because SAME with stride 2 pads unevenly.
        conv_stem = partial(conv, self.num_filters, (7, 7), 2, padding=3)
        is_blocked = images.shape[-1] == 4 * _COLOURS
        if self.space_to_depth:
            images = images if is_blocked else space_to_depth.rearrange(images)
            conv_stem = partial(conv, self.num_filters, (4, 4), padding=space_to_depth.PADDING)
            conv_stem = partial(conv_stem, kernel_init=space_to_depth.init_kernel)
        elif is_blocked:
            if not self._takes_blocks(train):
                raise ValueError("images in blocks need a plain stem, or space_to_depth=True")
            conv_stem = partial(space_to_depth.BlockedConv, self.num_filters, self.dtype)

        stem, block = self._layers(train)
        if self.deep_stem:
            conv_stem = conv
        x = stem(images, conv_stem, norm, self.max_pool_padding)
        if self.max_pool_padding is None:
            x = variants.conv_pool(x, conv, norm)
        outputs = {}
        rates = iter(enumerate(drop_path.rates(sum(self.stage_sizes), self.drop_path)))
        for i, size in enumerate(self.stage_sizes):
            for j in range(size):
                stride = self.strides[i] if j == 0 else 1
                name = f"stage{i + 1}_block{j + 1}"
                number, rate = next(rates)
                factors = drop_path.factors(rate, seeds, number)
                rows = () if factors is None else (factors,)
                x = block(self.num_filters * 2**i, conv, norm, stride, name=name)(x, *rows)
            outputs[f"C{i + 2}"] = x.unpack() if isinstance(x, Pairs) else x
        if self.version == "2":
            outputs[f"C{len(self.stage_sizes) + 1}"] = nn.relu(norm(name="bn_final")(x))
        return outputs

    def _makers(self, train: bool) -> tuple[Any, Any]:
        """The functions that make convolutions and normalizations."""
        if self.normalization == "group":
            conv: Any = partial(group_norm.StandardizedConv, dtype=self.dtype)
            norm = partial(group_norm.group_norm, epsilon=self.bn_epsilon, dtype=self.dtype)
        else:
            conv = partial(
                nn.Conv,
                use_bias=False,
                dtype=self.dtype,
                conv_general_dilated_cls=lambda: strided.conv_general_dilated,
            )
            axis_name: Any = self.bn_axes or None  # flax says str; lax.pmean takes a tuple
            norm = partial(
                nn.BatchNorm,
                use_running_average=not train,
                momentum=self.bn_momentum,
                epsilon=self.bn_epsilon,
                dtype=self.dtype,  # of the output: flax keeps the statistics in float32
                axis_name=axis_name,
            )
        return blur.blurred(conv) if self.blur_pool else conv, norm

    def _takes_blocks(self, train: bool) -> bool:
        """Whether `space_to_depth.BlockedConv` can take the place of the stem's convolution."""
        is_gram = train and self.batch_norm == "gram"
        return not (self.deep_stem or self.normalization == "group" or is_gram)

    def _layers(self, train: bool) -> tuple[Any, Any]:
        """The functions that make the stem and the blocks."""
        if self.version == "2":
            return LAYERS["v2", self.bottleneck]
        is_variant = self.version == "1" or self.deep_stem or self.squeeze_excite
        is_variant = is_variant or self.normalization == "group" or self.max_pool_padding is None
        if not is_variant:
            return LAYERS[self.batch_norm if train else "plain", self.bottleneck]
        stem, block = LAYERS["plain", self.bottleneck]
        if self.deep_stem:
            stem = partial(variants.deep_stem, features=self.num_filters)
        parts = {"stride_in": self.version == "1", "mean_shortcut": self.deep_stem}
        return stem, partial(block, **parts, squeeze_excite=self.squeeze_excite)


def resnet(depth: int, **kwargs: Any) -> ResNet:
    """Returns the ResNet of a depth in `DEPTHS`; `kwargs` are attributes and take precedence."""
    if depth not in DEPTHS:
        known = ", ".join(map(str, DEPTHS))
        raise ValueError(f"no ResNet of depth {depth!r}; known depths: {known}")
    stage_sizes, bottleneck = DEPTHS[depth]
    return ResNet(**{"stage_sizes": stage_sizes, "bottleneck": bottleneck, **kwargs})
