"""Deals the steps of a run to pools of images: those that are higher than wide, and the others.

Each pool has its `Order`, so a step has examples of one pool. Steps are dealt in rounds
of about an epoch. A round gives every pool steps in proportion to its size, and what is left of a
step is carried to the next round; the order within a round is drawn from (seed, round). The pool of
a step is therefore a function of (seed, step), and no state is saved.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from benchmarks.detection.records import Source, marked_shards
from benchmarks.detection.settings import Data
from common.data.order import Order, Permutation, hash64
from common.data.shards import Shards


@dataclasses.dataclass(frozen=True)
class Pools:
    """The images of a split in pools; the second pool's are numbered after the first pool's."""

    sources: tuple[Source, ...]

    @classmethod
    def by_orientation(cls, source: Source) -> "Pools":
        """The images that are at least as wide as high, then the others."""
        upright = np.array(source.upright, bool)
        return cls((_part(source, ~upright), _part(source, upright)))

    @functools.cached_property
    def shards(self) -> Shards:
        """The files of the pools, one pool's after the other's."""
        parts = [source.shards for source in self.sources]
        columns = ((part.paths, part.counts, part.left_out) for part in parts)
        return Shards(*(sum(column, ()) for column in zip(*columns, strict=True)))

    @property
    def image_ids(self) -> tuple[int, ...]:
        """The ids of the images to evaluate in the annotations; () to train."""
        return sum((source.image_ids for source in self.sources), ())


def _part(source: Source, chosen: np.ndarray) -> Source:
    """Some images of a source, chosen bool[n]."""
    shards, examples = source.shards, []
    for file, of_file in enumerate(np.split(chosen, np.cumsum(shards.counts)[:-1])):
        left_out = shards.left_out[file]
        records = np.zeros(len(of_file) + len(left_out), bool)
        records[np.delete(np.arange(len(records)), left_out)] = of_file
        examples.append(records)
    ids = tuple(np.array(source.image_ids)[chosen].tolist()) if source.image_ids else ()
    return Source(marked_shards(shards.paths, examples), source.category_ids, ids)


@dataclasses.dataclass(frozen=True)
class Mix:
    """The training order of examples in one or two pools.

    The examples of the second pool are numbered after the first pool's. One pool may be empty.
    """

    counts: tuple[tuple[int, ...], ...]  # by pool, the examples in each file
    seed: int
    batch_size: int  # a step has examples of one pool
    max_streams: int  # a multiple of every number of hosts that will ever share the run
    buffer: int  # examples that all streams together hold for shuffling; the pools share it

    @classmethod
    def make(cls, pools: Pools, keys: Data, batch_size: int) -> "Mix":
        """The order of the images in pools."""
        counts = tuple(source.shards.counts for source in pools.sources)
        return cls(counts, keys.seed, batch_size, keys.input_streams, keys.shuffle_buffer_size)

    @functools.cached_property
    def totals(self) -> np.ndarray:
        """int64[pools]: the examples of each."""
        return np.array([sum(counts) for counts in self.counts], np.int64)

    @functools.cached_property
    def first(self) -> np.ndarray:
        """int64[pools]: the number of the first example of each."""
        return np.cumsum(self.totals) - self.totals

    @functools.cached_property
    def copies(self) -> tuple[int, ...]:
        """How often the order of each pool lists its files; 0 for an empty pool.

        More than once if the pool has fewer examples than the batch has streams: hosts share
        streams, and each of these must hold an example.
        """
        streams = math.gcd(self.batch_size, self.max_streams)
        return tuple(-(-streams // total) if total else 0 for total in self.totals.tolist())

    @functools.cached_property
    def orders(self) -> dict[int, Order]:
        """The order of each pool that has examples, by its number."""
        orders = {}
        for pool, copies in enumerate(self.copies):
            if copies:
                share = self.buffer * int(self.totals[pool]) // int(self.totals.sum())
                orders[pool] = Order.make(
                    self.counts[pool] * copies,
                    # The first pool has the order that it would have alone.
                    int(hash64(self.seed, 4, pool) >> np.uint64(32)) if pool else self.seed,
                    self.batch_size,
                    self.max_streams,
                    share,
                )
        return orders

    def numbers(self, pool: int, ids: np.ndarray) -> np.ndarray:
        """The numbers of examples among all pools, from those in a pool's order; of their type."""
        return (self.first[pool] + ids % self.totals[pool]).astype(ids.dtype)

    def steps(self, start: int) -> Iterator[tuple[int, int]]:
        """Endless (pool, step of this pool) of the steps from `start` on."""
        number, position = divmod(start, self._round)
        while True:
            before, pools = self._dealt(number), self._pools(number)
            for k in range(position, self._round):
                pool = pools[k]
                yield int(pool), int(before[pool] + np.count_nonzero(pools[:k] == pool))
            number, position = number + 1, 0

    def batch_ids(self, step: int) -> np.ndarray:
        """int64[batch_size]: the examples of the global batch of a step, among all pools."""
        pool, of_pool = next(self.steps(step))
        return self.numbers(pool, self.orders[pool].batch_ids(of_pool))

    @functools.cached_property
    def _round(self) -> int:
        """The steps of a round."""
        return max(1, round(int(self.totals.sum()) / self.batch_size))

    def _dealt(self, rounds: int) -> np.ndarray:
        """int64[pools]: how many steps of the first rounds each pool is dealt."""
        steps = rounds * self._round
        ends = [steps * int(end) // int(self.totals.sum()) for end in np.cumsum(self.totals)]
        return np.diff(ends, prepend=0)

    def _pools(self, number: int) -> np.ndarray:
        """int64[steps]: the pool of each step of a round."""
        steps = self._dealt(number + 1) - self._dealt(number)
        in_order = np.repeat(np.arange(len(steps)), steps)
        return in_order[Permutation(self._round, self.seed, 5, number)(np.arange(self._round))]
