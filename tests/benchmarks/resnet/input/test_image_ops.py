"""The operations of RandAugment against Pillow's, on noise and on smooth images."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from benchmarks.resnet.input import image_ops

FILL = (128.0, 7.0, 200.0)
BILINEAR, AFFINE = Image.Resampling.BILINEAR, Image.Transform.AFFINE


def noise(height=30, width=30, low=0, high=256, seed=0):
    return np.random.default_rng(seed).integers(low, high, (height, width, 3), np.uint8)


def smooth(height=30, width=30):
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 7), np.cos(y / 6 + x / 9), np.sin(y / 8)]
    return np.stack([110 + 90 * wave for wave in waves], -1).round().astype(np.uint8)


@functools.cache
def compiled(effect, *more):
    return jax.jit(lambda images, magnitudes: effect(images, magnitudes, *more))


def ours(effect, pictures, magnitudes, *more):
    """[b, h, w, 3] in float32, compiled as a run does."""
    images = jnp.asarray(np.stack(pictures), jnp.float32)
    changed = compiled(effect, *more)(images, jnp.asarray(magnitudes, jnp.float32))
    assert changed.dtype == jnp.float32 and changed.shape == images.shape
    return np.asarray(changed)


def compare(effect, pillow, magnitudes, most, pictures=None):
    """Pillow rounds down at the end: our results are up to a level larger."""
    pictures = pictures or [noise(), noise(low=60, high=180), smooth()]
    for magnitude in magnitudes:
        changed = ours(effect, pictures, [magnitude] * len(pictures))
        assert changed.min() >= 0 and changed.max() <= 255.001
        for picture, result in zip(pictures, changed, strict=True):
            expected = np.asarray(pillow(Image.fromarray(picture), magnitude), np.float32)
            difference = result - expected
            assert difference.min() >= -1e-3 and difference.max() <= most, magnitude


@pytest.mark.parametrize(
    ("effect", "pillow"),
    [
        (image_ops.colour, ImageEnhance.Color),
        (image_ops.contrast, ImageEnhance.Contrast),
        (image_ops.brightness, ImageEnhance.Brightness),
        (image_ops.sharpness, ImageEnhance.Sharpness),
    ],
)
def test_enhancers(effect, pillow):
    """Exactly, from Pillow's image of factor 0; Pillow itself then rounds down."""
    pictures = [noise(64, 64), noise(low=60, high=180), smooth()]
    for picture in pictures:
        enhancer = pillow(Image.fromarray(picture))
        plain = np.asarray(enhancer.degenerate, float)
        for factor in (0.01, 0.4, 1.0, 1.37, 1.99, 7.3):
            expected = np.clip(plain + factor * (picture - plain), 0, 255)
            result = ours(effect, [picture], [factor])[0]
            np.testing.assert_allclose(result, expected, rtol=0, atol=1e-3)
            enhanced = np.asarray(enhancer.enhance(factor), float)
            assert np.abs(np.floor(expected + 1e-3) - enhanced).max() <= 1


@pytest.mark.parametrize(
    ("effect", "pillow", "magnitudes", "most"),
    [
        (image_ops.posterize, ImageOps.posterize, (1, 2, 4, 7, 8), 0),
        (image_ops.solarize, ImageOps.solarize, (0, 1, 100, 255, 256), 0),
        (image_ops.invert, lambda image, _: ImageOps.invert(image), (0,), 0),
        (image_ops.autocontrast, lambda image, _: ImageOps.autocontrast(image), (0,), 1.001),
        (image_ops.equalize, lambda image, _: ImageOps.equalize(image), (0,), 0),
        (image_ops.identity, lambda image, _: image, (0,), 0),
        (image_ops.solarize_add, lambda image, n: image.point(added(n)), (0, 37, 128), 0),
    ],
)
def test_values(effect, pillow, magnitudes, most):
    flat = np.full((30, 30, 3), 77, np.uint8)
    few = noise(low=250)
    two = np.where(noise() < 60, 3, 9).astype(np.uint8)
    compare(effect, pillow, magnitudes, most, [noise(), noise(30, 30, 60, 180), flat, few, two])


def test_luma_is_pillows():
    """Also where the weighted sum is just below a half, and just at it."""
    edges = [(0, 62, 229), (0, 183, 27), (1, 63, 230), (0, 52, 184), (1, 53, 185), (255, 255, 255)]
    picture = np.concatenate([noise(200, 200).reshape(-1, 3), np.array(edges, np.uint8)])[None]
    expected = np.asarray(Image.fromarray(picture).convert("L"))
    grey = jax.jit(image_ops._grey)(jnp.asarray(picture[None], jnp.float32))
    np.testing.assert_array_equal(grey[0, ..., 0], expected)


def test_a_stretched_channel_begins_at_0_and_ends_at_255():
    picture = noise(low=40, high=140)
    picture[..., 1] = 9
    result = ours(image_ops.autocontrast, [picture], [0])[0]
    for i in (0, 2):
        channel = picture[..., i].astype(float)
        expected = np.interp(channel, [channel.min(), channel.max()], [0, 255])
        np.testing.assert_allclose(result[..., i], expected, rtol=0, atol=1e-3)
    assert (result[..., 1] == 9).all()


def added(amount):
    return [min(i + amount, 255) if i < 128 else i for i in range(256)] * 3


def test_no_bits_are_black():
    assert not ours(image_ops.posterize, [noise()], [0]).any()


def test_rows_have_magnitudes_of_their_own():
    pictures = [noise(seed=seed) for seed in range(3)]
    for effect in (image_ops.contrast, image_ops.posterize, image_ops.solarize):
        together = ours(effect, pictures, [2, 4, 5])
        for picture, magnitude, result in zip(pictures, [2, 4, 5], together, strict=True):
            np.testing.assert_allclose(ours(effect, [picture], [magnitude])[0], result, atol=1e-3)


# Geometry. The height is no multiple of the blocks that a product moves.

MATRICES = {
    image_ops.shear_x: lambda m: (1, m, 0, 0, 1, 0),
    image_ops.shear_y: lambda m: (1, 0, 0, m, 1, 0),
    image_ops.translate_x: lambda m: (1, 0, m, 0, 1, 0),
    image_ops.translate_y: lambda m: (1, 0, 0, 0, 1, m),
}
SHEARS, MOVES = (0.0, 0.07, -0.29, 0.99, -1.0), (0.0, 3.0, -7.0, 2.3, -11.6, 40.0)
GENTLE = (0.0, 0.07, -0.29, 0.3, -0.3)


@pytest.mark.parametrize(
    ("effect", "magnitudes"),
    [
        (image_ops.shear_x, SHEARS),
        (image_ops.shear_y, SHEARS),
        (functools.partial(image_ops.shear_x, most=0.3), GENTLE),
        (functools.partial(image_ops.shear_y, most=0.3), GENTLE),
        (image_ops.translate_x, MOVES),
        (image_ops.translate_y, MOVES),
    ],
)
def test_shears_and_translations(effect, magnitudes):
    """Weights of bfloat16 err by up to 2^-9 of 255, and Pillow rounds down."""
    matrix = MATRICES[getattr(effect, "func", effect)]
    for picture in (noise(30, 37), smooth(30, 37)):
        changed = ours(effect, [picture] * len(magnitudes), magnitudes, FILL)
        for magnitude, result in zip(magnitudes, changed, strict=True):
            expected = Image.fromarray(picture).transform(
                *((37, 30), AFFINE, matrix(magnitude), BILINEAR), fillcolor=(128, 7, 200)
            )
            difference = result - np.asarray(expected, np.float32)
            # A source on the very border may fall to either side.
            off = (np.abs(difference) > 1.6).any(-1)
            assert off.sum() <= 2, (magnitude, np.abs(difference).max())
            assert np.abs(difference[~off]).mean() < 0.7


def test_a_source_on_the_border_is_inside_at_the_left_alone():
    """Half a pixel to the right, the first source is at 0, the border; to the left, the last."""
    picture = noise()
    right, left = ours(image_ops.translate_x, [picture] * 2, [-0.5, 0.5], FILL)
    half = (picture[:, 1:].astype(float) + picture[:, :-1]) / 2
    np.testing.assert_allclose(right[:, 0], picture[:, 0])
    np.testing.assert_allclose(right[:, 1:], half)
    np.testing.assert_allclose(left[:, :-1], half)
    np.testing.assert_allclose(left[:, -1], np.broadcast_to(FILL, (30, 3)))


ANGLES = (0.0, 5.0, -17.0, 30.0, 44.0, -46.0, 90.0, -90.0, 133.0, 180.0, 300.0)


@pytest.mark.parametrize("size", [30, 33])
@pytest.mark.parametrize(
    ("most", "angles"), [(math.inf, ANGLES), (30.0, (0.0, 5.0, -17.0, 30.0)), (45.0, (44.0, -45.0))]
)
def test_rotation_of_smooth_images(size, most, angles):
    picture = smooth(size, size)
    rotate = functools.partial(image_ops.rotate, most=most)
    changed = ours(rotate, [picture] * len(angles), angles, FILL)
    for angle, result in zip(angles, changed, strict=True):
        expected = Image.fromarray(picture).rotate(angle, BILINEAR, fillcolor=(128, 7, 200))
        difference = np.abs(result - np.asarray(expected, np.float32))
        off = (difference > 3.5).any(-1)
        assert off.sum() <= 4, (angle, off.sum(), difference.max())  # sources on the very border
        assert difference[~off].mean() < 0.9, (angle, difference[~off].mean())


def test_rotation_of_noise():
    """Quarter turns are exact. Three shears smooth noise more than one interpolation does."""
    picture = noise(32, 32)
    changed = ours(image_ops.rotate, [picture] * len(ANGLES), ANGLES, FILL)
    for angle, result in zip(ANGLES, changed, strict=True):
        expected = np.asarray(Image.fromarray(picture).rotate(angle, BILINEAR), np.float32)
        if angle % 90 == 0:
            np.testing.assert_allclose(result, expected, atol=0.5)
            continue
        inner = (slice(8, 24), slice(8, 24))
        similar = np.corrcoef(result[inner].ravel(), expected[inner].ravel())[0, 1]
        assert similar > 0.8, (angle, similar)
