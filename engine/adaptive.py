"""Optimizers that adapt the rate of each layer or of each weight: LARS, Adam, LAMB."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from engine.optim import Optimizer
from engine.schedules import Rate


def lars(settings: Optimizer, rate: Rate, decayed: Any) -> optax.GradientTransformation:
    """Layer-wise adaptive rates (You et al. 2017, arXiv:1708.03888), as MLPerf's reference does.

    For each decayed parameter with gradient g and weights w, norms in float32:

        r = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon); 1 if |g| or |w| is 0
        m <- momentum * m + rate * r * (g + weight_decay * w)
        w <- w - m

    Biases and the scales of normalisation have r = 1, no decay and the full rate. The rate is
    inside of the momentum, unlike in `sgd`. `optax.lars` differs: it divides by
    |g + weight_decay * w|, which is less than the sum of the norms above.
    """
    decay = settings.weight_decay

    def adapt(gradient: jax.Array, weight: jax.Array, is_decayed: bool) -> jax.Array:
        if not is_decayed:
            return gradient
        g, w = jnp.asarray(gradient, jnp.float32), jnp.asarray(weight, jnp.float32)
        g_norm, w_norm = jnp.linalg.norm(g.ravel()), jnp.linalg.norm(w.ravel())
        positive = (g_norm > 0) & (w_norm > 0)
        # `where` computes both branches, so the divisor must not be 0 either.
        divisor = jnp.where(positive, g_norm + decay * w_norm + settings.lars_epsilon, 1.0)
        ratio = jnp.where(positive, settings.lars_trust_coefficient * w_norm / divisor, 1.0)
        return ratio * (g + decay * w)

    return optax.chain(
        optax.stateless(lambda gradients, params: jax.tree.map(adapt, gradients, params, decayed)),
        optax.scale_by_learning_rate(rate),
        optax.trace(decay=settings.momentum),
    )


def adam(settings: Optimizer, rate: Rate, decayed: Any) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2014, arXiv:1412.6980, algorithm 1), without weight decay.

    With a gradient g at step t, counted from 1:

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        w <- w - rate * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)
    """
    return optax.chain(
        optax.scale_by_adam(settings.adam_beta1, settings.adam_beta2, settings.adam_epsilon),
        optax.scale_by_learning_rate(rate),
    )


def lamb(settings: Optimizer, rate: Rate, decayed: Any) -> optax.GradientTransformation:
    """Layer-wise adaptive Adam (You et al. 2019, arXiv:1904.00962, algorithm 2), as timm's Lamb.

    With m and v of `adam`, for each decayed parameter w, norms in float32:

        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * w
        w <- w - rate * |w| / |u| * u; the ratio is 1 if |w| or |u| is 0

    Biases and the scales of normalisation have no decay and the ratio 1, unlike in `optax.lamb`.
    timm clips the gradient before: its `max_grad_norm` is `gradient_clip_norm`.
    """

    def adapt(update: jax.Array, weight: jax.Array, is_decayed: bool) -> jax.Array:
        if not is_decayed:
            return update
        w = jnp.asarray(weight, jnp.float32)
        u = jnp.asarray(update, jnp.float32) + settings.weight_decay * w
        u_norm, w_norm = jnp.linalg.norm(u.ravel()), jnp.linalg.norm(w.ravel())
        positive = (u_norm > 0) & (w_norm > 0)
        return jnp.where(positive, w_norm / jnp.where(positive, u_norm, 1.0), 1.0) * u

    return optax.chain(
        optax.scale_by_adam(settings.adam_beta1, settings.adam_beta2, settings.adam_epsilon),
        optax.stateless(lambda updates, params: jax.tree.map(adapt, updates, params, decayed)),
        optax.scale_by_learning_rate(rate),
    )
