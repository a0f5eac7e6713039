"""The losses of the ResNet benchmark against loops in float64, and PyTorch where it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.resnet import losses

KINDS = ("softmax", "bce_sum", "bce_mean", "bce_binary")

B, K = 6, 5
_draw = np.random.default_rng(0)
LOGITS: Any = (4 * _draw.normal(size=(B, K))).astype(np.float32)
LABELS: Any = np.array([0, 4, 2, 2, 1, 3], np.int32)
OTHERS: Any = np.array([1, 4, 0, 3, 1, 2], np.int32)  # two rows have the same label twice
SHARE: Any = np.array([0.3, 0.9, 1.0, 0.0, 0.55, 0.19], np.float32)


def target(row, k, smoothing, mixed):
    share = float(SHARE[row]) if mixed else 1.0
    value = share * (LABELS[row] == k) + (1 - share) * (OTHERS[row] == k)
    return (1 - smoothing) * value + smoothing / K


def expected(kind, smoothing, mixed):
    result = np.zeros(B)
    for row in range(B):
        scores = LOGITS[row].astype(float)
        for k in range(K):
            y = target(row, k, smoothing, mixed)
            if kind == "bce_binary":
                y = float(y > 0.2)
            if kind == "softmax":
                result[row] -= y * (scores[k] - np.log(np.exp(scores).sum()))
            else:
                p = 1 / (1 + np.exp(-scores[k]))
                result[row] -= y * np.log(p) + (1 - y) * np.log(1 - p)
    return result / K if kind in ("bce_mean", "bce_binary") else result


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind, smoothing, mixed):
    pair = (OTHERS, SHARE) if mixed else (None, None)
    loss = losses.cross_entropy(LOGITS, LABELS, *pair, smoothing, kind)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected(kind, smoothing, mixed), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["bce_sum", "bce_mean"])
def test_several_labels_are_questions_of_two_answers(kind):
    """Smoothing takes each towards a half, and the other row's labels come in by their share."""
    hot, others = (np.random.default_rng(i).random((B, K)) < 0.5 for i in (1, 2))
    targets = SHARE[:, None] * hot + (1 - SHARE[:, None]) * others
    p = 1 / (1 + np.exp(-LOGITS.astype(float)))
    targets = 0.9 * targets + 0.05
    each = -targets * np.log(p) - (1 - targets) * np.log(1 - p)
    value = losses.cross_entropy(LOGITS, jnp.array(hot), jnp.array(others), SHARE, 0.1, kind)
    expected = each.sum(axis=1) if kind == "bce_sum" else each.mean(axis=1)
    np.testing.assert_allclose(value, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parity
def test_pytorch_has_the_same_values_and_gradients():
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    rows = range(B)
    targets = torch.tensor([[target(i, k, 0.08, True) for k in range(K)] for i in rows])
    for kind, function in (
        ("softmax", functional.cross_entropy),
        ("bce_mean", functional.binary_cross_entropy_with_logits),
    ):
        logits = torch.tensor(LOGITS, requires_grad=True)
        value = function(logits, targets.float())  # the mean over rows, and for BCE over classes
        value.backward()

        def mean(x, kind=kind):
            return jnp.mean(losses.cross_entropy(x, LABELS, OTHERS, SHARE, 0.08, kind))

        ours, gradient = jax.value_and_grad(mean)(LOGITS)
        np.testing.assert_allclose(ours, value.item(), rtol=1e-6)
        np.testing.assert_allclose(gradient, logits.grad.numpy(), rtol=1e-5, atol=1e-7)


def test_a_share_of_exactly_a_fifth_is_not_present():
    """As timm: a label counts above 0.2. A logit of 100 costs 100 without its label."""
    share: Any = np.array([0.2, np.nextafter(np.float32(0.2), np.float32(1))], np.float32)
    logits: Any = np.array([[100.0, 0.0, -100.0]] * 2, np.float32)
    labels, others = jnp.array([[0, 0], [2, 2]])
    loss = losses.cross_entropy(logits, labels, others, share, 0.0, "bce_binary")
    expected = [(100 + np.log(2) + 100) / 3, (np.log(2) + 100) / 3]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_large_logits_stay_finite():
    logits = jnp.array([[200.0, -200.0]])
    for kind in KINDS:
        loss, gradient = jax.jit(
            jax.value_and_grad(
                lambda x, kind=kind: losses.cross_entropy(x, LABELS[:1] + 1, None, None, 0, kind)[0]
            )
        )(logits)
        assert np.isfinite(loss) and np.isfinite(gradient).all()
