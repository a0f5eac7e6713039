"""The samples and losses of the plain Mask R-CNN.

Of an image there are G true objects ("boxes" f32[G, 4], "classes" int32[G], 0 is padding, "masks"
in bits), N anchors and R regions. Random numbers are the hashes that ours are, so that the samples
are the same; here the smallest ones are found by sorting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.detection import boxes as boxes_
from benchmarks.detection.losses import smooth_l1
from benchmarks.detection.mask_rcnn.sampling import Sampling, fold
from ops.hashing import hash32
from scripts.bench.peers.ssd import matched

_ONES = (1.0, 1.0, 1.0, 1.0)
_ANCHOR_BETA = 1 / 9


class Regions(NamedTuple):
    """The sampled regions of b images, positives first."""

    boxes: jax.Array  # f32[b, R, 4]
    classes: jax.Array  # int32[b, R]; 0 is the background
    owner: jax.Array  # int32[b, R], the object of a positive region
    valid: jax.Array  # bool[b, R]; False is padding


def _drawn(eligible: jax.Array, count: Any, key: jax.Array) -> jax.Array:
    """Marks `count` random ones of the eligible [N]."""
    numbers = (hash32(key, jnp.arange(len(eligible))) >> 1).astype(jnp.int32)
    order = jnp.argsort(jnp.where(eligible, numbers, -1), descending=True, stable=True)
    return eligible & (jnp.argsort(order) < count)


def _balanced(positive: jax.Array, negative: jax.Array, rule: Sampling, key: jax.Array) -> Any:
    """The positives and negatives [N] to learn from."""
    positive = _drawn(positive, rule.positives, key)
    return positive, _drawn(negative, rule.count - jnp.sum(positive), key)


def sampled(batch: Mapping[str, jax.Array], rule: Sampling, proposals: jax.Array) -> Regions:
    """Chooses regions among proposals f32[b, P, 4] and true boxes."""

    def of_image(boxes: jax.Array, classes: jax.Array, key: jax.Array, proposals: jax.Array) -> Any:
        valid = (classes > 0) & (boxes_.area(boxes) > 0)
        candidates = jnp.concatenate([proposals, jnp.where(valid[:, None], boxes, 0)])
        overlaps = boxes_.iou(jnp.where(valid[:, None], boxes, 0), candidates)
        owner, overlap = jnp.argmax(overlaps, 0), jnp.max(overlaps, 0)
        positive = overlap >= rule.positive_iou
        negative = ~positive & (overlap < rule.negative_iou) & (boxes_.area(candidates) > 0)
        positive, negative = _balanced(positive, negative, rule, fold(key, 1))
        place = jnp.argsort(jnp.where(positive, 0, jnp.where(negative, 1, 2)), stable=True)
        place = place[: rule.count]
        chosen, is_object = (positive | negative)[place], positive[place]
        return Regions(
            jnp.where(chosen[:, None], candidates[place], 0),
            jnp.where(is_object, classes[owner[place]], 0),
            owner[place],
            chosen,
        )

    images = batch["boxes"], batch["classes"], batch["draw"], proposals
    return Regions(*jax.lax.stop_gradient(jax.vmap(of_image)(*images)))


def _of_anchors(logits: Any, codes: Any, anchors: jax.Array, rule: Sampling, truth: Any) -> Any:
    """The loss of an image's anchors: logits [N], codes [N, 4]."""
    boxes, classes, key = truth
    valid = (classes > 0) & (boxes_.area(boxes) > 0)
    owner, positive, overlap = matched(boxes, valid, anchors, rule.positive_iou)
    negative = ~positive & (overlap < rule.negative_iou)
    positive, negative = _balanced(positive, negative, rule, fold(key, 0))
    entropy = optax.sigmoid_binary_cross_entropy(logits, positive)
    distance = smooth_l1(codes - boxes_.encode(boxes[owner], anchors, _ONES), _ANCHOR_BETA).sum(-1)
    total = jnp.sum(jnp.where(positive | negative, entropy, 0))
    return (total + jnp.sum(jnp.where(positive, distance, 0))) / rule.count


def _of_regions(logits: jax.Array, codes: jax.Array, regions: Regions, boxes: jax.Array) -> Any:
    """The loss of an image's regions: logits [R, C], codes [R, C, 4]."""
    count, positive = len(logits), regions.classes > 0
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, regions.classes)
    own = jnp.where(positive[:, None], regions.boxes, jnp.array([0.0, 0, 1, 1]))
    targets = boxes_.encode(boxes[regions.owner], own)
    mine = codes[jnp.arange(count), regions.classes]
    distance = jnp.where(positive, smooth_l1(mine - targets).sum(-1), 0)
    return (jnp.sum(jnp.where(regions.valid, entropy, 0)) + jnp.sum(distance)) / count


def _true_masks(masks: jax.Array, boxes: jax.Array, regions: Regions, size: int) -> jax.Array:
    """Of masks [G, m, m], each in its object's box, the pixels [R, size, size] in the regions."""

    def of_region(region: jax.Array, owner: jax.Array) -> jax.Array:
        box, side = boxes[owner], masks.shape[-1]

        def along(axis: int) -> tuple[jax.Array, ...]:
            first, length = box[axis], box[axis + 2] - box[axis]
            centres = (jnp.arange(size, dtype=jnp.float32) + 0.5) / size
            points = region[axis] + (region[axis + 2] - region[axis]) * centres
            place = (points - first) / jnp.where(length > 0, length, 1)
            inside = (place >= 0) & (place <= 1) & (length > 0)
            cell = jnp.clip(place * side - 0.5, 0, side - 1)
            low = jnp.floor(cell).astype(jnp.int32)
            return low, jnp.minimum(low + 1, side - 1), cell - low, inside

        (y0, y1, dy, y_in), (x0, x1, dx, x_in) = along(0), along(1)
        mask, dy = masks[owner], dy[:, None]
        above = mask[y0[:, None], x0] * (1 - dx) + mask[y0[:, None], x1] * dx
        below = mask[y1[:, None], x0] * (1 - dx) + mask[y1[:, None], x1] * dx
        return jnp.where(y_in[:, None] & x_in, above * (1 - dy) + below * dy, 0)

    return jax.vmap(of_region)(regions.boxes, regions.owner)


def _of_masks(logits: jax.Array, regions: Regions, boxes: jax.Array, masks: jax.Array) -> Any:
    """The sum over the pixels of an image's positive regions, and their number."""
    side, positive = logits.shape[1], regions.classes > 0
    target = _true_masks(masks, boxes, regions, side) >= 0.5
    mine = logits[jnp.arange(len(logits)), :, :, regions.classes]
    entropy = optax.sigmoid_binary_cross_entropy(mine, target).sum((1, 2))
    return jnp.sum(jnp.where(positive, entropy, 0)), jnp.sum(positive) * side**2


def total(settings: Any, batch: Mapping[str, jax.Array], anchors: Any, outputs: Any) -> jax.Array:
    """The loss f32[] of a batch.

    Args:
      settings: of our benchmark.
      batch: of ours.
      anchors: f32[n, 4] of each level.
      outputs: (logits and codes of the anchors, regions, outputs of the box and of the mask head).
    """
    proposed, regions, found, outlines = outputs
    boxes, classes = batch["boxes"], batch["classes"]
    rule, corners = settings.anchors.sampling, jnp.concatenate([jnp.asarray(x) for x in anchors])
    first = jax.vmap(lambda x, y, *truth: _of_anchors(x, y, corners, rule, truth))
    anchor_loss = first(*proposed, boxes, classes, batch["draw"])
    logits, codes = found
    region_loss = jax.vmap(_of_regions)(logits, codes, regions, boxes)
    side, most = settings.images.mask_size, outlines.shape[1]
    bits = jnp.unpackbits(batch["masks"], axis=-1)
    masks = bits.reshape(*bits.shape[:-1], side, side).astype(jnp.float32)
    with_masks = Regions(*(x[:, :most] for x in regions))
    pixels, count = jax.vmap(_of_masks)(outlines, with_masks, boxes, masks)
    mask_loss = jnp.sum(pixels) / jnp.maximum(jnp.sum(count), 1)
    return jnp.mean(anchor_loss + region_loss) + mask_loss
