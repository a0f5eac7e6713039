"""GNMT's smoothed loss against loops in float64, and its gradients against autodiff's."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from benchmarks.translation import losses

WORDS, PADDED, WIDTH, STEPS, ROWS = 11, 16, 4, 7, 3


def example(scale=1.0) -> Any:
    """Features, kernel and bias; targets and weights."""
    draw = np.random.default_rng(0)
    features = draw.normal(0, scale, (STEPS, ROWS, WIDTH))
    kernel, bias = draw.normal(size=(WIDTH, PADDED)), draw.normal(size=PADDED)
    targets = draw.integers(0, WORDS, (STEPS, ROWS)).astype(np.int32)
    weights = draw.uniform(0, 2, (STEPS, ROWS)) * (draw.random((STEPS, ROWS)) < 0.7)
    return (features, kernel, bias), (targets, weights)


def written_out(arrays, targets, weights, smoothing):
    """Word by word, over the words alone."""
    features, kernel, bias = arrays
    total = 0.0
    for index in np.ndindex(targets.shape):
        scores = [
            np.dot(features[index], kernel[:, v]) + (0 if bias is None else bias[v])
            for v in range(WORDS)
        ]
        largest = max(scores)
        normalizer = largest + math.log(sum(math.exp(s - largest) for s in scores))
        costs = [normalizer - s for s in scores]
        smooth = sum(costs) / WORDS
        each = (1 - smoothing) * costs[targets[index]] + smoothing * smooth
        total += weights[index] * each
    return total


def plain(arrays, targets, weights, smoothing):
    """The formula in jax, for its gradients."""
    features, kernel, bias = arrays
    scores = features @ kernel[:, :WORDS]
    scores = scores if bias is None else scores + bias[:WORDS]
    costs = -jax.nn.log_softmax(scores, -1)
    one = jnp.take_along_axis(costs, targets[..., None], -1)[..., 0]
    return jnp.sum(weights * ((1 - smoothing) * one + smoothing * costs.mean(-1)))


def ours(arrays: Any, targets, weights, smoothing=0.1, slices=1):
    features, kernel, bias = arrays
    how: Any = {"vocab_size": WORDS, "smoothing": smoothing, "slices": slices}
    return losses.smoothed_cross_entropy(features, kernel, bias, targets, weights, **how)


def evaluate(*arguments):
    """The value and its gradients, traced anew: a test chooses the kind of device."""
    return jax.jit(lambda *x: jax.value_and_grad(ours)(*x), static_argnums=(3, 4))(*arguments)


@pytest.mark.parametrize("kind", ["", "cpu"])
@pytest.mark.parametrize(
    ("smoothing", "slices", "has_bias"),
    [(0.1, 1, True), (0.1, 7, False), (0.3, 3, True), (0.0, 100, True)],
)
def test_the_loss_and_its_gradients(smoothing, slices, has_bias, kind, monkeypatch):
    monkeypatch.setattr(losses, "device_kind", lambda: kind)
    monkeypatch.setattr(losses, "_CACHED", 5 * PADDED)  # the tokens of a slice on CPUs, of 21
    monkeypatch.setattr(losses, "_MIN_TOKENS", 1)
    (features, kernel, bias), (targets, weights) = example()
    arrays = features, kernel, bias if has_bias else None
    with jax.enable_x64(True):
        value, gradients = evaluate(arrays, targets, weights, smoothing, slices)
        twice = jax.jit(jax.grad(lambda x: 2 * ours(x, targets, weights, smoothing, slices)))(
            arrays
        )
        primal = ours(arrays, targets, weights, smoothing, slices)
        wanted = jax.grad(plain)(arrays, targets, weights, smoothing)
    assert value.dtype == np.float64 and value.shape == ()
    reference = written_out(arrays, targets, weights, smoothing)
    np.testing.assert_allclose([value, primal], reference, rtol=1e-13)
    for mine, other, double in zip(*map(jax.tree.leaves, (gradients, wanted, twice)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)
        np.testing.assert_allclose(double, 2 * np.asarray(mine), rtol=1e-13)


def test_columns_that_are_no_words_do_not_matter():
    (features, kernel, bias), others = jax.tree.map(np.float32, example())
    others = others[0].astype(np.int32), others[1]
    wild = kernel.copy()
    wild[:, WORDS:] = 1e4
    actual = [evaluate((features, x, bias), *others) for x in (kernel, wild)]
    jax.tree.map(np.testing.assert_array_equal, *actual)
    _, (_, of_kernel, of_bias) = actual[0]
    assert not np.asarray(of_kernel)[:, WORDS:].any() and not np.asarray(of_bias)[WORDS:].any()
    scores = losses.logits(features, jnp.asarray(wild), bias, WORDS)
    assert scores.dtype == np.float32 and (np.asarray(scores)[..., WORDS:] == -1e9).all()
    wanted = features @ kernel[:, :WORDS] + bias[:WORDS]
    np.testing.assert_allclose(scores[..., :WORDS], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["", "cpu"])
def test_bfloat16_has_a_loss_and_a_kernel_gradient_in_float32(kind, monkeypatch):
    monkeypatch.setattr(losses, "device_kind", lambda: kind)
    arrays, (targets, weights) = example(scale=50.0)  # e^100 is no float32
    (features, kernel), bias = map(jnp.bfloat16, arrays[:2]), np.float32(arrays[2])
    value, gradients = evaluate((features, np.float32(kernel), bias), targets, np.float32(weights))
    rounded = np.asarray(features, float), np.asarray(kernel, float), np.float64(bias)
    assert [x.dtype for x in gradients] == [jnp.bfloat16, np.float32, np.float32]
    np.testing.assert_allclose(value, written_out(rounded, targets, weights, 0.1), rtol=1e-5)
    with jax.enable_x64(True):
        wanted = jax.grad(plain)(rounded, targets, weights, 0.1)
    for mine, other in zip(gradients, wanted, strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(np.asarray(mine, float), other, rtol=0, atol=0.01 * scale)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("slices", [7, 4])
def test_logits_are_computed_once_and_never_exist_whole(slices):
    arrays, others = example()

    def of(function):
        return list(
            equations(
                jax.make_jaxpr(function, static_argnums=(3, 4))(arrays, *others, 0.1, slices).jaxpr
            )
        )

    value, gradient = of(ours), of(jax.value_and_grad(ours))
    for actual, products in ((value, 1), (gradient, 3)):
        found = [x.outvars[0].aval.shape for x in actual if x.primitive.name == "dot_general"]
        assert sum(8 not in shape for shape in found) == products  # eight rows of ones make a sum
        shapes = {y.aval.shape for x in actual for y in x.outvars if y.aval.ndim == 3}
        largest = max((shape for shape in shapes if shape[-1] == PADDED), key=math.prod)
        assert largest == (-(-STEPS // slices), ROWS, PADDED)
