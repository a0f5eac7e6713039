"""Compares the space-to-depth stem with the plain stem."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from benchmarks.detection.mask_rcnn.models import blocked_stem
from common.layers import space_to_depth
from common.layers.space_to_depth import unfold_kernel
from tests.test_models import apply, make_images, random_variables, small

FOLDED = space_to_depth.stem(models.stem)


def test_space_to_depth_is_the_same_function():
    plain, folded = small(), small(stem=FOLDED)
    variables = random_variables(plain)
    images = make_images(2, 32, 48, 3)
    want = apply(plain, variables, images, False)

    params = dict(variables["params"])
    kernel = space_to_depth.convert_kernel(params["conv_stem"]["kernel"])
    assert kernel.shape == (4, 4, 12, 4)
    params["conv_stem"] = {"kernel": kernel}
    got = apply(folded, {**variables, "params": params}, images, False)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_space_to_depth_stem_begins_as_the_plain_one():
    def init(stem):
        model = small(stage_sizes=(), stem=stem)
        images = jnp.zeros((1, 8, 8, 3))
        variables: Any = model.init(jax.random.key(3), images, False, method="endpoints")
        return variables["params"]["conv_stem"]["kernel"]

    want = space_to_depth.convert_kernel(init(models.stem))
    np.testing.assert_array_equal(init(FOLDED), want)
    assert np.count_nonzero(want) == 7 * 7 * 3 * 4


def test_space_to_depth_layout():
    images = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    got = space_to_depth.rearrange(jnp.asarray(images))
    assert got.shape == (2, *space_to_depth.blocked(4, 6)) == (2, 2, 3, 12)
    want = [images[1, 2 + dy, 4 + dx, c] for dy in (0, 1) for dx in (0, 1) for c in range(3)]
    np.testing.assert_array_equal(got[1, 1, 2], want)
    np.testing.assert_array_equal(space_to_depth.restore(np.asarray(got)), images)
    np.testing.assert_array_equal(space_to_depth.restore(np.asarray(got[1])), images[1])


def test_an_unfolded_kernel_has_a_tap_for_each_pixel():
    """Of cell (i, j), channel (2 * y + x) * C + c is pixel (2 * i + y, 2 * j + x), channel c."""
    kernel = np.arange(4 * 4 * 12 * 2, dtype=np.float16).reshape(4, 4, 12, 2)
    plain = unfold_kernel(kernel)
    assert plain.shape == (8, 8, 3, 2) and plain.dtype == np.float16
    for i, j, y, x, c in np.ndindex(4, 4, 2, 2, 3):
        expected = kernel[i, j, (2 * y + x) * 3 + c]
        np.testing.assert_array_equal(plain[2 * i + y, 2 * j + x, c], expected)
    original = make_images(7, 7, 3, 5)
    folded = np.asarray(space_to_depth.convert_kernel(jnp.asarray(original)))
    expected = np.pad(original, ((1, 0), (1, 0), (0, 0), (0, 0)))
    np.testing.assert_array_equal(unfold_kernel(folded), expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stem", "blocked"), [(models.stem, blocked_stem(models.stem)), (FOLDED, FOLDED)]
)
def test_images_may_come_in_blocks(stem, blocked):
    """With the same kernel, gradients included, and with the same initial kernel."""
    model, other_model = (small(stage_sizes=(1,), stem=each) for each in (stem, blocked))
    images = make_images(2, 32, 48, 3)
    variables = random_variables(model)
    blocks = space_to_depth.rearrange(jnp.asarray(images))
    (want, gradients), (got, others) = (
        jax.value_and_grad(lambda x, m=m, given=given: apply(m, x, given, False).sum())(variables)
        for m, given in ((model, images), (other_model, blocks))
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    a, b = (x["params"]["conv_stem"]["kernel"] for x in (gradients, others))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(a).max())
    begin = model.init(jax.random.key(3), images, False)
    other = other_model.init(jax.random.key(3), blocks, False)
    jax.tree.map(np.testing.assert_array_equal, begin, other)
