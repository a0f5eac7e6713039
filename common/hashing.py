"""Random numbers as a hash of integers, on the device, and dropout by them.

They cost a few operations each, fuse into the operation that uses them, and depend on their words
alone: on any number of devices an example gets the same numbers. A full-size draw of
`jax.random` can take as long as the rest of a step.

The dropout mask of a row is a function of the row's seed, the number of the dropout in the network
(`site`) and the element's position in the row, however the rows are cut over devices and
micro-batches. The backward pass computes it again: no mask is stored.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def hash32(*words: Any) -> jax.Array:
    """Mixes integer arrays (broadcast) of at most 32 bits into uint32, a chain of `lowbias32`.

    Source: Chris Wellons, "Prospecting for hash functions", 2018.
    """
    mixed = jnp.uint32(0)
    for word in words:
        x = (mixed ^ jnp.asarray(word).astype(jnp.uint32)) + jnp.uint32(0x9E3779B9)
        x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
        mixed = x ^ (x >> 16)
    return mixed


def uniform(*words: Any) -> jax.Array:
    """float32 in [0, 1), multiples of 2^-24: a function of integer arrays (broadcast)."""
    return (hash32(*words) >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def dropout(x: jax.Array, rate: float, seeds: jax.Array | None, site: int) -> jax.Array:
    """Sets each element to 0 with probability `rate`, and divides the others by 1 - rate.

    Args:
      x: float[b, ..., n], the rows first.
      rate: in [0, 1); one of 2^32 equal steps.
      seeds: int32[b], one for each row. Rows with the same seed get the same mask. None: `x`
        is returned as it is.
      site: another number for each dropout in the network.
    """
    if seeds is None or not rate:
        return x
    # In bfloat16 the factor alone would be wrong by 0.2 %.
    scaled = x.astype(jnp.promote_types(x.dtype, jnp.float32)) * (1 / (1 - rate))
    return jnp.where(keep_mask(x.shape, rate, seeds, site), scaled, 0).astype(x.dtype)


def keep_mask(shape: tuple[int, ...], rate: float, seeds: jax.Array, site: int) -> jax.Array:
    """bool[shape]: the elements [b, ..., n] that stay, for seeds int32[b].

    Each line of n elements has another key, a full hash. In a line, the key is added to
    multiples of an odd number, and half a round of `lowbias32` follows: of 200,000 lines of 1,024,
    elements at 17 distances are correlated by at most 0.001. Less work is visible here: the hash
    limits the speed of the products that it is a part of.
    """
    rows, *middle, width = shape
    lines = jnp.arange(math.prod(middle), dtype=jnp.uint32).reshape(*middle, 1)
    keys = hash32(seeds.reshape(rows, *([1] * len(middle)), 1), site, lines)
    x = keys + np.arange(width, dtype=np.uint32) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x >= jnp.uint32(round(rate * 2**32))
