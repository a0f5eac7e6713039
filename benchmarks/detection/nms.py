"""Suppresses detections that overlap better ones of the same object."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.detection import boxes as boxes_


def keep(boxes: jax.Array, threshold: float, *, inclusive: bool) -> jax.Array:
    """Which boxes greedy non-maximum suppression keeps.

    The algorithm goes through the boxes in their order and keeps each one that no kept box before
    it suppresses. Here all boxes are decided at once, again and again, until nothing changes: a
    box is kept if none before it that was kept suppresses it. After k rounds the first k boxes
    are decided for good, so the end is exactly the greedy result. It takes as many rounds as the
    longest chain of boxes that suppress one another has links, usually below ten. A round is a
    product with an n x n matrix of zeros and ones, which takes 2 bytes of memory per entry.

    Args:
        boxes: f32[..., n, 4], the best first. Each row is a problem of its own. Boxes without area
            are padding: they are not kept and suppress nothing.
        threshold: the IoU above which a box suppresses another one.
        inclusive: whether an IoU equal to the threshold suppresses as well.

    Returns:
        bool[..., n].
    """
    n = boxes.shape[-2]
    overlaps = boxes_.iou(boxes, boxes)
    too_close = overlaps >= threshold if inclusive else overlaps > threshold
    suppresses = too_close & (jnp.arange(n)[:, None] < jnp.arange(n))
    # Without the barrier, the compiler computes all overlaps again in each round.
    suppresses = lax.optimization_barrier(suppresses.astype(jnp.bfloat16))
    valid = boxes_.area(boxes) > 0

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


def best(
    boxes: jax.Array,
    scores: jax.Array,
    min_score: float,
    iou: float,
    most: int,
    candidates: int | None = None,
) -> dict[str, jax.Array]:
    """The best detections of each image after suppression within each class.

    Args:
        boxes: f32[b, N, 4], or f32[b, N, C, 4] with a box of its own for each class.
        scores: f32[b, N, C], without the background.
        min_score: >= 0; detections whose score is not higher are dropped.
        iou: of two detections of a class that overlap so much, the better one stays.
        most: how many detections an image has.
        candidates: how many of each class, the best ones, take part in its suppression; None for
            `most` of them. Memory grows with C times its square.

    Returns:
        {"boxes": f32[b, D, 4], "score": f32[b, D], "class": int32[b, D] from 1, "index":
        int32[b, D], the detection's place among the N}, the best first; score 0 is padding. D is
        `most`, or the number of all candidates if there are fewer.
    """
    of_class = min(candidates or most, boxes.shape[1])
    top, index = lax.top_k(jnp.swapaxes(scores, 1, 2), of_class)  # [b, C, of_class]
    if boxes.ndim == 3:
        found = jax.vmap(lambda image, chosen: image[chosen])(boxes, index)
    else:
        found = jnp.take_along_axis(jnp.swapaxes(boxes, 1, 2), index[..., None], 2)
    found = jnp.where((top > min_score)[..., None], found, 0)
    top = jnp.where(keep(found, iou, inclusive=True), top, 0)
    flat = top.reshape(len(top), -1)
    score, place = lax.top_k(flat, min(most, flat.shape[1]))
    return {
        "boxes": jnp.take_along_axis(found.reshape(len(top), -1, 4), place[..., None], 1),
        "score": score,
        "class": (place // of_class + 1).astype(jnp.int32),
        "index": jnp.take_along_axis(index.reshape(len(top), -1), place, 1),
    }
