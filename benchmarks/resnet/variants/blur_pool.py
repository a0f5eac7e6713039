"""BlurPool: a low-pass filter before each convolution with a stride, against aliasing.

Sources: Zhang 2019 (arXiv:1904.11486); ffcv-imagenet and Composer for the place of the filter
(before the convolution instead of behind it) and for the rule which convolutions get it.

The filter is a few shifts and sums. They are fused with the BatchNorm and the ReLU before them, so
that the blurred values are stored instead of the sharp ones. Two other forms are dearer: one 5x5
convolution with both kernels in it has 25 / 9 of the work of the 3x3 one, 15 % more for a
ResNet-50, and blurs across the edge; a depthwise convolution leaves most of the matrix unit idle.
Before a 1x1 convolution only the values that its stride meets are computed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import ModuleDef, ResNet

MIN_CHANNELS = 16  # a convolution of fewer, which is the stem's, is left as it is
KERNEL = np.outer((1, 2, 1), (1, 2, 1)) / 16  # what `blur` convolves with


@jax.named_scope("blur")
def blur(x: jax.Array, stride: int = 1) -> jax.Array:
    """Convolves each channel with (1 2 1) / 4 in both directions, with zeros around the image.

    float[b, h, w, c] to [b, ceil(h / stride), ceil(w / stride), c], summed in float32 or wider.
    """
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for axis in (1, 2):
        size = y.shape[axis]
        y = jnp.pad(y, [(1, 1) if i == axis else (0, 0) for i in range(4)])
        first, middle, last = (jax.lax.slice_in_dim(y, i, i + size, stride, axis) for i in range(3))
        y = (first + last) / 4 + middle / 2
    return y.astype(x.dtype)


def compose(model: ResNet) -> ResNet:
    """`model` with a blur before the convolutions with a stride."""

    def conv(features: int, size: tuple[int, int], stride: int = 1, **others: Any) -> ModuleDef:
        def apply(x: jax.Array) -> jax.Array:
            rest = stride
            if stride > 1 and x.shape[-1] >= MIN_CHANNELS:
                x, rest = (blur(x, stride), 1) if size == (1, 1) else (blur(x), stride)
            return model.conv(features, size, rest, **others)(x)

        return apply

    return model.clone(conv=conv)
