"""A random order of numbers of which each position is computed alone, without a list."""

import numpy as np

from common.data.order import hash64

_ROUNDS = 6  # of `Permutation`


class Permutation:
    """A bijection of 0 .. size - 1 drawn from the integers `key`.

    A Feistel network with tables of random functions (Luby and Rackoff 1988) permutes the next
    power of two. An image outside of the range is permuted again until it is inside.
    """

    def __init__(self, size: int, *key: int):
        self._size = size
        bits = max(2, (size - 1).bit_length())
        low, high = bits // 2, bits - bits // 2
        self._low = low
        self._tables = [
            (hash64(*key, i, np.arange(1 << (low, high)[i % 2])) >> np.uint64(33)).astype(np.int64)
            & ((1 << (high, low)[i % 2]) - 1)
            for i in range(_ROUNDS)
        ]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """int64[k] in the range -> int64[k], the images."""
        images = self._once(positions)
        outside = np.flatnonzero(images >= self._size)
        while len(outside):
            images[outside] = self._once(images[outside])
            outside = outside[images[outside] >= self._size]
        return images

    def _once(self, x: np.ndarray) -> np.ndarray:
        low, high = x & ((1 << self._low) - 1), x >> self._low
        for i, table in enumerate(self._tables):
            if i % 2:
                low = low ^ table[high]
            else:
                high = high ^ table[low]
        return high << self._low | low
