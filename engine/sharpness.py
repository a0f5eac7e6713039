"""Sharpness-aware minimization (Foret et al. 2020, arXiv:2010.01412), for config.sam_radius."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def climb(
    gradients_at: Callable[[Any], Any], params: Any, gradients: Any, norm: jax.Array, radius: float
) -> Any:
    """The gradient at w + radius * g / |g|, which replaces the gradient g at w.

    It has the batch and the randomness of g, and |g| is of the global gradient. All else that the
    step reports and keeps, such as BatchNorm's statistics, is from the pass at w. MosaicML's
    Composer differs: there each device climbs along its own g, and both passes update the
    statistics.

    Args:
      gradients_at: params -> (gradients, ...).
      params: w.
      gradients: g.
      norm: |g|, f32[].
      radius: of the climb.

    Returns:
      (gradient, its norm f32[]).
    """
    scale = radius / jnp.maximum(norm, 1e-12)
    raised = jax.tree.map(lambda w, g: (w + scale * g).astype(w.dtype), params, gradients)
    sharp, *_ = gradients_at(raised)
    return sharp, optax.tree.norm(sharp)
