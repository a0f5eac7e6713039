"""Convolutions as products of matrices, for CPUs.

XLA's convolution of a 1x1 kernel takes up to ten times as long there as the product of [pixels,
channels] with the kernel, most of all its gradient in the kernel: 97 ms of a core against 9 for 16
images of 56x56 and 64 to 256 channels. Where the result has few pixels the rest is as slow: 9.4 ms
against 0.4 for 64 images of 2x2 and a 3x3 kernel of 128 to 128 channels. A stem of 32 features is
slow with three channels only: 4.9 ms against 1.3 with a fourth of zeros, for 64 images of 32x32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

_FEW = 2  # the largest side of a result that has few pixels
_COLOURS, _NARROW = 3, range(17, 33)  # channels and features of a stem that XLA is slow with


def conv(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> jax.Array:
    """The convolution of [b, h, w, C] with [kh, kw, C, D], in the form that is fastest on a CPU."""
    sides = list(zip(x.shape[1:3], kernel.shape, strides, padding, strict=False))
    height, width = ((n + sum(pads) - window) // s + 1 for n, window, s, pads in sides)
    is_point = kernel.shape[:2] == (1, 1) and not any(map(any, padding))
    is_tiny = 0 < height <= _FEW and 0 < width <= _FEW
    if not is_point and not is_tiny:
        if x.shape[-1] == _COLOURS and kernel.shape[-1] in _NARROW:
            x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1)))
            kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, 1), (0, 0)))
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers)
    # The places of the kernel that meet the image anywhere; in a 3x3 kernel on one pixel, one does.
    rows, columns = (
        [i for i in range(window) if any(0 <= i + s * o - low < n for o in range(count))]
        for (n, window, s, (low, _)), count in zip(sides, (height, width), strict=True)
    )
    places = list(itertools.product(rows, columns))
    if is_tiny and 1 < x.shape[1] * x.shape[2] < len(places):
        return _from_all_pixels(x, kernel, strides, padding, (height, width))
    padded = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    ends = strides[0] * (height - 1) + 1, strides[1] * (width - 1) + 1
    seen = [
        padded[:, i : i + ends[0] : strides[0], j : j + ends[1] : strides[1]] for i, j in places
    ]
    pixels = jnp.concatenate(seen, -1).reshape(-1, len(places) * x.shape[-1])
    weights = jnp.concatenate([kernel[i, j] for i, j in places])
    return (pixels @ weights).reshape(len(x), height, width, -1)


def _from_all_pixels(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    size: tuple[int, int],
) -> jax.Array:
    """The convolution as one matrix from all pixels of x to all those of the result, its `size`.

    It has zeros where the kernel does not reach, and yet fewer multiplications than windows with
    padding have.
    """
    spans = [s * (count - 1) for s, count in zip(strides, size, strict=True)]
    # Pixel p meets place p + low - s * o of the kernel in the result's pixel o: turned round, every
    # s-th place from the pixel's first one on. Zeros let each pixel have all of its places.
    starts, around = [], []
    for n, window, span, (low, _) in zip(x.shape[1:3], kernel.shape, spans, padding, strict=False):
        first = [window - 1 - p - low for p in range(n)]
        before = max(0, -first[-1])
        starts.append([i + before for i in first])
        around.append((before, max(0, first[0] + span + 1 - window)))
    turned = jnp.pad(kernel[::-1, ::-1], (*around, (0, 0), (0, 0)))
    parts = [
        turned[i : i + spans[0] + 1 : strides[0], j : j + spans[1] + 1 : strides[1]]
        for i, j in itertools.product(*starts)
    ]
    matrix = jnp.stack(parts).transpose(0, 3, 1, 2, 4)  # [pixels, C, height, width, D]
    pixels = x.reshape(len(x), -1)
    return (pixels @ matrix.reshape(pixels.shape[1], -1)).reshape(len(x), *size, -1)
