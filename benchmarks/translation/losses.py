"""Cross-entropy with label smoothing, in slices: GNMT's loss, and the Transformer's on CPUs.

The logits of a batch are as large as the vocabulary times its tokens. Here they exist for one slice
of the steps at a time, and are computed once: the forward pass also makes the gradients.

Letters in shapes: T target positions, b rows, H width, V words, Vp columns of the classifier.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.translation import reductions
from common.layers.convolutions import device_kind

MASKED_LOGIT = -1e9  # of columns that are no words and of masked keys; finite: no row is nan
_CACHED = 1 << 21  # logits of a slice on CPUs: 8 MB in float32 stay in the caches
_MIN_TOKENS = 256  # of a slice on CPUs: the products of fewer are slow


class _Rule(NamedTuple):
    vocab_size: int
    smoothing: float


def logits(
    features: jax.Array, kernel: jax.Array, bias: jax.Array | None, vocab_size: int
) -> jax.Array:
    """The logits float32[..., Vp] of features [..., H]; float64 stays float64.

    The product is in the dtype of the features. Columns from `vocab_size` on only fill up the
    kernel float32[H, Vp] and the bias float32[Vp]; their logits are -1e9.
    """
    dtype = jnp.promote_types(features.dtype, jnp.float32)
    product = jnp.dot(features, kernel.astype(features.dtype), preferred_element_type=dtype)
    product = product if bias is None else product + bias.astype(dtype)
    return jnp.where(jnp.arange(product.shape[-1]) < vocab_size, product, MASKED_LOGIT)


def smoothed_cross_entropy(
    features: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array,
    *,
    vocab_size: int,
    smoothing: float,
    slices: int,
) -> jax.Array:
    """The weighted sum over all tokens of (1 - smoothing) (-log p_y) + smoothing mean_V(-log p).

    The target has probability 1 - smoothing + smoothing / V, and each other word smoothing / V. A
    perfect model has a loss above 0.

    Args:
      features: [T, b, H] in the compute dtype.
      kernel: float32[H, Vp], Vp >= V.
      bias: float32[Vp] or None.
      targets: int32[T, b] in [0, V).
      weights: float32[T, b], 0 for padding. They are constants: they have no gradient.
      vocab_size: V.
      smoothing: in [0, 1).
      slices: the most slices of the time axis, at least 1. They are equally long; if T is no
        multiple of their length, the last one is padded. On CPUs the axis of all tokens is cut
        instead, into more slices.

    Returns:
      float32[], or float64 if the features are float64.

    Source: the loss of MLPerf's reference, `LabelSmoothing`.
    """
    if device_kind() == "cpu":
        features = features.reshape(-1, features.shape[-1])
        targets, weights = targets.reshape(-1), weights.reshape(-1)
        tokens = max(_CACHED // kernel.shape[1], _MIN_TOKENS)
        slices = max(slices, -(-targets.size // tokens))
    size = -(-len(targets) // slices)  # steps of a slice
    slices = -(-len(targets) // size)

    def cut(x: jax.Array) -> jax.Array:
        padding = [(0, slices * size - len(x))] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(slices, size, *x.shape[1:])

    rule = _Rule(vocab_size, smoothing)
    return _loss(rule, cut(features), (kernel, bias), cut(targets), cut(weights))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(rule: _Rule, features: Any, classifier: Any, targets: Any, weights: Any) -> jax.Array:
    kernel, bias = classifier

    def add(total: jax.Array, part: Any) -> Any:
        features, targets, weights = part
        scores = logits(features, kernel, bias, rule.vocab_size)
        token_losses, _ = _losses(rule, scores, targets)
        return total + jnp.sum(token_losses * weights), None

    start = jnp.zeros((), jnp.promote_types(features.dtype, jnp.float32))
    return jax.lax.scan(add, start, (features, targets, weights))[0]


def _forward(rule: _Rule, features: Any, classifier: Any, targets: Any, weights: Any) -> Any:
    kernel, bias = classifier
    cast_kernel = kernel.astype(features.dtype)
    # In this order of the axes TPUs compile the product as they did the einsum "tbh,tbv->hv".
    tokens = tuple(reversed(range(targets.ndim - 1)))
    acc_dtype = jnp.promote_types(features.dtype, jnp.float32)

    def add(carry: Any, part: Any) -> Any:
        (total, of_kernel, of_bias), (features, targets, weights) = carry, part
        scores = logits(features, kernel, bias, rule.vocab_size)
        token_losses, log_sums = _losses(rule, scores, targets)
        gradients_at = partial(_gradients, rule, targets, weights, log_sums)
        gradients = gradients_at(scores).astype(features.dtype)
        if of_bias is not None:
            # On TPUs the barrier has XLA compute the gradients again, where it would store them.
            again = jax.lax.platform_dependent(
                scores, tpu=jax.lax.optimization_barrier, default=lambda x: x
            )
            of_bias += reductions.sum_first_axes(
                gradients_at(again).astype(features.dtype), acc_dtype
            )
        of_kernel += jnp.tensordot(
            features, gradients, (tokens, tokens), preferred_element_type=acc_dtype
        )
        of_features = jnp.einsum("...v,hv->...h", gradients, cast_kernel)
        return (total + jnp.sum(token_losses * weights), of_kernel, of_bias), of_features

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, acc_dtype), (jnp.float32(0), kernel, bias))
    parts = features, targets, weights
    (total, *of_classifier), of_features = jax.lax.scan(add, start, parts)
    of_classifier = jax.tree.map(lambda x, y: x.astype(y.dtype), tuple(of_classifier), classifier)
    return total, (of_features, of_classifier)


def _backward(rule: _Rule, saved: Any, gradient: jax.Array) -> Any:
    return *jax.tree.map(lambda x: (x * gradient).astype(x.dtype), saved), None, None


_loss.defvjp(_forward, _backward)


def _losses(rule: _Rule, scores: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loss [t, b] of each token, and the logarithm of the sum of its exponentials."""
    log_sums = reductions.log_sum_exp(scores)
    if device_kind() == "cpu":  # without an array of the labels
        of_target = jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
        expected = jnp.dot(scores, _share(rule, scores)) + (1 - rule.smoothing) * of_target
        return log_sums - expected, log_sums
    return log_sums - jnp.sum(_labels(rule, scores, targets) * scores, -1), log_sums


def _gradients(
    rule: _Rule, targets: Any, weights: Any, log_sums: Any, scores: jax.Array
) -> jax.Array:
    """The gradient [t, b, Vp] of the weighted losses by the logits `scores`."""
    gradients = jnp.exp(scores - log_sums[..., None]) - _labels(rule, scores, targets)
    return gradients * weights[..., None]


def _labels(rule: _Rule, scores: jax.Array, targets: jax.Array) -> jax.Array:
    """The probabilities [t, b, Vp] that the loss asks for."""
    is_target = jnp.arange(scores.shape[-1]) == targets[..., None]
    return _share(rule, scores) + jnp.where(is_target, 1 - rule.smoothing, 0.0)


def _share(rule: _Rule, scores: jax.Array) -> jax.Array:
    """The probabilities [Vp] that smoothing gives to each word, 0 for columns that are no word."""
    is_word = jnp.arange(scores.shape[-1]) < rule.vocab_size
    return jnp.where(is_word, rule.smoothing / rule.vocab_size, 0.0).astype(scores.dtype)
