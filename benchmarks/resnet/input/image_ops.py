"""The operations of RandAugment and its relatives on batches of images, on the device.

Each takes images float32[b, h, w, 3] in 0..255 and a magnitude float32[b] that means what the
argument of Pillow's operation means, and returns float32[b, h, w, 3] in 0..255. Pillow also rounds
the result, mostly down, to integer levels.

Colours change element by element, after at most one reduction. Geometry is linear interpolation by
matrix products with factors of bfloat16. These hold integers exactly and round others by up to
0.5; weights are rounded by up to 2^-9. A pixel whose source lies outside the image gets `fill`;
at the border, Pillow and this module repeat the outermost pixels.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Fill = tuple[float, float, float]
_BLOCK, _STEEP_BLOCK = 16, 4  # rows that one matrix product moves together
_STEEP = 0.5  # with larger shears, the sum of neighbours for a large block would be long
_LANES = 256  # columns of one product; the compiler makes wider ones four times slower


# Colours.


def expand(values: jax.Array) -> jax.Array:
    """A value of each image, [b], as [b, 1, 1, 1]."""
    return values[:, None, None, None]


def _blend(plain: jax.Array, images: jax.Array, factor: jax.Array) -> jax.Array:
    return jnp.clip(plain + expand(factor) * (images - plain), 0, 255)


def _grey(images: jax.Array) -> jax.Array:
    """float32[b, h, w, 1]: the luma (ITU-R BT.601) in integers, with Pillow's factors.

    Of integer levels, all sums are integers below 2^24: float32 is exact.
    """
    red, green, blue = jnp.split(images, 3, axis=-1)
    return jnp.floor((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536)


def brightness(images: jax.Array, factor: jax.Array) -> jax.Array:
    """Factor 0 is black, 1 changes nothing (`ImageEnhance.Brightness`)."""
    return jnp.clip(images * expand(factor), 0, 255)


def colour(images: jax.Array, factor: jax.Array) -> jax.Array:
    """Factor 0 is grey, 1 changes nothing (`ImageEnhance.Color`)."""
    return _blend(_grey(images), images, factor)


def contrast(images: jax.Array, factor: jax.Array) -> jax.Array:
    """Factor 0 is the mean luma of the image, 1 changes nothing (`ImageEnhance.Contrast`).

    h * w is at most 2^23.
    """
    # Sums of integers are the same in any order, so that devices of another number agree.
    sums = jnp.sum(_grey(images).astype(jnp.int32), axis=(1, 2, 3), keepdims=True)
    pixels = images.shape[1] * images.shape[2]
    return _blend(jnp.floor(sums.astype(jnp.float32) / pixels + 0.5), images, factor)


def sharpness(images: jax.Array, factor: jax.Array) -> jax.Array:
    """Factor 0 is smooth, 1 changes nothing (`ImageEnhance.Sharpness`).

    Smooth is the mean over 3 x 3 pixels with 5 times the weight in the centre. The outermost pixels
    keep their values.
    """
    rows = images[:, :-2] + images[:, 1:-1] + images[:, 2:]
    sums = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    inner = images[:, 1:-1, 1:-1]
    sharpened = _blend(jnp.floor((sums + 4 * inner) / 13 + 0.5), inner, factor)
    return images.at[:, 1:-1, 1:-1].set(sharpened)


def posterize(images: jax.Array, bits: jax.Array) -> jax.Array:
    """Keeps the `bits` highest bits of a value: 0 is black, 8 keeps all (`ImageOps.posterize`)."""
    unused = jnp.left_shift(1, 8 - bits.astype(jnp.int32)) - 1
    return (images.astype(jnp.int32) & ~expand(unused)).astype(jnp.float32)


def solarize(images: jax.Array, threshold: jax.Array) -> jax.Array:
    """Inverts the values from the threshold on (`ImageOps.solarize`)."""
    return jnp.where(images < expand(threshold), images, 255 - images)


def solarize_add(images: jax.Array, amount: jax.Array) -> jax.Array:
    """Adds an amount to the values below 128, up to 255."""
    return jnp.where(images < 128, jnp.minimum(images + expand(amount), 255), images)


def invert(images: jax.Array, magnitude: jax.Array) -> jax.Array:
    """255 minus the value (`ImageOps.invert`); the magnitude is not used."""
    del magnitude
    return 255 - images


def identity(images: jax.Array, magnitude: jax.Array) -> jax.Array:
    """The images as they are; the magnitude is not used."""
    del magnitude
    return images


def autocontrast(images: jax.Array, magnitude: jax.Array) -> jax.Array:
    """Stretches each channel to 0..255 (`ImageOps.autocontrast`); the magnitude is not used."""
    del magnitude
    low = jnp.min(images, axis=(1, 2), keepdims=True)
    high = jnp.max(images, axis=(1, 2), keepdims=True)
    stretched = (images - low) * (255 / jnp.maximum(high - low, 1e-6))
    return jnp.where(high > low, stretched, images)


def equalize(images: jax.Array, magnitude: jax.Array) -> jax.Array:
    """Makes the values of each channel equally frequent (`ImageOps.equalize`).

    Counts the values by a product of one-hot halves, 16 x 16, and looks the new values up by
    another. Values count as integers, rounded down. The magnitude is not used.
    """
    del magnitude
    b, h, w, c = images.shape
    levels = jnp.moveaxis(images.astype(jnp.uint8), -1, 1).reshape(b, c, h * w).astype(jnp.int32)
    high = jax.nn.one_hot(levels >> 4, 16, dtype=jnp.bfloat16, axis=2)
    low = jax.nn.one_hot(levels & 15, 16, dtype=jnp.bfloat16, axis=2)
    counts = jnp.einsum("bcip,bcjp->bcij", high, low, preferred_element_type=jnp.float32)
    counts = counts.reshape(b, c, 256).astype(jnp.int32)
    below = jnp.cumsum(counts, axis=-1) - counts
    # As Pillow: the most frequent levels below the highest one fill 255 steps.
    step = jnp.max(jnp.where(counts > 0, below, 0), axis=-1, keepdims=True) // 255
    table = jnp.clip((below + step // 2) // jnp.maximum(step, 1), 0, 255)
    table = jnp.where(step > 0, table, jnp.arange(256)).reshape(b, c, 16, 16)
    rows = jnp.einsum(
        "bcij,bcip->bcjp", table.astype(jnp.bfloat16), high, preferred_element_type=jnp.float32
    )
    return jnp.moveaxis(jnp.sum(rows * low, axis=2).reshape(b, c, h, w), 1, -1)


# Geometry.


def shear_x(images: jax.Array, factor: jax.Array, fill: Fill, most: float = 1.0) -> jax.Array:
    """Moves row y by factor * (y + 0.5) pixels to the left; |factor| is at most `most`.

    `Image.transform` with AFFINE, (1, factor, 0, 0, 1, 0) and BILINEAR. A smaller `most` is faster.
    """
    width = images.shape[2]
    moved = _slide(images, factor, factor / 2, most, width)
    y, x = _centres(images)
    return _filled(moved, _is_inside(x + expand(factor)[..., 0] * y, width), fill)


def shear_y(images: jax.Array, factor: jax.Array, fill: Fill, most: float = 1.0) -> jax.Array:
    """Moves column x by factor * (x + 0.5) pixels up; |factor| is at most `most`."""
    return _turned(shear_x(_turned(images), factor, fill, most))


def translate_x(images: jax.Array, pixels: jax.Array, fill: Fill) -> jax.Array:
    """Moves the images to the left by `pixels`, fractions allowed.

    `Image.transform` with AFFINE, (1, 0, pixels, 0, 1, 0) and BILINEAR.
    """
    width = images.shape[2]
    source = jnp.clip(jnp.arange(width) + pixels[:, None], 0, width - 1)
    weights = jnp.maximum(1 - jnp.abs(jnp.arange(width) - source[..., None]), 0)
    factors = weights.astype(jnp.bfloat16), images.astype(jnp.bfloat16)
    moved = jnp.einsum("btx,byxc->bytc", *factors, preferred_element_type=jnp.float32)
    return _filled(moved, _is_inside(_centres(images)[1] + expand(pixels)[..., 0], width), fill)


def translate_y(images: jax.Array, pixels: jax.Array, fill: Fill) -> jax.Array:
    """Moves the images up by `pixels`, fractions allowed."""
    return _turned(translate_x(_turned(images), pixels, fill))


def rotate(images: jax.Array, degrees: jax.Array, fill: Fill, most: float = math.inf) -> jax.Array:
    """Turns the images counter-clockwise about their centre; |degrees| is at most `most`.

    `Image.rotate` with BILINEAR, but as quarter turns and three shears of at most 45 degrees:
    A. Paeth, "A fast algorithm for general raster rotation", Graphics Interface 1986. Each shear
    interpolates, so that fine patterns become smoother than with Pillow. With `most` up to 45 there
    are no quarter turns, and a smaller one is faster. ValueError: the images are not square.
    """
    size = images.shape[1]
    if images.shape[2] != size:
        raise ValueError(
            f"images of {size} x {images.shape[2]} pixels cannot be rotated: not square"
        )
    if most > 45:
        quarters = jnp.round(degrees / 90)
        degrees, most = degrees - 90 * quarters, 45
        images = _quarter_turns(images.astype(jnp.bfloat16), quarters.astype(jnp.int32) % 4)
    angle, largest = jnp.deg2rad(degrees), math.radians(most)
    slant, rise = -jnp.tan(angle / 2), jnp.sin(angle)
    steep, half = math.tan(largest / 2), (size - 1) / 2
    margin = math.ceil(steep * size / 2) + 1  # columns that the last shear brings back
    images = _slide(images, slant, -slant * half - margin, steep, size + 2 * margin)
    images = _turned(images)
    images = _slide(images, rise, -rise * (half + margin), math.sin(largest), size)
    images = _slide(_turned(images), slant, margin - slant * half, steep, size)
    y, x = (centre - size / 2 for centre in _centres(images))
    cosine, sine = (expand(part)[..., 0] for part in (jnp.cos(angle), jnp.sin(angle)))
    inside = [
        _is_inside(p + size / 2, size) for p in (cosine * x - sine * y, sine * x + cosine * y)
    ]
    return _filled(images, inside[0] & inside[1], fill)


def _slide(
    images: jax.Array, shear: jax.Array, start: jax.Array, steepest: float, width: int
) -> jax.Array:
    """Moves each row by another distance: out[y, x] = in[y, x + start + shear * y].

    A matrix product moves blocks of rows by an integer number of pixels: with a matrix for each
    row, the matrix units would use only 3 of their 128 columns. A weighted sum of a few neighbours
    then moves each row by the rest. Beyond the edges the outermost pixels repeat.

    float[b, h, w, c] to float32[b, h, width, c]; `start` and `shear` are f32[b], the latter at most
    `steepest` in size.
    """
    b, h, w, c = images.shape
    block = _BLOCK if steepest <= _STEEP else _STEEP_BLOCK
    blocks = -(-h // block)
    images = jnp.pad(images, ((0, 0), (0, blocks * block - h), (0, 0), (0, 0)))
    y = jnp.arange(blocks * block, dtype=jnp.float32).reshape(blocks, block)
    shift = start[:, None, None] + shear[:, None, None] * y
    base = jnp.floor(jnp.min(shift, axis=-1, keepdims=True))
    taps = math.ceil((block - 1) * steepest + 1) + 1
    rows = images.reshape(b, blocks, block, w, c).astype(jnp.bfloat16)
    pieces = []
    for columns in np.split(np.arange(width + taps - 1), range(_LANES, width + taps - 1, _LANES)):
        source = jnp.clip(base.astype(jnp.int32) + columns, 0, w - 1)
        chosen = (source[..., None] == jnp.arange(w)).astype(jnp.bfloat16)  # [b, blocks, o, w]
        pieces.append(jnp.einsum("bnox,bnyxc->bnyoc", chosen, rows))
    rows = jnp.concatenate(pieces, axis=3)
    weights = jnp.maximum(1 - jnp.abs((shift - base)[..., None] - jnp.arange(taps)), 0)
    parts = [weights[..., t, None, None] * rows[:, :, :, t : t + width] for t in range(taps)]
    return sum(parts[1:], parts[0]).reshape(b, -1, width, c)[:, :h]


def _quarter_turns(images: jax.Array, count: jax.Array) -> jax.Array:
    """Turns square images counter-clockwise; `count` int32[b] is in 0..3."""
    count = expand(count)
    half = jnp.where(count >= 2, images[:, ::-1, ::-1], images)
    return jnp.where(count % 2 == 1, _turned(half)[:, ::-1], half)


def _turned(images: jax.Array) -> jax.Array:
    return jnp.swapaxes(images, 1, 2)


def _centres(images: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32[h, 1] and f32[1, w]: the centres of the pixels."""
    h, w = images.shape[1:3]
    return (jnp.arange(h) + 0.5)[:, None], (jnp.arange(w) + 0.5)[None]


def _is_inside(positions: jax.Array, size: int) -> jax.Array:
    return (positions >= 0) & (positions < size)


def _filled(images: jax.Array, inside: Any, fill: Fill) -> jax.Array:
    return jnp.where(inside[..., None], images, jnp.asarray(fill, jnp.float32))
