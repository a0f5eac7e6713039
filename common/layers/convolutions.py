"""Convolutions in other forms: with a stride, for few images on a device, for CPUs, and in pairs.

With a stride: the gradient of such a convolution in its input is a convolution of a gradient with
zeros between its values. XLA leaves out the zeros, but for TPU v2 and v3 it lays this out for 128
images: with 4 images of 104x168x256 the gradient of a 3x3 convolution takes 10.7 ms on v3 by the
compiler's estimate, with the zeros written out 1.4 ms. On later TPUs the zeros cost more than they
gain. A 1x1 convolution is faster on all of them if the values that its stride leaves out are cut
away before.

On CPUs they are products of matrices: a step of ResNet-50 takes a fifth less with products for the
1x1 kernels, mostly because of their gradients in the kernel. Where the result has few pixels, XLA's
convolution takes up to eleven times as long: 36.6 ms against 3.3 for 64 images of 2x2 and a 3x3
kernel of 256 to 256 channels.

`Pairs` are for arrays with few channels. A TPU's matrix unit multiplies by 128 x 128 numbers (v6e:
256 x 256) at a time. A convolution of 64 to 64 channels fills a quarter of them, or half where XLA
packs two of its taps. Here the channels of two pixels lie side by side, and a window of two such
cells makes two new pixels: 128 to 128 channels, of whose products three quarters are not zero.

    cells of x       (0 1) (2 3) (4 5)
    of conv(x)    (- 0) (1 2) (3 4) (5 -)    each from the four pixels above it

So each convolution shifts the cells by one pixel, and the next one shifts them back.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_FEW_IMAGES = 16  # with 32, XLA's own way is as fast on v3, and needs less memory
_FEW_PIXELS = 2  # the largest side of a result that has few pixels
_WRITES_ZEROS = ("TPU v2", "TPU v3")
_native = partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def device_kind() -> str:
    """The kind of device that the program is traced for, as "cpu"; "" outside of a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device else ""


def conv_general_dilated(
    x: jax.Array,
    kernel: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **others: Any,
) -> jax.Array:
    """`lax.conv_general_dilated` for flax's `nn.Conv` of [b, h, w, c]: the same function."""
    strides, window = tuple(window_strides), kernel.shape[:2]
    on_cpu = device_kind() == "cpu"
    # An exported program does not know how many images it has.
    is_small = isinstance(x.shape[0], int) and x.shape[0] <= _FEW_IMAGES
    if (on_cpu or max(strides) > 1 and is_small) and _is_plain(**others):
        if isinstance(padding, str):
            padding = lax.padtype_to_pads(x.shape[1:3], window, strides, padding)
        sides = tuple((low, high) for low, high in padding)
        if on_cpu:
            return conv_by_products(x, kernel, strides, sides)
        if window == (1, 1) and not any(map(any, sides)):
            x, strides = x[:, :: strides[0], :: strides[1]], (1, 1)
        elif device_kind() in _WRITES_ZEROS:
            return _conv_with_zeros(strides, sides, x, kernel)
    return lax.conv_general_dilated(x, kernel, strides, padding, **others)


def _is_plain(
    lhs_dilation: Any = None,
    rhs_dilation: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    **others: Any,
) -> bool:
    """Whether `_conv_with_zeros` can take these arguments besides strides and padding."""
    dilations = *(lhs_dilation or ()), *(rhs_dilation or ())
    is_known = set(others) <= {"dimension_numbers"}
    return is_known and set(dilations) <= {1} and feature_group_count == 1 and precision is None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conv_with_zeros(strides: Any, padding: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _native(x, kernel, strides, padding)


def _forward_with_zeros(strides: Any, padding: Any, x: jax.Array, kernel: jax.Array) -> Any:
    return _native(x, kernel, strides, padding), (x, kernel)


def _backward_with_zeros(
    strides: Any, padding: Any, saved: Any, gradient: jax.Array
) -> tuple[Any, Any]:
    x, kernel = saved
    (of_kernel,) = jax.vjp(lambda kernel: _native(x, kernel, strides, padding), kernel)[1](gradient)
    around = [(0, 0, 0)]
    for axis, (stride, (low, _)) in enumerate(zip(strides, padding, strict=True)):
        before = kernel.shape[axis] - 1 - low
        spread = stride * (gradient.shape[1 + axis] - 1) + 1
        after = x.shape[1 + axis] + kernel.shape[axis] - 1 - spread - before
        around.append((before, after, stride - 1))
    zero = jnp.zeros((), gradient.dtype)
    with_zeros = lax.pad(gradient, zero, [*around, (0, 0, 0)])
    turned = kernel[::-1, ::-1].swapaxes(2, 3)
    return _native(with_zeros, turned, (1, 1), "VALID"), of_kernel


_conv_with_zeros.defvjp(_forward_with_zeros, _backward_with_zeros)


def conv_by_products(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Sequence[tuple[int, int]]
) -> jax.Array:
    """The convolution of [b, h, w, C] with [kh, kw, C, D], in the form that is fastest on a CPU."""
    sides = list(zip(x.shape[1:3], kernel.shape, strides, padding, strict=False))
    height, width = ((n + sum(pads) - window) // s + 1 for n, window, s, pads in sides)
    is_point = kernel.shape[:2] == (1, 1) and not any(map(any, padding))
    is_tiny = 0 < height <= _FEW_PIXELS and 0 < width <= _FEW_PIXELS
    if not is_point and not is_tiny:
        return _native(x, kernel, strides, padding)
    # The taps of the kernel that meet the image anywhere; in a 3x3 kernel on one pixel, one does.
    rows, columns = (
        [i for i in range(window) if any(0 <= i + s * o - low < n for o in range(count))]
        for (n, window, s, (low, _)), count in zip(sides, (height, width), strict=True)
    )
    taps = list(itertools.product(rows, columns))
    padded = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    ends = strides[0] * (height - 1) + 1, strides[1] * (width - 1) + 1
    seen = [padded[:, i : i + ends[0] : strides[0], j : j + ends[1] : strides[1]] for i, j in taps]
    pixels = jnp.concatenate(seen, -1).reshape(-1, len(taps) * x.shape[-1])
    weights = jnp.concatenate([kernel[i, j] for i, j in taps])
    return (pixels @ weights).reshape(len(x), height, width, -1)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """An array [b, h, w, c] with two neighbouring pixels of a row in each cell."""

    cells: jax.Array  # [b, h, n, 2 * c]; pixels outside of the image are zeros
    width: int  # w
    shifted: bool = False  # the first cell holds a pixel outside of the image, and pixel 0

    @classmethod
    def pack(cls, x: jax.Array) -> Self:
        """Packs the pixels [b, h, w, c]."""
        b, h, w, c = x.shape
        padded = jnp.pad(x, [(0, 0), (0, 0), (0, w % 2), (0, 0)])
        return cls(padded.reshape(b, h, -1, 2 * c), w)

    def unpack(self) -> jax.Array:
        """Returns the pixels [b, h, w, c]."""
        b, h, n, channels = self.cells.shape
        pixels = self.cells.reshape(b, h, 2 * n, channels // 2)
        return pixels[:, :, self.shifted : self.shifted + self.width]

    def __jax_array__(self) -> jax.Array:
        return self.unpack()

    @property
    def inside(self) -> np.ndarray:
        """bool[n, 2 * c]: whether a number of a cell is of a pixel inside of the image."""
        n, channels = self.cells.shape[2:]
        pixels = np.arange(2 * n) - self.shifted
        inside = (pixels >= 0) & (pixels < self.width)
        return inside.repeat(channels // 2).reshape(n, channels)

    def normalize(self, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
        """(x - mean) * factor + bias as cells, in the dtype of the three [c]; 0 outside."""
        mean, factor, bias = (jnp.tile(values, 2) for values in (mean, factor, bias))
        # The masks are in the small arrays: selecting among the cells would take longer.
        factor, bias = (jnp.where(self.inside, values, 0) for values in (factor, bias))
        return (self.cells.astype(mean.dtype) - mean) * factor + bias

    def conv(self, kernel: jax.Array) -> Self:
        """Convolves with [3, 3, c, d], padding 1. Pixels outside of the image are not cleared."""
        c, d = kernel.shape[2:]
        sides = [(0, 0), (0, 1), (0, 0), (0, 0)], [(0, 0), (1, 0), (0, 0), (0, 0)]
        windows = jnp.stack([jnp.pad(kernel, side) for side in sides], 3)  # [3, 4, c, 2, d]
        is_odd = self.width % 2
        windows = windows.reshape(3, 2, 2 * c, 2 * d).astype(self.cells.dtype)
        padding = (1, 1), (0, is_odd) if self.shifted else (1, 1 - is_odd)
        cells = _native(self.cells, windows, (1, 1), padding)
        return dataclasses.replace(self, cells=cells, shifted=not self.shifted)

    def halve(self, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A convolution with [3, 3, c, d], stride 2 and padding 1; and every other pixel.

        Returns ([b, h / 2, w / 2, d], [b, h / 2, w / 2, c]), sides rounded up.
        """
        c, d = kernel.shape[2:]
        side, ends, even = (1, 0), (1, 0), slice(c)
        if self.shifted:
            side, ends, even = (0, 1), (0, self.width % 2), slice(c, None)
        windows = jnp.pad(kernel, [(0, 0), side, (0, 0), (0, 0)]).reshape(3, 2, 2 * c, d)
        y = _native(self.cells, windows.astype(self.cells.dtype), (2, 1), ((1, 1), ends))
        return y, self.cells[:, ::2, : y.shape[2], even]

    def moments(self) -> tuple[jax.Array, jax.Array]:
        """Means over the image's pixels of its values and of their squares, f32[c] or f64[c]."""
        values = self.cells.astype(jnp.promote_types(self.cells.dtype, jnp.float32))
        b, h = self.cells.shape[:2]
        sums = [jnp.sum(x, (0, 1)) for x in (values, jnp.square(values))]  # [n, 2 * c]
        sums = [jnp.sum(jnp.where(self.inside, x, 0), 0).reshape(2, -1).sum(0) for x in sums]
        return sums[0] / (b * h * self.width), sums[1] / (b * h * self.width)
