"""Proposes regions that may hold an object: the end of a region proposal network.

Ren et al. 2015, arXiv:1506.01497; level by level of a feature pyramid as in arXiv:1612.03144.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.detection import boxes as boxes_
from benchmarks.detection import nms, select

_WEIGHTS = (1.0, 1.0, 1.0, 1.0)  # of the offsets from anchors, see `boxes.decode`


def propose(
    logits: Sequence[jax.Array],
    codes: Sequence[jax.Array],
    anchors: Sequence[jax.typing.ArrayLike],
    sizes: jax.Array,
    *,
    before: int,
    after: int,
    iou: float,
) -> jax.Array:
    """The best regions of each image, of which none overlaps a better one of its level too much.

    Equal logits are in the order of the levels and anchors. Gradients do not pass.

    Args:
        logits: of each level, f32[b, n].
        codes: of each level, f32[b, n, 4]: the offsets from the anchors.
        anchors: of each level, f32[n, 4] in pixels.
        sizes: f32[b, 2], height and width of the image without padding; boxes are cut to it, and
            those without area then are left out.
        before: how many of a level, those of the highest logits, take part in the suppression.
        after: how many of an image are proposed, of all levels.
        iou: of two boxes of a level that overlap by more, the better one stays.

    Returns:
        f32[b, P, 4], the best first, within the image; zeros are padding. P is `after`, or the
        number of boxes that took part if they are fewer.
    """
    found = [
        _best(*level, sizes, before)
        for level in zip(map(lax.stop_gradient, logits), codes, anchors, strict=True)
    ]
    # The levels become rows of one problem, and the shorter ones are padded with empty boxes.
    longest = max(top.shape[1] for top, _ in found)
    gaps = [((0, 0), (0, longest - top.shape[1])) for top, _ in found]
    top = jnp.stack([jnp.pad(top, gap) for (top, _), gap in zip(found, gaps, strict=True)], 1)
    boxes = jnp.stack(
        [jnp.pad(boxes, (*gap, (0, 0))) for (_, boxes), gap in zip(found, gaps, strict=True)], 1
    )
    kept = nms.keep(boxes, iou, inclusive=False)
    ranked = jnp.where(kept, top, -jnp.inf).reshape(len(sizes), -1)
    most = min(after, sum(top.shape[1] for top, _ in found))
    best, place = lax.top_k(ranked, most)
    chosen = jnp.take_along_axis(boxes.reshape(len(sizes), -1, 4), place[..., None], 1)
    return jnp.where(best[..., None] > -jnp.inf, chosen, 0)


def _best(
    logits: jax.Array, codes: jax.Array, anchors: jax.typing.ArrayLike, sizes: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """(logits f32[b, k], boxes f32[b, k, 4]) of the best anchors of a level, the best first."""
    top, index = select.top_k(logits.astype(jnp.float32), min(most, logits.shape[1]))
    offsets = jnp.take_along_axis(lax.stop_gradient(codes), index[..., None], 1)
    boxes = boxes_.decode(offsets.astype(jnp.float32), jnp.asarray(anchors)[index], _WEIGHTS)
    return top, boxes_.clip(boxes, sizes[:, :1], sizes[:, 1:])
