"""Computes with boxes: areas, overlaps, and the offsets between a box and its anchor.

A box is (y0, x0, y1, x1) in continuous coordinates: its height is y1 - y0, without the "+ 1 pixel"
of some older detectors. A box without area, such as the zeros of a padded list, overlaps nothing.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

# The weights of the offsets y, x, log height, log width; Fast R-CNN's targets of unit variance.
WEIGHTS = (10.0, 10.0, 5.0, 5.0)

LARGEST_LOG = math.log(1000 / 16)  # a decoded side is at most 62.5 times its anchor's
_SMALLEST_SHARE = 1e-6  # of the anchor's side, so that the logarithm of an empty box is finite


def area(boxes: jax.typing.ArrayLike) -> jax.Array:
    """Areas f32[...] of boxes f32[..., 4]; 0 where a side is negative."""
    y0, x0, y1, x1 = _coordinates(boxes)
    return jnp.maximum(y1 - y0, 0) * jnp.maximum(x1 - x0, 0)


def iou(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> jax.Array:
    """The intersection of each two boxes over their union.

    Args:
        a: f32[..., G, 4].
        b: f32[..., N, 4].

    Returns:
        f32[..., G, N] from 0 to 1; 0 where either box has no area.
    """
    a, b = jnp.asarray(a)[..., :, None, :], jnp.asarray(b)[..., None, :, :]
    ay0, ax0, ay1, ax1 = _coordinates(a)
    by0, bx0, by1, bx1 = _coordinates(b)
    height = jnp.maximum(jnp.minimum(ay1, by1) - jnp.maximum(ay0, by0), 0)
    width = jnp.maximum(jnp.minimum(ax1, bx1) - jnp.maximum(ax0, bx0), 0)
    intersection = height * width
    union = area(a) + area(b) - intersection
    return intersection / jnp.where(union > 0, union, 1)


def encode(
    boxes: jax.typing.ArrayLike,
    anchors: jax.typing.ArrayLike,
    weights: tuple[float, float, float, float] = WEIGHTS,
) -> jax.Array:
    """The offsets from anchors to boxes, which a detector learns (R-CNN, arXiv:1311.2524).

    Args:
        boxes: f32[..., 4]. The logarithms of a box without area are finite, and mean nothing.
        anchors: f32[..., 4], each with area; broadcast against `boxes`.
        weights: factors of the four offsets.

    Returns:
        f32[..., 4]: the distances of the centres along y and x in heights and widths of the
        anchor, then the logarithms of the ratios of the heights and of the widths, all times
        `weights`.
    """
    cy, cx, h, w = centred(boxes)
    anchor_y, anchor_x, anchor_h, anchor_w = centred(anchors)
    offsets = (
        (cy - anchor_y) / anchor_h,
        (cx - anchor_x) / anchor_w,
        jnp.log(jnp.maximum(h / anchor_h, _SMALLEST_SHARE)),
        jnp.log(jnp.maximum(w / anchor_w, _SMALLEST_SHARE)),
    )
    return jnp.stack([weight * each for weight, each in zip(weights, offsets, strict=True)], -1)


def decode(
    codes: jax.typing.ArrayLike,
    anchors: jax.typing.ArrayLike,
    weights: tuple[float, float, float, float] = WEIGHTS,
) -> jax.Array:
    """The boxes f32[..., 4] at offsets `codes` from `anchors`; undoes `encode`.

    A box is at most 62.5 times as high and wide as its anchor (1000 / 16, as in Detectron).
    """
    anchor_y, anchor_x, anchor_h, anchor_w = centred(anchors)
    dy, dx, log_h, log_w = (
        each / weight for each, weight in zip(_coordinates(codes), weights, strict=True)
    )
    cy, cx = anchor_y + dy * anchor_h, anchor_x + dx * anchor_w
    half_h = 0.5 * anchor_h * jnp.exp(jnp.minimum(log_h, LARGEST_LOG))
    half_w = 0.5 * anchor_w * jnp.exp(jnp.minimum(log_w, LARGEST_LOG))
    return jnp.stack([cy - half_h, cx - half_w, cy + half_h, cx + half_w], -1)


def clip(
    boxes: jax.typing.ArrayLike, height: jax.typing.ArrayLike, width: jax.typing.ArrayLike
) -> jax.Array:
    """Cuts boxes f32[..., 4] at an image's borders; `height` and `width` broadcast to [...].

    A box outside of the image loses its area.
    """
    y0, x0, y1, x1 = _coordinates(boxes)
    height, width = jnp.asarray(height), jnp.asarray(width)
    return jnp.stack(
        [
            jnp.clip(y0, 0, height),
            jnp.clip(x0, 0, width),
            jnp.clip(y1, 0, height),
            jnp.clip(x1, 0, width),
        ],
        -1,
    )


def _coordinates(boxes: jax.typing.ArrayLike) -> tuple[jax.Array, ...]:
    """The four numbers of boxes [..., 4], each [...]."""
    boxes = jnp.asarray(boxes)
    return tuple(boxes[..., i] for i in range(4))


def centred(boxes: jax.typing.ArrayLike) -> tuple[jax.Array, ...]:
    """The centres along y and x, the heights and the widths of boxes."""
    y0, x0, y1, x1 = _coordinates(boxes)
    return (y0 + y1) / 2, (x0 + x1) / 2, y1 - y0, x1 - x0
