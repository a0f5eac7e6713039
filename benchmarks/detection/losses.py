"""The parts of the detectors' losses: smooth L1 and cross-entropy."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def smooth_l1(x: jax.Array, beta: float = 1.0) -> jax.Array:
    """x**2 / (2 beta) where |x| < beta, else |x| - beta / 2.

    Source: Girshick 2015 (arXiv:1504.08083), equation 3, where beta is 1.
    """
    size = jnp.abs(x)
    return jnp.where(size < beta, (0.5 / beta) * x * x, size - 0.5 * beta)


def cross_entropy(logits: jax.Array, labels: jax.Array, num_logits: int | None = None) -> jax.Array:
    """-log softmax(logits)[label]: float[..., C] and int32[...] to f32[...], all >= 0.

    Neither the one-hot labels nor, for the backward pass, the probabilities are stored. With
    `num_logits`, further columns do not count; leaving them out before would cost a copy.
    """
    value: Any = _cross_entropy(num_logits, logits, labels)
    return value


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(num_logits: int | None, logits: jax.Array, labels: jax.Array) -> jax.Array:
    return _forward(num_logits, logits, labels)[0]


def _forward(num_logits: int | None, logits: jax.Array, labels: jax.Array) -> Any:
    used = _as_float32(logits[..., :num_logits])
    largest = jnp.max(used, -1)
    total = jnp.log(jnp.sum(jnp.exp(used - largest[..., None]), -1)) + largest
    picked = jnp.sum(jnp.where(_columns(used) == labels[..., None], used, 0), -1)
    return total - picked, (logits, labels, total)


def _backward(num_logits: int | None, saved: Any, gradient: jax.Array) -> Any:
    logits, labels, total = saved
    columns = _columns(logits)
    probabilities = jnp.exp(_as_float32(logits) - total[..., None])
    gradients = gradient[..., None] * (probabilities - (columns == labels[..., None]))
    if num_logits is not None:
        gradients = jnp.where(columns < num_logits, gradients, 0)
    return gradients.astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _as_float32(x: jax.Array) -> jax.Array:
    """`x` in float32; float64 stays float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _columns(logits: jax.Array) -> jax.Array:
    """The number of each column, int32[C]."""
    return jnp.arange(logits.shape[-1])
