"""The terms of a loss, {name: (sum f32[], weight f32[])}: their means and their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def sums(terms: Any, metrics: Any) -> dict[str, Any]:
    """What a step reports, {name: (sum f32[], weight f32[])}, from sums over all devices."""
    value = sum(mean(value, weight) for value, weight in terms.values())
    several = terms if len(terms) > 1 else {}
    return {"loss": (value, jnp.float32(1)), **several, **metrics}


def vjp(loss: Any, params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
    """Returns (function from factors of the terms to the gradient, terms, metrics, model_state)."""

    def evaluate(params: Any) -> Any:
        terms, *others = loss(params, model_state, batch, key)
        return {name: value for name, (value, _) in terms.items()}, (terms, *others)

    _, pullback, (terms, metrics, model_state) = jax.vjp(evaluate, params, has_aux=True)
    return lambda factors: pullback(factors)[0], terms, metrics, model_state


def weights(terms: Any) -> dict[str, Any]:
    """The weight of each term."""
    return {name: weight for name, (_, weight) in terms.items()}


def factors(weights: dict[str, Any], axes: Any) -> dict[str, Any]:
    """The factor 1 / weight of each term, with its weight in the global batch."""
    return {name: mean(1.0, weight) for name, weight in jax.lax.psum(weights, axes).items()}


def mean(total: Any, weight: jax.Array) -> jax.Array:
    """Returns total / weight, and 0 where the weight is 0."""
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))
