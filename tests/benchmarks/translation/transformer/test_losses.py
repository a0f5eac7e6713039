"""The smoothed loss against NumPy's float64 with every soft target written out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.translation import losses as sliced
from benchmarks.translation.transformer import losses

WORDS, PADDED, WIDTH = 41, 128, 8


def example(seed=0, scale=1.0) -> Any:
    draw = np.random.default_rng(seed)
    features = draw.normal(0, scale, (3, 5, WIDTH))
    table = draw.normal(0, 1, (PADDED, WIDTH))
    return features, table, draw.integers(0, WORDS, (3, 5)).astype(np.int32)


def reference(features, table, targets, smoothing):
    """(loss, softmax - targets), both float64, over the words alone."""
    scores = features @ table[:WORDS].T
    soft = np.full((*targets.shape, WORDS), smoothing / (WORDS - 1))
    for index in np.ndindex(targets.shape):
        soft[*index, targets[index]] = 1 - smoothing
    log = scores - scores.max(-1, keepdims=True)
    log -= np.log(np.exp(log).sum(-1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.sum(np.where(soft > 0, soft * np.log(soft), 0), -1)
    return -np.sum(soft * log, -1) - entropy, np.exp(log) - soft


@pytest.mark.parametrize("smoothing", [0.1, 0.3, 0.0])
@pytest.mark.parametrize("wide", [False, True])
def test_the_loss_and_its_gradient(smoothing, wide):
    features, table, targets = example()
    wanted, of_scores = reference(features, table, targets, smoothing)
    weights = np.linspace(0, 2, targets.size).reshape(targets.shape)
    with jax.enable_x64(wide):
        dtype = jnp.float64 if wide else jnp.float32

        def total(features, table):
            each = losses.smoothed_cross_entropy(features, table, targets, WORDS, smoothing)
            return jnp.sum(each * weights), each

        arguments = jnp.asarray(features, dtype), jnp.asarray(table, dtype)
        (_, actual), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(*arguments)
    tolerance: Any = {"rtol": 1e-11, "atol": 1e-12} if wide else {"rtol": 2e-5, "atol": 1e-5}
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, wanted, **tolerance)
    of_scores = of_scores * weights[..., None]
    np.testing.assert_allclose(gradients[0], of_scores @ table[:WORDS], **tolerance)
    of_table = np.zeros_like(table)
    of_table[:WORDS] = np.einsum("blv,bld->vd", of_scores, features)
    np.testing.assert_allclose(gradients[1], of_table, **tolerance)


@pytest.mark.parametrize("kind", ["", "cpu"])
def test_the_weighted_sum_is_the_same_in_slices(kind, monkeypatch):
    monkeypatch.setattr(losses, "device_kind", lambda: kind)
    monkeypatch.setattr(sliced, "device_kind", lambda: kind)
    features, table, targets = example()
    wanted, of_scores = reference(features, table, targets, 0.1)
    weights = np.linspace(0, 2, targets.size).reshape(targets.shape)
    with jax.enable_x64(True):
        total = jax.value_and_grad(losses.total, (0, 1))
        value, gradients = total(*map(jnp.asarray, (features, table, targets, weights)), WORDS, 0.1)
    of_scores = of_scores * weights[..., None]
    np.testing.assert_allclose(value, np.sum(weights * wanted), rtol=1e-11)
    np.testing.assert_allclose(gradients[0], of_scores @ table[:WORDS], atol=1e-12)
    of_table = np.einsum("blv,bld->vd", of_scores, features)
    np.testing.assert_allclose(gradients[1][:WORDS], of_table, atol=1e-12)


def test_rows_that_are_no_words_do_not_matter():
    features, table, targets = example()
    features, table = jnp.float32(features), jnp.float32(table)
    other = table.at[WORDS:].set(1e4)
    a, b = (losses.smoothed_cross_entropy(features, t, targets, WORDS) for t in (table, other))
    np.testing.assert_array_equal(a, b)
    scores = losses.logits(features, table, WORDS)
    assert scores.dtype == jnp.float32
    assert np.all(np.asarray(scores)[..., WORDS:] == -1e9)
    wanted = features @ table[:WORDS].T
    np.testing.assert_allclose(scores[..., :WORDS], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance"), [(jnp.float32, 300.0, 1e-4), (jnp.bfloat16, 1.0, 1e-5)]
)
def test_large_logits_stay_finite_and_the_loss_is_in_float32(dtype, scale, tolerance):
    features, table, targets = example(scale=scale)
    rounded, words = (np.asarray(jnp.asarray(x, dtype), float) for x in (features, table))
    wanted, _ = reference(rounded, words, targets, 0.1)
    arrays = jnp.asarray(features, dtype), jnp.float32(table)
    value = losses.smoothed_cross_entropy(*arrays, targets, WORDS)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=1e-5)
