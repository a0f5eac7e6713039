"""GNMT's beam search: one list of beams, length penalty and coverage penalty.

Letters in shapes: b sentences, k beams of each, V tokens that the model knows, S positions of the
source, T of the translation.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.translation import beam_search
from benchmarks.translation.beam_search import Cache, Rules
from benchmarks.translation.vocabulary import EOS, PAD

# (ids, position, cache) -> (logits, attention float32[b, k, S] to the source, cache)
Step = Callable[[jax.Array, jax.Array, Cache], tuple[jax.Array, jax.Array, Cache]]


class _Beams(NamedTuple):
    """One list of sequences per sentence; the most probable first."""

    tokens: jax.Array  # int32[b, k, T], up to EOS, then PAD
    logp: jax.Array  # float32[b, k]; -inf for a beam that does not exist
    is_finished: jax.Array  # bool[b, k]
    attention: jax.Array  # float32[b, k, S], the sum over the steps of the sequence


def search(
    step: Step, cache: Cache, mask: jax.Array, limit: jax.Array, coverage: float, rules: Rules
) -> tuple[jax.Array, jax.Array]:
    """Finds the translations with the largest scores that a list of k beams leads to.

    Each step keeps the k most probable continuations of a sentence's list. A beam that has ended
    with EOS stays in the list with its probability, until k more probable ones push it out. A
    sentence is done when all its beams have ended, or at its limit. Only then are its beams
    compared by

        logp / ((5 + n) / 6)^alpha + coverage * sum of log(min(attention to j, 1)) over j

    where n counts EOS, and the attention to the source position j is the sum over the n steps;
    positions of padding or without any attention are left out. Between equal values, the
    beam with the lower index wins, then the token with the lower id. PAD is never chosen.

    Args:
      step, cache: as `beam_search.run` takes them.
      mask: bool[b, S], which positions of the source are not padding.
      limit: int32[b], the most tokens of each sentence, EOS included; 0 for rows of padding.
      coverage: the strength of the coverage penalty, 0 or more.

    Returns:
      Sequences int32[b, top, T] with EOS and then PAD, and their scores float32[b, top], the
      best first. Sequences without EOS have reached the limit. A sequence that does not exist is
      all PAD, and its score is -inf. A row of padding is all PAD, and its best score is 0.

    Source: Wu et al. 2016, arXiv:1609.08144, section 7, by the rules of MLPerf's reference. The
    reference adds up the attention of each index of the list, although beams change their index;
    here the sum stays with its beam.
    """
    limit = jnp.clip(limit, 0, rules.max_length)

    def is_searching(position: jax.Array, lists: _Beams) -> jax.Array:
        ends = lists.is_finished | (lists.logp == -jnp.inf)
        return (position < limit) & ~jnp.all(ends, axis=1)  # bool[b]

    start = _start(mask, rules)
    end = beam_search.run(step, cache, start, is_searching, _extend, rules)
    lengths = jnp.sum(end.tokens != PAD, axis=2)
    scores = end.logp / rules.length_penalties[lengths]
    scores += coverage * _log_coverage(end.attention, mask)
    if rules.top == 1:
        best = jnp.argmax(scores, axis=1)[:, None]
    else:
        best = jax.lax.top_k(scores, rules.top)[1]
    return beam_search.gather(end.tokens, best), beam_search.gather(scores, best)


def _start(mask: jax.Array, rules: Rules) -> _Beams:
    """One beam without tokens."""
    sentences, positions = mask.shape
    missing = jnp.full((sentences, rules.beam_size), -jnp.inf, jnp.float32)
    return _Beams(
        jnp.zeros((sentences, rules.beam_size, rules.max_length), jnp.int32),
        missing.at[:, 0].set(0.0),
        jnp.zeros((sentences, rules.beam_size), bool),
        jnp.zeros((sentences, rules.beam_size, positions), jnp.float32),
    )


def _extend(
    lists: _Beams, logp: jax.Array, position: jax.Array, attention: jax.Array
) -> tuple[_Beams, jax.Array]:
    """Adds a token to each beam; `attention` float32[b, k, S] is this token's.

    Returns the beams, and the indices int32[b, k] of the beams that they continue.
    """
    ended = lists.is_finished[:, :, None]
    again = jnp.where(jnp.arange(logp.shape[-1]) == EOS, 0.0, -jnp.inf)  # EOS once more, for free
    values, parents, tokens = beam_search.best_continuations(
        lists.logp, jnp.where(ended, again, logp), lists.logp.shape[1]
    )
    total = lists.attention + jnp.where(ended, 0.0, attention.astype(jnp.float32))
    sequences, was_finished, total = beam_search.gather(
        (lists.tokens, lists.is_finished, total), parents
    )
    sequences = sequences.at[:, :, position].set(jnp.where(was_finished, PAD, tokens))
    return _Beams(sequences, values, was_finished | (tokens == EOS), total), parents


def _log_coverage(attention: jax.Array, mask: jax.Array) -> jax.Array:
    """float32[b, k]: the coverage penalty, the sum over S of log(min(attention, 1))."""
    counts = mask[:, None] & (attention > 0)
    return jnp.sum(jnp.log(jnp.where(counts, jnp.minimum(attention, 1.0), 1.0)), axis=2)
