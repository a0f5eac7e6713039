"""The space-to-depth stem: 2x2 pixels become channels, and the kernel changes accordingly.

Source: Google's MLPerf v0.7 entry. The stem feeds 12 channels instead of 3 to the matrix unit.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

_COLOURS = 3
PADDING = ((2, 1), (2, 1))  # of the convolution of `rearrange`d images


def rearrange(images: jax.Array) -> jax.Array:
    """Moves 2x2 pixels into channels: [b, H, W, C] to [b, H/2, W/2, 4 * C], dtype kept.

    Channel (2 * (y % 2) + x % 2) * C + c holds pixel (y, x), channel c. ValueError: odd H or W.
    """
    b, h, w, c = images.shape
    if h % 2 or w % 2:
        raise ValueError(f"space_to_depth needs even image height and width, got {h} x {w}")
    x = images.reshape(b, h // 2, 2, w // 2, 2, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, h // 2, w // 2, 4 * c)


def blocked(height: int, width: int, channels: int = 3) -> tuple[int, int, int]:
    """The shape of an image of even sides that is `rearrange`d."""
    return height // 2, width // 2, 4 * channels


def restore(blocks: np.ndarray) -> np.ndarray:
    """Undoes `rearrange`: [..., H/2, W/2, 4 * C] to [..., H, W, C], dtype kept."""
    *front, h, w, c = blocks.shape
    x = blocks.reshape(*front, h, w, 2, 2, c // 4)
    return np.moveaxis(x, -3, -4).reshape(*front, 2 * h, 2 * w, c // 4)


def stem(inner: Callable[..., Any]) -> Callable[..., Any]:
    """`inner`, such as `models.stem`, with a kernel [4, 4, 4 * C, F] in its 7x7 convolution.

    It takes images [b, H, W, 3] or `rearrange`d ones; odd H or W are a ValueError.
    """

    def folded(images: jax.Array, features: int, conv: Any, norm: Any) -> Any:
        def conv_stem(features: int, size: tuple[int, int], stride: int, **others: Any) -> Any:
            if size != (7, 7):
                return conv(features, size, stride, **others)
            others |= {"padding": PADDING, "kernel_init": init_kernel}
            return conv(features, (4, 4), **others)

        images = rearrange(images) if images.shape[-1] == _COLOURS else images
        return inner(images, features, conv_stem, norm)

    return folded


def convert_kernel(kernel: jax.Array) -> jax.Array:
    """Converts the plain stem's kernel to the space-to-depth stem's, dtype kept.

    [7, 7, C, F] to [4, 4, 4 * C, F]. Stride 1 and padding (2, 1) on `rearrange(images)` then give
    the same result as stride 2 and padding (3, 3) on `images`.
    """
    if kernel.ndim != 4 or kernel.shape[:2] != (7, 7):
        raise ValueError(f"convert_kernel needs [7, 7, C, F], got {list(kernel.shape)}")
    c, f = kernel.shape[2:]
    # The window begins 3 pixels before an even one, inside a 2x2 cell: a zero row and column in
    # front make it begin with the cell.
    k = jnp.pad(kernel, ((1, 0), (1, 0), (0, 0), (0, 0))).reshape(4, 2, 4, 2, c, f)
    return k.transpose(0, 2, 1, 3, 4, 5).reshape(4, 4, 4 * c, f)


def init_kernel(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws the plain stem's kernel and converts it: both stems begin as the same function."""
    plain_shape = (7, 7, shape[2] // 4, shape[3])
    return convert_kernel(nn.initializers.lecun_normal()(key, plain_shape, dtype))


def unfold_kernel(kernel: np.ndarray) -> np.ndarray:
    """Converts the space-to-depth stem's kernel to a plain convolution's, dtype kept.

    [4, 4, 4 * C, F] to [8, 8, C, F]: stride 2 and padding (4, 2) on images then give the same
    result. The first row and column are 0, and the rest is the kernel that
    `convert_kernel` got, unless this stem was trained.
    """
    c, f = kernel.shape[2] // 4, kernel.shape[3]
    return kernel.reshape(4, 4, 2, 2, c, f).transpose(0, 2, 1, 3, 4, 5).reshape(8, 8, c, f)
