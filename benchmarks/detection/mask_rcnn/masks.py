"""True masks on the device: unpacked from bits, and cut to the regions that a network looks at."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.detection import select


def unpack(bits: jax.Array, side: int) -> jax.Array:
    """Masks f32[..., side, side] of 0 and 1 from bits, as `numpy.packbits` makes them.

    Args:
        bits: uint8[..., side * side / 8], row by row, the highest bit of a byte first.
        side: side * side must be a multiple of 8.
    """
    each = (bits[..., None] >> jnp.arange(7, -1, -1, dtype=jnp.uint8)) & 1
    return each.reshape(*bits.shape[:-1], side, side).astype(jnp.float32)


def crop(
    masks: jax.Array, boxes: jax.Array, index: jax.Array, regions: jax.Array, size: int
) -> jax.Array:
    """Samples the masks of objects at the cells of regions.

    The value of a cell is that of the mask at the cell's centre, between the centres of the mask's
    own cells by bilinear interpolation. Outside of the object's box it is 0.

    Args:
        masks: f32[b, G, m, m], each spanning its object's box.
        boxes: f32[b, G, 4], of the objects. The mask of a box without area is 0.
        index: int32[b, R], the object of each region.
        regions: f32[b, R, 4] in the same coordinates.
        size: the number of a region's cells along y and along x.

    Returns:
        f32[b, R, size, size].
    """
    boxes, masks = select.take(boxes, index), select.take(masks, index)
    y, x = (_weights(boxes[..., i::2], regions[..., i::2], size, masks.shape[-1]) for i in (0, 1))
    # In bfloat16, a TPU's default, values near a threshold would change sides.
    return jnp.einsum("brip,brpq,brjq->brij", y, masks, x, precision="highest")


def _weights(spans: jax.Array, regions: jax.Array, size: int, side: int) -> jax.Array:
    """The shares of a mask's cells in a region's cells along an axis: f32[..., size, side].

    `spans` and `regions` f32[..., 2] have the first and last coordinate of the boxes.
    """
    first, length = spans[..., :1], spans[..., 1:] - spans[..., :1]
    centres = (jnp.arange(size, dtype=jnp.float32) + 0.5) / size
    points = regions[..., :1] + (regions[..., 1:] - regions[..., :1]) * centres
    place = (points - first) / jnp.where(length > 0, length, 1)  # 0 .. 1 in the box
    inside = (place >= 0) & (place <= 1) & (length > 0)
    cell = jnp.clip(place * side - 0.5, 0, side - 1)
    near = jnp.maximum(1 - jnp.abs(cell[..., None] - jnp.arange(side)), 0)
    return jnp.where(inside[..., None], near, 0)
