"""Sums over the last axis by the TPU's matrix units, in less time than its reductions take.

A product with ones takes about half the time, by the compiler's estimates for v3 and v5e. XLA turns
a product with a single column of ones back into a reduction, hence eight.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def last(x: jax.Array, dtype: Any) -> jax.Array:
    """The sum over the last axis: [..., n] to `dtype`[...].

    On TPUs a float32 `x` is the sum of two bfloat16 numbers there, with an error of 2^-16.
    """
    by_products = partial(_by_products, dtype=dtype)
    return lax.platform_dependent(
        x, tpu=by_products, default=partial(jnp.sum, axis=-1, dtype=dtype)
    )


def log_sum_exp(scores: jax.Array) -> jax.Array:
    """log(sum(exp(scores))) over the last axis: finite float32[..., n] to float32[...].

    float64 stays float64, for tests.
    """
    largest = jnp.max(scores, -1)
    exponentials = jnp.exp(scores - largest[..., None])
    return largest + jnp.log(last(exponentials, scores.dtype))


def _by_products(x: jax.Array, dtype: Any) -> jax.Array:
    precision = None if x.dtype == jnp.bfloat16 else lax.Precision.HIGH
    ones = jnp.ones((x.shape[-1], 8), x.dtype)
    return jnp.dot(x, ones, precision=precision, preferred_element_type=dtype)[..., 0]
