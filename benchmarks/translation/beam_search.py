"""Beam search: the loop over positions, the length penalty, and steps that both translators share.

Each has its rules in `transformer.finished_beams` and `gnmt.coverage_beams`. Letters in shapes:
b sentences, k beams of each, V tokens that the model knows, T positions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.translation.vocabulary import PAD

Cache = Any  # a tree of arrays [b, k, ...]
Lists = Any  # a NamedTuple of arrays [b, ...]; its `tokens` int32[b, k, T] are to be continued


class Rules(NamedTuple):
    """How to search: beam size, length penalty, and how many sequences are wanted."""

    beam_size: int  # k
    alpha: float  # the strength of the length penalty, 0 or more
    max_length: int  # T, the most tokens of a sequence
    vocab_size: int  # V; logits of further ids are ignored
    top: int = 1  # how many sequences to return for a sentence, at most k
    marian: bool = False  # the rules of transformers for Marian's models, see `finished_beams`

    @property
    def length_penalties(self) -> jax.Array:
        """GNMT's penalty ((5 + n) / 6)^alpha for n = 0 ... T, or Marian's n^alpha: f32[T + 1]."""
        lengths = np.arange(self.max_length + 1)
        numbers = np.maximum(lengths, 1) if self.marian else (5 + lengths) / 6
        return jnp.asarray((numbers**self.alpha).astype(np.float32))


def run(
    step: Callable[..., Any],
    cache: Cache,
    lists: Lists,
    is_searching: Callable[[jax.Array, Lists], jax.Array],
    extend: Callable[..., tuple[Lists, jax.Array]],
    rules: Rules,
) -> Lists:
    """Extends the sequences of all sentences by a token, until no sentence is searching.

    Args:
      step: (ids int32[b, k], position int32[], cache) -> (logits float[b, k, V or more], further
        arrays, cache). `ids` are the tokens at `position` - 1, and PAD at position 0; the logits
        are for the tokens at `position`. Arrays that do not change belong into its closure.
      cache: the cache of the first step, the same for the k beams of a sentence.
      lists: the lists at position 0.
      is_searching: (position int32[], lists) -> bool[b].
      extend: (lists, logarithms of probabilities float32[b, k, V], position, further arrays) ->
        (the lists with the tokens at `position`, the indices int32[b, k] of the beams that they
        continue).
      rules: the rules of the search.

    Returns:
      The lists at the end. The lists of a sentence do not depend on the other sentences.
    """

    def advance(state: tuple[jax.Array, Lists, Cache]) -> tuple[jax.Array, Lists, Cache]:
        position, lists, cache = state
        last = lists.tokens[:, :, jnp.maximum(position - 1, 0)]  # all PAD at position 0
        logits, *further, cache = step(last, position, cache)
        logp = log_probabilities(logits, rules.vocab_size)
        extended, parents = extend(lists, logp, position, *further)
        lists = choose(is_searching(position, lists), extended, lists)
        return position + 1, lists, gather(cache, parents) if rules.beam_size > 1 else cache

    start = jnp.int32(0), lists, cache
    return jax.lax.while_loop(lambda state: jnp.any(is_searching(*state[:2])), advance, start)[1]


def log_probabilities(logits: jax.Array, vocab_size: int) -> jax.Array:
    """The log probabilities float32 of logits [..., V or more]; -inf for PAD and further ids."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    masked = jnp.where(ids < vocab_size, logits.astype(jnp.float32), -jnp.inf)
    return jnp.where(ids == PAD, -jnp.inf, jax.nn.log_softmax(masked))


def best_continuations(
    live_logp: jax.Array, logp: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses the most probable sequences that are a token longer.

    Args:
      live_logp: float32[b, k], log probabilities of the sequences so far.
      logp: float32[b, k, V], log probabilities of the next token.
      count: how many to choose, at most k * V.

    Returns:
      Logarithms of probabilities float32[b, count], the best first, the sequences int32[b, count]
      that are continued, and the tokens int32[b, count]. Between equal values the lower index of
      the sequence comes first, then the lower token. Where the value is -inf, the token is PAD.
    """
    width = min(count, logp.shape[-1])  # one sequence has at most `count` of the best
    values, tokens = jax.lax.top_k(live_logp[:, :, None] + logp, width)
    values, order = jax.lax.top_k(values.reshape(len(values), -1), count)
    tokens = jnp.take_along_axis(tokens.reshape(len(tokens), -1), order, axis=1)
    return values, order // width, jnp.where(values > -jnp.inf, tokens, PAD)


def gather(tree: Any, rows: jax.Array) -> Any:
    """Leaves [b, n, ...] of `tree` -> [b, m, ...]: the entries `rows` int32[b, m] of axis 1."""
    pick = jax.vmap(lambda values, row: values.at[row].get(mode="promise_in_bounds"))
    return jax.tree.map(lambda leaf: pick(leaf, rows), tree)


def choose(which: jax.Array, yes: Any, no: Any) -> Any:
    """Leaves [b, ...]: the sentences of `yes` where `which` bool[b] is True, others of `no`."""
    pick = jax.vmap(jnp.where)
    return jax.tree.map(lambda a, b: pick(which, a, b), yes, no)
