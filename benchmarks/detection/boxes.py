"""Boxes: area, IoU, deltas (the box coder), matching to anchors, and NMS.

A box is (y0, x0, y1, x1) in continuous coordinates: its height is y1 - y0, without the "+ 1 pixel"
of some older detectors. A box without area, such as the zeros of a padded list, overlaps nothing.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from common.layers.convolutions import device_kind

# The box coder's weights of the deltas y, x, log height and log width (Fast R-CNN: unit variance).
CODER_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
LARGEST_LOG = math.log(1000 / 16)  # Detectron's BBOX_XFORM_CLIP: at most 62.5 times the anchor
_SMALLEST_SHARE = 1e-6  # a side / the anchor's, at least, so that logarithms are finite
_COLUMNS = 128  # in the table of `_best_anchors`; the width of a TPU's tile


def area(boxes: jax.typing.ArrayLike) -> jax.Array:
    """Areas f32[...] of boxes f32[..., 4]; 0 where a side is negative."""
    y0, x0, y1, x1 = _coordinates(boxes)
    return jnp.maximum(y1 - y0, 0) * jnp.maximum(x1 - x0, 0)


def iou(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> jax.Array:
    """The intersection over union of each pair of f32[..., G, 4] and f32[..., N, 4].

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


def encode_boxes(
    boxes: jax.typing.ArrayLike,
    anchors: jax.typing.ArrayLike,
    weights: tuple[float, float, float, float] = CODER_WEIGHTS,
) -> jax.Array:
    """The deltas from anchors to boxes, which a detector learns (R-CNN, arXiv:1311.2524).

    Args:
        boxes: f32[..., 4]. The logarithms of a box without area are finite, and mean nothing.
        anchors: f32[..., 4], each with area; broadcast against `boxes`.
        weights: factors of the four deltas.

    Returns:
        f32[..., 4]: the distances of the centres along y and x in heights and widths of the
        anchor, then the logarithms of the ratios of the heights and of the widths, all times
        `weights`.
    """
    cy, cx, h, w = centred(boxes)
    anchor_y, anchor_x, anchor_h, anchor_w = centred(anchors)
    deltas = (
        (cy - anchor_y) / anchor_h,
        (cx - anchor_x) / anchor_w,
        jnp.log(jnp.maximum(h / anchor_h, _SMALLEST_SHARE)),
        jnp.log(jnp.maximum(w / anchor_w, _SMALLEST_SHARE)),
    )
    return jnp.stack([weight * delta for weight, delta in zip(weights, deltas, strict=True)], -1)


def decode_boxes(
    deltas: jax.typing.ArrayLike,
    anchors: jax.typing.ArrayLike,
    weights: tuple[float, float, float, float] = CODER_WEIGHTS,
) -> jax.Array:
    """The boxes f32[..., 4] at `deltas` from `anchors`; undoes `encode_boxes`.

    A box is at most 62.5 times as high and wide as its anchor.
    """
    anchor_y, anchor_x, anchor_h, anchor_w = centred(anchors)
    dy, dx, log_h, log_w = (
        delta / weight for delta, weight in zip(_coordinates(deltas), weights, strict=True)
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
    sides = ((y0, height), (x0, width), (y1, height), (x1, width))
    return jnp.stack([jnp.clip(x, 0, side) for x, side in sides], -1)


def _coordinates(boxes: jax.typing.ArrayLike) -> tuple[jax.Array, ...]:
    """The four numbers of boxes [..., 4], each [...]."""
    boxes = jnp.asarray(boxes)
    return tuple(boxes[..., i] for i in range(4))


def centred(boxes: jax.typing.ArrayLike) -> tuple[jax.Array, ...]:
    """The centres along y and x, the heights and the widths of boxes."""
    y0, x0, y1, x1 = _coordinates(boxes)
    return (y0 + y1) / 2, (x0 + x1) / 2, y1 - y0, x1 - x0


class Match(NamedTuple):
    """The true box of each of N anchors."""

    box: jax.Array  # int32[N], the number of the anchor's box among the true boxes
    positive: jax.Array  # bool[N], whether the anchor is to detect this box
    # f32[N], the highest IoU with a true box. A second, lower threshold tells anchors that a
    # detector ignores from negatives.
    overlap: jax.Array


def match(
    boxes: jax.Array,
    valid: jax.Array,
    anchors: jax.typing.ArrayLike,
    threshold: float,
    *,
    allow_low_quality_matches: bool = True,
) -> Match:
    """Gives each anchor the true box of the highest IoU, and each true box its best anchor.

    An anchor is positive if its highest IoU reaches the threshold. Besides, the best anchor of
    each true box is assigned to this box, however low the IoU, as long as it is above 0. Where two
    true boxes have the same best anchor, it is assigned to the later one. Of equal IoUs the first
    is the highest (SSD, arXiv:1512.02325, section 2.2).

    Args:
        boxes: f32[G, 4], G >= 1.
        valid: bool[G]; the other boxes are padding. Boxes without area match nothing either.
        anchors: f32[N, 4].
        threshold: the least IoU of a positive anchor, above 0.
        allow_low_quality_matches: False leaves out the best anchors of true boxes: the threshold
            alone decides (the second stage of Faster R-CNN, arXiv:1506.01497).

    Returns:
        The matches of one image; for a batch, use `jax.vmap` over boxes and valid.
    """
    overlaps = iou(jnp.where(valid[:, None], boxes, 0), anchors)
    overlap, nearest = _highest(overlaps, 0)
    if not allow_low_quality_matches:
        return Match(nearest, overlap >= threshold, overlap)
    assigned = _best_anchors(*_highest(overlaps, 1), overlaps.shape[1])
    is_best = assigned >= 0
    return Match(jnp.where(is_best, assigned, nearest), is_best | (overlap >= threshold), overlap)


def take_by_product(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[index]` for finite f32[G, ...] and int32[N], without a gather.

    TPUs gather slowly. The product with a matrix of zeros and ones is exact where a TPU multiplies
    in bfloat16 as well, because the values are cut into three parts of 8 bits. The compiler does
    not store that matrix. An index outside of 0 .. G - 1 takes zeros.
    """
    chosen = index[:, None] == jnp.arange(values.shape[0])
    high = lax.reduce_precision(values, 8, 7)  # a cast to bfloat16 and back is optimised away
    middle = lax.reduce_precision(values - high, 8, 7)
    parts = jnp.stack([high, middle, values - high - middle])
    taken = jnp.einsum("ng,pg...->pn...", chosen.astype(values.dtype), parts)
    return taken[0] + taken[1] + taken[2]


def _highest(values: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The maximum of float values along an axis, and its first position int32.

    One pass finds both. The TPU compiler lets `jnp.argmax` alone, whose maximum nobody reads,
    write that maximum in bfloat16. On CPUs two passes, which XLA vectorises, take less time.
    """
    positions = lax.broadcasted_iota(jnp.int32, values.shape, axis)
    if device_kind() == "cpu":
        maximum = jnp.max(values, axis, keepdims=True)
        first = jnp.where(values == maximum, positions, values.shape[axis])
        return jnp.squeeze(maximum, axis), jnp.min(first, axis)

    def higher(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = (x[0] > y[0]) | ((x[0] == y[0]) & (x[1] < y[1]))
        return jnp.where(first, x[0], y[0]), jnp.where(first, x[1], y[1])

    initial = (np.array(-np.inf, values.dtype), np.int32(0))
    maximum, position = lax.reduce((values, positions), initial, higher, (axis,))
    return maximum, position


def _best_anchors(overlap: jax.Array, best: jax.Array, count: int) -> jax.Array:
    """Scatters the numbers of the true boxes to their best anchors, int32[count]; else -1.

    `overlap` f32[G] is the highest IoU of each true box, `best` int32[G] its best anchor; of
    several boxes with the same one the last counts. Comparing every anchor with every box would
    take as long as the overlaps themselves. Instead the anchors form a table with rows of
    `_COLUMNS`, and the product of the boxes' rows and columns as one-hot matrices scatters the
    numbers into it.
    """
    numbers = jnp.arange(len(best))
    overlaps = overlap > 0
    overwritten = overlaps & (best[:, None] == best) & (numbers[:, None] < numbers)
    entries = jnp.where(overlaps & ~jnp.any(overwritten, 1), numbers + 1, 0)
    rows = best // _COLUMNS == jnp.arange(-(-count // _COLUMNS))[:, None]
    columns = (best % _COLUMNS)[:, None] == jnp.arange(_COLUMNS)
    table = jnp.dot(
        jnp.where(rows, entries, 0).astype(jnp.float32),
        columns.astype(jnp.float32),
        precision="highest",
    )
    return table.reshape(-1)[:count].astype(jnp.int32) - 1


def nms(boxes: jax.Array, threshold: float, *, inclusive: bool) -> jax.Array:
    """Which boxes greedy non-maximum suppression (NMS) keeps.

    The algorithm goes through the boxes in their order and keeps each one that no kept box before
    it suppresses. Here all boxes are decided at once, again and again, until nothing changes: a
    box is kept if none before it that was kept suppresses it. After k rounds the first k boxes
    are decided for good, so the end is exactly the greedy result. It takes as many rounds as the
    longest chain of boxes that suppress one another has links, usually below ten. A round is a
    product with an n x n matrix of zeros and ones, which takes 2 bytes of memory per entry.

    Args:
        boxes: f32[..., n, 4], the best first; leading axes are independent. Boxes without area are
            padding: they are not kept and suppress nothing.
        threshold: the IoU above which a box suppresses another one.
        inclusive: whether an IoU equal to the threshold suppresses as well.

    Returns:
        bool[..., n].
    """
    n = boxes.shape[-2]
    overlaps = iou(boxes, boxes)
    too_close = overlaps >= threshold if inclusive else overlaps > threshold
    suppresses = too_close & (jnp.arange(n)[:, None] < jnp.arange(n))
    # Without the barrier, the compiler computes all overlaps again in each round.
    suppresses = lax.optimization_barrier(suppresses.astype(jnp.bfloat16))
    valid = area(boxes) > 0

    def decide(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        kept, _ = state
        better = jnp.einsum(
            "...i,...ij->...j",
            kept.astype(jnp.bfloat16),
            suppresses,
            preferred_element_type=jnp.float32,
        )
        return valid & (better == 0), kept

    def changed(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        kept, before = state
        return jnp.any(kept != before)

    return lax.while_loop(changed, decide, (valid, ~valid))[0]


def postprocess_detections(
    boxes: jax.Array,
    scores: jax.Array,
    min_score: float,
    iou_threshold: float,
    max_detections: int,
    candidates: int | None = None,
) -> dict[str, jax.Array]:
    """The best detections of each image after NMS within each class.

    Args:
        boxes: f32[b, N, 4], or f32[b, N, C, 4] with a separate box for each class.
        scores: f32[b, N, C], without the background.
        min_score: >= 0; detections whose score is not higher are dropped.
        iou_threshold: of two detections of a class with this IoU or more, the better one stays.
        max_detections: how many detections an image has.
        candidates: how many of the best detections of each class take part in its NMS; None for
            `max_detections`. Memory grows with C times its square.

    Returns:
        {"boxes": f32[b, D, 4], "score": f32[b, D], "class": int32[b, D] from 1, "index":
        int32[b, D], the detection's index among the N}, the best first; score 0 is padding. D is
        `max_detections`, or the number of all candidates if there are fewer.
    """
    per_class = min(candidates or max_detections, boxes.shape[1])
    top, index = lax.top_k(jnp.swapaxes(scores, 1, 2), per_class)  # [b, C, per_class]
    if boxes.ndim == 3:
        top_boxes = jax.vmap(lambda image, chosen: image[chosen])(boxes, index)
    else:
        top_boxes = jnp.take_along_axis(jnp.swapaxes(boxes, 1, 2), index[..., None], 2)
    top_boxes = jnp.where((top > min_score)[..., None], top_boxes, 0)
    top = jnp.where(nms(top_boxes, iou_threshold, inclusive=True), top, 0)
    flat = top.reshape(len(top), -1)
    score, best = lax.top_k(flat, min(max_detections, flat.shape[1]))
    return {
        "boxes": jnp.take_along_axis(top_boxes.reshape(len(top), -1, 4), best[..., None], 1),
        "score": score,
        "class": (best // per_class + 1).astype(jnp.int32),
        "index": jnp.take_along_axis(index.reshape(len(top), -1), best, 1),
    }
