"""Convolutions of two pixels at once against those of one, in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops.layers.pairs import Pairs
from tests.ops.test_gram_models import (
    assert_trees_close,
    both,
    random_leaves,
    trained,
    variables_of,
)
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
    first, second = RNG.normal(size=(3, 3, 3, 5)), RNG.normal(size=(3, 3, 5, 3))
    mean, factor, bias = RNG.normal(size=(3, 5))
    with jax.enable_x64(True):
        pairs, expected = Pairs.pack(jnp.asarray(x)), conv(x, first, 1)
        np.testing.assert_array_equal(pairs.unpack(), x)
        pairs = pairs.conv(jnp.asarray(first))
        assert pairs.shifted
        np.testing.assert_allclose(pairs.unpack(), expected, atol=1e-12)
        moments = jnp.mean(expected, (0, 1, 2)), jnp.mean(expected**2, (0, 1, 2))
        np.testing.assert_allclose(pairs.moments(), moments, atol=1e-12)
        cells = pairs.normalize(*map(jnp.asarray, (mean, factor, bias)))
        assert not cells[:, :, ~pairs.inside].any() and pairs.inside.sum() == 5 * width
        pairs = Pairs(cells, width, shifted=True).conv(jnp.asarray(second))
        assert not pairs.shifted
        expected = conv((expected - mean) * factor + bias, second, 1)
        np.testing.assert_allclose(pairs.unpack(), expected, atol=1e-11)


@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_stride_two(width):
    x, kernel = RNG.normal(size=(2, 5, width, 3)), RNG.normal(size=(3, 3, 3, 7))
    with jax.enable_x64(True):
        y, sampled = Pairs.pack(jnp.asarray(x)).halve(jnp.asarray(kernel))
        np.testing.assert_allclose(y, conv(x, kernel, 2), atol=1e-12)
        np.testing.assert_array_equal(sampled, x[:, ::2, ::2])


@pytest.mark.parametrize(
    ("side", "kwargs"),
    [
        (16, {"num_filters": 64, "stage_sizes": (2, 1), "strides": (1, 2)}),
        (20, {"num_filters": 64, "stage_sizes": (1, 1), "strides": (1, 2)}),  # rows of 5 pixels
        (20, {"num_filters": 64, "stage_sizes": (1, 1), "max_pool_padding": ((1, 1), (1, 1))}),
        (20, {"num_filters": 64, "stage_sizes": (1,), "strides": (2,)}),
        (24, {"num_filters": 64, "stage_sizes": (1, 1), "strides": (1, 1)}),  # unpacked
        (24, {"num_filters": 32, "stage_sizes": (1, 2), "strides": (1, 2)}),  # packed
    ],
)
def test_models_agree_in_float64(side, kwargs):
    """Where blocks of 64 channels begin, go on and end: gradients and running statistics."""
    images, labels = RNG.normal(size=(3, side, side, 3)), np.eye(5)[[0, 3, 1]]
    with jax.enable_x64(True):
        models = both(18, **kwargs)
        variables = random_leaves(variables_of(models[1]))
        actual, expected = (
            jitted(functools.partial(trained, model), variables, images, labels) for model in models
        )
        assert_trees_close(actual[1], expected[1], 1e-9)
        assert_trees_close(actual[2], expected[2], 1e-8)
