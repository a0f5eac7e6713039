"""SSD's loss: offsets to the matched boxes, and classes with the hardest negatives.

Liu et al. 2016 (arXiv:1512.02325), sections 2.2 and 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ops.detection import boxes as boxes_
from ops.detection import matching, select

MATCH_IOU = 0.5  # an anchor with at least this IoU with a true box is positive
NEGATIVES = 3  # of the other anchors, this many per positive one count


def detection_loss(
    codes: jax.Array | Sequence[jax.Array],
    logits: jax.Array | Sequence[jax.Array],
    boxes: jax.Array,
    classes: jax.Array,
    anchors: np.ndarray,
    num_logits: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The two parts of the loss of each image.

    An image with P positive anchors has P times 3 negatives, or all its other anchors if these
    are fewer: those with the highest cross-entropy. Of equal ones, the first count.

    Args:
        codes: float[b, N, 4], the predicted offsets, see `ops.detection.boxes.encode`. A list
            has float[b, n, 4] of one map after the other.
        logits: float[b, N, 1 + C], or a list of float[b, n, 1 + C]; class 0 is the background.
        boxes: f32[b, G, 4], the true boxes.
        classes: int32[b, G], 1 .. C. Class 0 marks padding; so does a box without area.
        anchors: f32[N, 4], as corners.
        num_logits: 1 + C, if the logits have more columns, which mean nothing.

    Returns:
        (box_loss f32[b], class_loss f32[b]): smooth L1, summed over offsets and positive anchors,
        and cross-entropy, summed over positive anchors and negatives. Both are divided by the
        image's P, and are 0 where it has none.
    """
    with jax.named_scope("matching"):
        targets, labels = jax.vmap(_targets, (0, 0, None))(boxes, classes, anchors)
        # Behind the barrier the offsets of a box lie side by side, as the heads write them. Without
        # it XLA copies the outputs of the heads into the order of the offsets' computation.
        flat = jax.lax.optimization_barrier(targets.reshape(len(targets), -1))
        targets = flat.reshape(targets.shape)
    positive = labels > 0
    positives = jnp.sum(positive, 1, dtype=jnp.int32)
    # Every map is read where its head has written it: joining the logits would copy them all.
    per_anchor = _per_map(partial(cross_entropy, num_logits=num_logits), logits, labels)
    with jax.named_scope("mining"):
        hardest = select.largest(
            jax.lax.stop_gradient(per_anchor), ~positive, NEGATIVES * positives
        )
    class_sum = jnp.sum(jnp.where(positive | hardest, per_anchor, 0), 1)
    distances = _per_map(lambda x, y: jnp.sum(smooth_l1(x - y), -1), codes, targets)
    box_sum = jnp.sum(jnp.where(positive, distances, 0), 1)
    share = 1 / jnp.maximum(positives, 1).astype(jnp.float32)
    return box_sum * share, class_sum * share


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


def smooth_l1(x: jax.Array) -> jax.Array:
    """x**2 / 2 where |x| < 1, else |x| - 1/2 (Girshick 2015, arXiv:1504.08083, equation 3)."""
    size = jnp.abs(x)
    return jnp.where(size < 1, 0.5 * x * x, size - 0.5)


def cross_entropy(logits: jax.Array, labels: jax.Array, num_logits: int | None = None) -> jax.Array:
    """-log softmax(logits)[label]: float[..., C] and int32[...] to f32[...], all >= 0.

    Neither the one-hot labels nor, for the backward pass, the probabilities are stored. With
    `num_logits`, further columns do not count; leaving them out before would cost a copy.
    """
    value: Any = _cross_entropy(num_logits, logits, labels)
    return value


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(num_logits: int | None, logits: jax.Array, labels: jax.Array) -> jax.Array:
    return _forward(num_logits, logits, labels)[0]


def _forward(num_logits: int | None, logits: jax.Array, labels: jax.Array) -> Any:
    used = logits[..., :num_logits].astype(jnp.float32)
    largest = jnp.max(used, -1)
    total = jnp.log(jnp.sum(jnp.exp(used - largest[..., None]), -1)) + largest
    picked = jnp.sum(jnp.where(_columns(used) == labels[..., None], used, 0), -1)
    return total - picked, (logits, labels, total)


def _backward(num_logits: int | None, saved: Any, gradient: jax.Array) -> Any:
    logits, labels, total = saved
    columns = _columns(logits)
    probabilities = jnp.exp(logits.astype(jnp.float32) - total[..., None])
    slopes = gradient[..., None] * (probabilities - (columns == labels[..., None]))
    if num_logits is not None:
        slopes = jnp.where(columns < num_logits, slopes, 0)
    return slopes.astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _columns(logits: jax.Array) -> jax.Array:
    """The number of each column, int32[C]."""
    return jnp.arange(logits.shape[-1])


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
