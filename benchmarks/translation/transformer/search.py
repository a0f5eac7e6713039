"""Searches for the best translations by the rules of tensor2tensor's Transformer.

Letters in shapes: b sentences, k beams of each, V tokens that the model knows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.translation import search
from benchmarks.translation.search import Cache
from benchmarks.translation.vocabulary import EOS, PAD

# step(ids int32[b, k], position int32[], cache) -> (logits float[b, k, >= V], cache). `ids` are the
# tokens at `position` - 1, and PAD at position 0. `logits` are those of the tokens at `position`.
Step = Callable[[jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]


class _Lists(NamedTuple):
    """Two lists of sequences per sentence; both are sorted, the best first."""

    live: jax.Array  # int32[b, k, T], without EOS
    live_logp: jax.Array  # float32[b, k]; -inf for a beam that does not exist
    finished: jax.Array  # int32[b, k, T], up to EOS, and PAD behind it
    finished_scores: jax.Array  # float32[b, k]; -inf for a place that is free


class _State(NamedTuple):
    position: jax.Array  # int32[]
    lists: _Lists
    cache: Cache


def beam_search(
    step: Step,
    cache: Cache,
    limit: jax.Array,
    *,
    beams: int,
    alpha: float,
    length: int,
    vocab_size: int,
    top: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Finds the sequences with the largest logp / ((5 + n) / 6)^alpha; n counts EOS.

    Each step takes the best 2k continuations of a sentence's k live beams. Those that end with EOS
    compete with the k finished ones. The best k of the others stay live. A sentence is done when
    its `top` best finished scores cannot be beaten by what its live beams can still reach, or at
    its limit; if nothing has finished by then, its live beams are the result. The search ends when
    all sentences are done. What a sentence gets does not depend on the others. Between equal
    values, the beam with the lower index wins, then the token with the lower id. One beam
    makes it greedy, except that it goes on until its best EOS is sure to win. The model's
    probabilities are those over the first V ids; PAD is never chosen.

    Args:
      step: continues all beams by one token.
      cache: what `step` needs, leaves [b, k, ...], the same for the k beams of a sentence.
        Arrays that do not change belong into `step`'s closure.
      limit: int32[b], the most tokens of each sentence, EOS included; 0 for rows of padding.
      beams: k.
      alpha: the strength of the length penalty, 0 or more.
      length: T; no limit may be larger.
      vocab_size: V; logits of further ids are ignored.
      top: how many sequences to return, at most k. For more than one, the search runs longer.

    Returns:
      Sequences int32[b, top, T] with EOS and PAD behind it, and their scores float32[b, top], the
      best first. A sequence that does not exist is all PAD, and its score is -inf. Sequences
      without EOS have reached the limit.

    Source: Vaswani et al. 2017, section 6.1; Wu et al. 2016, arXiv:1609.08144, section 7; the rules
    of tensor2tensor's `beam_search` and of MLPerf's reference, whose best sequence is the same.
    """
    penalties = jnp.asarray(search.length_penalties(length, alpha))
    limit = jnp.clip(limit, 0, length)
    largest = penalties[limit][:, None]

    def is_searching(state: _State) -> jax.Array:
        reachable = state.lists.live_logp[:, :1] / largest
        is_final = jnp.all(state.lists.finished_scores[:, :top] >= reachable, axis=1)
        return (state.position < limit) & ~is_final  # bool[b]

    def advance(state: _State) -> _State:
        position, lists, cache = state
        last = lists.live[:, :, jnp.maximum(position - 1, 0)]  # all PAD at position 0
        logits, cache = step(last, position, cache)
        logp = search.log_probabilities(logits, vocab_size)
        extended, parents = _extend(lists, logp, position, penalties[position + 1])
        lists = search.choose(is_searching(state), extended, lists)
        return _State(position + 1, lists, search.gather(cache, parents) if beams > 1 else cache)

    start = _State(jnp.int32(0), _start(len(limit), beams, length), cache)
    end = jax.lax.while_loop(lambda state: jnp.any(is_searching(state)), advance, start).lists
    has_finished = end.finished_scores[:, 0] > -jnp.inf
    unfinished = _Lists(end.live, end.live_logp, end.live, end.live_logp / largest)
    end = search.choose(has_finished, end, unfinished)
    exists = end.finished_scores[:, :top, None] > -jnp.inf
    return jnp.where(exists, end.finished[:, :top], PAD), end.finished_scores[:, :top]


def _start(sentences: int, beams: int, length: int) -> _Lists:
    """One live beam without tokens, and nothing finished."""
    empty = jnp.zeros((sentences, beams, length), jnp.int32)
    missing = jnp.full((sentences, beams), -jnp.inf, jnp.float32)
    return _Lists(empty, missing.at[:, 0].set(0.0), empty, missing)


def _extend(
    lists: _Lists, logp: jax.Array, position: jax.Array, penalty: jax.Array
) -> tuple[_Lists, jax.Array]:
    """Both lists with the token at `position`, and the parents int32[b, k] of the live beams.

    logp: float32[b, k, V] of this token; penalty: float32[], of sequences that end with it.
    """
    beams = lists.live.shape[1]
    values, parents, tokens = search.best_continuations(lists.live_logp, logp, 2 * beams)
    sequences = search.gather(lists.live, parents).at[:, :, position].set(tokens)
    ends = tokens == EOS
    # The finished ones first: between equal scores they stay.
    scores = jnp.where(ends, values / penalty, -jnp.inf)
    scores = jnp.concatenate([lists.finished_scores, scores], axis=1)
    finished_scores, chosen = jax.lax.top_k(scores, beams)
    finished = search.gather(jnp.concatenate([lists.finished, sequences], axis=1), chosen)
    live_logp, chosen = jax.lax.top_k(jnp.where(ends, -jnp.inf, values), beams)
    live = search.gather(sequences, chosen)
    parents = jnp.take_along_axis(parents, chosen, axis=1)
    return _Lists(live, live_logp, finished, finished_scores), parents
