"""GNMT's beam search against a plain search written from the rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.translation.gnmt import search

T, S = 5, 4  # positions of the translation and of the source
PADDED = 8  # logits of the model; the vocabularies are smaller


def step(model, ids, position, cache):
    """A model whose next token and attention depend on a hash of all tokens so far.

    model: logits float[b, T, 64, PADDED] and attention float32[b, T, 64, S]; the cache is the hash.
    """
    seen = jnp.where(position > 0, (cache["seen"] * 5 + ids * 7 + 1) % 64, cache["seen"])
    rows = jax.vmap(lambda table, rows: table[position, rows])
    return rows(model[0], seen), rows(model[1], seen), {"seen": seen}


def beam_search(model, visible, limit, *, beams, alpha=0.6, strength=0.1, vocab_size=PADDED):
    return search.beam_search(
        functools.partial(step, model),
        {"seen": jnp.zeros((len(limit), beams), jnp.int32)},
        visible,
        limit,
        beams=beams,
        alpha=alpha,
        coverage=strength,
        length=T,
        vocab_size=vocab_size,
    )


run = jax.jit(beam_search, static_argnames=("beams", "alpha", "strength", "vocab_size"))


def sentence(model, row):
    """The same model for one sentence: tokens so far -> (log-probabilities, attention)."""

    def after(tokens, vocab_size):
        seen = 0
        for token in tokens:
            seen = (seen * 5 + token * 7 + 1) % 64
        logits, attention = (np.asarray(table)[row, len(tokens), seen] for table in model)
        shifted = logits[:vocab_size].astype(np.float32) - logits[:vocab_size].max()
        return shifted - np.log(np.exp(shifted).sum(dtype=np.float32)), attention

    return after


def score(logp, n, total, alpha, strength):
    covered = sum(np.log(min(float(a), 1.0)) for a in total if a > 0)
    return float(logp) / ((5 + n) / 6) ** alpha + strength * covered


def plain(after, visible, limit, *, vocab_size, beams, alpha, strength):
    """The rules for one sentence: its list of beams as [(score, tokens)]."""
    beam = [(np.float32(0), [], np.zeros(S))]  # log-probability, tokens, attention
    for _ in range(limit):
        ways = []
        for logp, tokens, total in beam:
            if tokens[-1:] == [1]:
                ways.append((logp, tokens, total))
                continue
            more, attention = after(tokens, vocab_size)
            for token in range(1, vocab_size):
                ways.append((logp + more[token], [*tokens, token], total + attention))
        beam = sorted(ways, key=lambda way: -way[0])[:beams]  # stable: ties by index
    return [(score(p, len(t), a[visible], alpha, strength), t) for p, t, a in beam]


def random_model(rows, seed):
    """From flat to peaked distributions; in every third sentence EOS is improbable."""
    draw = np.random.default_rng(seed)
    scale = draw.uniform(0.3, 4, (rows, 1, 1, 1))
    logits = draw.normal(0, scale, (rows, T, 64, PADDED)).astype(np.float32)
    logits[::3, :, :, 1] -= 15
    attention = draw.random((rows, T, 64, S)) ** 4
    attention *= draw.random(attention.shape) < 0.6  # some positions are never looked at
    attention /= np.maximum(attention.sum(axis=3, keepdims=True), 1e-3)
    visible = np.arange(S) < draw.integers(1, S + 1, (rows, 1))
    return (logits, attention.astype(np.float32)), visible


def check(result, row, want, tokens):
    assert np.asarray(result[0])[row].tolist() == tokens + [0] * (T - len(tokens))
    np.testing.assert_allclose(result[1][row], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("beams", "vocab_size", "strength"), [(1, 7, 0.1), (2, 3, 0.1), (2, 7, 0.0), (5, 7, 2.0)]
)
def test_equals_a_plain_search(beams, vocab_size, strength):
    """Hundreds of models and limits, rows of padding among them."""
    (model, visible), limit = random_model(240, 2), np.arange(240) % 6
    options = {"vocab_size": vocab_size, "beams": beams, "alpha": 0.6, "strength": strength}
    result = run(model, visible, limit, **options)
    ends, changed = [], 0
    for row in range(240):
        if not limit[row]:
            check(result, row, 0.0, [])
            continue
        pairs = plain(sentence(model, row), visible[row], int(limit[row]), **options)
        best = max(pairs, key=lambda pair: pair[0])
        check(result, row, *best)
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
    attention[0, 1, 3 * 7 + 1] = [0.25, 0.25, 0.25, 0.25]  # behind 3, by the hash of `step`
    attention[0, 1, 4 * 7 + 1] = [0.75, 0.5, 0.0, 0.0]
    limit = np.full(1, T)
    for visible, strength, word, want in [
        ([1, 1, 1, 1], 0.0, 3, 0.0),  # the lower token
        ([1, 1, 1, 1], 1.0, 4, np.log(0.5)),  # 3 has log(0.5) and three times log(0.25)
        ([1, 0, 1, 1], 1.0, 4, 0.0),  # positions without attention do not count
        ([0, 1, 0, 0], 2.0, 4, 2 * np.log(0.5)),  # 3 has log(0.25)
    ]:
        tokens, value = run(
            (logits, attention), np.array([visible], bool), limit, beams=2, strength=strength
        )
        assert tokens[0].tolist() == [word, 1, 0, 0, 0]
        np.testing.assert_allclose(value[0], np.log(0.5) / (7 / 6) ** 0.6 + want, rtol=1e-5)


def test_equal_values_go_to_the_lower_index():
    """Each word is certain or one of m equal ones, so that sums of float32 are exact multiples."""
    draw = np.random.default_rng(3)
    kept = np.argsort(draw.random((200, T, 64, PADDED - 1))) + 1
    choices = draw.choice([2, 3, 4], (200, 1, 1))
    choices = np.where(draw.random((200, T, 64)) < 0.3, 1, choices)
    tables = np.full((200, T, 64, PADDED), -1e4, np.float32)
    first = np.arange(PADDED - 1) < choices[..., None]
    np.put_along_axis(tables, kept, np.where(first, 0, -1e4).astype(np.float32), axis=3)
    model, visible = (tables, np.zeros((200, T, 64, S), np.float32)), np.ones((200, S), bool)
    options = {"vocab_size": PADDED, "beams": 3, "alpha": 0.0, "strength": 0.0}
    result = run(model, visible, np.full(200, T), **options)
    ties = 0
    for row in range(200):
        pairs = plain(sentence(model, row), visible[row], T, **options)
        check(result, row, *pairs[0])
        ties += pairs[0][0] == pairs[1][0]
    assert ties > 40


def test_pad_is_never_chosen_and_half_precision_will_do():
    (model, visible), limit = random_model(50, 5), np.full(50, T)
    logits = jnp.asarray(model[0], jnp.bfloat16).at[..., 0].add(20)
    result = run((logits, model[1]), visible, limit, beams=3)
    rounded = (np.asarray(logits.astype(jnp.float32)), model[1])
    for row in range(50):
        pairs = plain(
            *(sentence(rounded, row), visible[row], T),
            **{"vocab_size": PADDED, "beams": 3, "alpha": 0.6, "strength": 0.1},
        )
        check(result, row, *max(pairs, key=lambda pair: pair[0]))


def test_the_search_ends_when_all_sentences_are_done():
    logits = np.full((2, T, 64, PADDED), -30, np.float32)
    logits[:, :, :, 2] = 0
    logits[0, 0, :, 1] = logits[1, 1:, :, 1] = 30  # after 1 token, and after 2
    logits[0, 1:, :, 1] = 30
    attention = np.full((2, T, 64, S), 0.25, np.float32)
    calls = []

    @functools.partial(jax.jit, static_argnames="beams")
    def searched(limit, beams):
        def counted(ids, position, cache):
            jax.debug.callback(lambda position: calls.append(int(position)), position)
            return step((jnp.asarray(logits), jnp.asarray(attention)), ids, position, cache)

        return search.beam_search(
            counted,
            {"seen": jnp.zeros((2, beams), jnp.int32)},
            jnp.ones((2, S), bool),
            limit,
            beams=beams,
            alpha=0.6,
            coverage=0.1,
            length=T,
            vocab_size=3,
        )

    for limit, beams, steps in [
        ([0, 0], 1, 0),  # rows of padding do not keep the search going
        ([5, 0], 1, 1),
        ([5, 5], 1, 2),
        ([1, 1], 1, 1),
        ([5, 0], 2, 2),  # the second beam ends with its second token
    ]:
        calls.clear()
        jax.block_until_ready(searched(jnp.array(limit), beams))
        jax.effects_barrier()
        assert sorted(calls) == list(range(steps))
