"""SSD's loss: smooth L1 of the deltas, and cross-entropy with hard negative mining.

Liu et al. 2016 (arXiv:1512.02325), sections 2.2 and 2.3.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.detection import selection
from benchmarks.detection.boxes import area, encode_boxes, match, take_by_product
from benchmarks.detection.losses import cross_entropy, smooth_l1

MATCH_IOU = 0.5  # an anchor with at least this IoU with a true box is positive
NEGATIVES = 3  # mined for each positive anchor


def detection_loss(
    deltas: jax.Array | Sequence[jax.Array],
    logits: jax.Array | Sequence[jax.Array],
    boxes: jax.Array,
    classes: jax.Array,
    anchors: np.ndarray,
    num_logits: int | None = None,
    empty_images: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The two parts of the loss of each image.

    An image with P positive anchors has 3 P negatives, or all its other anchors if these are
    fewer: those with the highest cross-entropy, and of equal ones the first. An image without
    objects, which the paper does not have, counts as P = 1: the three hardest negatives, as with
    `min_negatives_per_image: 3` of TensorFlow's Object Detection API. Its loss does not depend on
    the batch's other images, which another device or micro-batch may have. Floats may also be
    float64, for tests.

    Args:
        deltas: float[b, N, 4], the predicted deltas of `boxes.encode_boxes`; or a list of
            float[b, n, 4], one for each map.
        logits: float[b, N, 1 + C], or a list of float[b, n, 1 + C]; class 0 is the background.
        boxes: f32[b, G, 4], the true boxes.
        classes: int32[b, G], 1 .. C. Class 0, or a box without area, is padding.
        anchors: f32[N, 4], as corners.
        num_logits: 1 + C, if the logits have further columns, which are ignored.
        empty_images: False: an image without objects has no loss, as in MLPerf's reference.

    Returns:
        (box_loss f32[b], class_loss f32[b]): smooth L1, summed over deltas and positive anchors,
        and cross-entropy, summed over positive anchors and negatives. Both are divided by the
        image's P.
    """
    with jax.named_scope("matching"):
        targets, labels = jax.vmap(_targets, (0, 0, None))(boxes, classes, anchors)
        # Behind the barrier the deltas of a box lie side by side, as the heads write them. Without
        # it XLA copies the outputs of the heads into the order of the deltas' computation.
        flat = jax.lax.optimization_barrier(targets.reshape(len(targets), -1))
        targets = flat.reshape(targets.shape)
    positive = labels > 0
    positives = jnp.sum(positive, 1, dtype=jnp.int32)
    if empty_images:
        positives = jnp.maximum(positives, 1)
    # Every map is read where its head has written it: joining the logits would copy them all.
    per_anchor = _per_map(partial(cross_entropy, num_logits=num_logits), logits, labels)
    with jax.named_scope("mining"):
        hardest = selection.largest(
            jax.lax.stop_gradient(per_anchor), ~positive, NEGATIVES * positives
        )
    class_sum = jnp.sum(jnp.where(positive | hardest, per_anchor, 0), 1)
    distances = _per_map(lambda x, y: jnp.sum(smooth_l1(x - y), -1), deltas, targets)
    box_sum = jnp.sum(jnp.where(positive, distances, 0), 1)
    divisor = jnp.maximum(positives, 1)
    return box_sum / divisor, class_sum / divisor


def _per_map(
    function: Callable[[jax.Array, jax.Array], jax.Array],
    predicted: jax.Array | Sequence[jax.Array],
    true: jax.Array,
) -> jax.Array:
    """f32[b, N]: `function` of predictions [b, N, c], or a list, and true values [b, N, ...]."""
    parts = jax.tree.leaves(predicted)
    starts = np.cumsum([x.shape[1] for x in parts])[:-1]
    pairs = zip(parts, jnp.split(true, starts, 1), strict=True)
    return jnp.concatenate([function(*pair) for pair in pairs], 1)


def _targets(
    boxes: jax.Array, classes: jax.Array, anchors: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """The deltas f32[N, 4] that an image's anchors should have, and their classes int32[N].

    The deltas of an anchor of class 0 mean nothing.
    """
    valid = (classes > 0) & (area(boxes) > 0)
    matched = match(boxes, valid, anchors, MATCH_IOU)
    taken = take_by_product(jnp.concatenate([boxes, classes[:, None]], 1), matched.box)
    labels = jnp.where(matched.positive, taken[:, 4], 0).astype(jnp.int32)
    return encode_boxes(taken[:, :4], anchors), labels
