"""The exponential moving average of the weights, for config.moving_average_decay."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def first(tree: Any) -> Any:
    """The average before the first step: a copy with floats in float32.

    In bfloat16 an average with decay 0.999 hardly moves. The step donates its state, and one buffer
    cannot be donated twice.
    """

    def copied(x: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        return jnp.array(x, jnp.float32 if is_float else x.dtype, copy=True)

    return jax.tree.map(copied, tree)


def update(average: Any, newest: Any, done: jax.Array, decay: float) -> Any:
    """One update of an average, after `done` others: decay * average + (1 - decay) * newest.

    The memory is short at first: the decay is at most (1 + done) / (10 + done), as with
    TensorFlow's ExponentialMovingAverage. Later it reaches back about 1 / (1 - decay) updates.

    Args:
      average: tree of arrays as `first` makes it.
      newest: the same tree of any dtypes. Integers are not averaged: the newest value counts.
      done: i32[].
      decay: in [0, 1].

    Returns:
      The new average.
    """
    now = jnp.minimum(decay, (1.0 + done) / (10.0 + done))

    def averaged(old: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return new
        mean: Any = optax.incremental_update(jnp.float32(new), jnp.float32(old), 1.0 - now)
        return mean

    return jax.tree.map(averaged, average, newest)
