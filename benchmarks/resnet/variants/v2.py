"""ResNet v2: BatchNorm and ReLU come before each convolution, and the shortcut is added last.

Source: He et al. 2016 (arXiv:1603.05027), "pre-activation".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax

from models import BasicBlock, Block, ModuleDef, ResNet
from ops.layers.pooling import max_pool


def compose(model: ResNet, padding: Any) -> ResNet:
    """`model`, which has the parts of v1.5, with blocks of v2; `padding` as in `models.stem`."""
    block = PreBasicBlock if model.block is BasicBlock else PreBottleneckBlock
    return model.clone(stem=partial(stem, padding=padding), block=block, last=last)


def stem(
    images: jax.Array, features: int, conv: ModuleDef, norm: ModuleDef, padding: Any
) -> jax.Array:
    """`models.stem` without BatchNorm and ReLU, with which each block begins."""
    del norm
    x = conv(features, (7, 7), 2, padding=3, name="conv_stem")(images)
    return max_pool(x, padding)


def last(x: jax.Array, norm: ModuleDef) -> jax.Array:
    """The BatchNorm and the ReLU after the last block."""
    return nn.relu(norm(name="bn_final")(x))


class PreActivation(Block):
    """A block that begins with BatchNorm and ReLU."""

    def convolve(self, x: jax.Array, *layers: tuple[int, int, int]) -> jax.Array:
        """The block with convolutions of (features, side of the kernel, stride)."""
        y, shortcut = x, x
        for i, (features, side, stride) in enumerate(layers, 1):
            y = nn.relu(self.norm(name=f"bn{i}")(y))
            differs = self.stride != 1 or x.shape[-1] != layers[-1][0]
            if i == 1 and (self.projects or differs):
                shortcut = self.conv(layers[-1][0], (1, 1), self.stride, name="conv_proj")(y)
            y = self.conv(features, (side, side), stride, padding=side // 2, name=f"conv{i}")(y)
        return shortcut + self.rescale(y)


class PreBasicBlock(PreActivation):
    """`models.BasicBlock` with pre-activation."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.convolve(x, (self.filters, 3, self.stride), (self.filters, 3, 1))


class PreBottleneckBlock(PreActivation):
    """`models.BottleneckBlock` with pre-activation."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        f = self.filters
        return self.convolve(x, (f, 1, 1), (f, 3, self.stride), (4 * f, 1, 1))
