"""The step of flax's ImageNet example: a ResNet of plain layers, SGD with momentum, bfloat16.

Rewritten after the example's definition (google/flax, examples/imagenet, 2024): images arrive
normalised in the compute dtype, each device has its BatchNorm statistics, and half the squared norm
of all kernels times 1e-4 is part of the loss. Layers have our names, so that our weights fit.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.base import Spec
from benchmarks.resnet.classifier import ImageClassifier
from common.errors import ConfigError
from models import DEPTHS, BottleneckBlock
from scripts.bench.peers import Peer

_PENALTY = 1e-4  # factor of the squared norm of the kernels


class Block(nn.Module):
    """A basic block or a bottleneck with its shortcut."""

    filters: int
    is_bottleneck: bool
    stride: int
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        channels = self.filters * (4 if self.is_bottleneck else 1)
        if self.is_bottleneck:
            layers = [(self.filters, 1, 1), (self.filters, 3, self.stride), (channels, 1, 1)]
        else:
            layers = [(channels, 3, self.stride), (channels, 3, 1)]
        y = x
        for i, (filters, side, stride) in enumerate(layers, 1):
            padding = [(side // 2, side // 2)] * 2
            y = self.conv(filters, (side, side), stride, padding, name=f"conv{i}")(y)
            if i < len(layers):
                y = nn.relu(self.norm(name=f"bn{i}")(y))
        y = self.norm(scale_init=nn.initializers.zeros, name=f"bn{len(layers)}")(y)
        if x.shape != y.shape:
            x = self.conv(channels, (1, 1), self.stride, name="conv_proj")(x)
            x = self.norm(name="bn_proj")(x)
        return nn.relu(x + y)


class Trunk(nn.Module):
    """A ResNet's stem and stages.

    `filters` is the number of channels of the first stage, `norm` BatchNorm without dtype and mode,
    `pool` the padding of the stem's max-pool.
    """

    stage_sizes: Sequence[int]
    is_bottleneck: bool
    strides: Sequence[int]
    filters: int
    dtype: Any
    norm: Any = partial(nn.BatchNorm, momentum=0.9, epsilon=1e-5)
    pool: Any = "SAME"

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> Any:
        """The list of the maps of all stages, for images [b, H, W, 3]."""
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(self.norm, use_running_average=not train, dtype=self.dtype)
        x = conv(self.filters, (7, 7), 2, [(3, 3), (3, 3)], name="conv_stem")(images)
        x = nn.relu(norm(name="bn_stem")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), self.pool)
        maps = []
        for i, (size, first) in enumerate(zip(self.stage_sizes, self.strides, strict=True)):
            for j in range(size):
                x = Block(
                    self.filters * 2**i,
                    self.is_bottleneck,
                    1 if j else first,
                    conv,
                    norm,
                    name=f"stage{i + 1}_block{j + 1}",
                )(x)
            maps.append(x)
        return maps


class Classifier(Trunk):
    """A ResNet that classifies."""

    classes: int = 1000

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Logits [b, classes] in the compute dtype."""
        *_, x = super().__call__(images, train)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(jnp.mean(x, axis=(1, 2)))


def make(benchmark: ImageClassifier, freeze: str) -> Peer:
    """The peer of a benchmark with ResNet v1.5."""
    keys, side = benchmark.settings.model, benchmark.settings.images.image_size
    if keys.resnet_version != "1.5" or keys.deep_stem or keys.squeeze_excite or keys.blur_pool:
        raise ConfigError("--peer: flax's example is a ResNet v1.5, without this recipe's variants")
    sizes, block = DEPTHS[keys.resnet_depth]
    dtype = jnp.dtype(keys.precision)
    is_bottleneck, strides = block is BottleneckBlock, (1, 2, 2, 2)
    network = Classifier(
        sizes, is_bottleneck, strides, keys.num_filters, dtype, classes=benchmark.classes
    )

    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = network.init(key, jnp.zeros((1, side, side, 3), dtype), train=False)
        return variables["params"], variables["batch_stats"]

    def loss(params: Any, stats: Any, batch: Mapping[str, jax.Array], key: jax.Array) -> Any:
        variables = {"params": params, "batch_stats": stats}
        logits: Any
        logits, changed = network.apply(
            variables, batch["image"], train=True, mutable=["batch_stats"]
        )
        labels = jax.nn.one_hot(batch["label"], logits.shape[-1])
        entropy = jnp.mean(optax.softmax_cross_entropy(logits, labels))
        kernels = [x for x in jax.tree.leaves(params) if x.ndim > 1]
        penalty = 0.5 * _PENALTY * sum(jnp.sum(x**2) for x in kernels)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        metrics = {"cross_entropy": entropy, "accuracy": accuracy}
        return entropy + penalty, (metrics, changed["batch_stats"])

    def specs(batch_size: int) -> tuple[Spec, ...]:
        def spec(side: int) -> Spec:
            return {
                "image": jax.ShapeDtypeStruct((batch_size, side, side, 3), dtype),
                "label": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
            }

        return tuple(map(spec, benchmark.settings.images.sides))

    rate = optax.warmup_cosine_decay_schedule(0.0, 0.4, 6255, 112_590)
    return Peer(init, loss, optax.sgd(rate, momentum=0.9, nesterov=True), specs)
