"""SSD: boxes and classes from the maps of a ResNet and of a few more convolutions.

Sources: Liu et al. 2015 (arXiv:1512.02325) for the detector; MLPerf's `ssd` for the ResNet-34
without its last stage, with stride 1 in the third, and for the extra layers.

Parameters are float32. Convolutions, activations and predictions are in the compute dtype; the
loss and the scores are computed from them in float32.

Every detection is a default box moved by deltas. Each cell of each feature map has a few of them
around its centre: a square of the map's scale, a square of a size between this scale and the next
one's, and for each aspect ratio a a wide box and a high one of the first square's area (section
2.2 of the paper).
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from models import BasicBlock, ResNet, stem

# PyTorch's padding; "SAME" pads unevenly where an even side is halved. The centres of the default
# boxes fit the even one.
PADDING = ((1, 1), (1, 1))
_ROWS = 8  # rows in a tile of the TPU's memory


class Extra(NamedTuple):
    """An extra layer: a 1x1 convolution and a 3x3 one, each with bias and ReLU."""

    squeezed: int  # channels of the 1x1 convolution
    filters: int
    stride: int
    padding: int

    def side(self, side: int) -> int:
        """The side of its map, from the side of the map before."""
        return (side + 2 * self.padding - 3) // self.stride + 1


@dataclasses.dataclass(frozen=True)
class DefaultBoxes:
    """The feature maps of a detector and the default boxes in their cells."""

    image_size: int  # side of the square image in pixels
    feature_sizes: Sequence[int]  # side of each feature map in cells
    steps: Sequence[float]  # by map, pixels between the centres of two cells
    scales: Sequence[float]  # by map, pixels of the smaller square's side; one more
    aspect_ratios: Sequence[Sequence[float]]  # by map, width / height of its wide boxes

    @property
    def boxes_per_cell(self) -> tuple[int, ...]:
        """The number of boxes in each cell of each map."""
        return tuple(2 + 2 * len(ratios) for ratios in self.aspect_ratios)

    @property
    def grids(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The centres of each map's cells, and the sizes of the boxes around them, in pixels.

        For each map: float64[n] along a side, and heights and widths float64[k, 2], at most the
        image's.
        """
        grids = []
        for k, (size, step) in enumerate(zip(self.feature_sizes, self.steps, strict=True)):
            scale, between = self.scales[k], math.sqrt(self.scales[k] * self.scales[k + 1])
            shapes = [(scale, scale), (between, between)]
            for ratio in self.aspect_ratios[k]:
                long, short = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
                shapes += [(short, long), (long, short)]
            grid = (np.arange(size) + 0.5) * step, np.array(shapes)
            grids.append(tuple(part.clip(0, self.image_size) for part in grid))
        return grids

    def boxes(self) -> np.ndarray:
        """All default boxes, by map, then row, column and shape.

        float64[N, 4]: (centre y, centre x, height, width) as shares of the image, each of the four
        clipped to 0 .. 1. The corners may lie outside of the image. In this order a convolution's
        output [b, rows, columns, boxes_per_cell * c] only needs to be reshaped.
        """
        boxes = []
        for centres, shapes in self.grids:
            cells = np.zeros((len(centres), len(centres), len(shapes), 4))
            cells[..., 0] = centres[:, None, None]
            cells[..., 1] = centres[:, None]
            cells[..., 2:] = shapes
            boxes.append(cells.reshape(-1, 4))
        return np.concatenate(boxes) / self.image_size


def backbone(stage_sizes: Sequence[int], pool_padding: Any, **kwargs: Any) -> ResNet:
    """The first three stages of a ResNet of basic blocks; the last map has an eighth of the side.

    `pool_padding` is the padding of the stem's max-pool, `kwargs` are attributes of
    `models.ResNet`.
    """
    return ResNet(
        tuple(stage_sizes),
        BasicBlock,
        strides=(1, 2, 1),
        stem=partial(stem, padding=pool_padding),
        **kwargs,
    )


class Head(nn.Module):
    """Predicts the deltas and logits of n boxes in each cell of a map, with one 3x3 convolution.

    Boxes and classes share the convolution, because a wide one is faster. Each box has its logits,
    then its deltas, then zeros up to a complete row of the TPU's memory, so that XLA reads the
    features as [n, width] without a copy.
    """

    boxes_per_cell: int
    num_logits: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [b, h * w * n, width] from x [b, h, w, c]."""
        n, logits = self.boxes_per_cell, self.num_logits
        shape = (3, 3, x.shape[-1], n * (4 + logits))
        kernel = self.param("kernel", nn.initializers.xavier_uniform(), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, shape[-1:], jnp.float32)

        def arranged(values: jax.Array) -> jax.Array:
            values = values.reshape(*values.shape[:-1], n, -1)
            values = jnp.concatenate([values[..., 4:], values[..., :4]], -1)
            padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % _ROWS)]
            return jnp.pad(values, padding).reshape(*values.shape[:-2], -1).astype(self.dtype)

        y = jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            arranged(kernel),
            (1, 1),
            PADDING,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        y += arranged(bias)
        return y.reshape(len(y), -1, y.shape[-1] // n)


def deltas(outputs: Sequence[jax.Array], num_logits: int) -> list[jax.Array]:
    """The deltas [b, n, 4] of each map, from what `SSD` returns."""
    return [y[..., num_logits : num_logits + 4] for y in outputs]


def join(outputs: Sequence[jax.Array], num_logits: int) -> tuple[jax.Array, jax.Array]:
    """(deltas float32[b, N, 4], logits float32[b, N, num_logits]) of all that `SSD` returns."""
    logits = jnp.concatenate([y[..., :num_logits] for y in outputs], 1)
    joined = jnp.concatenate(deltas(outputs, num_logits), 1)
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    return joined.astype(dtype), logits.astype(dtype)


class SSD(nn.Module):
    """The network; variables are `params` and `batch_stats`, float32."""

    backbone: ResNet
    extras: tuple[Extra, ...]
    boxes_per_cell: tuple[int, ...]  # by map; there is one map more than extra layers
    num_classes: int  # without the background

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> list[jax.Array]:
        """Predicts from each map of images float[b, H, W, 3], already normalised.

        For each map [b, n, width] in the compute dtype, for its n default boxes in the order row,
        column, shape. Columns are the logits (0 is the background), the four deltas, and zeros.
        """
        dtype = self.backbone.dtype
        conv = partial(nn.Conv, dtype=dtype, kernel_init=nn.initializers.xavier_uniform())
        *_, x = self.backbone.endpoints(images, train).values()
        maps = [x]
        for i, extra in enumerate(self.extras):
            x = nn.relu(conv(extra.squeezed, (1, 1), name=f"extra{i + 1}_conv1")(x))
            layer = conv(
                extra.filters, (3, 3), extra.stride, extra.padding, name=f"extra{i + 1}_conv2"
            )
            x = nn.relu(layer(x))
            maps.append(x)
        return [
            Head(count, 1 + self.num_classes, dtype, name=f"head{i + 1}")(x)
            for i, (x, count) in enumerate(zip(maps, self.boxes_per_cell, strict=True))
        ]


def box_corners(boxes: np.ndarray) -> np.ndarray:
    """(centre y, centre x, height, width) [..., 4] as (y0, x0, y1, x1), dtype kept."""
    centres, sides = boxes[..., :2], boxes[..., 2:]
    return np.concatenate([centres - sides / 2, centres + sides / 2], -1)
