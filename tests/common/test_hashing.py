"""The hash against Python's integers, and its numbers against what chance would do."""

import jax
import numpy as np

from common import hashing


def lowbias32(x):
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def plain(*words):
    mixed = 0
    for word in words:
        mixed = lowbias32(((mixed ^ (word % 2**32)) + 0x9E3779B9) % 2**32)
    return mixed


def test_the_hash_is_that_of_python():
    rows = [(0,), (1,), (-1, 7), (2**31 - 1, 0, 5), (123456789, 987654321)]
    for words in rows:
        assert int(hashing.hash32(*words)) == plain(*words)
    seeds, counters = np.array([3, -(2**31), 77], np.int32), np.arange(5)
    table = np.asarray(jax.jit(hashing.hash32)(seeds[:, None], counters))
    assert table.dtype == np.uint32
    assert table.tolist() == [[plain(int(s), k) for k in range(5)] for s in seeds]


def test_numbers_are_uniform_and_independent():
    seeds = np.arange(100_000, dtype=np.int32)
    u = np.asarray(hashing.uniform(seeds[:, None], np.arange(3))).astype(float)
    assert u.min() >= 0 and u.max() < 1
    # The bounds are five standard deviations.
    counts = np.stack([np.bincount((column * 64).astype(int), minlength=64) for column in u.T])
    assert np.abs(counts - 1562.5).max() < 5 * 1562.5**0.5
    neighbours = np.stack([*u.T, np.roll(u[:, 0], 1)])
    correlation = np.corrcoef(neighbours)[np.triu_indices(4, 1)]
    assert np.abs(correlation).max() < 5 / 100_000**0.5
