"""Mask R-CNN's sampling and losses: of anchors (RPN), of regions (RoIs, box head), and of masks.

Sources: Ren et al. 2015 (arXiv:1506.01497) section 3.1.2 and 3.1.3 for the anchors; Girshick 2015
(arXiv:1504.08083) sections 2.1 and 2.3 for the regions; He et al. 2017 (arXiv:1703.06870) section 3
for the masks. Numbers that the papers leave open come from MLPerf's reference.

Boxes are (y0, x0, y1, x1) in pixels. Class 0 is the background, and padding among true objects. A
random sample is a function of the image's key and of the position alone: it is the same on any
number of devices, and again when a run is resumed.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.detection import selection
from benchmarks.detection.boxes import Match, area, encode_boxes, match
from benchmarks.detection.losses import cross_entropy, smooth_l1
from benchmarks.detection.mask_rcnn.models import RPN_WEIGHTS
from common.hashing import hash32

_ANCHOR_BETA = 1 / 9  # where smooth L1 of the RPN's deltas becomes linear


class Objects(NamedTuple):
    """The true objects of b images, padded to G."""

    boxes: jax.Array  # f32[b, G, 4]
    classes: jax.Array  # int32[b, G] from 1; 0 is padding

    @property
    def valid(self) -> jax.Array:
        """bool[b, G]"""
        return (self.classes > 0) & (area(self.boxes) > 0)


class Regions(NamedTuple):
    """The sampled regions of interest (RoIs) of b images, positives first; R of each."""

    boxes: jax.Array  # f32[b, R, 4]
    classes: jax.Array  # int32[b, R]; 0 for the background
    owner: jax.Array  # int32[b, R], the object that a positive region is matched with
    valid: jax.Array  # bool[b, R]; False is padding

    def first(self, count: int) -> "Regions":
        """The first `count` regions of each image."""
        return Regions(*(x[:, :count] for x in self))


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How many anchors or RoIs of an image are trained on, and which are positive."""

    count: int  # samples of an image, such as 256 anchors and 512 RoIs
    share: float  # the largest share of positives in `count`
    positive_iou: float  # at least this IoU with a true box makes a positive
    negative_iou: float  # below it one is negative; those between the two are ignored

    @property
    def positives(self) -> int:
        """The largest number of positives of an image."""
        return int(self.count * self.share)


def rpn_loss(
    logits: Sequence[jax.Array],
    deltas: Sequence[jax.Array],
    anchors: Sequence[np.ndarray],
    objects: Objects,
    rule: Sampling,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The loss of the region proposal network on a random sample of each image's anchors.

    Args:
        logits, deltas, anchors: of each level, f32[b, n], f32[b, n, 4] and f32[n, 4].
        rule: with `share` of positives at most, the others are negatives.
        key: int32[b], decides the sample.

    Returns:
        (class_loss f32[b], box_loss f32[b]): binary cross-entropy summed over the sample, and
        smooth L1 summed over its positives, both over `rule.count`.
    """
    all_anchors = jnp.concatenate(anchors)
    matched = jax.vmap(lambda b, v: match(b, v, all_anchors, rule.positive_iou))(
        objects.boxes, objects.valid
    )
    negative = ~matched.positive & (matched.overlap < rule.negative_iou)
    key = fold_in(key, 0)
    positive, negative = sample_balanced(matched.positive, negative, rule, key)
    joined = jnp.concatenate(logits, 1)
    entropy = jax.nn.softplus(joined) - jnp.where(positive, joined, 0)
    class_loss = jnp.sum(jnp.where(positive | negative, entropy, 0), 1)

    # Only the sampled positives, few of many, have deltas to learn.
    index, valid = selection.compact(positive, rule.positives)
    boxes = selection.take(objects.boxes, selection.take(matched.box, index))
    targets = encode_boxes(boxes, all_anchors[index], RPN_WEIGHTS)
    distance = smooth_l1(selection.take(jnp.concatenate(deltas, 1), index) - targets, _ANCHOR_BETA)
    box_loss = jnp.sum(jnp.where(valid[..., None], distance, 0), (1, 2))
    return class_loss / rule.count, box_loss / rule.count


def sample_regions(
    proposals: jax.Array, objects: Objects, rule: Sampling, key: jax.Array
) -> Regions:
    """Samples the RoIs to train the heads on, among the proposals and the true boxes.

    `proposals` are f32[b, P, 4], those without area padding; `key` int32[b] decides the sample.
    """
    valid = objects.valid
    candidates = jnp.concatenate(
        [proposals, jnp.where(valid[..., None], objects.boxes, 0)], 1
    )  # f32[b, P + G, 4]

    def nearest(boxes: jax.Array, valid: jax.Array, regions: jax.Array) -> Match:
        return match(boxes, valid, regions, rule.positive_iou, allow_low_quality_matches=False)

    matched = jax.vmap(nearest)(objects.boxes, valid, candidates)
    negative = ~matched.positive & (matched.overlap < rule.negative_iou) & (area(candidates) > 0)
    key = fold_in(key, 1)
    positive, negative = sample_balanced(matched.positive, negative, rule, key)
    first, is_first = selection.compact(positive, rule.positives)
    # Where there are fewer positives, more negatives replace them.
    others, is_other = selection.compact(negative, rule.count)
    order = jnp.argsort(~jnp.concatenate([is_first, is_other], 1), axis=1, stable=True)
    index = selection.take(jnp.concatenate([first, others], 1), order)[:, : rule.count]
    sampled = selection.take(jnp.concatenate([is_first, is_other], 1), order)[:, : rule.count]
    owner = selection.take(matched.box, index)
    is_positive = selection.take(positive, index) & sampled
    return Regions(
        jnp.where(sampled[..., None], selection.take(candidates, index), 0),
        jnp.where(is_positive, selection.take(objects.classes, owner), 0),
        owner,
        sampled,
    )


def box_head_loss(
    logits: jax.Array, deltas: jax.Array, regions: Regions, objects: Objects
) -> tuple[jax.Array, jax.Array]:
    """The loss of the box head (Fast R-CNN's) on sampled RoIs.

    Of `logits` f32[b, R, C] and `deltas` f32[b, R, C, 4], only the deltas of the true class count.
    Returns (class_loss f32[b], box_loss f32[b]): cross-entropy summed over the regions, and smooth
    L1 over the positive ones, both over R.
    """
    count = logits.shape[1]
    entropy = cross_entropy(logits, regions.classes)
    class_loss = jnp.sum(jnp.where(regions.valid, entropy, 0), 1) / count
    true = selection.take(objects.boxes, regions.owner)
    positive = regions.classes > 0
    # A padding region has no side to measure deltas in.
    boxes = jnp.where(positive[..., None], regions.boxes, jnp.array([0.0, 0, 1, 1]))
    targets = encode_boxes(true, boxes)
    is_true = jnp.arange(deltas.shape[2]) == regions.classes[..., None]
    predicted = jnp.sum(jnp.where(is_true[..., None], deltas, 0), 2)
    distance = jnp.where(positive[..., None], smooth_l1(predicted - targets), 0)
    return class_loss, jnp.sum(distance, (1, 2)) / count


def mask_loss(
    logits: jax.Array, regions: Regions, objects: Objects, masks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The loss of the mask head on regions of which only the positive ones count.

    Args:
        logits: f32[b, R, s, s, C], of which only the true class's masks count.
        masks: f32[b, G, m, m] from 0 to 1: the true masks, each cut to its object's box.

    Returns:
        (sum f32[b] of the binary cross-entropy over the pixels, number of pixels f32[b]).
    """
    side = logits.shape[2]
    positive = regions.classes > 0
    target = crop_masks(masks, objects.boxes, regions.owner, regions.boxes, side) >= 0.5
    is_true = jnp.arange(logits.shape[-1]) == regions.classes[..., None, None, None]
    predicted = jnp.sum(jnp.where(is_true, logits, 0), -1)
    entropy = jax.nn.softplus(predicted) - jnp.where(target, predicted, 0)
    total = jnp.sum(jnp.where(positive[..., None, None], entropy, 0), (1, 2, 3))
    return total, jnp.sum(positive, 1, dtype=jnp.float32) * side**2


def fold_in(key: jax.Array, number: int) -> jax.Array:
    """Another key int32[...] for each `number`, so that two draws of an image differ."""
    return lax.bitcast_convert_type(hash32(key, number), jnp.int32)


def draw_positions(eligible: jax.Array, k: jax.typing.ArrayLike, key: jax.Array) -> jax.Array:
    """bool[b, N]: k random eligible positions of each row, or all if there are fewer.

    `eligible` is bool[b, N], `key` int32[b], and `k` int32[b] or one number for all rows.
    """
    numbers = hash32(key[:, None], jnp.arange(eligible.shape[1])) >> 1  # 31 bits, as int32
    return selection.largest(numbers.astype(jnp.int32), eligible, k)


def sample_balanced(
    positive: jax.Array, negative: jax.Array, rule: Sampling, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Samples positive and negative positions of each row, the positives up to their share.

    Negatives replace positives that a row lacks (Fast R-CNN, arXiv:1504.08083, section 2.3;
    torchvision's BalancedPositiveNegativeSampler). `positive` and `negative` are bool[b, N], never
    both, and so are the results; `key` is int32[b].
    """
    positive = draw_positions(positive, rule.positives, key)
    missing = rule.count - jnp.sum(positive, 1, dtype=jnp.int32)
    return positive, draw_positions(negative, missing, key)


def unpack_masks(bits: jax.Array, side: int) -> jax.Array:
    """Masks f32[..., side, side] of 0 and 1 from bits, as `numpy.packbits` makes them.

    `bits` are uint8[..., side * side / 8], row by row, the highest bit of a byte first.
    """
    pixels = (bits[..., None] >> jnp.arange(7, -1, -1, dtype=jnp.uint8)) & 1
    return pixels.reshape(*bits.shape[:-1], side, side).astype(jnp.float32)


def crop_masks(
    masks: jax.Array, boxes: jax.Array, index: jax.Array, regions: jax.Array, size: int
) -> jax.Array:
    """Crops and resizes the objects' masks to regions: the mask targets.

    A cell has the value of the mask at the cell's centre, interpolated bilinearly between the
    centres of the mask's cells. Outside of the object's box it is 0.

    Args:
        masks: f32[b, G, m, m], each spanning its object's box.
        boxes: f32[b, G, 4], of the objects. The mask of a box without area is 0.
        index: int32[b, R], the object of each region.
        regions: f32[b, R, 4] in the same coordinates.
        size: the number of a region's cells along y and along x.

    Returns:
        f32[b, R, size, size].
    """
    boxes, masks = selection.take(boxes, index), selection.take(masks, index)
    y, x = (
        _cell_shares(boxes[..., i::2], regions[..., i::2], size, masks.shape[-1]) for i in (0, 1)
    )
    # In bfloat16, a TPU's default, values near a threshold would change sides.
    return jnp.einsum("brip,brpq,brjq->brij", y, masks, x, precision="highest")


def _cell_shares(spans: jax.Array, regions: jax.Array, size: int, side: int) -> jax.Array:
    """The shares of a mask's cells in a region's cells along an axis: f32[..., size, side].

    `spans` and `regions` f32[..., 2] have the first and last coordinate of the boxes.
    """
    first, length = spans[..., :1], spans[..., 1:] - spans[..., :1]
    centres = (jnp.arange(size, dtype=jnp.float32) + 0.5) / size
    points = regions[..., :1] + (regions[..., 1:] - regions[..., :1]) * centres
    position = (points - first) / jnp.where(length > 0, length, 1)  # 0 .. 1 in the box
    inside = (position >= 0) & (position <= 1) & (length > 0)
    cell = jnp.clip(position * side - 0.5, 0, side - 1)
    near = jnp.maximum(1 - jnp.abs(cell[..., None] - jnp.arange(side)), 0)
    return jnp.where(inside[..., None], near, 0)
