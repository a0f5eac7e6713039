"""Stochastic depth: a residual block's branch is dropped for some rows of a training batch.

Source: Huang et al. 2016 (arXiv:1603.09382). As in timm, each row is drawn on its own, and what
stays is scaled in training, so that evaluation needs no factor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from models import ResNet
from ops.hashing import hash32

_SITE = 0x70617468  # apart from other users of the same seeds


def compose(model: ResNet, last: float, seeds: jax.Array) -> ResNet:
    """`model` for the training rows with these seeds, int32[b].

    The last block is dropped with the probability `last`, the first one never.
    """
    names = [
        f"stage{i}_block{j}" for i, n in enumerate(model.stage_sizes, 1) for j in range(1, n + 1)
    ]
    numbers = {name: number for number, name in enumerate(names)}

    def block(*parts: Any, name: str, **others: Any) -> Any:
        number = numbers[name]
        if rate := last * number / max(len(names) - 1, 1):
            others["rescale"] = partial(scale, factors=factors(rate, seeds, number))
        return model.block(*parts, name=name, **others)

    return model.clone(block=block)


def factors(rate: float, seeds: jax.Array, block: int) -> jax.Array:
    """f32[b]: 0 for a row with probability `rate`, and 1 / (1 - rate) for the others.

    Args:
      rate: in [0, 1).
      seeds: int32[b], one for each row.
      block: the number of the block.
    """
    stays = hash32(seeds, _SITE, block) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(stays, jnp.float32(1 / (1 - rate)), 0)


@jax.named_scope("drop_path")
def scale(y: jax.Array, factors: jax.Array) -> jax.Array:
    """float[b, h, w, c], each row times its factor f32[b]."""
    # In bfloat16 the factor alone would be wrong by 0.2 %.
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32)) * factors[:, None, None, None]
    return wide.astype(y.dtype)
