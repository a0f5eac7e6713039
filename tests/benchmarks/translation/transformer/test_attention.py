"""Attention against a softmax written out in float64, and its gradients against autodiff's."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.translation.transformer import attention
from common import hashing

ROWS, QUERIES, KEYS, HEADS, HEAD = 2, 5, 7, 3, 4


def example() -> Any:
    draw = np.random.default_rng(0)
    query = draw.normal(size=(ROWS, QUERIES, HEADS, HEAD))
    key, value = draw.normal(size=(2, ROWS, KEYS, HEADS, HEAD))
    mask = draw.random((ROWS, QUERIES, KEYS)) < 0.6
    mask[0, 2] = False  # this query sees nothing
    mask[1, 1] = [True] + [False] * (KEYS - 1)
    return query, key, value, mask


def turned(x):
    """[b, heads, head, L] of [b, L, heads, head]; and back."""
    return jnp.moveaxis(x, 1, -1) if x.shape[2] == HEADS else jnp.moveaxis(x, -1, 1)


def written_out(query, key, value, mask, mask_of_dropout, rate):
    """One query, head and row after the other."""
    actual = np.zeros(query.shape)
    for b, q, h in np.ndindex(query.shape[:3]):
        scores = [np.dot(query[b, q, h], key[b, k, h]) for k in range(KEYS)]
        scores = [s if mask[b, q, k] else -1e9 for k, s in enumerate(scores)]
        powers = [math.exp(s - max(scores)) for s in scores]
        for k in range(KEYS if mask[b, q].any() else 0):
            share = powers[k] / sum(powers) * mask_of_dropout[b, h, q, k] / (1 - rate)
            actual[b, q, h] += share * value[b, k, h]
    return actual


def plain(query, key, value, mask, mask_of_dropout, rate):
    """The same with jax's softmax, for its gradients."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    probabilities = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e9), -1)
    probabilities *= mask.any(-1)[:, None, :, None]
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities * mask_of_dropout / (1 - rate), value)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("tokens_last", [True, False])
def test_attention_and_its_gradients(rate, tokens_last):
    query, key, value, mask = example()
    seeds, site = np.array([4, -9], np.int32), 12
    shape = ROWS, HEADS, QUERIES, KEYS
    mask_of_dropout = (
        np.asarray(hashing.keep_mask(shape, rate, jnp.asarray(seeds), site))
        if rate
        else np.ones(shape)
    )
    gradient = np.random.default_rng(1).normal(size=query.shape)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in (query, key, value)]

        def ours(*arrays):
            dropped = rate, jnp.asarray(seeds), site
            turn = turned if tokens_last else partial(jnp.swapaxes, axis1=1, axis2=2)
            how: Any = {"mask": jnp.asarray(mask), "dropped": dropped, "tokens_last": tokens_last}
            query, key, value = map(turn, arrays)
            return turn(attention.attend(query, key, value, **how))

        def theirs(*arrays):
            return plain(*arrays, mask=mask, mask_of_dropout=mask_of_dropout, rate=rate)

        @partial(jax.jit, static_argnums=0)
        def pulled(function, *arrays):
            actual, pullback = jax.vjp(function, *arrays)
            return actual, pullback(jnp.asarray(gradient))

        actual, gradients = pulled(ours, *arrays)
        _, wanted_gradients = pulled(theirs, *arrays)
    np.testing.assert_allclose(
        actual, written_out(query, key, value, mask, mask_of_dropout, rate), rtol=1e-10, atol=1e-12
    )
    for mine, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-13)


@pytest.mark.long
def test_large_scores_and_bfloat16_stay_finite():
    query, key, value, mask = example()
    arrays = [jnp.bfloat16(x) for x in (300 * query, key, value)]

    def ours(*arrays):
        dropped = 0.3, None, 5  # nothing, without seeds
        return turned(attention.attend(*map(turned, arrays), mask=mask, dropped=dropped))

    actual, pullback = jax.vjp(ours, *arrays)
    assert actual.dtype == jnp.bfloat16
    rounded: Any = [np.asarray(x, float) for x in arrays]
    scores = np.einsum("bqhd,bkhd->bhqk", rounded[0], rounded[1])
    assert np.abs(scores).max() > 500  # e^500 is no float32
    mask_of_dropout = np.ones((ROWS, HEADS, QUERIES, KEYS))
    wanted = written_out(*rounded, mask=mask, mask_of_dropout=mask_of_dropout, rate=0.0)
    # Scores are rounded to bfloat16, so close ones may change places: most are far apart.
    close = np.isclose(np.asarray(actual, float), wanted, rtol=0.02, atol=0.02)
    assert close.mean() > 0.9
    assert all(np.isfinite(np.asarray(x, float)).all() for x in pullback(actual))


def test_in_bfloat16_equal_values_are_not_changed():
    """Numerator and denominator have the same rounded exponentials."""
    query, key, value, mask = example()
    arrays: Any = [jnp.asarray(turned(x), jnp.bfloat16) for x in (query, key, np.ones_like(value))]
    result = turned(attention.attend(*arrays, mask=jnp.asarray(mask), dropped=(0.0, None, 0)))
    np.testing.assert_array_equal(result[mask.any(-1)], 1)
