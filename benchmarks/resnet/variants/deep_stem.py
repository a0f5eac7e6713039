"""ResNet-D: a stem of three convolutions, and shortcuts that take means instead of a stride.

Source: He et al. 2018 (arXiv:1812.01187).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax

from models import ModuleDef, ResNet
from ops.layers.pooling import max_pool


def compose(model: ResNet, padding: Any) -> ResNet:
    """`model` as ResNet-D; `padding` is that of the stem's max-pool, as in `models.stem`."""

    def block(filters: int, conv: ModuleDef, *parts: Any, **others: Any) -> Any:
        return model.block(filters, partial(_projection, conv), *parts, **others)

    return model.clone(stem=partial(stem, padding=padding), block=block)


def stem(
    images: jax.Array, features: int, conv: ModuleDef, norm: ModuleDef, padding: Any
) -> jax.Array:
    """`models.stem` with three 3x3 convolutions: [b, H, W, 3] to [b, H / 4, W / 4, features]."""
    return max_pool(convolutions(images, features, conv, norm), padding)


def convolutions(images: jax.Array, features: int, conv: ModuleDef, norm: ModuleDef) -> jax.Array:
    """The stem before its max-pool: [b, H, W, 3] to [b, H / 2, W / 2, features]."""
    x, half = images, features // 2
    for suffix, width, stride in (("", half, 2), ("2", half, 1), ("3", features, 1)):
        x = conv(width, (3, 3), stride, padding=1, name=f"conv_stem{suffix}")(x)
        x = nn.relu(norm(name=f"bn_stem{suffix}")(x))
    return x


def pooled(x: jax.Array) -> jax.Array:
    """The mean of 2x2 windows at a stride of 2; at odd edges, of the pixels that exist."""
    return nn.avg_pool(x, (2, 2), (2, 2), "SAME", count_include_pad=False)


def _projection(
    conv: ModuleDef, features: int, size: tuple[int, int], stride: int = 1, **others: Any
) -> Any:
    """`conv`, but of `pooled` values and without a stride where it is a block's projection."""
    if others["name"] != "conv_proj" or stride != 2:
        return conv(features, size, stride, **others)
    return lambda x: conv(features, size, **others)(pooled(x))
