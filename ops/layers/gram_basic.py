"""ResNet's stem and basic blocks in training: `gram_resnet` for networks without bottlenecks.

* The stem normalises after the pooling.
* The projections get the statistics of BatchNorm from the moments of their inputs.
* Blocks of 64 channels convolve two pixels at once (`pairs`).
* The ReLU at a block's end saves only its output, which the next layer saves anyway.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax

from ops.layers import gram_resnet
from ops.layers.gram_resnet import (
    ONES,
    ZEROS,
    Block,
    Kernel,
    batch_norm,
    conv_norms,
    max_pool,
    norm_relu,
    pooled,
    relu,
)
from ops.layers.pairs import Pairs

PAIRED = 64  # so many channels fill half of the matrix unit


def compose(model: Any, padding: Any) -> Any:
    """`model`, a `models.ResNet` of basic blocks, with these layers in training.

    `padding` is that of the max-pool, as in `models.stem`.
    """
    return gram_resnet.compose(model, stem, BasicBlock, padding)


def stem(images: jax.Array, features: int, conv: Any, norm: Any, padding: Any) -> jax.Array | Pairs:
    """`gram_resnet.stem` for `BasicBlock`: in pairs, and with the convolution's output saved."""
    conv = partial(conv, features, (7, 7), 2, padding=3)
    is_paired, width = features == PAIRED, 0

    def pool(x: jax.Array) -> jax.Array:
        nonlocal width
        sides = padding
        if isinstance(padding, str):
            sides = jax.lax.padtype_to_pads(x.shape[1:3], (3, 3), (2, 2), padding)
        rows, (left, right) = sides
        width = (x.shape[2] + left + right - 3) // 2 + 1
        # An even number of columns can be read as pairs without a copy. The new window must not be
        # empty: its maximum would be infinite.
        more = 2 if is_paired and width % 2 and 2 * width - left < x.shape[2] else 0
        return max_pool(x, (rows, (left, right + more)))

    y, *factors = pooled(images, conv, norm, pool)
    if not is_paired or y.shape[2] % 2:
        return norm_relu(y, *factors)
    # Without the barrier XLA converts the pixels to float32 and stores that.
    cells = jax.lax.optimization_barrier(y.reshape(*y.shape[:2], -1, 2 * y.shape[3]))
    pairs = Pairs(cells, width)
    cells = pairs.normalize(*factors).astype(y.dtype)
    return dataclasses.replace(pairs, cells=nn.relu(cells))


class BasicBlock(Block):
    """`models.BasicBlock` in training."""

    @nn.compact
    def __call__(self, x: jax.Array | Pairs) -> jax.Array | Pairs:
        s = self.stride
        channels = x.cells.shape[-1] // 2 if isinstance(x, Pairs) else x.shape[-1]
        if s == 1 and channels == self.filters == PAIRED:
            return self._paired(x if isinstance(x, Pairs) else Pairs.pack(x))
        if isinstance(x, Pairs) and s == 2:
            layer = partial(self.conv, self.filters, (3, 3))
            y, x = x.halve(Kernel(layer, name="conv1")(channels))
        else:
            x = x.unpack() if isinstance(x, Pairs) else x
            y = self.conv(self.filters, (3, 3), s, padding=1, name="conv1")(x)
            x = x[:, ::s, ::s]
        y = nn.relu(self.norm(name="bn1")(y))
        y = self.conv(self.filters, (3, 3), padding=1, name="conv2")(y)
        y = self.norm(scale_init=ZEROS, name="bn2")(y)
        if s != 1 or x.shape[-1] != self.filters:
            conv = partial(self.conv, self.filters, (1, 1))
            x = conv_norms(conv, self.norm, (x, "_proj", ONES))
        return relu(x + y)

    def _paired(self, x: Pairs) -> Pairs:
        """The block without a projection."""

        def conv_norm(y: Pairs, suffix: str, scale_init: Any) -> tuple[Pairs, jax.Array]:
            layer = partial(self.conv, self.filters, (3, 3))
            y = y.conv(Kernel(layer, name=f"conv{suffix}")(self.filters))
            variables = batch_norm(self.norm, f"bn{suffix}", scale_init)
            scale, bias = variables(self.filters)
            mean, var = variables.statistics(y.moments())
            variables.update(mean, var)
            factor = jax.lax.rsqrt(var + variables.epsilon) * scale
            return y, y.normalize(mean, factor, bias)

        dtype = x.cells.dtype
        y, cells = conv_norm(x, "1", ONES)
        y = dataclasses.replace(y, cells=nn.relu(cells.astype(dtype)))
        y, cells = conv_norm(y, "2", ZEROS)
        return dataclasses.replace(y, cells=relu(x.cells + cells.astype(dtype)))
