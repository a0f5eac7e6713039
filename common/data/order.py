"""Computes the order of training examples from (seed, step), without any state to save.

A run that stops at any step continues with exactly the examples that it would have seen, on any
number of hosts that divides the number of streams. The examples are numbered in file order:

* The global batch consists of S streams of m = batch_size / S rows each, stream-major. A host
  takes a contiguous range of streams.
* In epoch e the files are put in an order drawn from (seed, e). Stream s takes positions
  [s*N/S, (s+1)*N/S) of that sequence, so that every example occurs once per epoch.
* A stream reads up to `interleaved` files in turn, a run of examples from each. When a file ends,
  the next one takes its place. Each file is read from its beginning to its end.
* A stream is cut into blocks of `block` examples, about one run from each file; within a block the
  order is drawn from (seed, e, example). Only one block is read again when a run resumes.
* With `repeats` r, each example fills r rows of a stream, with seeds of their own. The rows of a
  step that belong to the same example are kept apart: neighbours are different examples, unless
  a step has a single one of a block.

A benchmark with several pools of examples, such as Mask R-CNN, gives each an `Order`. A random
order of examples in memory is a `Permutation`.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from common.errors import DataError

_OPEN_FILES = 512  # that all streams together read in turn; each takes memory for its buffers
_INTERLEAVED = 16  # files that a stream reads in turn, at most
_ROUNDS = 6  # of `Permutation`


def hash64(*words: Any) -> np.ndarray:
    """Mixes integers or integer arrays (broadcast) into uint64: splitmix64's finaliser, chained.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. Written
    out because the order of a run must not change with a library's version.
    """
    mixed = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            z = (mixed ^ np.asarray(word).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = z ^ (z >> np.uint64(31))
    return mixed


def first_examples(counts: Sequence[int]) -> np.ndarray:
    """int64[files + 1]: the number of the first example of each file, then the total."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def cut(parts: np.ndarray, begin: int, end: int) -> np.ndarray:
    """The rows (file, skip, take, ...) of int64[n, 3 or more] for positions [begin, end)."""
    ends = np.cumsum(parts[:, 2])
    begins = ends - parts[:, 2]
    rows = parts.copy()
    rows[:, 1] += np.maximum(begin - begins, 0)
    rows[:, 2] = np.minimum(end, ends) - np.maximum(begin, begins)
    return rows[rows[:, 2] > 0]


def segments(counts: Sequence[int], files: np.ndarray, begin: int, end: int) -> np.ndarray:
    """int64[n, 3] rows (file, skip, take) for positions [begin, end) of `files` in their order."""
    sizes = np.asarray(counts, np.int64)[files]
    return cut(np.stack([files, np.zeros_like(sizes), sizes], axis=1), begin, end)


def interleave(parts: np.ndarray, slots: int, run: int) -> np.ndarray:
    """int64[m, 4] rows (file, skip, take, slot): segments int64[n, 3], `run` examples at a time.

    The slots take turns. Each reads one segment to its end, then the next segment that no slot has.
    """
    free, rows = [(0, slot) for slot in range(slots)], []  # the next turn of each slot
    for file, skip, take in parts.tolist():
        turn, slot = heapq.heappop(free)
        offsets = np.arange(0, take, run)
        turns = turn + np.arange(len(offsets))
        heapq.heappush(free, (turn + len(offsets), slot))
        columns = file, skip + offsets, np.minimum(run, take - offsets), slot, turns
        rows.append(np.stack(np.broadcast_arrays(*columns), axis=1))
    runs = np.concatenate(rows)
    return runs[np.lexsort((runs[:, 3], runs[:, 4])), :4]


def example_numbers(counts: Sequence[int], parts: np.ndarray) -> np.ndarray:
    """int64[k]: the examples in segments, in reading order."""
    first = first_examples(counts)
    runs = [np.arange(take) + first[file] + skip for file, skip, take in parts[:, :3]]
    return np.concatenate([np.zeros(0, np.int64), *runs])


class Block(NamedTuple):
    """Examples that are read together and used in another order."""

    reads: np.ndarray  # int64[n, 3], the segments of all its examples
    rows: np.ndarray  # int64[k], which of the records read, in training order
    ids: np.ndarray  # int64[k], the numbers of these examples
    seeds: np.ndarray  # int32[k, 3], for stateless augmentation


@dataclasses.dataclass(frozen=True)
class Order:
    """The training order of examples in files.

    `counts` are the examples in each file; a step takes `rows` rows from each stream, which
    reads up to `interleaved` files in turn. Each example fills `repeats` rows: repeated
    augmentation (Hoffer et al. 2019, arXiv:1901.09335). An epoch of the examples then is as many
    epochs of rows.
    """

    counts: tuple[int, ...]
    seed: int
    streams: int
    rows: int
    block: int
    interleaved: int = 1
    repeats: int = 1

    @classmethod
    def make(
        cls,
        counts: tuple[int, ...],
        seed: int,
        batch_size: int,
        max_streams: int,
        buffer: int,
        repeats: int = 1,
    ) -> Self:
        """Cuts the global batch into as many streams as divide both it and `max_streams`.

        `max_streams` is a multiple of every number of hosts that will ever share the run. All
        streams together hold `buffer` examples for shuffling. Each example fills `repeats` rows; a
        step has at least so many rows of a stream, if it can.
        """
        total, common = sum(counts), math.gcd(batch_size, max_streams)
        limit = min(common, total, max(1, batch_size // repeats))  # every stream holds an example
        streams = max(n for n in range(1, limit + 1) if common % n == 0)
        rows = batch_size // streams
        block = max(1, buffer // streams)
        files = min(_OPEN_FILES, len(counts)) // streams
        interleaved = max(1, min(_INTERLEAVED, files, block))
        return cls(counts, seed, streams, rows, block, interleaved, repeats)

    def share(self, shard: int, num_shards: int) -> range:
        """The streams of one host; DataError if so many hosts cannot share them."""
        if self.streams % num_shards:
            raise DataError(
                f"{self.streams} input streams cannot be shared by {num_shards} hosts: set "
                f"--config.input_streams to a multiple of the hosts that divides the batch"
            )
        share = self.streams // num_shards
        return range(shard * share, (shard + 1) * share)

    def bounds(self, stream: int) -> tuple[int, int]:
        """The (begin, end) of a stream's positions in an epoch."""
        total = sum(self.counts)
        return stream * total // self.streams, (stream + 1) * total // self.streams

    def files(self, epoch: int) -> np.ndarray:
        """The order of the files in an epoch."""
        number = np.arange(len(self.counts))
        return np.argsort(hash64(self.seed, 1, epoch, number), kind="stable")

    def runs(self, stream: int, epoch: int) -> np.ndarray:
        """int64[n, 4]: the rows of `interleave` for an epoch of a stream."""
        begin, end = self.bounds(stream)
        parts = segments(self.counts, self.files(epoch), begin, end)
        # As many slots as all remain busy to the end of the epoch, if the files are equally long.
        longest = int(parts[:, 2].max())
        files_per_slot = -(-(end - begin) // (longest * self.interleaved))
        slots = -(-(end - begin) // (longest * files_per_slot))
        return interleave(parts, slots, max(1, self.block // slots))

    def epochs(self, stream: int, position: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless plans to read an epoch of a stream each; begins with the block of row `position`.

        Yields int64[n, 4] rows (file, skip, take, slot), each file once, and int64[k]: the slot
        that the next record comes from.
        """
        begin, end = self.bounds(stream)
        epoch, offset = divmod(position // self.repeats, end - begin)
        offset -= offset % self.block
        while True:
            runs = cut(self.runs(stream, epoch), offset, end - begin)
            _, first, number = np.unique(runs[:, 0], return_index=True, return_inverse=True)
            files = runs[first]
            files[:, 2] = np.bincount(number, runs[:, 2])
            yield files[np.argsort(first)], np.repeat(runs[:, 3], runs[:, 2])
            epoch, offset = epoch + 1, 0

    def blocks(self, stream: int, position: int) -> Iterator[Block]:
        """Endless blocks of a stream, of which the first begins at row `position`."""
        begin, end = self.bounds(stream)
        epoch, offset = divmod(position // self.repeats, end - begin)
        offset -= offset % self.block
        first = (epoch * (end - begin) + offset) * self.repeats  # row of the block
        while True:
            runs = self.runs(stream, epoch)[:, :3]
            for low in range(offset, end - begin, self.block):
                reads = cut(runs, low, low + self.block)
                ids = example_numbers(self.counts, reads)
                rows = np.argsort(hash64(self.seed, 2, epoch, ids), kind="stable")
                examples, copies = self._repeated(first, len(rows))
                drop = max(0, position - first)
                rows, copies = rows[examples[drop:]], copies[drop:]
                draws = np.arange(3) + 3 * copies[:, None]
                draws = hash64(self.seed, 3, epoch, ids[rows][:, None], draws)
                yield Block(reads, rows, ids[rows], (draws >> np.uint64(33)).astype(np.int32))
                first += len(examples)
            epoch, offset = epoch + 1, 0

    def _repeated(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of a block's `count` examples its rows have, and which copy of it each row is.

        `first` is the number of the block's first row. A step has first copies before second ones.
        """
        number = np.arange(count * self.repeats)
        examples, copies = np.divmod(number, self.repeats)
        order = np.lexsort((examples, copies, (first + number) // self.rows))
        return examples[order], copies[order]

    def steps(self, streams: range, step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless (ids int64[n], seeds int32[n, 3]) of the streams' rows from a step on."""

        def rows(stream: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            ids, seeds = np.zeros(0, np.int64), np.zeros((0, 3), np.int32)
            for block in self.blocks(stream, step * self.rows):
                ids, seeds = np.append(ids, block.ids), np.append(seeds, block.seeds, axis=0)
                while len(ids) >= self.rows:
                    yield ids[: self.rows], seeds[: self.rows]
                    ids, seeds = ids[self.rows :], seeds[self.rows :]

        for parts in zip(*map(rows, streams), strict=True):
            ids, seeds = zip(*parts, strict=True)
            yield np.concatenate(ids), np.concatenate(seeds)

    def batch_ids(self, step: int) -> np.ndarray:
        """int64[streams * rows]: the examples of the global batch of a step."""
        return next(self.steps(range(self.streams), step))[0]

    def reads(self, streams: range, step: int) -> np.ndarray:
        """int64[n, 3]: the segments of the blocks that hold the streams' rows of a step."""
        parts = []
        for stream in streams:
            missing, blocks = self.rows, self.blocks(stream, step * self.rows)
            while missing > 0:
                block = next(blocks)
                parts.append(block.reads)
                missing -= len(block.ids)
        return np.concatenate(parts)


class Permutation:
    """A bijection of 0 .. size - 1 drawn from the integers `key`, without a list.

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
