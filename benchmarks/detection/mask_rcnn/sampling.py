"""Draws random boxes of an image to train on.

A draw is a function of the image's key and of the position alone: it is the same on any number of
devices, and again when a run is resumed.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.detection import select
from ops.hashing import hash32


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How many anchors or regions of an image are trained on, and which are positive.

    Attributes:
      count: of an image.
      share: of `count` that may be positive at most.
      positive_iou: at least this IoU with a true box makes a positive.
      negative_iou: below it one is negative; those between the two are ignored.
    """

    count: int
    share: float
    positive_iou: float
    negative_iou: float

    @property
    def positives(self) -> int:
        """The most positives of an image."""
        return int(self.count * self.share)


def fold(key: jax.Array, number: int) -> jax.Array:
    """Another key int32[...] for each `number`, so that two draws of an image differ."""
    return lax.bitcast_convert_type(hash32(key, number), jnp.int32)


def draw(eligible: jax.Array, k: jax.typing.ArrayLike, key: jax.Array) -> jax.Array:
    """Marks k random ones of the eligible positions of each row, or all if there are fewer.

    Args:
        eligible: bool[b, N].
        k: int32[b], or one number for all rows.
        key: int32[b].

    Returns:
        bool[b, N].
    """
    numbers = hash32(key[:, None], jnp.arange(eligible.shape[1])) >> 1  # 31 bits, as int32
    return select.largest(numbers.astype(jnp.int32), eligible, k)


def balanced(
    positive: jax.Array, negative: jax.Array, rule: Sampling, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws from the positive and negative positions of each row.

    Negatives take the place of positives that a row lacks (Fast R-CNN, arXiv:1504.08083, section
    2.3).

    Args:
        positive, negative: bool[b, N], never both.
        key: int32[b].

    Returns:
        (bool[b, N], bool[b, N]): the positives and negatives that were drawn.
    """
    positive = draw(positive, rule.positives, key)
    rest = rule.count - jnp.sum(positive, 1, dtype=jnp.int32)
    return positive, draw(negative, rest, key)
