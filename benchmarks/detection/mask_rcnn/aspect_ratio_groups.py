"""Batches by aspect ratio: deals the steps of a run to upright images and to the others.

Each group has its `Order`, so a step has examples of one group. Steps are dealt in rounds
of about an epoch. A round gives every group steps in proportion to its size, and what is left of a
step is carried to the next round; the order within a round is drawn from (seed, round). The group
of a step is therefore a function of (seed, step), and no state is saved.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from benchmarks.detection.records import Source
from benchmarks.detection.settings import Data
from common.data.order import Order, Permutation, hash64
from common.data.shards import Shards


@dataclasses.dataclass(frozen=True)
class AspectRatioGroups:
    """The images of a split in groups; the second group's are numbered after the first group's."""

    sources: tuple[Source, ...]

    @classmethod
    def by_orientation(cls, source: Source) -> "AspectRatioGroups":
        """The images that are at least as wide as high, then the others."""
        upright = np.array(source.upright, bool)
        return cls((_part(source, ~upright), _part(source, upright)))

    @property
    def shards(self) -> Shards:
        """The files of the groups, one group's after the other's."""
        parts = [source.shards for source in self.sources]
        columns = ((part.paths, part.counts, part.left_out) for part in parts)
        return Shards(*(sum(column, ()) for column in zip(*columns, strict=True)))

    def only(self, kept: np.ndarray) -> "AspectRatioGroups":
        """The groups with only the images of `kept`, bool[n], in the order of `shards`."""
        ends = np.cumsum([source.shards.total for source in self.sources])[:-1]
        parts = zip(self.sources, np.split(kept, ends), strict=True)
        return AspectRatioGroups(tuple(_part(source, of_group) for source, of_group in parts))

    @property
    def image_ids(self) -> tuple[int, ...]:
        """The ids of the images to evaluate in the annotations; () to train."""
        return sum((source.image_ids for source in self.sources), ())


def _part(source: Source, chosen: np.ndarray) -> Source:
    """Some images of a source, chosen bool[n]."""
    ids = tuple(np.array(source.image_ids)[chosen].tolist()) if source.image_ids else ()
    return Source(source.shards.only(chosen), source.category_ids, ids)


@dataclasses.dataclass(frozen=True)
class GroupedOrder:
    """The training order of examples in one or two groups.

    The examples of the second group are numbered after the first group's. One group may be empty.
    """

    counts: tuple[tuple[int, ...], ...]  # by group, the examples in each file
    seed: int
    batch_size: int  # a step has examples of one group
    max_streams: int  # a multiple of every number of hosts that will ever share the run
    buffer: int  # examples that all streams together hold for shuffling; the groups share it

    @classmethod
    def make(cls, groups: AspectRatioGroups, keys: Data, batch_size: int) -> "GroupedOrder":
        """The order of the images in groups."""
        counts = tuple(source.shards.counts for source in groups.sources)
        return cls(counts, keys.seed, batch_size, keys.input_streams, keys.shuffle_buffer_size)

    @functools.cached_property
    def totals(self) -> np.ndarray:
        """int64[groups]: the examples of each."""
        return np.array([sum(counts) for counts in self.counts], np.int64)

    @functools.cached_property
    def first(self) -> np.ndarray:
        """int64[groups]: the number of the first example of each."""
        return np.cumsum(self.totals) - self.totals

    @functools.cached_property
    def copies(self) -> tuple[int, ...]:
        """How often the order of each group lists its files; 0 for an empty group.

        More than once if the group has fewer examples than the batch has streams: hosts share
        streams, and each of these must hold an example.
        """
        streams = math.gcd(self.batch_size, self.max_streams)
        return tuple(-(-streams // total) if total else 0 for total in self.totals.tolist())

    @functools.cached_property
    def orders(self) -> dict[int, Order]:
        """The order of each group that has examples, by its number."""
        orders = {}
        for group, copies in enumerate(self.copies):
            if copies:
                share = self.buffer * int(self.totals[group]) // int(self.totals.sum())
                orders[group] = Order.make(
                    self.counts[group] * copies,
                    # The first group has the order that it would have alone.
                    int(hash64(self.seed, 4, group) >> np.uint64(32)) if group else self.seed,
                    self.batch_size,
                    self.max_streams,
                    share,
                )
        return orders

    def numbers(self, group: int, ids: np.ndarray) -> np.ndarray:
        """The numbers of a group's examples among those of all groups; of the same type."""
        return (self.first[group] + ids % self.totals[group]).astype(ids.dtype)

    def steps(self, start: int) -> Iterator[tuple[int, int]]:
        """Endless (group, step of this group) of the steps from `start` on."""
        number, position = divmod(start, self._round)
        while True:
            before, groups = self._dealt(number), self._groups(number)
            for k in range(position, self._round):
                group = groups[k]
                yield int(group), int(before[group] + np.count_nonzero(groups[:k] == group))
            number, position = number + 1, 0

    def batch_ids(self, step: int) -> np.ndarray:
        """int64[batch_size]: the examples of the global batch of a step, among all groups."""
        group, of_group = next(self.steps(step))
        return self.numbers(group, self.orders[group].batch_ids(of_group))

    @functools.cached_property
    def _round(self) -> int:
        """The steps of a round."""
        return max(1, round(int(self.totals.sum()) / self.batch_size))

    def _dealt(self, rounds: int) -> np.ndarray:
        """int64[groups]: how many steps of the first rounds each group is dealt."""
        steps = rounds * self._round
        ends = [steps * int(end) // int(self.totals.sum()) for end in np.cumsum(self.totals)]
        return np.diff(ends, prepend=0)

    def _groups(self, number: int) -> np.ndarray:
        """int64[steps]: the group of each step of a round."""
        steps = self._dealt(number + 1) - self._dealt(number)
        in_order = np.repeat(np.arange(len(steps)), steps)
        return in_order[Permutation(self._round, self.seed, 5, number)(np.arange(self._round))]
