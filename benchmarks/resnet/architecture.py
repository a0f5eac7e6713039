"""The network that a recipe's keys describe, and the values that describe none."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import models
from ops.layers.group_norm import GROUPS

PRECISIONS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
# The padding of the stem's max-pool; "conv" has a convolution in its place.
MAX_POOLS = {"same": "SAME", "torch": ((1, 1), (1, 1)), "conv": None}


def network(settings: Any, classes: int) -> models.ResNet:
    """The model of valid settings."""
    return models.resnet(
        settings.resnet_depth,
        num_classes=classes,
        num_filters=settings.num_filters,
        dtype=PRECISIONS[settings.precision],
        bn_axes=() if settings.bn_span == 1 else ("group",),
        bn_momentum=settings.bn_momentum,
        batch_norm=settings.batch_norm,
        normalization=settings.normalization,
        space_to_depth=settings.space_to_depth,
        max_pool_padding=MAX_POOLS[settings.max_pool],
        version=settings.resnet_version,
        deep_stem=settings.deep_stem,
        squeeze_excite=settings.squeeze_excite,
        blur_pool=settings.blur_pool,
        drop_path=settings.drop_path,
        dropout=settings.dropout,
        head_init_std=settings.head_init_std,
    )


def remedies(settings: Any) -> dict[str, str]:
    """A remedy for each key with a value that cannot work."""
    found = {}
    for key, known in (
        ("precision", PRECISIONS),
        ("resnet_depth", models.DEPTHS),
        ("resnet_version", models.VERSIONS),
        ("max_pool", MAX_POOLS),
        ("batch_norm", models.BATCH_NORMS),
        ("normalization", models.NORMALIZATIONS),
    ):
        if getattr(settings, key) not in known:
            found[key] = f"use one of {', '.join(map(repr, known))}"
    if settings.resnet_version == "2" and (settings.deep_stem or settings.squeeze_excite):
        found["resnet_version"] = "has neither deep_stem nor squeeze_excite; use '1.5' or '1'"
    if settings.resnet_version == "2" and settings.max_pool == "conv":
        found["max_pool"] = "has no form with resnet_version='2'; use 'same' or 'torch'"
    if settings.deep_stem and settings.space_to_depth:
        found["deep_stem"] = "has no form with space_to_depth; set one of them to False"
    if settings.deep_stem and settings.num_filters < 2:
        found["num_filters"] = "must be at least 2 for deep_stem"
    return found | (_of_groups(settings) if settings.normalization == "group" else {})


def _of_groups(settings: Any) -> dict[str, str]:
    """A remedy for each key with a value that cannot work with GroupNorm."""
    found = {}
    least = GROUPS * (2 if settings.deep_stem else 1)  # a deep stem begins with half the channels
    if settings.num_filters % least:
        found["num_filters"] = f"use a multiple of {least}, for groups of channels of equal size"
    if settings.space_to_depth:
        found["space_to_depth"] = "has no form with normalization='group'; use False"
    if settings.bn_span != 1:
        found["bn_span"] = "normalization='group' has no statistics to share; use 1"
    if settings.bn_statistics == "frozen":
        found["bn_statistics"] = "normalization='group' has no statistics to keep; use 'batch'"
    return found
