"""The Transformer's loss: cross-entropy with label smoothing over tied embeddings."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.translation import losses as sliced
from benchmarks.translation import reductions
from common.layers.convolutions import device_kind


def logits(
    features: jax.Array, table: jax.Array, vocab_size: int, bias: jax.Array | None = None
) -> jax.Array:
    """The logits float32[..., V] of features [..., width] for a table [V, width] of embeddings.

    The product is in the dtype of the features; `bias` is float32[V]. Rows of the table from
    `vocab_size` on only fill it up; their logits are -1e9. float64 stays float64, for tests.
    """
    dtype, table = jnp.promote_types(features.dtype, jnp.float32), table.astype(features.dtype)
    product = jnp.einsum("...d,vd->...v", features, table, preferred_element_type=dtype)
    product = product if bias is None else product + bias
    return jnp.where(jnp.arange(len(table)) < vocab_size, product, sliced.MASKED_LOGIT)


def total(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    vocab_size: int,
    smoothing: float,
    bias: jax.Array | None = None,
) -> jax.Array:
    """The sum float32[] of `smoothed_cross_entropy` times the constants `weights` float32[b, L].

    On CPUs it is computed in slices, which takes a third of the time.
    """
    if device_kind() != "cpu":
        losses = smoothed_cross_entropy(features, table, targets, vocab_size, smoothing, bias)
        return jnp.sum(losses * weights)
    share = smoothing * vocab_size / (vocab_size - 1)  # that loss gives the target a share, too
    rule: Any = {"vocab_size": vocab_size, "smoothing": share, "slices": 1}
    loss = sliced.smoothed_cross_entropy(features, table.T, bias, targets, weights, **rule)
    return loss - normalizing_constant(vocab_size, smoothing) * jnp.sum(weights)


def smoothed_cross_entropy(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    vocab_size: int,
    smoothing: float = 0.1,
    bias: jax.Array | None = None,
) -> jax.Array:
    """The loss of each token minus the normalizing constant, so that a perfect model has 0.

    With V = vocab_size, the target has probability 1 - smoothing and each other word
    smoothing / (V - 1). The logits are stored once, for the backward pass.

    Args:
      features: [b, L, width] in the compute dtype.
      table: float32[padded, width], padded >= V.
      targets: int32[b, L] in [0, V).
      vocab_size: V, at least 2.
      smoothing: in [0, 1).
      bias: float32[padded] of the logits, or None.

    Returns:
      float32[b, L]. Padding (target 0) has a loss as well: weigh it with 0.
    """
    return _loss((vocab_size, smoothing), features, table, bias, targets)


def normalizing_constant(vocab_size: int, smoothing: float) -> float:
    """The cross-entropy of a model that predicts the smoothed labels: their entropy."""
    low = smoothing / (vocab_size - 1)
    of_others = smoothing * math.log(low) if smoothing else 0.0
    return -((1 - smoothing) * math.log(1 - smoothing) + of_others)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    static: tuple[int, float], features: jax.Array, table: jax.Array, bias: Any, targets: jax.Array
) -> jax.Array:
    return _forward(static, features, table, bias, targets)[0]


def _forward(static: tuple[int, float], features: Any, table: Any, bias: Any, targets: Any) -> Any:
    vocab_size, smoothing = static
    low = smoothing / (vocab_size - 1)
    scores = logits(features, table, vocab_size, bias)
    columns = jnp.arange(len(table))
    total = reductions.log_sum_exp(scores)
    weights = jnp.where(columns == targets[..., None], 1 - smoothing, low)
    weights = jnp.where(columns < vocab_size, weights, 0)
    expected = jnp.sum(weights * scores, -1)
    loss = total - expected - normalizing_constant(vocab_size, smoothing)
    return loss, (features, table, bias, targets, scores, total)


def _backward(static: tuple[int, float], saved: Any, gradient: jax.Array) -> Any:
    vocab_size, smoothing = static
    features, table, bias, targets, scores, total = saved
    columns = jnp.arange(len(table))
    labels = jnp.where(columns == targets[..., None], 1 - smoothing, smoothing / (vocab_size - 1))
    of_scores = jnp.exp(scores - total[..., None]) - labels
    of_scores = jnp.where(columns < vocab_size, of_scores, 0) * gradient[..., None]
    of_bias = None if bias is None else jnp.sum(of_scores, (0, 1)).astype(bias.dtype)
    of_scores = of_scores.astype(features.dtype)
    acc_dtype = jnp.promote_types(features.dtype, jnp.float32)
    of_features = jnp.einsum("...v,vd->...d", of_scores, table.astype(features.dtype))
    of_table = jnp.einsum("blv,bld->vd", of_scores, features, preferred_element_type=acc_dtype)
    return of_features, of_table.astype(table.dtype), of_bias, None


_loss.defvjp(_forward, _backward)
