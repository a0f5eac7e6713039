"""Dropout by a hash: how many elements go, which ones, and the gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common import hashing
from tests.common.test_hashing import plain


def masks(seeds, shape, rate=0.1, site=3):
    keep = jax.jit(hashing.keep_mask, static_argnums=(0, 1, 3))
    return np.asarray(keep((len(seeds), *shape), rate, np.asarray(seeds, np.int32), site))


def test_the_mask_is_that_of_pythons_integers():
    def kept(seed, site, line, column):
        x = (plain(seed, site, line) + column * 0x7FEB352D) % 2**32
        return ((x ^ (x >> 15)) * 0x846CA68B) % 2**32 >= 2**29

    mask = masks([7, -5], (2, 3, 5), rate=0.125, site=11)
    for (row, i, j, column), value in np.ndenumerate(mask):
        assert value == kept((7, -5)[row], 11, 3 * i + j, column)


def test_the_rate():
    for rate in (0.1, 0.5):
        mask = masks(range(8), (64, 1024), rate)
        spread = (rate * (1 - rate) / mask.size) ** 0.5
        assert abs((~mask).mean() - rate) < 4 * spread
        for axis in (0, 1, 2):  # no row, line or column has more than its share
            shares = (~mask).mean(axis=tuple({0, 1, 2} - {axis}))
            spread = (rate * (1 - rate) * len(shares) / mask.size) ** 0.5
            assert abs(shares - rate).max() < 5 * spread


def correlation(a, b):
    return np.corrcoef(a.ravel(), b.ravel())[0, 1] * a.size**0.5  # standard deviations from 0


def test_neighbours_lines_rows_and_sites_are_independent():
    mask = masks(range(4), (128, 512), 0.3).astype(float)
    for lag in (1, 2, 3, 4, 7, 8, 64, 128, 255, 256):
        assert abs(correlation(mask[..., lag:], mask[..., :-lag])) < 5
    for lag in (1, 2, 8, 64):
        assert abs(correlation(mask[:, lag:], mask[:, :-lag])) < 5
    assert abs(correlation(mask[1:], mask[:-1])) < 5
    for site in (4, 5, 13, 1003):
        assert abs(correlation(mask, masks(range(4), (128, 512), 0.3, site).astype(float))) < 5
    # Of three neighbours any combination is as frequent as it should be.
    triples = mask[..., :-2] * 4 + mask[..., 1:-1] * 2 + mask[..., 2:]
    counts = np.bincount(triples.ravel().astype(int))
    ones = np.array([bin(i).count("1") for i in range(8)])
    wanted = 0.7**ones * 0.3 ** (3 - ones) * counts.sum()
    assert (abs(counts - wanted) / wanted**0.5).max() < 6


def test_the_rows_may_be_cut_over_devices():
    seeds: Any = np.array([5, 9, 5, -3], np.int32)
    x: Any = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
    whole = hashing.dropout(x, 0.4, seeds, 2)
    parts = [hashing.dropout(x[i : i + 1], 0.4, seeds[i : i + 1], 2) for i in range(4)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    np.testing.assert_array_equal(np.asarray(whole[0] == 0), np.asarray(whole[2] == 0))
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    inputs = jax.device_put((x, seeds), spec)
    sharded = jax.jit(lambda x, seeds: hashing.dropout(x, 0.4, seeds, 2))(*inputs)
    np.testing.assert_array_equal(whole, sharded)


def test_what_stays_is_scaled_and_so_is_its_gradient():
    x = jnp.arange(1.0, 41.0).reshape(2, 20)
    seeds = jnp.array([1, 2])
    y, pullback = jax.vjp(lambda x: hashing.dropout(x, 0.2, seeds, 0), x)
    mask = np.asarray(hashing.keep_mask(x.shape, 0.2, seeds, 0))
    np.testing.assert_allclose(y, mask * x / 0.8, rtol=1e-6)
    np.testing.assert_allclose(pullback(jnp.ones_like(x))[0], mask / 0.8, rtol=1e-6)
    assert hashing.dropout(x.astype(jnp.bfloat16), 0.2, seeds, 0).dtype == jnp.bfloat16


def test_no_seeds_and_no_rate_change_nothing():
    x = jnp.ones((2, 3))
    assert hashing.dropout(x, 0.1, None, 0) is x
    assert hashing.dropout(x, 0.0, jnp.array([1, 2]), 0) is x
