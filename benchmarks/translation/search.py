"""What the beam searches of the translators share.

Letters in shapes: b sentences, k beams of each, V tokens that the model knows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.translation.vocabulary import PAD

Cache = Any  # a tree of arrays [b, k, ...]


def length_penalties(length: int, alpha: float) -> np.ndarray:
    """((5 + n) / 6)^alpha for n = 0 ... length: float32[length + 1]."""
    return (((5 + np.arange(length + 1)) / 6) ** alpha).astype(np.float32)


def log_probabilities(logits: jax.Array, vocab_size: int) -> jax.Array:
    """The logarithms of the probabilities of the first V ids; -inf for PAD and for further ids.

    Args:
      logits: float[..., V or more].
      vocab_size: V.

    Returns:
      float32, of the shape of `logits`.
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    known = jnp.where(ids < vocab_size, logits.astype(jnp.float32), -jnp.inf)
    return jnp.where(ids == PAD, -jnp.inf, jax.nn.log_softmax(known))


def best_continuations(
    live_logp: jax.Array, logp: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses the most probable sequences that are a token longer.

    Args:
      live_logp: float32[b, k] of the sequences so far.
      logp: float32[b, k, V] of the next token.
      count: how many to choose, at most k * V.

    Returns:
      Logarithms of probabilities float32[b, count], the best first, the sequences int32[b, count]
      that are continued, and the tokens int32[b, count]. Between equal values the lower index of
      the sequence comes first, then the lower token. Where the value is -inf, the token is PAD.
    """
    width = min(count, logp.shape[-1])  # no more of one sequence can be among the best
    values, tokens = jax.lax.top_k(live_logp[:, :, None] + logp, width)
    values, order = jax.lax.top_k(values.reshape(len(values), -1), count)
    tokens = jnp.take_along_axis(tokens.reshape(len(tokens), -1), order, axis=1)
    return values, order // width, jnp.where(values > -jnp.inf, tokens, PAD)


def gather(tree: Any, rows: jax.Array) -> Any:
    """Leaves [b, n, ...] of `tree` -> [b, m, ...]: the entries `rows` int32[b, m] of axis 1."""
    pick = jax.vmap(lambda values, row: values.at[row].get(mode="promise_in_bounds"))
    return jax.tree.map(lambda leaf: pick(leaf, rows), tree)


def choose(which: jax.Array, yes: Any, no: Any) -> Any:
    """The sentences of `yes` where `which` bool[b] is true, else those of `no`; leaves [b, ...]."""
    pick = jax.vmap(jnp.where)
    return jax.tree.map(lambda a, b: pick(which, a, b), yes, no)
