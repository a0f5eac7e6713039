"""The Transformer's loss: cross-entropy with smoothed labels over a shared table of words."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.translation import losses as sliced
from common.layers import device_kind, sums


def logits(features: jax.Array, table: jax.Array, vocab_size: int) -> jax.Array:
    """The logits float32[..., V] of features [..., width] for a table [V, width].

    The product is in the dtype of the features. Rows of the table from `vocab_size` on only fill
    it up; their logits are -1e9. float64 stays float64, for tests.
    """
    wide = jnp.promote_types(features.dtype, jnp.float32)
    product = jnp.einsum(
        "...d,vd->...v", features, table.astype(features.dtype), preferred_element_type=wide
    )
    return jnp.where(jnp.arange(len(table)) < vocab_size, product, sliced.BARRED)


def total(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    vocab_size: int,
    smoothing: float,
) -> jax.Array:
    """The sum float32[] of `smoothed_cross_entropy` times the constants `weights` float32[b, L].

    On CPUs it is computed in slices, which takes a third of the time.
    """
    if device_kind() != "cpu":
        each = smoothed_cross_entropy(features, table, targets, vocab_size, smoothing)
        return jnp.sum(each * weights)
    share = smoothing * vocab_size / (vocab_size - 1)  # that loss gives the target a share, too
    rule: Any = {"vocab_size": vocab_size, "smoothing": share, "slices": 1}
    loss = sliced.smoothed_cross_entropy(features, table.T, None, targets, weights, **rule)
    return loss - perfect(vocab_size, smoothing) * jnp.sum(weights)


def smoothed_cross_entropy(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    vocab_size: int,
    smoothing: float = 0.1,
) -> jax.Array:
    """The loss of each token minus the loss of a perfect model, which thus has 0.

    With V = vocab_size, the target has probability 1 - smoothing and each other word
    smoothing / (V - 1). The logits are stored once, for the backward pass.

    Args:
      features: [b, L, width] in the compute dtype.
      table: float32[padded, width], padded >= V.
      targets: int32[b, L] in [0, V).
      vocab_size: V, at least 2.
      smoothing: in [0, 1).

    Returns:
      float32[b, L]. Padding (target 0) has a loss as well: weigh it with 0.
    """
    return _loss((vocab_size, smoothing), features, table, targets)


def perfect(vocab_size: int, smoothing: float) -> float:
    """The cross-entropy of a model that predicts the smoothed labels: their entropy."""
    low = smoothing / (vocab_size - 1)
    rest = smoothing * math.log(low) if smoothing else 0.0
    return -((1 - smoothing) * math.log(1 - smoothing) + rest)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    how: tuple[int, float], features: jax.Array, table: jax.Array, targets: jax.Array
) -> jax.Array:
    return _forward(how, features, table, targets)[0]


def _forward(how: tuple[int, float], features: Any, table: Any, targets: Any) -> Any:
    vocab_size, smoothing = how
    low = smoothing / (vocab_size - 1)
    scores = logits(features, table, vocab_size)
    columns = jnp.arange(len(table))
    total = sums.log_sum_exp(scores)
    weights = jnp.where(columns == targets[..., None], 1 - smoothing, low)
    weights = jnp.where(columns < vocab_size, weights, 0)
    expected = jnp.sum(weights * scores, -1)
    loss = total - expected - perfect(vocab_size, smoothing)
    return loss, (features, table, targets, scores, total)


def _backward(how: tuple[int, float], saved: Any, gradient: jax.Array) -> Any:
    vocab_size, smoothing = how
    features, table, targets, scores, total = saved
    columns = jnp.arange(len(table))
    labels = jnp.where(columns == targets[..., None], 1 - smoothing, smoothing / (vocab_size - 1))
    of_scores = jnp.exp(scores - total[..., None]) - labels
    of_scores = jnp.where(columns < vocab_size, of_scores, 0) * gradient[..., None]
    of_scores = of_scores.astype(features.dtype)
    wide = jnp.promote_types(features.dtype, jnp.float32)
    of_features = jnp.einsum("...v,vd->...d", of_scores, table.astype(features.dtype))
    of_table = jnp.einsum("blv,bld->vd", of_scores, features, preferred_element_type=wide)
    return of_features, of_table.astype(table.dtype), None


_loss.defvjp(_forward, _backward)
