"""Scaled dot-product attention with dropout, written for few passes over the scores.

The scores of a head are as large as its row is long, squared: on a TPU their way to memory and back
takes longer than the products. Here softmax divides after the product with the values, so that no
pass over the scores is for the division. Only the exponentials are stored for the backward pass.
The tokens are the last axis of all arrays: heads are narrower than the 128 lanes of the TPU. On
CPUs the heads are the last axis: the same products take three quarters of the time.
"""

import math
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.translation import reductions
from benchmarks.translation.losses import MASKED_LOGIT
from common.hashing import keep_mask

_PARTS = 2  # slices of the rows on CPUs: XLA has one core for a batch of products


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    dropped: tuple[float, jax.Array | None, int],
    tokens_last: bool = True,
) -> jax.Array:
    """dropout(softmax(query key^T)) value, for each head.

    The products are in the dtype of the inputs, to which the exponentials are rounded before they
    are added in float32, or float64 if the inputs are. A query that sees no key gets 0.

    Args:
      query: [b, heads, head, Lq], already scaled.
      key, value: [b, heads, head, Lk].
      mask: bool[b, Lq, Lk], which keys a query sees.
      dropped: the dropout's (rate, seeds int32[b] of the rows or None, site number).
      tokens_last: False if queries, keys, values and the result are [b, heads, L, head].

    Returns:
      [b, heads, head, Lq].
    """
    rate, seeds, site = dropped
    static = tokens_last, (rate, site) if seeds is not None and rate else None
    arrays = query, key, value, mask, seeds if static[1] else None
    if tokens_last:
        return _attend(static, *arrays)
    number = math.gcd(len(query), _PARTS)
    cut = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), arrays)
    parts = (jax.tree.map(operator.itemgetter(i), cut) for i in range(number))
    return jnp.concatenate([_attend(static, *part) for part in parts])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Any, query: Any, key: Any, value: Any, mask: Any, seeds: Any) -> jax.Array:
    return _forward(static, query, key, value, mask, seeds)[0]


def _forward(static: Any, query: Any, key: Any, value: Any, mask: Any, seeds: Any) -> Any:
    tokens_last, dropped = static
    product = partial(_product, tokens_last)
    scores = product("bhdq,bhdk->bhqk", query, key)
    acc_dtype = jnp.promote_types(scores.dtype, jnp.float32)
    scores = jnp.where(mask[:, None], scores.astype(acc_dtype), MASKED_LOGIT)
    # A query that sees no key has exponentials of 0, not of its largest score.
    largest = jnp.maximum(jnp.max(scores, -1, keepdims=True), MASKED_LOGIT / 2)
    exponentials = jnp.exp(scores - largest).astype(query.dtype)
    # [b, heads, Lq], at least 1 otherwise; of the rounded values, as the product below.
    totals = jnp.maximum(reductions.sum_last_axis(exponentials, acc_dtype), 0.5)
    kept = _kept(dropped, exponentials, seeds)
    context = product("bhqk,bhdk->bhdq", kept, value, preferred_element_type=acc_dtype)
    factors = 1 / (totals * (1 - dropped[0])) if dropped else 1 / totals
    factors = jnp.expand_dims(factors, 2 if tokens_last else 3)
    result = (context * factors).astype(query.dtype)
    return result, (query, key, value, seeds, exponentials, factors, result)


def _backward(static: Any, saved: Any, gradient: jax.Array) -> Any:
    """With e the exponentials, m the mask of the dropout and g = gradient / (sum * (1 - rate)):

    d value = (m e)^T g;   d scores = e * (m * (g value^T) - (1 - rate) * (g . result))
    """
    query, key, value, seeds, exponentials, factors, result = saved
    tokens_last, dropped = static
    product = partial(_product, tokens_last)
    acc_dtype = factors.dtype
    rate = dropped[0] if dropped else 0.0
    scaled = (gradient.astype(acc_dtype) * factors).astype(query.dtype)
    dots = scaled.astype(acc_dtype) * result.astype(acc_dtype)
    shares = jnp.sum(dots, 2 if tokens_last else 3) * (1 - rate)
    shares = shares[..., None]  # [b, heads, Lq, 1]
    of_value = product("bhqk,bhdq->bhdk", _kept(dropped, exponentials, seeds), scaled)
    of_scores = product("bhdq,bhdk->bhqk", scaled, value, preferred_element_type=acc_dtype)
    of_scores = exponentials.astype(acc_dtype) * (_kept(dropped, of_scores, seeds) - shares)
    of_scores = of_scores.astype(query.dtype)
    of_query = product("bhqk,bhdk->bhdq", of_scores, key)
    of_key = product("bhqk,bhdq->bhdk", of_scores, query)
    return of_query, of_key, of_value, None, None


_attend.defvjp(_forward, _backward)


def _product(tokens_last: bool, equation: str, *operands: jax.Array, **options: Any) -> jax.Array:
    """`jnp.einsum` with an equation for tokens last; else the last two axes of arrays swap."""
    if not tokens_last:
        equation = equation.replace("dq", "qd").replace("dk", "kd")
    return jnp.einsum(equation, *operands, **options)


def _kept(dropped: Any, x: jax.Array, seeds: Any) -> jax.Array:
    """`x` [b, heads, Lq, Lk] with zeros where the dropout has them."""
    if dropped is None:
        return x
    return jnp.where(keep_mask(x.shape, dropped[0], seeds, dropped[1]), x, 0)
