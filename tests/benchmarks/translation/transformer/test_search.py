"""Beam search against exhaustive search, and against a plain search written from the rules."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.translation.transformer import search

T = 5  # positions
PADDED = 8  # logits of the model; the vocabularies are smaller


def step(tables, ids, position, cache):
    """A model whose next token depends on a hash of all tokens so far.

    tables: float32[b, T, 64, PADDED]; the cache is the hash int32[b, k].
    """
    seen = jnp.where(position > 0, (cache["seen"] * 5 + ids * 7 + 1) % 64, cache["seen"])
    logits = jax.vmap(lambda table, rows: table[position, rows])(tables, seen)
    return logits, {"seen": seen}


def model(tables, row):
    """The same model for one sentence, in NumPy: tokens so far -> logits."""

    def logits(tokens):
        seen = 0
        for token in tokens:
            seen = (seen * 5 + token * 7 + 1) % 64
        return tables[row, len(tokens), seen]

    return logits


def beam_search(tables, limit, *, beams, alpha=0.6, vocab_size=PADDED, top=1):
    cache = {"seen": jnp.zeros((len(tables), beams), jnp.int32)}
    options = {"beams": beams, "alpha": alpha, "length": T, "vocab_size": vocab_size, "top": top}
    return search.beam_search(functools.partial(step, tables), cache, limit, **options)


run = jax.jit(beam_search, static_argnames=("beams", "alpha", "vocab_size", "top"))


def log_softmax(logits):
    shifted = (logits - logits.max()).astype(np.float32)
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float32))


def score(logp, n, alpha):
    return np.float32(logp) / np.float32(((5 + n) / 6) ** alpha)


def plain(logits, vocab_size, beams, alpha, limit):
    """The rules for one sentence, to the end of the limit: [(score, tokens)], the best first."""
    live, finished = [(np.float32(0), [])], []
    for n in range(1, limit + 1):
        ways = [
            (logp + p, tokens, token)
            for logp, tokens in live
            for token, p in enumerate(log_softmax(logits(tokens)[:vocab_size]))
            if token != 0
        ]
        ways = sorted(ways, key=lambda way: -way[0])[: 2 * beams]  # stable: ties by index
        finished += [(score(p, n, alpha), [*tokens, 1]) for p, tokens, token in ways if token == 1]
        finished = sorted(finished, key=lambda pair: -pair[0])[:beams]
        live = [(p, [*tokens, token]) for p, tokens, token in ways if token != 1][:beams]
    return finished or [(score(p, limit, alpha), tokens) for p, tokens in live]


def exhaustive(logits, vocab_size, alpha, limit):
    """All sequences that end within the limit: [(score, tokens)], the best first."""
    pairs = []
    for n in range(1, limit + 1):
        for body in itertools.product(range(2, vocab_size), repeat=n - 1):
            tokens = [*body, 1]
            steps = [log_softmax(logits(tokens[:i])[:vocab_size])[t] for i, t in enumerate(tokens)]
            pairs.append((score(sum(steps), n, alpha), tokens))
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


def random_tables(rows, seed):
    """From flat to peaked distributions; in every third sentence EOS is improbable."""
    draw = np.random.default_rng(seed)
    scale = draw.uniform(0.3, 4, (rows, 1, 1, 1))
    tables = draw.normal(0, scale, (rows, T, 64, PADDED)).astype(np.float32)
    tables[::3, :, :, 1] -= 15
    return tables


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_wide_beam_equals_exhaustive_search(alpha):
    """Vocabulary of 4: two words, so that 31 sequences end within 5 tokens."""
    tables, limit = random_tables(30, 1), np.arange(30) % 5 + 1
    result = run(tables, limit, beams=31, alpha=alpha, vocab_size=4, top=31)
    for row in range(30):
        check(result, exhaustive(model(tables, row), 4, alpha, limit[row]), row)


@pytest.mark.parametrize(
    ("beams", "vocab_size", "top", "alpha"),
    [(1, 7, 1, 0.6), (3, 3, 1, 0.6), (3, 7, 1, 0.0), (3, 7, 3, 0.6)],
)
def test_equals_a_plain_search_that_never_stops_early(beams, vocab_size, top, alpha):
    """Hundreds of models and limits, rows of padding among them."""
    tables, limit = random_tables(300, 2), np.arange(300) % 6
    result = run(tables, limit, beams=beams, alpha=alpha, vocab_size=vocab_size, top=top)
    ends = []
    for row in range(300):
        expected = plain(model(tables, row), vocab_size, beams, alpha, int(limit[row]))
        check(result, expected, row)
        ends.append(expected[0][1][-1:] == [1])
    assert 20 < sum(ends) < 280  # some end with EOS, others at the limit


def test_equal_values_go_to_the_lower_index():
    """Each word is certain or one of m equal ones, so that sums of float32 are exact multiples."""
    draw = np.random.default_rng(3)
    kept = np.argsort(draw.random((300, T, 64, PADDED - 1))) + 1
    choices = draw.choice([2, 3, 4], (300, 1, 1))
    choices = np.where(draw.random((300, T, 64)) < 0.3, 1, choices)
    tables = np.full((300, T, 64, PADDED), -1e4, np.float32)
    first = np.arange(PADDED - 1) < choices[..., None]
    np.put_along_axis(tables, kept, np.where(first, 0, -1e4).astype(np.float32), axis=3)
    result = run(tables, np.full(300, T), beams=3, alpha=0.0, top=3)
    ties = 0
    for row in range(300):
        expected = plain(model(tables, row), PADDED, 3, 0.0, T)
        check(result, expected, row)
        ties += len(expected) > 1 and expected[0][0] == expected[1][0]
    assert ties > 50


def test_pad_is_never_chosen_and_half_precision_will_do():
    tables = random_tables(50, 5)
    tables[..., 0] += 20
    tables = np.asarray(jnp.asarray(tables, jnp.bfloat16).astype(jnp.float32))
    sequences, _ = result = run(tables.astype(jnp.bfloat16), np.full(50, T), beams=3)
    for row in range(50):
        check(result, plain(model(tables, row), PADDED, 3, 0.6, T), row)
        tokens = sequences[row, 0].tolist()
        assert 0 not in tokens[: [*tokens, 1].index(1)]


def test_the_search_ends_when_all_sentences_are_done():
    tables = np.zeros((2, T, 64, PADDED), np.float32)
    tables[:, :, :, 2] = 12
    tables[0, 0, :, 1] = tables[1, 2, :, 1] = 24
    calls = []

    @functools.partial(jax.jit, static_argnames="top")
    def run(limit, top):
        def counted(ids, position, cache):
            jax.debug.callback(lambda position: calls.append(int(position)), position)
            return step(jnp.asarray(tables), ids, position, cache)

        cache = {"seen": jnp.zeros((2, 2), jnp.int32)}
        options = {"beams": 2, "alpha": 0.6, "length": T, "vocab_size": PADDED, "top": top}
        return search.beam_search(counted, cache, limit, **options)

    for limit, top, steps in [
        ([0, 0], 1, 0),  # rows of padding do not keep the search going
        ([0, 2], 1, 2),
        ([5, 5], 1, 3),  # the second sentence ends with its third token
        ([5, 0], 1, 1),
        ([5, 5], 2, 5),  # the second best may still change
    ]:
        calls.clear()
        jax.block_until_ready(run(jnp.array(limit), top))
        jax.effects_barrier()
        assert sorted(calls) == list(range(steps))


def test_the_search_ends_when_no_beam_is_live():
    """Of two ids only EOS can be chosen."""
    calls = []

    def counted(ids, position, cache):
        jax.debug.callback(lambda position: calls.append(int(position)), position)
        return jnp.zeros((1, 2, 2)), cache

    options = {"beams": 2, "alpha": 0.6, "length": T, "vocab_size": 2, "top": 2}
    sequences, scores = search.beam_search(counted, {}, jnp.array([T]), **options)
    jax.effects_barrier()
    assert calls == [0]
    assert np.asarray(sequences).tolist() == [[[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]]
    np.testing.assert_allclose(scores, [[-np.log(2), -np.inf]], rtol=1e-6)
