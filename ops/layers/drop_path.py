"""Stochastic depth: a residual block's branch is dropped for some rows of a training batch.

Source: Huang et al. 2016 (arXiv:1603.09382). As in timm, each row is drawn on its own, and what
stays is scaled in training, so that evaluation needs no factor.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ops.hashing import hash32

_SITE = 0x70617468  # apart from other users of the same seeds


def rates(blocks: int, last: float) -> list[float]:
    """The probability for each block: from 0 for the first one in equal steps to `last`."""
    return [last * i / max(blocks - 1, 1) for i in range(blocks)]


def factors(rate: float, seeds: jax.Array | None, block: int) -> jax.Array | None:
    """f32[b]: 0 for a row with probability `rate`, and 1 / (1 - rate) for the others.

    Args:
      rate: in [0, 1).
      seeds: int32[b], one for each row; None, like a rate of 0, drops nothing: None.
      block: the number of the block.
    """
    if seeds is None or not rate:
        return None
    stays = hash32(seeds, _SITE, block) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(stays, jnp.float32(1 / (1 - rate)), 0)


@jax.named_scope("drop_path")
def scale(y: jax.Array, factors: jax.Array | None) -> jax.Array:
    """float[b, h, w, c], each row times its factor f32[b]; None leaves `y` as it is."""
    if factors is None:
        return y
    # In bfloat16 the factor alone would be wrong by 0.2 %.
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32)) * factors[:, None, None, None]
    return wide.astype(y.dtype)
