"""How well an item is ranked among others: HR@10 and NDCG@10, as MLPerf has them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

TOP = 10


def ranks(scores: jax.Array, items: jax.Array) -> jax.Array:
    """The place of each row's first item among the row's others, best score first.

    An item that comes several times in a row counts once. An item whose score is the same goes
    before the first, so that a model that tells nothing apart hits nothing; so does nan.

    Args:
      scores: f32[b, n].
      items: i32[b, n], what is scored.

    Returns:
      i32[b]: from 0.
    """
    # By item, equal ones beside each other.
    others, other_scores = jax.lax.sort((items[:, 1:], scores[:, 1:]), num_keys=1)
    again = jnp.pad(others[:, 1:] == others[:, :-1], ((0, 0), (1, 0)))
    counts = ~again & (others != items[:, :1])
    before = ~(other_scores < scores[:, :1])
    return jnp.sum(counts & before, axis=1, dtype=jnp.int32)


def hits(rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(hit, gain) f32[b] of ranks i32[b].

    hit is 1 for ranks below 10, else 0; gain is ln 2 / ln(rank + 2) there, which is the NDCG of a
    single relevant item.
    """
    hit = (rank < TOP).astype(jnp.float32)
    return hit, hit * math.log(2) / jnp.log(rank.astype(jnp.float32) + 2)
