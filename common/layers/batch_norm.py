"""Cross-replica BatchNorm (SyncBatchNorm), in the form that is fastest on a CPU.

On CPUs it is one product and one sum for each value. In flax's form the gradient in the scale needs
x - mean, which XLA stores: as many bytes as the convolution's output, written and read twice.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes

from common.layers.convolutions import device_kind


class BatchNorm(nn.BatchNorm):
    """flax's `nn.BatchNorm` of [..., c], in training on CPUs as x * factor + shift.

    factor = scale / sqrt(var + epsilon), and shift = bias - mean * factor. The devices of the mesh
    axis `axis_name` share mean and variance; without it each device has its own. The benchmarks'
    axis is `benchmarks.base.BATCH_NORM_AXIS`, as wide as `config.bn_span`.
    """

    @nn.compact
    def __call__(self, x: jax.Array, use_running_average: bool | None = None, **others: Any) -> Any:
        running = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        is_usual = self.axis == -1 and self.use_scale and self.use_bias and not others
        is_training = not (running or self.is_initializing())
        if not (is_usual and is_training and device_kind() == "cpu"):
            return super().__call__(x, use_running_average, **others)
        scale = self.param("scale", self.scale_init, x.shape[-1:], self.param_dtype)
        bias = self.param("bias", self.bias_init, x.shape[-1:], self.param_dtype)
        dtype = dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        values = x.astype(jnp.promote_types(dtype, jnp.float32))
        axes = tuple(range(x.ndim - 1))
        moments = jnp.stack([jnp.mean(values, axes), jnp.mean(jnp.square(values), axes)])
        if self.axis_name:
            moments = jax.lax.pmean(moments, self.axis_name)
        mean, var = moments[0], jnp.maximum(moments[1] - jnp.square(moments[0]), 0)
        update_statistics(self, mean, var)
        factor = jax.lax.rsqrt(var + self.epsilon) * scale
        return (values * factor + (bias - mean * factor)).astype(dtype)


def update_statistics(layer: Any, mean: jax.Array, var: jax.Array) -> None:
    """Moves the running statistics of a BatchNorm towards a batch's mean and variance, f32[c]."""
    for name, value in (("mean", mean), ("var", var)):
        old = layer.get_variable("batch_stats", name)
        layer.put_variable("batch_stats", name, layer.momentum * old + (1 - layer.momentum) * value)
