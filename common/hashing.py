"""Random numbers as a hash of integers, on the device.

They cost a few operations each, fuse into the operation that uses them, and depend on their words
alone: on any number of devices an example gets the same numbers. A full-size draw of
`jax.random` can take as long as the rest of a step.
"""

from typing import Any

import jax
import jax.numpy as jnp


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
