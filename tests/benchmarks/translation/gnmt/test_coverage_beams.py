"""GNMT's beam search against a plain search written from the rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.translation.beam_search import Rules
from benchmarks.translation.gnmt import coverage_beams
from tests.benchmarks.translation import search_fixture
from tests.benchmarks.translation.search_fixture import PADDED, T

S = 4  # positions of the source


@functools.partial(jax.jit, static_argnames=("beams", "alpha", "strength", "vocab_size", "top"))
def run(model, visible, limit, *, beams, alpha=0.6, strength=0.1, vocab_size=PADDED, top=1):
    """model: logits float[b, T, 64, PADDED] and attention float32[b, T, 64, S]."""
    sequences, scores = coverage_beams.search(
        functools.partial(search_fixture.step, model),
        search_fixture.start(len(limit), beams),
        *(visible, limit, strength, Rules(beams, alpha, T, vocab_size, top)),
    )
    return (sequences, scores) if top > 1 else (sequences[:, 0], scores[:, 0])


def score(logp, n, total, alpha, strength):
    covered = sum(np.log(min(float(a), 1.0)) for a in total if a > 0)
    return float(logp) / ((5 + n) / 6) ** alpha + strength * covered


def plain(model, row, visible, limit, *, beams, alpha=0.6, strength=0.1, vocab_size=PADDED):
    """The rules for one sentence: its list of beams as [(score, tokens)]."""
    beam = [(np.float32(0), [], np.zeros(S))]  # log-probability, tokens, attention
    for _ in range(limit):
        ways = []
        for logp, tokens, total in beam:
            if tokens[-1:] == [1]:
                ways.append((logp, tokens, total))
                continue
            logits, attention = (search_fixture.look_up(table, row, tokens) for table in model)
            more = search_fixture.log_softmax(logits[:vocab_size])
            for token in range(1, vocab_size):
                ways.append((logp + more[token], [*tokens, token], total + attention))
        beam = sorted(ways, key=lambda way: -way[0])[:beams]  # stable: ties by index
    return [(score(p, len(t), a[visible[row]], alpha, strength), t) for p, t, a in beam]


def random_attention(draw, rows):
    """Attention float32[b, T, 64, S], and which positions are visible."""
    attention = draw.random((rows, T, 64, S)) ** 4
    attention *= draw.random(attention.shape) < 0.6  # some positions are never looked at
    attention /= np.maximum(attention.sum(axis=3, keepdims=True), 1e-3)
    visible = np.arange(S) < draw.integers(1, S + 1, (rows, 1))
    return attention.astype(np.float32), visible


def check(result, row, value, tokens):
    assert np.asarray(result[0])[row].tolist() == tokens + [0] * (T - len(tokens))
    np.testing.assert_allclose(result[1][row], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("beams", "vocab_size", "strength"), [(1, 7, 0.1), (2, 3, 0.1), (2, 7, 0.0), (5, 7, 2.0)]
)
def test_equals_a_plain_search(beams, vocab_size, strength):
    """Hundreds of models and limits, rows of padding among them."""
    draw, limit = np.random.default_rng(2), np.arange(240) % 6
    logits = search_fixture.random_logits(draw, 240)
    attention, visible = random_attention(draw, 240)
    model = logits, attention
    options = {"vocab_size": vocab_size, "beams": beams, "strength": strength}
    result = run(model, visible, limit, **options)
    every = run(model, visible, limit, **options, top=beams) if beams > 1 else None
    ends, changed = [], 0
    for row in range(240):
        if not limit[row]:
            check(result, row, 0.0, [])
            continue
        pairs = plain(model, row, visible, int(limit[row]), **options)
        best = max(pairs, key=lambda pair: pair[0])
        check(result, row, *best)
        if every:
            scores = sorted((pair[0] for pair in pairs), reverse=True)
            np.testing.assert_allclose(every[1][row, : len(scores)], scores, rtol=1e-5, atol=1e-5)
            check((every[0][:, 0], every[1][:, 0]), row, *best)
        ends.append(best[1][-1] == 1)
        changed += best[1] != pairs[0][1]
    assert 20 < sum(ends) < 220  # some end with EOS, others at the limit
    assert (changed > 0) == (beams > 1)  # the score is not the order of the list


def test_coverage_decides():
    """Of two equally probable translations the one with the better coverage wins."""
    logits = np.full((1, T, 64, PADDED), -30, np.float32)
    logits[0, 0, :, [3, 4]] = 0  # the first word is 3 or 4, then comes EOS
    logits[0, 1, :, 1] = 0
    attention = np.zeros((1, T, 64, S), np.float32)
    attention[..., 0] = 1.0
    attention[0, 0, :] = [0.25, 0.0, 0.0, 0.0]
    attention[0, 1, search_fixture.following(0, 3)] = [0.25, 0.25, 0.25, 0.25]
    attention[0, 1, search_fixture.following(0, 4)] = [0.75, 0.5, 0.0, 0.0]
    for visible, strength, word, value in [
        ([1, 1, 1, 1], 0.0, 3, 0.0),  # the lower token
        ([1, 1, 1, 1], 1.0, 4, np.log(0.5)),  # 3 has log(0.5) and three times log(0.25)
        ([1, 0, 1, 1], 1.0, 4, 0.0),  # positions without attention do not count
        ([0, 1, 0, 0], 2.0, 4, 2 * np.log(0.5)),  # 3 has log(0.25)
    ]:
        seen, limit = np.array([visible], bool), np.full(1, T)
        result = run((logits, attention), seen, limit, beams=2, strength=strength)
        check(result, 0, np.log(0.5) / (7 / 6) ** 0.6 + value, [word, 1])


def test_equal_values_go_to_the_lower_index():
    model = search_fixture.tied_logits(200), np.zeros((200, T, 64, S), np.float32)
    visible, options = np.ones((200, S), bool), {"beams": 3, "alpha": 0.0, "strength": 0.0}
    result = run(model, visible, np.full(200, T), **options)
    ties = 0
    for row in range(200):
        pairs = plain(model, row, visible, T, **options)
        check(result, row, *pairs[0])
        ties += pairs[0][0] == pairs[1][0]
    assert ties > 40


def test_pad_is_never_chosen_and_half_precision_will_do():
    draw = np.random.default_rng(5)
    narrow, logits = search_fixture.rounded_logits(draw, 50)
    attention, visible = random_attention(draw, 50)
    result = run((narrow, attention), visible, np.full(50, T), beams=3)
    for row in range(50):
        pairs = plain((logits, attention), row, visible, T, beams=3)
        check(result, row, *max(pairs, key=lambda pair: pair[0]))


@pytest.mark.parametrize(
    ("limit", "beams", "steps"),
    [
        ([0, 0], 1, 0),  # rows of padding do not keep the search going
        ([5, 0], 1, 1),
        ([5, 5], 1, 2),
        ([1, 1], 1, 1),
        ([5, 0], 2, 2),  # the second beam ends with its second token
    ],
)
def test_the_search_ends_when_all_sentences_are_done(limit, beams, steps):
    logits = np.full((2, T, 64, PADDED), -30, np.float32)
    logits[:, :, :, 2] = 0
    logits[0, 0, :, 1] = logits[1, 1:, :, 1] = 30  # after 1 token, and after 2
    logits[0, 1:, :, 1] = 30
    model = jnp.asarray(logits), jnp.full((2, T, 64, S), 0.25)

    @functools.partial(jax.jit, static_argnums=0)
    def searched(noting, limit):
        return coverage_beams.search(
            noting(functools.partial(search_fixture.step, model)),
            search_fixture.start(2, beams),
            *(jnp.ones((2, S), bool), limit, 0.1, Rules(beams, 0.6, T, 3)),
        )

    assert search_fixture.steps_of(searched, np.array(limit)) == steps
