"""The Transformer's beam search: live and finished beams in two lists, as in tensor2tensor.

Letters in shapes: b sentences, k beams of each, V tokens that the model knows, T positions.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.translation import beam_search
from benchmarks.translation.beam_search import Cache, Rules
from benchmarks.translation.vocabulary import EOS, PAD

# (ids, position, cache) -> (logits, cache)
Step = Callable[[jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]


class _Lists(NamedTuple):
    """Two lists of sequences per sentence; both are sorted, the best first."""

    tokens: jax.Array  # int32[b, k, T] of the live beams, without EOS
    logp: jax.Array  # float32[b, k] of the live beams; -inf for a beam that does not exist
    finished: jax.Array  # int32[b, k, T], up to EOS, then PAD
    finished_scores: jax.Array  # float32[b, k]; -inf where there is none


def search(step: Step, cache: Cache, limit: jax.Array, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Finds the sequences with the largest logp / `rules.length_penalties`[n]; n counts EOS.

    Each step takes the best 2k continuations of a sentence's k live beams. Those that end with EOS
    compete with the k finished ones. The best k of the others stay live. A sentence is done when
    its live beams can no longer reach a score above its `top` best finished ones, or at its limit;
    if nothing has finished by then, its live beams are the result. Between equal values,
    the beam with the lower index wins, then the token with the lower id. PAD is never chosen. One
    beam makes it greedy, except that it goes on until its best EOS is sure to win.

    With `rules.marian`, only an EOS among the best k continuations ends a sequence, and a sentence
    is done when none of its live beams has a score, at its own length, above the k finished ones.

    Args:
      step, cache: as `beam_search.run` takes them.
      limit: int32[b], the most tokens of each sentence, EOS included; 0 for rows of padding.
      rules: for a `top` above 1, the search runs longer.

    Returns:
      Sequences int32[b, top, T] with EOS and then PAD, and their scores float32[b, top], the
      best first. A sequence that does not exist is all PAD, and its score is -inf. Sequences
      without EOS have reached the limit.

    Source: Vaswani et al. 2017, section 6.1; Wu et al. 2016, arXiv:1609.08144, section 7; the rules
    of tensor2tensor's `beam_search` and of MLPerf's reference, whose best sequence is the same.
    """
    penalties, top = rules.length_penalties, rules.top
    limit = jnp.clip(limit, 0, rules.max_length)
    largest = penalties[limit][:, None]

    def is_searching(position: jax.Array, lists: _Lists) -> jax.Array:
        divisors, count = largest, top
        if rules.marian:  # of the tokens so far, which stay as they are where the search has ended
            lengths = jnp.sum(lists.tokens[:, 0] > 0, -1)
            divisors, count = penalties[lengths][:, None], rules.beam_size
        reachable = lists.logp[:, :1] / divisors
        is_final = jnp.all(lists.finished_scores[:, :count] >= reachable, axis=1)
        return (position < limit) & ~is_final  # bool[b]

    def extend(lists: _Lists, logp: jax.Array, position: jax.Array) -> tuple[_Lists, jax.Array]:
        return _extend(lists, logp, position, penalties[position + 1], rules.marian)

    start = _start(len(limit), rules)
    end = beam_search.run(step, cache, start, is_searching, extend, rules)
    has_finished = end.finished_scores[:, 0] > -jnp.inf
    unfinished = _Lists(end.tokens, end.logp, end.tokens, end.logp / largest)
    end = beam_search.choose(has_finished, end, unfinished)
    exists = end.finished_scores[:, :top, None] > -jnp.inf
    return jnp.where(exists, end.finished[:, :top], PAD), end.finished_scores[:, :top]


def _start(sentences: int, rules: Rules) -> _Lists:
    """One live beam without tokens, and nothing finished."""
    empty = jnp.zeros((sentences, rules.beam_size, rules.max_length), jnp.int32)
    missing = jnp.full((sentences, rules.beam_size), -jnp.inf, jnp.float32)
    return _Lists(empty, missing.at[:, 0].set(0.0), empty, missing)


def _extend(
    lists: _Lists, logp: jax.Array, position: jax.Array, penalty: jax.Array, marian: bool
) -> tuple[_Lists, jax.Array]:
    """Adds a token to each live beam; `penalty` float32[] is for sequences that end here.

    Returns the lists, and the indices int32[b, k] of the beams that the live ones continue.
    """
    beams = lists.tokens.shape[1]
    values, parents, tokens = beam_search.best_continuations(lists.logp, logp, 2 * beams)
    sequences = beam_search.gather(lists.tokens, parents).at[:, :, position].set(tokens)
    ends = tokens == EOS
    # The finished ones first: between equal scores they stay.
    counts = ends & (jnp.arange(2 * beams) < beams) if marian else ends
    scores = jnp.where(counts, values / penalty, -jnp.inf)
    scores = jnp.concatenate([lists.finished_scores, scores], axis=1)
    finished_scores, chosen = jax.lax.top_k(scores, beams)
    finished = beam_search.gather(jnp.concatenate([lists.finished, sequences], axis=1), chosen)
    live_logp, chosen = jax.lax.top_k(jnp.where(ends, -jnp.inf, values), beams)
    live = beam_search.gather(sequences, chosen)
    parents = jnp.take_along_axis(parents, chosen, axis=1)
    return _Lists(live, live_logp, finished, finished_scores), parents
