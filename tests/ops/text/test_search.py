"""Beam search against exhaustive search, and against a plain search written from the rules."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops.text import search

T = 5  # positions
PADDED = 8  # logits of the model; the vocabularies are smaller


def step(tables, ids, position, cache):
    """A model that remembers all it has seen: its next token depends on a hash of the history.

    tables: float32[b, T, 64, PADDED]; cache: the hash int32[b, k] and what is checked below.
    """
    seen = jnp.where(position > 0, (cache["seen"] * 5 + ids * 7 + 1) % 64, cache["seen"])
    history = cache["history"].at[:, :, position].set(ids)
    logits = jax.vmap(lambda table, rows: table[position, rows])(tables, seen)
    return logits, {"seen": seen, "history": history}


def model(tables, row):
    """The same model for one sentence, in NumPy: tokens so far -> logits."""

    def logits(tokens):
        seen = 0
        for token in tokens:
            seen = (seen * 5 + token * 7 + 1) % 64
        return tables[row, len(tokens), seen]

    return logits


@functools.partial(jax.jit, static_argnames=("beams", "alpha", "vocab_size", "top"))
def run(tables, limit, *, beams, alpha=0.6, vocab_size=PADDED, top=1):
    rows = len(tables)
    cache = {
        "seen": jnp.zeros((rows, beams), jnp.int32),
        "history": jnp.zeros((rows, beams, T), jnp.int32),
    }
    options = {"beams": beams, "alpha": alpha, "length": T, "vocab_size": vocab_size, "top": top}
    return search.beam_search(functools.partial(step, tables), cache, limit, **options)


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


def random_tables(rows, seed, ties=False):
    draw = np.random.default_rng(seed)
    scale = draw.uniform(0.3, 4, (rows, 1, 1, 1))
    tables = draw.normal(0, scale, (rows, T, 64, PADDED))
    # Logits of few values: equal probabilities, also of different beams.
    tables = draw.integers(0, 2, tables.shape) if ties else tables
    return tables.astype(np.float32)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_a_wide_beam_equals_exhaustive_search(alpha):
    """Vocabulary of 4: two words, so that 16 beams hold all that can be live."""
    tables, limit = random_tables(40, 1), np.arange(40) % 5 + 1
    result = run(tables, limit, beams=16, alpha=alpha, vocab_size=4, top=16)
    for row in range(40):
        check(result, exhaustive(model(tables, row), 4, alpha, limit[row])[:16], row)


@pytest.mark.parametrize("top", [1, 3])
@pytest.mark.parametrize("vocab_size", [3, 7])
def test_equals_the_plain_search(vocab_size, top):
    """Hundreds of models and limits; the plain search does not stop early."""
    tables, limit = random_tables(300, 2), np.arange(300) % 5 + 1
    result = run(tables, limit, beams=3, vocab_size=vocab_size, top=top)
    lists = [
        plain(model(tables, row), vocab_size, 3, 0.6, int(limit[row])) for row in range(300)
    ]
    for row, expected in enumerate(lists):
        check(result, expected, row)
    assert {tokens[-1] == 1 for rows in lists for _, tokens in rows} == {True, False}


def test_equal_values_go_to_the_lower_index():
    """Logits are 0 or 1; the sums are those of float32 in both searches."""
    tables, limit = random_tables(300, 3, ties=True), np.full(300, T)
    tables = np.where(tables == 1, 0.0, -1e4).astype(np.float32)  # probabilities 1/n or 0
    tables[:, :, :, 4:] = -1e4
    tables[:, :, :, 2:4] = 0.0  # 1/2, 1/3 or 1/4
    result = run(tables, limit, beams=4, alpha=0.0, top=1)
    for row in range(300):
        check(result, plain(model(tables, row), PADDED, 4, 0.0, T), row)


def test_one_beam_is_greedy():
    """The most probable word at each step; EOS is taken when it is the best, and then wins."""
    tables, limit = random_tables(100, 4), np.full(100, T)
    tables[..., 1] += 1
    sequences, _ = run(tables, limit, beams=1)
    finished = 0
    for row in range(100):
        tokens = []
        while len(tokens) < T and tokens[-1:] != [1]:
            tokens.append(int(np.argmax(model(tables, row)(tokens)[1:])) + 1)
        found = [token for token in sequences[row, 0].tolist() if token]
        # t2t's rules keep the best two: EOS as the second best may finish, and win by its score.
        if found != tokens:
            assert found[:-1] == tokens[: len(found) - 1] and found[-1] == 1
        finished += found == tokens
    assert finished > 60
