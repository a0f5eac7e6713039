"""Permutations have each number once, look random and never change."""

import numpy as np
import pytest

from common.data.permutation import Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 115, 1000, 4096, 4097, 99_999])
def test_a_permutation_has_every_number_once(size):
    images = Permutation(size, 3, 1)(np.arange(size))
    assert np.array_equal(np.sort(images), np.arange(size))


def test_a_permutation_is_the_same_in_any_pieces_and_order():
    images = Permutation(1000, 7)(np.arange(1000))
    positions = np.random.default_rng(0).permutation(1000)
    assert np.array_equal(Permutation(1000, 7)(positions), images[positions])


def test_permutations_look_random():
    """Over 2000 keys, a number is about as often at each position, and after each other number."""
    size, keys = 10, 2000
    images = np.array([Permutation(size, 5, key)(np.arange(size)) for key in range(keys)])
    positions = np.broadcast_to(np.arange(size), images.shape)
    for other in (positions, np.roll(images, 1, axis=1)):
        counts = np.zeros((size, size))
        np.add.at(counts, (images.ravel(), other.ravel()), 1)
        expected = counts.sum() / np.count_nonzero(counts)
        freedom = np.count_nonzero(counts) - 2 * size + 1
        chi2 = ((counts[counts > 0] - expected) ** 2 / expected).sum()
        assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5, chi2


def test_permutations_never_change():
    """The order of every NCF epoch that is under way depends on these."""
    assert Permutation(10, 7)(np.arange(10)).tolist() == [9, 6, 5, 3, 0, 4, 8, 1, 2, 7]
    assert Permutation(100, 0, 2)(np.arange(8)).tolist() == [53, 94, 68, 0, 93, 52, 5, 54]
