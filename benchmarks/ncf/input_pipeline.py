"""Batches of NCF as arithmetic: which example a step has is a function of (seed, step).

Training examples are numbered: with n negatives per positive, example x is positive x // (n + 1),
as itself if x % (n + 1) is 0 and else one of the items drawn beside it. An epoch has every example
once, in an order that is a bijection drawn from (seed, epoch); negatives are drawn from (seed,
epoch, x). So nothing is stored per epoch, any step is computed alone, and hosts take slices.
"""

from __future__ import annotations

import functools
import time

import numpy as np

from benchmarks.ncf.interactions import Interactions
from ops.order import hash64
from ops.permutation import Permutation

_PIECE = 8192  # values looked up at a time
_ORDER, _TRAIN, _EVAL = 11, 12, 13  # what is drawn


class Sampler:
    """Draws batches from an index."""

    def __init__(self, data: Interactions, seed: int, train_negatives: int, eval_negatives: int):
        self._data, self._seed = data, seed
        self._group, self._asked = 1 + train_negatives, eval_negatives
        counts = np.diff(data.starts)
        self._users = np.repeat(np.arange(data.num_users, dtype=np.int32), counts)
        # For each item to train on, how many smaller ones its user does not train on. It rises
        # within a user, so a bisection finds the n-th item that a user does not train on.
        ranks = data.items - (np.arange(len(data.items)) - data.starts[self._users])
        self._ranks = ranks.astype(np.int32)
        self._free = (data.num_items - counts).astype(np.int32)
        everybody = np.arange(data.num_users)
        self._held_rank = data.held - self._count(data.items, everybody, data.held)

        @functools.lru_cache(2)  # a batch may be in two epochs, and there are several threads
        def order(epoch: int) -> Permutation:
            return Permutation(self.epoch_size, seed, _ORDER, epoch)

        self._order = order

    @property
    def epoch_size(self) -> int:
        """Training examples in an epoch."""
        return self._data.num_positives * self._group

    @property
    def nbytes(self) -> int:
        """Bytes that the index and this hold."""
        data = self._data
        arrays = (data.starts, data.items, data.held, data.user_ids, data.item_ids)
        own = (self._users, self._ranks, self._free, self._held_rank)
        return sum(array.nbytes for array in (*arrays, *own))

    def examples(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(epochs, examples) int64[k] of positions int64[k] of a run, which must not fall."""
        epochs, offsets = np.divmod(positions, self.epoch_size)
        found = np.empty_like(offsets)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            inside = slice(*np.searchsorted(epochs, [epoch, epoch + 1]))
            found[inside] = self._order(epoch)(offsets[inside])
        return epochs, found

    def train(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The training examples at positions int64[k] of a run, which must not fall: see `Ncf`."""
        begun = time.monotonic()
        epochs, examples = self.examples(positions)
        positives, place = np.divmod(examples, self._group)
        users, items = self._users[positives], self._data.items[positives]
        drawn = np.flatnonzero(place)
        whose = users[drawn]
        draws = hash64(self._seed, _TRAIN, epochs[drawn], examples[drawn])
        free = (draws % self._free[whose].astype(np.uint64)).astype(np.int32)
        items[drawn] = free + self._count(self._ranks, whose, free)
        seconds = (time.monotonic() - begun) / len(positions)
        return {
            "user": users,
            "item": items,
            "label": place == 0,
            "id": examples.astype(np.int32),
            "host_seconds": np.full(len(positions), seconds, np.float32),
        }

    def candidates(self, users: np.ndarray) -> np.ndarray:
        """int32[k, 1 + negatives]: the held-out item of users int32[k], and items that are not.

        The others are drawn from (seed, user), with replacement, from the items that a user has
        neither trained on nor held out.
        """
        found = np.empty((len(users), 1 + self._asked), np.int32)
        found[:, 0] = self._data.held[users]
        at_once = max(1, _PIECE // self._asked)
        for first in range(0, len(users), at_once):
            rows = slice(first, first + at_once)
            whose = np.repeat(users[rows], self._asked)
            draws = hash64(self._seed, _EVAL, users[rows, None], np.arange(self._asked)).ravel()
            free = (draws % (self._free[whose] - 1).astype(np.uint64)).astype(np.int32)
            free += free >= self._held_rank[whose]
            items = free + self._count(self._ranks, whose, free)
            found[rows, 1:] = items.reshape(-1, self._asked)
        return found

    def where(self, example: int) -> str:
        """What an example is, in the file's words."""
        data = self._data
        positive, place = divmod(example, self._group)
        user, item = self._users[positive], data.items[positive]
        said = f"user {data.user_ids[user]}, item {data.item_ids[item]}"
        return f"an item that was drawn beside {said}" if place else said

    def _count(self, values: np.ndarray, users: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """int32[k]: how many of each user's `values` (one per item to train on) are <= a bound.

        A bisection of all at once, in pieces that stay in the processor's cache: it takes a tenth
        of the time of np.searchsorted over the whole array.
        """
        found = np.empty(len(users), np.int32)
        for first in range(0, len(users), _PIECE):
            piece = slice(first, first + _PIECE)
            begins, ends = self._data.starts[users[piece]], self._data.starts[users[piece] + 1]
            places, most = begins.copy(), bounds[piece]
            step = 1 << int((ends - begins).max()).bit_length()
            while step := step >> 1:
                ahead = places + step
                inside = ahead <= ends
                inside &= values[np.minimum(ahead, ends) - 1] <= most
                places += step * inside
            found[piece] = places - begins
        return found
