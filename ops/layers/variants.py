"""The parts in which other ResNets differ from v1.5 of `models.py`.

Sources: He et al. 2016 (arXiv:1603.05027) for pre-activation ("v2"); He et al. 2018
(arXiv:1812.01187) for the deep stem and the shortcuts with a mean ("D"); Hu et al. 2017
(arXiv:1709.01507) for squeeze and excitation ("SE"), with timm's rounding of its width; Bello et
al. 2021 (arXiv:2103.07579) for a stem without max-pool ("RS").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ops.layers import drop_path
from ops.layers.pooling import max_pool

ModuleDef = Callable[..., nn.Module]


def deep_stem(
    images: jax.Array, conv: ModuleDef, norm: ModuleDef, padding: Any, *, features: int
) -> jax.Array:
    """`models.stem` with three 3x3 convolutions: [b, H, W, 3] to [b, H / 4, W / 4, features]."""
    x = images
    for suffix, width, stride in (
        ("", features // 2, 2),
        ("2", features // 2, 1),
        ("3", features, 1),
    ):
        x = conv(width, (3, 3), stride, padding=1, name=f"conv_stem{suffix}")(x)
        x = nn.relu(norm(name=f"bn_stem{suffix}")(x))
    return x if padding is None else max_pool(x, padding)


def conv_pool(x: jax.Array, conv: ModuleDef, norm: ModuleDef) -> jax.Array:
    """What ResNet-RS has for the max-pool: [b, h, w, c] to [b, h / 2, w / 2, c]."""
    x = conv(x.shape[-1], (3, 3), 2, padding=1, name="conv_pool")(x)
    return nn.relu(norm(name="bn_pool")(x))


def bare_stem(images: jax.Array, conv: ModuleDef, norm: ModuleDef, padding: Any) -> jax.Array:
    """`models.stem` without BatchNorm and ReLU, with which each pre-activation block begins."""
    del norm
    return max_pool(conv(name="conv_stem")(images), padding)


def pooled(x: jax.Array) -> jax.Array:
    """The mean of 2x2 windows at a stride of 2; at odd edges, of the pixels that exist."""
    return nn.avg_pool(x, (2, 2), (2, 2), "SAME", count_include_pad=False)


def squeeze_excite(x: jax.Array, ratio: float) -> jax.Array:
    """Scales the channels of x [b, h, w, c] by factors that follow from their means, in float32.

    Called in a block, it makes the layers `se_reduce`, of about `ratio` * c units, and `se_expand`.
    """
    channels = x.shape[-1]

    def dense(features: int, name: str) -> nn.Dense:
        exact = jax.lax.Precision.HIGHEST
        return nn.Dense(features, dtype=jnp.float32, precision=exact, name=name)

    means = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
    y = dense(channels, "se_expand")(nn.relu(dense(squeezed(channels, ratio), "se_reduce")(means)))
    return x * nn.sigmoid(y)[:, None, None].astype(x.dtype)


def squeezed(channels: int, ratio: float) -> int:
    """How many units `squeeze_excite` reduces channels to: a multiple of 8, as in timm."""
    return max(8, int(channels * ratio + 4) // 8 * 8)


class PreActivation(nn.Module):
    """Begins a block with BatchNorm and ReLU, and adds the shortcut last.

    Attributes: those of `models.Block`.
    """

    filters: int
    conv: ModuleDef
    norm: ModuleDef
    stride: int = 1

    def convolve(
        self, x: jax.Array, factors: jax.Array | None, *layers: tuple[int, int, int]
    ) -> jax.Array:
        """Layers are (features, side of the kernel, stride); `factors` scale the last one."""
        y, shortcut = x, x
        for i, (features, side, stride) in enumerate(layers, 1):
            y = nn.relu(self.norm(name=f"bn{i}")(y))
            if i == 1 and (self.stride != 1 or x.shape[-1] != layers[-1][0]):
                proj = self.conv(layers[-1][0], (1, 1), self.stride, name="conv_proj")
                shortcut = proj(y)
            y = self.conv(features, (side, side), stride, padding=side // 2, name=f"conv{i}")(y)
        return shortcut + drop_path.scale(y, factors)


class PreBasicBlock(PreActivation):
    """`models.BasicBlock` with pre-activation."""

    @nn.compact
    def __call__(self, x: jax.Array, factors: jax.Array | None = None) -> jax.Array:
        return self.convolve(x, factors, (self.filters, 3, self.stride), (self.filters, 3, 1))


class PreBottleneckBlock(PreActivation):
    """`models.BottleneckBlock` with pre-activation."""

    @nn.compact
    def __call__(self, x: jax.Array, factors: jax.Array | None = None) -> jax.Array:
        f = self.filters
        return self.convolve(x, factors, (f, 1, 1), (f, 3, self.stride), (4 * f, 1, 1))
