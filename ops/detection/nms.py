"""Suppresses detections that overlap better ones of the same object."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ops.detection import boxes as boxes_


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
