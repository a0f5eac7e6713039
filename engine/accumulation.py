"""Cuts a device's share of the batch into micro-batches, for config.gradient_accumulation_steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from engine.terms import factors as factors_of
from engine.terms import vjp
from engine.terms import weights as weights_of


def accumulate(loss: Any, axes: Any, params: Any, model_state: Any, parts: Any) -> Any:
    """Runs one device's micro-batches through the loss, with one backward pass for each.

    Args:
      loss: the benchmark's loss.
      axes: the mesh's axes.
      params: the parameters.
      model_state: the model's state before the first micro-batch.
      parts: (batch, key) with the micro-batches along a new first dimension.

    Returns:
      (the device's part of the mean gradient, terms of the loss, metrics, new model_state).
    """

    def weigh(model_state: Any, part: Any) -> Any:
        terms, _, model_state = loss(params, model_state, *part)
        return model_state, weights_of(terms)

    first = jax.tree.map(lambda x: x[0], parts)
    _, names = jax.eval_shape(weigh, model_state, first)
    if len(names) == 1:  # the gradient of a single term can be divided by its weight afterwards
        factors = {name: jnp.float32(1) for name in names}
    else:
        # The gradient of a term needs the weight in the global batch. This loop computes only the
        # weights: the compiler removes all else from the forward pass.
        _, weights = jax.lax.scan(weigh, model_state, parts)
        factors = factors_of({name: jnp.sum(w) for name, w in weights.items()}, axes)

    def differentiate(model_state: Any, part: Any) -> Any:
        pullback, terms, metrics, model_state = vjp(loss, params, model_state, *part)
        return (pullback(factors), terms, metrics), model_state

    def add(carry: Any, part: Any) -> Any:
        sums, model_state = carry
        more, model_state = differentiate(model_state, part)
        return (jax.tree.map(jnp.add, sums, more), model_state), None

    shapes, _ = jax.eval_shape(differentiate, model_state, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (sums, model_state), _ = jax.lax.scan(add, (zeros, model_state), parts)
    gradients, terms, metrics = sums
    if len(terms) == 1:
        ((_, weight),) = terms.values()
        total = jax.lax.psum(weight, axes)
        gradients = jax.tree.map(lambda g: g / jnp.where(total, total, 1), gradients)
    return gradients, terms, metrics, model_state
