"""Makes the network that a recipe's keys describe."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import models
from benchmarks.base import BATCH_NORM_AXIS
from benchmarks.resnet import variants
from benchmarks.resnet.settings import Architecture
from common.hashing import dropout as drop
from common.layers import gram_resnet, space_to_depth

PRECISIONS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
# The padding of the stem's max-pool, which never wins; "conv" has a convolution in its place.
MAX_POOLS = {"same": "SAME", "torch": ((1, 1), (1, 1)), "conv": None}
_DROPOUT = 0x68656164  # the site of the dropout before the head


def network(keys: Architecture, classes: int) -> models.ResNet:
    """The model of valid keys."""
    padding = MAX_POOLS[keys.max_pool]
    model = models.resnet(
        keys.resnet_depth,
        num_classes=classes,
        num_filters=keys.num_filters,
        dtype=PRECISIONS[keys.precision],
        stem=partial(models.stem, padding=padding),
        norm=partial(
            models.BatchNorm,
            momentum=keys.bn_momentum,
            axis_name=None if keys.bn_span == 1 else BATCH_NORM_AXIS,
        ),
    )
    # Whether the recipe names a variant, what composes it, and with which arguments. Later ones
    # change the parts of earlier ones.
    table: list[tuple[bool, Callable[..., models.ResNet], tuple[Any, ...]]] = [
        (keys.resnet_version == "1", variants.compose_v1, ()),
        (keys.resnet_version == "2", variants.compose_v2, (padding,)),
        (keys.stage1_projection, variants.compose_stage1_projection, ()),
        (keys.deep_stem, variants.compose_deep_stem, (padding,)),
        (keys.max_pool == "conv", variants.compose_conv_pool, (keys.deep_stem,)),
        (keys.squeeze_excite > 0, variants.compose_squeeze_excite, (keys.squeeze_excite,)),
        (keys.blur_pool, variants.compose_blur_pool, ()),
        (keys.kernels == "pallas", variants.compose_pallas, (padding,)),
    ]
    for is_named, compose, arguments in table:
        model = compose(model, *arguments) if is_named else model
    if keys.batch_norm == "gram" and not any(is_named for is_named, _, _ in table):
        model = gram(model, padding)
    if keys.space_to_depth:
        model = model.clone(stem=space_to_depth.stem(model.stem))
    return model


def gram(model: models.ResNet, padding: Any) -> models.ResNet:
    """The model with the layers of `batch_norm='gram'`, which move fewer bytes in training."""
    if model.block is models.BottleneckBlock:
        return gram_resnet.compose(model, gram_resnet.stem, gram_resnet.BottleneckBlock, padding)
    return gram_resnet.compose_basic(model, padding)


def training_apply(
    model: models.ResNet, drop_path: float, dropout: float, seeds: jax.Array | None
) -> Callable[..., Any]:
    """`model.apply` for rows of a training batch with these seeds, int32[b].

    `drop_path` is the probability that a row skips the branch of the last block, `dropout` the
    probability that a feature before the head is set to 0. `seeds` may be None if both are 0.
    """
    if drop_path:
        assert seeds is not None
        model = variants.compose_stochastic_depth(model, drop_path, seeds)
    if not dropout:
        return model.apply

    def logits(model: models.ResNet, images: jax.Array, train: bool) -> jax.Array:
        return model.head(drop(model.features(images, train), dropout, seeds, _DROPOUT))

    return partial(model.apply, method=logits)
