"""SE-ResNet: each block's branch scales its channels by factors that follow from their means.

Source: Hu et al. 2017 (arXiv:1709.01507), with timm's rounding of the width.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import ResNet


def compose(model: ResNet, ratio: float) -> ResNet:
    """`model` with a `squeeze_excite` of this ratio at the end of each branch."""

    def block(*parts: Any, rescale: Any = lambda y: y, **others: Any) -> Any:
        return model.block(*parts, rescale=lambda y: rescale(squeeze_excite(y, ratio)), **others)

    return model.clone(block=block)


def squeeze_excite(x: jax.Array, ratio: float) -> jax.Array:
    """Scales the channels of x [b, h, w, c] by factors that follow from their means, in float32.

    Called in a block, it makes the layers `se_reduce`, of about `ratio` * c units, and `se_expand`.
    """
    channels = x.shape[-1]

    def dense(features: int, name: str) -> nn.Dense:
        exact = jax.lax.Precision.HIGHEST
        return nn.Dense(features, dtype=jnp.float32, precision=exact, name=name)

    means = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
    y = dense(channels, "se_expand")(nn.relu(dense(squeezed(channels, ratio), "se_reduce")(means)))
    return x * nn.sigmoid(y)[:, None, None].astype(x.dtype)


def squeezed(channels: int, ratio: float) -> int:
    """How many units `squeeze_excite` reduces channels to: a multiple of 8, as in timm."""
    return max(8, int(channels * ratio + 4) // 8 * 8)
