"""Makes the network that a recipe's keys describe, and refuses keys that describe none."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

import models
from benchmarks.resnet import variants
from common.keys import Share
from common.layers import gram_resnet, space_to_depth
from common.layers.dropout import dropout as drop

PRECISIONS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
# The padding of the stem's max-pool, which never wins; "conv" has a convolution in its place.
MAX_POOLS = {"same": "SAME", "torch": ((1, 1), (1, 1)), "conv": None}
_DROPOUT = 0x68656164  # the site of the dropout before the head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """The config's keys that describe the network; configs/resnet50.py explains them."""

    resnet_depth: int
    # "1": bottlenecks stride in the first convolution, as Keras has it; "2": pre-activation
    resnet_version: Literal["1.5", "1", "2"] = "1.5"
    deep_stem: bool = False
    squeeze_excite: Share = 0.0
    max_pool: Literal["same", "torch", "conv"] = "same"
    num_filters: Annotated[int, "[1, 4096]"]
    precision: Literal["bfloat16", "float32"]
    space_to_depth: bool
    blur_pool: bool = False
    stage1_projection: bool = False
    bn_span: Annotated[int, "[0, 1e6]"] | str
    bn_momentum: Share
    batch_norm: Literal["gram", "plain"]
    kernels: Literal["xla", "pallas"] = "xla"


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
            axis_name=None if keys.bn_span == 1 else "group",
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


def fixes(keys: Architecture) -> dict[str, str]:
    """A fix for each key with a value that cannot work."""
    errors = {}
    if keys.resnet_depth not in models.DEPTHS:
        errors["resnet_depth"] = f"use one of {', '.join(map(str, models.DEPTHS))}"
    if keys.resnet_version == "2" and (keys.deep_stem or keys.squeeze_excite):
        errors["resnet_version"] = "has neither deep_stem nor squeeze_excite; use '1.5' or '1'"
    if keys.resnet_version == "2" and keys.max_pool == "conv":
        errors["max_pool"] = "has no form with resnet_version='2'; use 'same' or 'torch'"
    if keys.deep_stem and keys.space_to_depth:
        errors["deep_stem"] = "has no form with space_to_depth; set one of them to False"
    if keys.deep_stem and keys.num_filters < 2:
        errors["num_filters"] = "must be at least 2 for deep_stem"
    has_variant = keys.resnet_version != "1.5" or keys.max_pool == "conv" or keys.blur_pool
    has_variant |= bool(keys.deep_stem or keys.squeeze_excite)
    has_kernel = keys.resnet_depth >= 50 and keys.batch_norm == "gram" and not has_variant
    if keys.kernels == "pallas" and not has_kernel:
        errors["kernels"] = (
            "needs bottlenecks (50 layers or more), batch_norm='gram' and no variant; use 'xla'"
        )
    return errors
