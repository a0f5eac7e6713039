"""3x3 convolutions of two neighbouring pixels at once, for arrays with few channels.

A TPU's matrix unit multiplies by 128 x 128 numbers (v6e: 256 x 256) at a time. A convolution of 64
to 64 channels fills a quarter of them, or half where XLA packs two of its taps. Here the channels
of two pixels lie side by side, and a window of two such cells makes two new pixels:
128 to 128 channels, of whose products three quarters are not zero.

    cells of x       (0 1) (2 3) (4 5)
    of conv(x)    (- 0) (1 2) (3 4) (5 -)    each from the four pixels above it

So each convolution shifts the cells by one pixel, and the next one shifts them back.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Pairs:
    """An array [b, h, w, c] with two neighbouring pixels of a row in each cell.

    Attributes:
      cells: [b, h, n, 2 * c]. Pixels outside of the image are zeros.
      width: w.
      shifted: the first cell holds a pixel outside of the image, and pixel 0.
    """

    cells: jax.Array
    width: int
    shifted: bool = False

    @classmethod
    def pack(cls, x: jax.Array) -> Pairs:
        """The pairs of [b, h, w, c]."""
        b, h, w, c = x.shape
        padded = jnp.pad(x, [(0, 0), (0, 0), (0, w % 2), (0, 0)])
        return cls(padded.reshape(b, h, -1, 2 * c), w)

    def unpack(self) -> jax.Array:
        """[b, h, w, c]."""
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

    def conv(self, kernel: jax.Array) -> Pairs:
        """Convolves with [3, 3, c, d], padding 1. Pixels outside of the image are not cleared."""
        c, d = kernel.shape[2:]
        sides = [(0, 0), (0, 1), (0, 0), (0, 0)], [(0, 0), (1, 0), (0, 0), (0, 0)]
        windows = jnp.stack([jnp.pad(kernel, side) for side in sides], 3)  # [3, 4, c, 2, d]
        is_odd = self.width % 2
        cells = jax.lax.conv_general_dilated(
            self.cells,
            windows.reshape(3, 2, 2 * c, 2 * d).astype(self.cells.dtype),
            (1, 1),
            ((1, 1), (0, is_odd) if self.shifted else (1, 1 - is_odd)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return Pairs(cells, self.width, not self.shifted)

    def halve(self, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A convolution with [3, 3, c, d], stride 2 and padding 1; and every other pixel.

        Returns:
            ([b, h / 2, w / 2, d], [b, h / 2, w / 2, c]), sides rounded up. The cells must not be
            shifted.
        """
        c, d = kernel.shape[2:]
        windows = jnp.pad(kernel, [(0, 0), (1, 0), (0, 0), (0, 0)]).reshape(3, 2, 2 * c, d)
        y = jax.lax.conv_general_dilated(
            *(self.cells, windows.astype(self.cells.dtype), (2, 1), ((1, 1), (1, 0))),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y, self.cells[:, ::2, :, :c]

    def moments(self) -> tuple[jax.Array, jax.Array]:
        """Means over the image's pixels of its values and of their squares, f32[c] or f64[c]."""
        wide = self.cells.astype(jnp.promote_types(self.cells.dtype, jnp.float32))
        b, h = self.cells.shape[:2]
        sums = [jnp.sum(x, (0, 1)) for x in (wide, jnp.square(wide))]  # [n, 2 * c]
        sums = [jnp.sum(jnp.where(self.inside, x, 0), 0).reshape(2, -1).sum(0) for x in sums]
        return sums[0] / (b * h * self.width), sums[1] / (b * h * self.width)
