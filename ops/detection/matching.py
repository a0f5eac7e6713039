"""Finds for each anchor the true box that it is to detect."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ops.detection import boxes as boxes_


class Match(NamedTuple):
    """The true box of each of N anchors.

    Attributes:
      index: int32[N], the place of the anchor's box among the true ones.
      positive: bool[N], whether the anchor is to detect that box.
      overlap: f32[N], the anchor's highest IoU with any true box. An anchor that is not positive
        lies below the threshold; a detector that ignores some of these asks for less still.
    """

    index: jax.Array
    positive: jax.Array
    overlap: jax.Array


def match(
    boxes: jax.Array, valid: jax.Array, anchors: jax.typing.ArrayLike, threshold: float
) -> Match:
    """Gives each anchor the true box of the highest IoU, and each true box its best anchor.

    An anchor is positive if that IoU reaches the threshold. Besides, the best anchor of each true
    box takes that box, whatever the IoU; where two true boxes share their best anchor, the later
    one wins. Of equal IoUs the lower index is the best (SSD, arXiv:1512.02325, section 2.2).

    Args:
        boxes: f32[G, 4], G >= 1.
        valid: bool[G]; the other boxes are padding and match nothing.
        anchors: f32[N, 4].
        threshold: the least IoU of a positive anchor, above 0.

    Returns:
        A `Match`. `jax.vmap` over the first two arguments makes it that of a batch.
    """
    overlaps = boxes_.iou(jnp.where(valid[:, None], boxes, 0), anchors)
    best_anchor = jnp.argmax(overlaps, 1)
    numbers = jnp.arange(len(valid), dtype=jnp.int32)
    takes = (best_anchor[:, None] == jnp.arange(overlaps.shape[1])) & valid[:, None]
    taker = jnp.max(jnp.where(takes, numbers[:, None], -1), 0)
    overlap = jnp.max(overlaps, 0)
    index = jnp.where(taker >= 0, taker, jnp.argmax(overlaps, 0).astype(jnp.int32))
    return Match(index, (taker >= 0) | (overlap >= threshold), overlap)


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[index]` for f32[G, ...] and int32[N], without a gather, which TPUs do slowly.

    The product with a matrix of zeros and ones is fused with the making of that matrix. The values
    must be finite; an index outside of 0 .. G - 1 takes zeros.
    """
    chosen = index[:, None] == jnp.arange(values.shape[0])
    return jnp.einsum("ng,g...->n...", chosen.astype(values.dtype), values, precision="highest")
