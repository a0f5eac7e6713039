"""Changes of colours against float64 arithmetic, one step after the other."""

import colorsys

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.detection.ssd import colour

LUMA = np.array([0.299, 0.587, 0.114])


def noise(count, height=5, width=7, low=0, high=256):
    shape = (count, height, width, 3)
    return np.random.default_rng(count).integers(low, high, shape, np.uint8)


def reference(image, brightness, contrast, saturation, hue):
    """One image, as float64 before clipping: with TensorFlow's conversion to YIQ and back."""
    import tensorflow as tf

    x = image.astype(float) * brightness
    mean = (x @ LUMA).mean()
    x = contrast * x + (1 - contrast) * mean
    grey = (x @ LUMA)[..., None]
    x = saturation * x + (1 - saturation) * grey
    y, i, q = np.moveaxis(tf.image.rgb_to_yiq(tf.constant(x)).numpy(), -1, 0)
    turned = (i + 1j * q) * np.exp(-2j * np.pi * hue)
    yiq = np.stack([y, turned.real, turned.imag], axis=-1)
    return tf.image.yiq_to_rgb(tf.constant(yiq)).numpy()


def jitter(images, *strengths):
    rows = [jnp.asarray(strength, jnp.float32) for strength in strengths]
    result = colour.jitter(jnp.asarray(images), *rows)
    assert result.dtype == jnp.float32 and result.shape == images.shape
    return np.asarray(result)


def test_all_steps_together():
    images, draw = noise(40), np.random.default_rng(0)
    strengths = [draw.uniform(*b, 40) for b in ((0.8, 1.2), (0.5, 1.5), (0.5, 1.5), (-0.5, 0.5))]
    expected = [reference(x, *(s[i] for s in strengths)) for i, x in enumerate(images)]
    assert np.min(expected) < -20 and np.max(expected) > 275  # something is clipped
    np.testing.assert_allclose(jitter(images, *strengths), np.clip(expected, 0, 255), atol=0.3)


def test_no_change():
    images = noise(3)
    np.testing.assert_allclose(jitter(images, *np.ones((3, 3)), np.zeros(3)), images, atol=2e-4)


@pytest.mark.parametrize("turns", [-0.05, 0.02, 0.05])
def test_a_hue_turns_the_way_of_hsv(turns):
    images = noise(1, 20, 20, 60, 200)
    ours = jitter(images, [1], [1], [1], [turns])[0].reshape(-1, 3) / 255
    moved = [
        (colorsys.rgb_to_hsv(*new)[0] - colorsys.rgb_to_hsv(*(old / 255))[0] + 0.5) % 1 - 0.5
        for old, new in zip(images.reshape(-1, 3), ours, strict=True)
    ]
    assert abs(np.median(moved) - turns) < 0.01


def test_means_of_large_images_are_exact():
    images = np.full((1, 2048, 2048, 3), 255, np.uint8)
    images[:, :1024] = 0  # the mean is 127.5; float32 sums over pixels would lose it
    result = jitter(images, [1], [0], [1], [0])
    np.testing.assert_allclose(result, 127.5, atol=1e-4)
