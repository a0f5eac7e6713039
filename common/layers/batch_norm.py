"""BatchNorm in the form that is fastest on a CPU: one product and one sum for each value.

In flax's form the gradient in the scale needs x - mean, which XLA stores on CPUs: as many bytes as
the convolution's output, written and read twice.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes

from common.layers import convolutions


class BatchNorm(nn.BatchNorm):
    """flax's `nn.BatchNorm` of [..., c], in training on CPUs as x * factor + shift.

    factor = scale / sqrt(var + epsilon), and shift = bias - mean * factor.
    """

    @nn.compact
    def __call__(self, x: jax.Array, use_running_average: bool | None = None, **others: Any) -> Any:
        running = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        is_usual = self.axis == -1 and self.use_scale and self.use_bias and not others
        is_training = not (running or self.is_initializing())
        if not (is_usual and is_training and convolutions.device_kind() == "cpu"):
            return super().__call__(x, use_running_average, **others)
        scale = self.param("scale", self.scale_init, x.shape[-1:], self.param_dtype)
        bias = self.param("bias", self.bias_init, x.shape[-1:], self.param_dtype)
        dtype = dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        wide = x.astype(jnp.promote_types(dtype, jnp.float32))
        axes = tuple(range(x.ndim - 1))
        moments = jnp.stack([jnp.mean(wide, axes), jnp.mean(jnp.square(wide), axes)])
        if self.axis_name:
            moments = jax.lax.pmean(moments, self.axis_name)
        mean, var = moments[0], jnp.maximum(moments[1] - jnp.square(moments[0]), 0)
        for name, value in (("mean", mean), ("var", var)):
            old = self.get_variable("batch_stats", name)
            new = self.momentum * old + (1 - self.momentum) * value
            self.put_variable("batch_stats", name, new)
        factor = jax.lax.rsqrt(var + self.epsilon) * scale
        return (wide * factor + (bias - mean * factor)).astype(dtype)
