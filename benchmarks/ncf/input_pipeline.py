"""NCF's batches with sampled negatives, as arithmetic: a function of (seed, step) alone.

Training examples are numbered. With n negatives per positive, example x belongs to positive
x // (n + 1): it is the positive itself if x % (n + 1) is 0, else a negative that is drawn for it.
An epoch has every example once, in an order that is a bijection drawn from (seed, epoch). Negatives
are drawn from (seed, epoch, x). So nothing is stored per epoch, any step is computed alone, and
each host computes only its rows.
"""

import concurrent.futures
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from benchmarks.base import HostBatch
from benchmarks.ncf.ratings import Interactions
from common import pools
from common.data import decoding
from common.data.order import Permutation, hash64

In = TypeVar("In")

_PIECE = 8192  # values looked up at a time
_TRAIN_PIECE = 65_536  # examples drawn at a time: short calls would contend for Python's lock
_ORDER, _TRAIN, _EVAL = 11, 12, 13  # hashed with the seed, so that draws are independent


class NegativeSampler:
    """Draws the batches of a run: positives, and for each some negatives (negative sampling).

    With 0 `eval_negatives` an evaluation has all items.
    """

    def __init__(self, data: Interactions, seed: int, train_negatives: int, eval_negatives: int):
        self._data, self._seed = data, seed
        self._per_positive, self._eval_negatives = 1 + train_negatives, eval_negatives
        self._users, counts = data.users, np.diff(data.starts)
        # For each positive: how many smaller items its user does not train on. These counts rise
        # within a user, so a bisection finds the n-th item that a user does not train on.
        gaps = data.items - (np.arange(len(data.items)) - data.starts[self._users])
        self._gaps = gaps.astype(np.int32)
        self._num_negatives = (data.num_items - counts).astype(np.int32)  # of each user

        @functools.lru_cache(2)  # a batch may lie in two epochs, and several threads draw batches
        def order(epoch: int) -> Permutation:
            return Permutation(self.epoch_size, seed, _ORDER, epoch)

        self._order = order

    @property
    def epoch_size(self) -> int:
        """Training examples in an epoch."""
        return self._data.num_positives * self._per_positive

    def host_bytes(self, split: str, share: int) -> tuple[int, int]:
        """About how many bytes a host needs for the index, and for the batches being drawn.

        `share` is the part of a batch that the host draws: training examples, or users.
        """
        arrays = (self._users, self._gaps, self._num_negatives)
        index = self._data.nbytes + sum(array.nbytes for array in arrays)
        if split == "train":
            batch = 100 * max(_TRAIN_PIECE, share)  # positions, hashes, bounds of the bisection
        elif self._eval_negatives:
            batch = 4 * share * (1 + self._eval_negatives)
        else:
            batch = 2 * share * self._data.num_items  # of both kinds, a byte for each item
        return index, (pools.cores() + 2) * batch

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        """Endless batches, of which a thread draws several at a time."""
        share = batch_size // num_shards
        steps = max(1, min(_TRAIN_PIECE, self.epoch_size) // share)
        rows = np.arange(steps)[:, None] * batch_size + shard * share + np.arange(share)

        def draw(step: int) -> HostBatch:
            return self.train(step * batch_size + rows.ravel())

        for piece in _in_order(draw, itertools.count(start_step, steps)):
            for first in range(0, rows.size, share):
                yield {name: values[first : first + share] for name, values in piece.items()}

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        """Every user who is ranked once, with the items to rank, or bits of those of the user."""
        ranked, share, data = self._data.evaluated, batch_size // num_shards, self._data

        def draw(rows: range) -> HostBatch:
            users = ranked[rows.start : rows.stop]
            if self._eval_negatives:
                batch = {"user": users, "items": self.candidates(users)}
            else:
                chosen = self._bits(users, data.starts, data.items)
                relevant = self._bits(users, data.held_starts, data.held_out)
                batch = {"user": users, "chosen": chosen, "relevant": relevant}
            return decoding.pad_batch(batch, len(rows), share)

        return _in_order(draw, decoding.eval_slices(len(ranked), batch_size, shard, num_shards))

    def _bits(self, users: np.ndarray, starts: np.ndarray, items: np.ndarray) -> np.ndarray:
        """uint8[k, ceil(items / 8)]: np.packbits of which items users int32[k] have."""
        has = np.zeros((len(users), self._data.num_items), np.bool_)
        for row, user in zip(has, users, strict=True):
            row[items[starts[user] : starts[user + 1]]] = True
        return np.packbits(has, axis=1)

    def examples(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(epochs, examples) int64[k] at rising positions int64[k] of a run."""
        epochs, offsets = np.divmod(positions, self.epoch_size)
        examples = np.empty_like(offsets)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            inside = slice(*np.searchsorted(epochs, [epoch, epoch + 1]))
            examples[inside] = self._order(epoch)(offsets[inside])
        return epochs, examples

    def train(self, positions: np.ndarray) -> HostBatch:
        """The training examples at rising positions int64[k] of a run, as arrays [k]."""
        begin = time.monotonic()
        epochs, examples = self.examples(positions)
        positives, number = np.divmod(examples, self._per_positive)
        users, items = self._users[positives], self._data.items[positives]
        negative = np.flatnonzero(number)
        draws = hash64(self._seed, _TRAIN, epochs[negative], examples[negative])
        items[negative] = self._draw_item(draws, users[negative], exclude_held_out=False)
        seconds = (time.monotonic() - begin) / len(positions)
        return {
            "user": users,
            "item": items,
            "label": number == 0,
            "id": examples.astype(np.int32),
            "host_seconds": np.full(len(positions), seconds, np.float32),
        }

    @functools.cached_property
    def _held_out_rank(self) -> np.ndarray:
        """int32[users]: the place of the held-out item among those that are not trained on."""
        held_out = self._data.held_out
        return held_out - self._count(self._data.items, np.arange(len(held_out)), held_out)

    def candidates(self, users: np.ndarray) -> np.ndarray:
        """int32[k, 1 + negatives]: the held-out item of users int32[k], then their negatives.

        It is leave-one-out evaluation. The negatives are drawn from (seed, user), with replacement,
        from the items that the user has not rated.
        """
        candidates = np.empty((len(users), 1 + self._eval_negatives), np.int32)
        candidates[:, 0] = self._data.held_out[users]
        piece = max(1, _PIECE // self._eval_negatives)
        for first in range(0, len(users), piece):
            rows = slice(first, first + piece)
            draws = hash64(self._seed, _EVAL, users[rows, None], np.arange(self._eval_negatives))
            owners = np.repeat(users[rows], self._eval_negatives)
            items = self._draw_item(draws.ravel(), owners, exclude_held_out=True)
            candidates[rows, 1:] = items.reshape(-1, self._eval_negatives)
        return candidates

    def _draw_item(
        self, draws: np.ndarray, users: np.ndarray, exclude_held_out: bool
    ) -> np.ndarray:
        """int32[k]: for random numbers uint64[k], an item that users int32[k] do not train on."""
        choices = self._num_negatives[users] - int(exclude_held_out)
        ranks = (draws % choices.astype(np.uint64)).astype(np.int32)
        if exclude_held_out:
            ranks += ranks >= self._held_out_rank[users]
        return ranks + self._count(self._gaps, users, ranks)

    def describe(self, example: int) -> str:
        """The user and the item of an example, with the ids of the file."""
        positive, number = divmod(example, self._per_positive)
        user = self._data.user_ids[self._users[positive]]
        item = self._data.item_ids[self._data.items[positive]]
        negative = "a negative drawn beside " if number else ""
        return f"{negative}user {user}, item {item}"

    def _count(self, values: np.ndarray, users: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """int32[k]: how many of each user's `values` (one per positive) are <= its bound.

        One bisection for all users at once, in pieces that stay in the processor's cache: it takes
        a tenth of the time of np.searchsorted over the complete array.
        """
        counts = np.empty(len(users), np.int32)
        for first in range(0, len(users), _PIECE):
            piece = slice(first, first + _PIECE)
            begins, ends = self._data.starts[users[piece]], self._data.starts[users[piece] + 1]
            positions, bound = begins.copy(), bounds[piece]
            step = 1 << int((ends - begins).max()).bit_length()
            while step := step >> 1:
                ahead = positions + step
                inside = ahead <= ends
                inside &= values[np.minimum(ahead, ends) - 1] <= bound
                positions += step * inside
            counts[piece] = positions - begins
        return counts


def _in_order(draw: Callable[[In], HostBatch], inputs: Iterable[In]) -> Iterator[HostBatch]:
    """The batches in order, drawn by a thread per core, a few ahead of the reader."""
    workers = pools.cores()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        yield from pools.ordered(pool, draw, inputs, workers + 2)
