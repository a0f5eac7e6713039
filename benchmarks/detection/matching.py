"""Finds for each anchor the true box that it is to detect."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.detection import boxes as boxes_

_COLUMNS = 128  # of the table in which `_takers` marks anchors; the width of a TPU's tile


class Match(NamedTuple):
    """The true box of each of N anchors.

    Attributes:
      box: int32[N], the number of the anchor's box among the true boxes.
      positive: bool[N], whether the anchor is to detect this box.
      overlap: f32[N], the anchor's highest IoU with a true box. A second, lower threshold tells
        anchors that a detector ignores from negatives.
    """

    box: jax.Array
    positive: jax.Array
    overlap: jax.Array


def match(
    boxes: jax.Array,
    valid: jax.Array,
    anchors: jax.typing.ArrayLike,
    threshold: float,
    *,
    for_every_box: bool = True,
) -> Match:
    """Gives each anchor the true box of the highest IoU, and each true box its best anchor.

    An anchor is positive if its highest IoU reaches the threshold. Besides, the best anchor of
    each true box takes this box, however low the IoU, as long as it is above 0. Where two true
    boxes have the same best anchor, the later box wins. Of equal IoUs the first is the highest
    (SSD, arXiv:1512.02325, section 2.2).

    Args:
        boxes: f32[G, 4], G >= 1.
        valid: bool[G]; the other boxes are padding. Boxes without area match nothing either.
        anchors: f32[N, 4].
        threshold: the least IoU of a positive anchor, above 0.
        for_every_box: False leaves out the best anchors of true boxes: the threshold alone decides
            (the second stage of Faster R-CNN, arXiv:1506.01497).

    Returns:
        The matches of one image; `jax.vmap` over boxes and valid gives those of a batch.
    """
    overlaps = boxes_.iou(jnp.where(valid[:, None], boxes, 0), anchors)
    overlap, nearest = _highest(overlaps, 0)
    if not for_every_box:
        return Match(nearest, overlap >= threshold, overlap)
    taker = _takers(*_highest(overlaps, 1), overlaps.shape[1])
    is_taken = taker >= 0
    return Match(jnp.where(is_taken, taker, nearest), is_taken | (overlap >= threshold), overlap)


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[index]` for finite f32[G, ...] and int32[N], without a gather.

    TPUs gather slowly. The product with a matrix of zeros and ones is exact where a TPU multiplies
    in bfloat16 as well, because the values are cut into three parts of 8 bits. The compiler does
    not store that matrix. An index outside of 0 .. G - 1 takes zeros.
    """
    chosen = index[:, None] == jnp.arange(values.shape[0])
    high = lax.reduce_precision(values, 8, 7)  # a cast to bfloat16 and back is optimised away
    middle = lax.reduce_precision(values - high, 8, 7)
    parts = jnp.stack([high, middle, values - high - middle])
    found = jnp.einsum("ng,pg...->pn...", chosen.astype(values.dtype), parts)
    return found[0] + found[1] + found[2]


def _highest(values: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The maximum of float values along an axis, and its first position int32.

    One pass finds both. The TPU compiler lets `jnp.argmax` alone, whose maximum nobody reads,
    write that maximum in bfloat16.
    """

    def higher(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = (x[0] > y[0]) | ((x[0] == y[0]) & (x[1] < y[1]))
        return jnp.where(first, x[0], y[0]), jnp.where(first, x[1], y[1])

    positions = lax.broadcasted_iota(jnp.int32, values.shape, axis)
    initial = (np.array(-np.inf, values.dtype), np.int32(0))
    maximum, position = lax.reduce((values, positions), initial, higher, (axis,))
    return maximum, position


def _takers(overlap: jax.Array, best: jax.Array, count: int) -> jax.Array:
    """The last true box that takes each of `count` anchors, int32[count]; -1 where none does.

    Comparing every anchor with every box would take as long as the overlaps themselves. Instead
    the anchors form a table with rows of `_COLUMNS`, and the product of the boxes' rows and columns
    as one-hot matrices marks the places of the best anchors.

    Args:
        overlap: f32[G], the highest IoU of each true box.
        best: int32[G], its best anchor.
        count: the number of anchors.
    """
    numbers = jnp.arange(len(best))
    takes = overlap > 0
    beaten = takes & (best[:, None] == best) & (numbers[:, None] < numbers)
    marks = jnp.where(takes & ~jnp.any(beaten, 1), numbers + 1, 0)
    rows = best // _COLUMNS == jnp.arange(-(-count // _COLUMNS))[:, None]
    columns = (best % _COLUMNS)[:, None] == jnp.arange(_COLUMNS)
    table = jnp.dot(
        jnp.where(rows, marks, 0).astype(jnp.float32),
        columns.astype(jnp.float32),
        precision="highest",
    )
    return table.reshape(-1)[:count].astype(jnp.int32) - 1
