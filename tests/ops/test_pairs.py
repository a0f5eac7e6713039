"""Convolutions of two pixels at once against those of one, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops.layers.pairs import Pairs
from tests.ops.test_gram_models import compare
from tests.ops.test_gram_norm import jitted

RNG = np.random.default_rng(5)


def conv(x: Any, kernel: Any, stride: int) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    sides = ((1, 1), (1, 1))
    return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, sides, dimension_numbers=numbers)


@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_two_convolutions_shift_the_cells_and_shift_them_back(width):
    """Between them a normalisation, which clears the pixels outside of the image."""
    x = RNG.normal(size=(2, 4, width, 3))
    kernels = RNG.normal(size=(3, 3, 3, 5)), RNG.normal(size=(3, 3, 5, 3))
    mean, factor, bias = RNG.normal(size=(3, 5))

    def in_pairs(x, first, second, *values):
        packed = Pairs.pack(x)
        pairs = packed.conv(first)
        cells = pairs.normalize(*values)
        back = Pairs(cells, width, shifted=True).conv(second)
        assert pairs.shifted and not back.shifted and pairs.inside.sum() == 5 * width
        outside = cells[:, :, ~pairs.inside]
        return packed.unpack(), pairs.unpack(), pairs.moments(), outside, back.unpack()

    def plainly(x, first, second):
        y = conv(x, first, 1)
        moments = jnp.mean(y, (0, 1, 2)), jnp.mean(y**2, (0, 1, 2))
        return y, moments, conv((y - mean) * factor + bias, second, 1)

    with jax.enable_x64(True):
        same, once, found, outside, twice = jitted(in_pairs, x, *kernels, mean, factor, bias)
        expected, moments, expected_twice = jitted(plainly, x, *kernels)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_allclose(once, expected, atol=1e-12)
    np.testing.assert_allclose(found, moments, atol=1e-12)
    assert not np.asarray(outside).any()
    np.testing.assert_allclose(twice, expected_twice, atol=1e-11)


@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_stride_two(width):
    x, kernel = RNG.normal(size=(2, 5, width, 3)), RNG.normal(size=(3, 3, 3, 7))
    with jax.enable_x64(True):
        y, sampled = jitted(lambda x, kernel: Pairs.pack(x).halve(kernel), x, kernel)
        np.testing.assert_allclose(y, conv(x, kernel, 2), atol=1e-12)
        np.testing.assert_array_equal(sampled, x[:, ::2, ::2])


@pytest.mark.long
@pytest.mark.parametrize(
    ("side", "kwargs"),
    [
        (16, {"num_filters": 64, "stage_sizes": (2, 1), "strides": (1, 2)}),
        # rows of 5 pixels
        (20, {"num_filters": 64, "stage_sizes": (1, 1), "padding": ((1, 1), (1, 1))}),
        (20, {"num_filters": 64, "stage_sizes": (1,), "strides": (2,)}),
        (24, {"num_filters": 64, "stage_sizes": (1, 1), "strides": (1, 1)}),  # unpacked
        (24, {"num_filters": 32, "stage_sizes": (1, 2), "strides": (1, 2)}),  # packed
    ],
)
def test_models_agree_in_float64(side, kwargs):
    """Where blocks of 64 channels begin, go on and end: gradients and running statistics."""
    images, labels = RNG.normal(size=(3, side, side, 3)), np.eye(5)[[0, 3, 1]]
    compare(18, images, labels, **kwargs)
