"""Mixing of images against NumPy: loops over rows with the hash of Python, and scipy's Beta."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from benchmarks.resnet.input import mixing
from tests.ops.test_hashing import plain

SEEDS: Any = np.array([3, -7, 2**31 - 1, 11, 0, 5, 6, 99], np.int32)
MANY: Any = np.random.default_rng(5).integers(-(2**31), 2**31, 20_000, dtype=np.int32)


def pictures(b=8, h=12, w=10, seed=0) -> Any:
    return np.random.default_rng(seed).normal(size=(b, h, w, 3)).astype(np.float32)


def drawn(seed, site, *words):
    """The number in [0, 1) that the device draws, in Python's integers."""
    return (plain(int(seed), site, *words) >> 8) / 2**24


@functools.partial(jax.jit, static_argnames=("mixup", "cutmix"))
def mix(images, seeds, mixup=0.0, cutmix=0.0):
    return mixing.mix(images, jnp.arange(len(images)), seeds, mixup=mixup, cutmix=cutmix)


@pytest.mark.parametrize(
    ("alpha", "error"), [(0.05, 1e-6), (0.1, 1e-6), (0.25, 1e-6), (1.0, 1e-6), (4.0, 4e-4)]
)
def test_quantiles_are_those_of_scipy(alpha, error):
    u = np.concatenate([np.linspace(0, 1, 4001)[:-1], 2.0 ** -np.arange(2, 25)])
    u: Any = (np.floor(u * 2**24) / 2**24).astype(np.float32)  # numbers that are drawn
    x = np.asarray(jax.jit(mixing._beta, static_argnums=1)(u, alpha), np.float64)
    beta: Any = stats.beta(alpha, alpha)
    assert x.min() >= 0 and x.max() <= 1
    np.testing.assert_allclose(x, beta.ppf(u.astype(np.float64)), rtol=0, atol=error)
    small = (u < 0.5) & (x > 1e-30)  # above, 1 - x is rounded to 2^-24
    np.testing.assert_allclose(beta.cdf(x[small]), u[small], rtol=0, atol=1e-6)


def test_mixup_adds_the_row_before():
    images = pictures()
    mixed = mix(images, SEEDS, mixup=0.2)
    for i, seed in enumerate(SEEDS):
        share = stats.beta.ppf(drawn(seed, 0x6D6979), 0.2, 0.2)
        assert abs(mixed.share[i] - share) < 2e-6
        expected = share * images[i].astype(float) + (1 - share) * images[i - 1]
        np.testing.assert_allclose(mixed.images[i], expected, rtol=0, atol=2e-5)
    assert np.asarray(mixed.labels).tolist() == list(range(8))
    assert np.asarray(mixed.others).tolist() == [7, 0, 1, 2, 3, 4, 5, 6]


def pasted(images, i, seed):
    """Row i with a box of the row before, and the share of it that is left; a loop over pixels."""
    _, h, w, _ = images.shape
    side = np.sqrt(1 - stats.beta.ppf(drawn(seed, 0x6D697A, 0), 1, 1))
    half_h, half_w = int(h * side) // 2, int(w * side) // 2
    y, x = int(drawn(seed, 0x6D697A, 1) * h), int(drawn(seed, 0x6D697A, 2) * w)
    result, left = images[i].copy(), h * w
    for row in range(max(y - half_h, 0), min(y + half_h, h)):
        for column in range(max(x - half_w, 0), min(x + half_w, w)):
            result[row, column] = images[i - 1, row, column]
            left -= 1
    return result, left / (h * w)


def test_cutmix_pastes_a_box_of_the_row_before():
    images = pictures()
    mixed = mix(images, SEEDS, cutmix=1.0)
    shares = set()
    for i, seed in enumerate(SEEDS):
        result, share = pasted(images, i, seed)
        np.testing.assert_array_equal(mixed.images[i], result)
        assert abs(mixed.share[i] - share) < 1e-6
        shares.add(share)
    assert len(shares) > 5


def test_both_take_half_of_the_rows_each():
    images = pictures()
    both = mix(images, SEEDS, mixup=0.2, cutmix=1.0)
    one, other = mix(images, SEEDS, mixup=0.2), mix(images, SEEDS, cutmix=1.0)
    cut = [drawn(seed, 0x6D6978) < 0.5 for seed in SEEDS]
    assert len(set(cut)) == 2
    for i, is_cut in enumerate(cut):
        wanted = other if is_cut else one
        np.testing.assert_array_equal(both.share[i], wanted.share[i])
        np.testing.assert_allclose(both.images[i], wanted.images[i], rtol=0, atol=1e-6)
    tiny: Any = np.zeros((len(MANY), 1, 1, 3), np.float32)
    share = np.asarray(mix(tiny, MANY, mixup=1.0, cutmix=1.0).share)
    # A pixel is never cut: its box has no whole pixel on each side.
    assert abs((share == 1).mean() - 0.5) < 0.02


def test_nothing_to_mix():
    images = jnp.ones((2, 3, 3, 3))
    mixed = mixing.mix(images, jnp.arange(2), jnp.arange(2), mixup=0, cutmix=0)
    assert mixed.images is images and mixed.others is None and mixed.share is None


@pytest.mark.parametrize("apply", ["mix", "erase"])
def test_the_dtype_stays_and_a_row_needs_no_other_device(apply):
    images = jnp.asarray(pictures(b=4), jnp.bfloat16)
    seeds = SEEDS[:4]
    functions = {
        "mix": lambda x, s: mixing.mix(x, s, s, mixup=0.4, cutmix=1.0).images,
        "erase": lambda x, s: mixing.erase(x, s, 0.7),
    }
    function = jax.jit(functions[apply])
    complete = function(images, seeds)
    assert complete.dtype == jnp.bfloat16
    if apply == "mix":  # rows 1 to 3 have their partners
        images, seeds, complete = images[:3], seeds[:3], complete[:3]
        np.testing.assert_array_equal(function(images, seeds)[1:], complete[1:])
    else:
        parts = [function(images[i : i + 2], seeds[i : i + 2]) for i in (0, 2)]
        np.testing.assert_array_equal(np.concatenate(parts), complete)


def erased(image, seed, probability):
    """The image with a window of zeros, by torchvision's rule."""
    h, w, _ = image.shape
    site, result = 0x6D697B, image.copy()
    if drawn(seed, site, 20) >= probability:
        return result
    for k in range(10):
        area = h * w * (0.02 + 0.31 * drawn(seed, site, 2 * k))
        ratio = np.exp(np.log(0.3) + np.log(11) * drawn(seed, site, 2 * k + 1))
        height, width = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if height < h and width < w:
            y = int(drawn(seed, site, 21) * (h - height + 1))
            x = int(drawn(seed, site, 22) * (w - width + 1))
            result[y : y + height, x : x + width] = 0
            break
    return result


@pytest.mark.parametrize("shape", [(12, 10), (4, 40), (1, 9)])
def test_erasing_is_that_of_torchvisions_rule(shape):
    images: Any = 1 + np.abs(pictures(200, *shape))
    result = np.asarray(jax.jit(mixing.erase, static_argnums=2)(images, MANY[:200], 0.5))
    for image, seed, one in zip(images, MANY[:200], result, strict=True):
        np.testing.assert_array_equal(one, erased(image, seed, 0.5))
    changed = (result == 0).any(axis=(1, 2, 3)).mean()
    assert changed == 0 if shape[0] == 1 else 0.3 < changed < 0.65
