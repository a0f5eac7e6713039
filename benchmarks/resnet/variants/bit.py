"""BiT: group normalization, and convolutions whose weights are standardized.

Sources: Wu and He 2018 (arXiv:1803.08494) for the normalization; Qiao et al. 2019
(arXiv:1903.10520) for the weights; Kolesnikov et al. 2019 (arXiv:1912.11370, "BiT") for both
together, with 32 groups. No image depends on the others of its batch, and nothing is kept for
evaluation.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.resnet.architecture import GROUPS
from models import EPSILON, ResNet

_EPSILON = 1e-10  # added to the variance of weights, as in BiT


def standardized(kernel: Any) -> Any:
    """The kernel [h, w, c, F] with the mean 0 and the variance 1 for each of the F outputs.

    A NumPy array stays one.
    """
    centred = kernel - kernel.mean((0, 1, 2))
    return centred / (centred.var((0, 1, 2)) + _EPSILON) ** 0.5


class StandardizedConv(nn.Module):
    """`nn.Conv` without a bias, of a `standardized` kernel: [b, h, w, c] to [b, h', w', features].

    The variable `kernel` is the raw one, float32[*kernel_size, c, features].
    """

    features: int
    kernel_size: tuple[int, int]
    strides: int = 1
    padding: int = 0  # rows and columns of zeros on each side
    dtype: Any = jnp.float32  # of the product; the weights are standardized in float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (*self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
        edge = (self.padding, self.padding)
        return jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            standardized(kernel).astype(self.dtype),
            (self.strides,) * 2,
            (edge, edge),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


def group_norm(
    *, name: str, use_running_average: bool, dtype: Any, scale_init: Any = nn.initializers.ones
) -> nn.GroupNorm:
    """A GroupNorm where `models` asks for the BatchNorm `name`: its own name has "gn" for "bn".

    The statistics are float32, the outputs `dtype`.
    """
    del use_running_average  # there are none
    name = name.replace("bn", "gn")
    return nn.GroupNorm(GROUPS, epsilon=EPSILON, dtype=dtype, scale_init=scale_init, name=name)


def compose(model: ResNet) -> ResNet:
    """`model` with these layers."""
    return model.clone(conv=StandardizedConv, norm=group_norm)
