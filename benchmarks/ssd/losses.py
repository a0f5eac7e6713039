"""SSD's loss: offsets to the matched boxes, and classes with the hardest negatives.

Liu et al. 2016 (arXiv:1512.02325), sections 2.2 and 2.3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ops.detection import boxes as boxes_
from ops.detection import matching, select

MATCH_IOU = 0.5  # an anchor with at least this IoU with a true box is positive
NEGATIVES = 3  # of the other anchors, this many per positive one count


def detection_loss(
    codes: jax.Array,
    logits: jax.Array,
    boxes: jax.Array,
    classes: jax.Array,
    anchors: np.ndarray,
) -> tuple[jax.Array, jax.Array]:
    """The two parts of the loss of each image.

    An image with P positive anchors has 3 P negatives, or all its other anchors if these are
    fewer: those with the highest cross-entropy, and of equal ones the first. Floats may also be
    float64, for tests.

    Args:
        codes: f32[b, N, 4], the predicted offsets, see `ops.detection.boxes.encode`.
        logits: f32[b, N, 1 + C]; class 0 is the background.
        boxes: f32[b, G, 4], the true boxes.
        classes: int32[b, G], 1 .. C. Class 0 marks padding; so does a box without area.
        anchors: f32[N, 4], as corners.

    Returns:
        (box_loss f32[b], class_loss f32[b]): smooth L1, summed over offsets and positive anchors,
        and cross-entropy, summed over positive anchors and negatives. Both are divided by the
        image's P, and are 0 where it has none.
    """
    with jax.named_scope("matching"):
        targets, labels = jax.vmap(_targets, (0, 0, None))(boxes, classes, anchors)
    positive = labels > 0
    positives = jnp.sum(positive, 1, dtype=jnp.int32)
    per_anchor = cross_entropy(logits, labels)
    with jax.named_scope("mining"):
        hardest = select.largest(
            jax.lax.stop_gradient(per_anchor), ~positive, NEGATIVES * positives
        )
    class_sum = jnp.sum(jnp.where(positive | hardest, per_anchor, 0), 1)
    distances = smooth_l1(codes - targets)
    box_sum = jnp.sum(jnp.where(positive[..., None], distances, 0), (1, 2))
    divisor = jnp.maximum(positives, 1)
    return box_sum / divisor, class_sum / divisor


def smooth_l1(x: jax.Array) -> jax.Array:
    """x**2 / 2 where |x| < 1, else |x| - 1/2 (Girshick 2015, arXiv:1504.08083, equation 3)."""
    size = jnp.abs(x)
    return jnp.where(size < 1, 0.5 * x * x, size - 0.5)


@jax.custom_vjp
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label]: f32[..., C] and int32[...] to f32[...], all >= 0.

    Neither the one-hot labels nor, for the backward pass, the probabilities are stored.
    """
    return _cross_entropy(logits, labels)[0]


def _cross_entropy(
    logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """The cross-entropy, and what its gradient needs.

    One pass over the logits finds their maximum, the sum of their exponentials relative to the
    maximum so far (Milakov and Gimelshein 2018, arXiv:1805.02867), and the label's logit.
    """

    def join(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest = jnp.maximum(a[0], b[0])
        total = a[1] * jnp.exp(a[0] - largest) + b[1] * jnp.exp(b[0] - largest)
        return largest, total, a[2] + b[2]

    picked = jnp.where(_is_label(logits, labels), logits, 0)
    initial = tuple(np.array([np.finfo(logits.dtype).min, 0, 0], logits.dtype))
    largest, total, own = jax.lax.reduce(
        (logits, jnp.ones_like(logits), picked), initial, join, (logits.ndim - 1,)
    )
    log_total = jnp.log(total) + largest
    return log_total - own, (logits, labels, log_total)


def _cross_entropy_gradient(
    saved: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
    logits, labels, log_total = saved
    probabilities = jnp.exp(logits - log_total[..., None])
    return gradient[..., None] * (probabilities - _is_label(logits, labels)), None


cross_entropy.defvjp(_cross_entropy, _cross_entropy_gradient)


def _is_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """bool[..., C]: True at the label of each row."""
    return labels[..., None] == jnp.arange(logits.shape[-1])


def _targets(
    boxes: jax.Array, classes: jax.Array, anchors: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """The offsets f32[N, 4] that an image's anchors should have, and their classes int32[N].

    The offsets of an anchor of class 0 mean nothing.
    """
    valid = (classes > 0) & (boxes_.area(boxes) > 0)
    found = matching.match(boxes, valid, anchors, MATCH_IOU)
    taken = matching.take(jnp.concatenate([boxes, classes[:, None]], 1), found.box)
    labels = jnp.where(found.positive, taken[:, 4], 0).astype(jnp.int32)
    return boxes_.encode(taken[:, :4], anchors), labels
