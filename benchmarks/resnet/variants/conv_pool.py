"""The stem of ResNet-RS: a convolution with a stride takes the place of the max-pool.

Source: Bello et al. 2021 (arXiv:2103.07579).
"""

from __future__ import annotations

import flax.linen as nn
import jax

from benchmarks.resnet.variants import deep_stem
from models import ModuleDef, ResNet


def compose(model: ResNet, deep: bool) -> ResNet:
    """`model` with this stem, of three first convolutions (`deep`) or of one."""
    first = deep_stem.convolutions if deep else _convolution

    def stem(images: jax.Array, features: int, conv: ModuleDef, norm: ModuleDef) -> jax.Array:
        x = first(images, features, conv, norm)
        x = conv(features, (3, 3), 2, padding=1, name="conv_pool")(x)
        return nn.relu(norm(name="bn_pool")(x))

    return model.clone(stem=stem)


def _convolution(images: jax.Array, features: int, conv: ModuleDef, norm: ModuleDef) -> jax.Array:
    """The stem of `models` before its max-pool."""
    x = conv(features, (7, 7), 2, padding=3, name="conv_stem")(images)
    return nn.relu(norm(name="bn_stem")(x))
