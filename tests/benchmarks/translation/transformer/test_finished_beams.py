"""Beam search against exhaustive search, and against a plain search written from the rules."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.translation.beam_search import Rules
from benchmarks.translation.transformer import finished_beams
from tests.benchmarks.translation import search_fixture
from tests.benchmarks.translation.search_fixture import PADDED, T, log_softmax, look_up


@functools.partial(jax.jit, static_argnames=("beams", "alpha", "vocab_size", "top", "marian"))
def run(logits, limit, *, beams, alpha=0.6, vocab_size=PADDED, top=1, marian=False):
    step = functools.partial(search_fixture.step, (logits,))
    rules = Rules(beams, alpha, T, vocab_size, top, marian)
    return finished_beams.search(step, search_fixture.start(len(limit), beams), limit, rules)


def score(logp, n, alpha):
    return np.float32(logp) / np.float32(((5 + n) / 6) ** alpha)


def plain(logits, row, limit, beams, alpha=0.6, vocab_size=PADDED):
    """The rules for one sentence, to the end of the limit: [(score, tokens)], the best first."""
    live, finished = [(np.float32(0), [])], []
    for n in range(1, limit + 1):
        ways = [
            (logp + p, tokens, token)
            for logp, tokens in live
            for token, p in enumerate(log_softmax(look_up(logits, row, tokens)[:vocab_size]))
            if token != 0
        ]
        ways = sorted(ways, key=lambda way: -way[0])[: 2 * beams]  # stable: ties by index
        finished += [(score(p, n, alpha), [*tokens, 1]) for p, tokens, token in ways if token == 1]
        finished = sorted(finished, key=lambda pair: -pair[0])[:beams]
        live = [(p, [*tokens, token]) for p, tokens, token in ways if token != 1][:beams]
    return finished or [(score(p, limit, alpha), tokens) for p, tokens in live]


def plain_marian(logits, row, limit, beams, alpha, vocab_size):
    """The same by the rules of transformers: ends among the best k only, and an earlier stop."""
    live, finished = [(np.float32(0), [])], []
    for n in range(1, limit + 1):
        best = live[0][0] / np.float32(max(n - 1, 1) ** alpha)
        if len(finished) == beams and finished[-1][0] >= best:
            break
        ways = [
            (logp + p, [*tokens, token])
            for logp, tokens in live
            for token, p in enumerate(log_softmax(look_up(logits, row, tokens)[:vocab_size]))
            if token != 0
        ]
        ways = sorted(ways, key=lambda way: -way[0])[: 2 * beams]
        ends = [way for way in ways[:beams] if way[1][-1] == 1]
        finished += [(logp / np.float32(n**alpha), tokens) for logp, tokens in ends]
        finished = sorted(finished, key=lambda pair: -pair[0])[:beams]
        live = [way for way in ways if way[1][-1] != 1][:beams]
    return finished or [
        (logp / np.float32(max(limit, 1) ** alpha), tokens) for logp, tokens in live
    ]


def exhaustive(logits, row, limit, alpha, vocab_size):
    """All sequences that end within the limit: [(score, tokens)], the best first."""
    pairs = []
    for n in range(1, limit + 1):
        for body in itertools.product(range(2, vocab_size), repeat=n - 1):
            tokens = [*body, 1]
            rows = [look_up(logits, row, tokens[:i])[:vocab_size] for i in range(n)]
            logp = sum(log_softmax(row)[t] for row, t in zip(rows, tokens, strict=True))
            pairs.append((score(logp, n, alpha), tokens))
    return sorted(pairs, key=lambda pair: -pair[0])


def check(result, expected, row):
    """Compares a sentence's list with [(score, tokens)]; what does not exist is PAD and -inf."""
    sequences, scores = (np.asarray(array)[row] for array in result)
    expected = expected[: len(scores)]
    for sequence, value, (want, tokens) in zip(sequences, scores, expected, strict=False):
        assert sequence.tolist() == tokens + [0] * (T - len(tokens))
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)
    assert (scores[len(expected) :] == -np.inf).all()
    assert (sequences[len(expected) :] == 0).all()


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_wide_beam_equals_exhaustive_search(alpha):
    """Vocabulary of 4: two words, so that 31 sequences end within 5 tokens."""
    logits = search_fixture.random_logits(np.random.default_rng(1), 30)
    limit = np.arange(30) % 5 + 1
    result = run(logits, limit, beams=31, alpha=alpha, vocab_size=4, top=31)
    for row in range(30):
        check(result, exhaustive(logits, row, limit[row], alpha, 4), row)


@pytest.mark.parametrize(
    ("beams", "vocab_size", "top", "alpha"),
    [(1, 7, 1, 0.6), (3, 3, 1, 0.6), (3, 7, 1, 0.0), (3, 7, 3, 0.6)],
)
def test_equals_a_plain_search_that_never_stops_early(beams, vocab_size, top, alpha):
    """Hundreds of models and limits, rows of padding among them."""
    logits = search_fixture.random_logits(np.random.default_rng(2), 300)
    limit = np.arange(300) % 6
    result = run(logits, limit, beams=beams, alpha=alpha, vocab_size=vocab_size, top=top)
    ends = []
    for row in range(300):
        expected = plain(logits, row, int(limit[row]), beams, alpha, vocab_size)
        check(result, expected, row)
        ends.append(expected[0][1][-1:] == [1])
    assert 20 < sum(ends) < 280  # some end with EOS, others at the limit


@pytest.mark.parametrize(("beams", "top", "alpha"), [(1, 1, 1.0), (3, 1, 1.0), (3, 3, 0.0)])
def test_equals_a_plain_search_by_the_rules_for_marian(beams, top, alpha):
    logits = search_fixture.random_logits(np.random.default_rng(7), 300)
    limit = np.arange(300) % 6
    result = run(logits, limit, beams=beams, alpha=alpha, vocab_size=7, top=top, marian=True)
    others = 0
    for row in range(300):
        expected = plain_marian(logits, row, int(limit[row]), beams, alpha, 7)
        check(result, expected, row)
        others += expected[0][1] != plain(logits, row, int(limit[row]), beams, alpha, 7)[0][1]
    assert beams == 1 or alpha == 0 or others > 5  # the rules matter


def test_equal_values_go_to_the_lower_index():
    logits = search_fixture.tied_logits(300)
    result = run(logits, np.full(300, T), beams=3, alpha=0.0, top=3)
    ties = 0
    for row in range(300):
        expected = plain(logits, row, T, 3, 0.0)
        check(result, expected, row)
        ties += len(expected) > 1 and expected[0][0] == expected[1][0]
    assert ties > 50


def test_pad_is_never_chosen_and_half_precision_will_do():
    narrow, logits = search_fixture.rounded_logits(np.random.default_rng(5), 50)
    result = run(narrow, np.full(50, T), beams=3)
    for row in range(50):
        check(result, plain(logits, row, T, 3), row)


@pytest.mark.parametrize(
    ("limit", "top", "steps"),
    [
        ([0, 0], 1, 0),  # rows of padding do not keep the search going
        ([0, 2], 1, 2),
        ([5, 5], 1, 3),  # the second sentence ends with its third token
        ([5, 0], 1, 1),
        ([5, 5], 2, 5),  # the second best may still change
    ],
)
def test_the_search_ends_when_all_sentences_are_done(limit, top, steps):
    logits = np.zeros((2, T, 64, PADDED), np.float32)
    logits[:, :, :, 2] = 12
    logits[0, 0, :, 1] = logits[1, 2, :, 1] = 24

    @functools.partial(jax.jit, static_argnums=0)
    def searched(noting, limit):
        step = noting(functools.partial(search_fixture.step, (jnp.asarray(logits),)))
        start, rules = search_fixture.start(2, 2), Rules(2, 0.6, T, PADDED, top)
        return finished_beams.search(step, start, limit, rules)

    assert search_fixture.steps_of(searched, np.array(limit)) == steps


def test_the_search_ends_when_no_beam_is_live():
    """Of two ids only EOS can be chosen."""

    def searched(noting):
        step = noting(lambda ids, position, cache: (jnp.zeros((1, 2, 2)), cache))
        sequences, scores = finished_beams.search(step, {}, jnp.array([T]), Rules(2, 0.6, T, 2, 2))
        assert np.asarray(sequences).tolist() == [[[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]]
        np.testing.assert_allclose(scores, [[-np.log(2), -np.inf]], rtol=1e-6)
        return scores

    assert search_fixture.steps_of(searched) == 1
