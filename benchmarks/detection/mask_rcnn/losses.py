"""Mask R-CNN's targets and losses: of the anchors, of the sampled regions, and of their masks.

Sources: Ren et al. 2015 (arXiv:1506.01497) section 3.1.2 and 3.1.3 for the anchors; Girshick 2015
(arXiv:1504.08083) sections 2.1 and 2.3 for the regions; He et al. 2017 (arXiv:1703.06870) section 3
for the masks. Numbers that the papers leave open are those of MLPerf's reference.

Boxes are (y0, x0, y1, x1) in pixels. Class 0 is the background, and padding among true objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.detection import boxes as boxes_
from benchmarks.detection import matching, select
from benchmarks.detection.losses import cross_entropy, smooth_l1
from benchmarks.detection.mask_rcnn import masks as masks_
from benchmarks.detection.mask_rcnn import sampling
from benchmarks.detection.mask_rcnn.sampling import Sampling

ANCHOR_WEIGHTS = (1.0, 1.0, 1.0, 1.0)  # of the offsets from anchors, see `boxes.encode`
_ANCHOR_BETA = 1 / 9  # where smooth L1 of these offsets becomes linear


class Objects(NamedTuple):
    """The true objects of b images, padded to G."""

    boxes: jax.Array  # f32[b, G, 4]
    classes: jax.Array  # int32[b, G] from 1; 0 is padding

    @property
    def valid(self) -> jax.Array:
        """bool[b, G]"""
        return (self.classes > 0) & (boxes_.area(self.boxes) > 0)


class Regions(NamedTuple):
    """The sampled regions of b images, positives first; R of each."""

    boxes: jax.Array  # f32[b, R, 4]
    classes: jax.Array  # int32[b, R]; 0 where the region is none of an object
    owner: jax.Array  # int32[b, R], the object that a positive region is to find
    valid: jax.Array  # bool[b, R]; False is padding

    def first(self, count: int) -> Regions:
        """The first regions of each image."""
        return Regions(*(x[:, :count] for x in self))


def proposal_loss(
    logits: Sequence[jax.Array],
    codes: Sequence[jax.Array],
    anchors: Sequence[np.ndarray],
    objects: Objects,
    rule: Sampling,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The loss of the region proposal network on a random sample of each image's anchors.

    Args:
        logits, codes: of each level, f32[b, n] and f32[b, n, 4].
        anchors: of each level, f32[n, 4].
        rule: with `share` of positives at most, the rest are negatives.
        key: int32[b], decides the sample.

    Returns:
        (class_loss f32[b], box_loss f32[b]): binary cross-entropy summed over the sample, and
        smooth L1 summed over its positives, both over `rule.count`.
    """
    everything = jnp.concatenate(anchors)
    found = jax.vmap(lambda b, v: matching.match(b, v, everything, rule.positive_iou))(
        objects.boxes, objects.valid
    )
    negative = ~found.positive & (found.overlap < rule.negative_iou)
    key = sampling.fold(key, 0)
    positive, negative = sampling.balanced(found.positive, negative, rule, key)
    joined = jnp.concatenate(logits, 1)
    entropy = jax.nn.softplus(joined) - jnp.where(positive, joined, 0)
    class_loss = jnp.sum(jnp.where(positive | negative, entropy, 0), 1)

    # Only the sampled positives, few of many, have offsets to learn.
    place, valid = select.compact(positive, rule.positives)
    boxes = select.take(objects.boxes, select.take(found.box, place))
    targets = boxes_.encode(boxes, everything[place], ANCHOR_WEIGHTS)
    distance = smooth_l1(select.take(jnp.concatenate(codes, 1), place) - targets, _ANCHOR_BETA)
    box_loss = jnp.sum(jnp.where(valid[..., None], distance, 0), (1, 2))
    return class_loss / rule.count, box_loss / rule.count


def sample(proposals: jax.Array, objects: Objects, rule: Sampling, key: jax.Array) -> Regions:
    """Chooses the regions to train the heads on, among the proposals and the true boxes.

    Args:
        proposals: f32[b, P, 4]; boxes without area are padding.
        key: int32[b], decides the sample.
    """
    valid = objects.valid
    candidates = jnp.concatenate(
        [proposals, jnp.where(valid[..., None], objects.boxes, 0)], 1
    )  # f32[b, P + G, 4]

    def nearest(boxes: jax.Array, valid: jax.Array, regions: jax.Array) -> matching.Match:
        return matching.match(boxes, valid, regions, rule.positive_iou, for_every_box=False)

    found = jax.vmap(nearest)(objects.boxes, valid, candidates)
    negative = ~found.positive & (found.overlap < rule.negative_iou) & (boxes_.area(candidates) > 0)
    key = sampling.fold(key, 1)
    positive, negative = sampling.balanced(found.positive, negative, rule, key)
    first, is_first = select.compact(positive, rule.positives)
    # Where there are fewer positives, more negatives take their places.
    rest, is_rest = select.compact(negative, rule.count)
    order = jnp.argsort(~jnp.concatenate([is_first, is_rest], 1), axis=1, stable=True)
    place = select.take(jnp.concatenate([first, rest], 1), order)[:, : rule.count]
    chosen = select.take(jnp.concatenate([is_first, is_rest], 1), order)[:, : rule.count]
    index = select.take(found.box, place)
    is_object = select.take(positive, place) & chosen
    return Regions(
        jnp.where(chosen[..., None], select.take(candidates, place), 0),
        jnp.where(is_object, select.take(objects.classes, index), 0),
        index,
        chosen,
    )


def region_loss(
    logits: jax.Array, codes: jax.Array, regions: Regions, objects: Objects
) -> tuple[jax.Array, jax.Array]:
    """The loss of the box head.

    Args:
        logits: f32[b, R, C].
        codes: f32[b, R, C, 4], of which only those of the true class count.

    Returns:
        (class_loss f32[b], box_loss f32[b]): cross-entropy summed over the regions, and smooth L1
        over the positive ones, both over R.
    """
    count = logits.shape[1]
    entropy = cross_entropy(logits, regions.classes)
    class_loss = jnp.sum(jnp.where(regions.valid, entropy, 0), 1) / count
    true = select.take(objects.boxes, regions.owner)
    positive = regions.classes > 0
    # A padding region has no side to measure offsets in.
    own = jnp.where(positive[..., None], regions.boxes, jnp.array([0.0, 0, 1, 1]))
    targets = boxes_.encode(true, own)
    mine = jnp.arange(codes.shape[2]) == regions.classes[..., None]
    predicted = jnp.sum(jnp.where(mine[..., None], codes, 0), 2)
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
    target = masks_.crop(masks, objects.boxes, regions.owner, regions.boxes, side) >= 0.5
    mine = jnp.arange(logits.shape[-1]) == regions.classes[..., None, None, None]
    own = jnp.sum(jnp.where(mine, logits, 0), -1)
    entropy = jax.nn.softplus(own) - jnp.where(target, own, 0)
    total = jnp.sum(jnp.where(positive[..., None, None], entropy, 0), (1, 2, 3))
    return total, jnp.sum(positive, 1, dtype=jnp.float32) * side**2
