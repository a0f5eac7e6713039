"""Normalises images on the device, as the ResNets of this program are trained."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

# Of the pixels 0..255 of ImageNet's training images: red, green, blue.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def normalize(images: jax.Array, dtype: Any) -> jax.Array:
    """Pixels [..., 3] in 0..255 -> dtype[..., 3] of about zero mean and unit variance."""
    mean, std = (jnp.asarray(each, jnp.float32) for each in (MEAN, STD))
    return ((images.astype(jnp.float32) - mean) / std).astype(dtype)
