"""Computes the order of training examples from (seed, step), without any state to save.

A run that stops at any step continues with exactly the examples that it would have seen, on any
number of hosts that divides the number of streams. The examples are numbered in file order:

* The global batch consists of S streams of m = batch_size / S rows each, stream-major. A host
  takes a contiguous range of streams.
* In epoch e the files are put in an order drawn from (seed, e). Stream s takes positions
  [s*N/S, (s+1)*N/S) of that sequence, so that every example occurs once per epoch.
* A stream is cut into blocks of `block` examples; within a block the order is drawn from
  (seed, e, example). Only one block is read again when a run resumes.

A benchmark with several pools of examples, such as buckets of text lengths, gives each pool an
`Order` and deals the steps of an epoch to the pools by an `ops.permutation.Permutation` of (seed,
epoch). The step of a pool is the number of earlier steps that it was dealt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from errors import DataError


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


def starts(counts: Sequence[int]) -> np.ndarray:
    """int64[files + 1]: the number of the first example of each file, then the total."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def segments(counts: Sequence[int], files: np.ndarray, begin: int, end: int) -> np.ndarray:
    """int64[n, 3] rows (file, skip, take) for positions [begin, end) of `files` in their order."""
    sizes = np.asarray(counts, np.int64)[files]
    ends = np.cumsum(sizes)
    skip = np.maximum(begin - (ends - sizes), 0)
    take = np.minimum(end, ends) - (ends - sizes) - skip
    return np.stack([files, skip, take], axis=1)[take > 0]


def numbers(counts: Sequence[int], parts: np.ndarray) -> np.ndarray:
    """int64[k]: the examples in segments, in reading order."""
    first = starts(counts)
    runs = [np.arange(take) + first[file] + skip for file, skip, take in parts]
    return np.concatenate([np.zeros(0, np.int64), *runs])


class Block(NamedTuple):
    """Examples that are read together and used in another order."""

    reads: np.ndarray  # int64[n, 3], the segments of the whole block
    rows: np.ndarray  # int64[k], which of the records read, in training order
    ids: np.ndarray  # int64[k], the numbers of these examples
    seeds: np.ndarray  # int32[k, 3], for stateless augmentation


@dataclasses.dataclass(frozen=True)
class Order:
    """The training order of examples in files: see the module's docstring.

    `counts` are the examples in each file; a step takes `rows` examples from each stream. With
    `fixed` a stream has the same examples in every epoch.
    """

    counts: tuple[int, ...]
    seed: int
    streams: int
    rows: int
    block: int
    fixed: bool = False

    @classmethod
    def make(
        cls,
        counts: tuple[int, ...],
        seed: int,
        batch_size: int,
        max_streams: int,
        buffer: int | None,
    ) -> Order:
        """Cuts the global batch into as many streams as divide both it and `max_streams`.

        Args:
          max_streams: a multiple of every number of hosts that will ever share the run.
          buffer: examples that all streams together hold for shuffling. None: each stream
            holds all of its examples, which are then the same in every epoch.
        """
        total, common = sum(counts), math.gcd(batch_size, max_streams)
        most = min(common, total)  # every stream holds an example
        streams = max(n for n in range(1, most + 1) if common % n == 0)
        block = -(-total // streams) if buffer is None else max(1, buffer // streams)
        return cls(counts, seed, streams, batch_size // streams, block, buffer is None)

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
        number, epoch = np.arange(len(self.counts)), 0 if self.fixed else epoch
        return np.argsort(hash64(self.seed, 1, epoch, number), kind="stable")

    def epochs(self, stream: int, position: int) -> Iterator[np.ndarray]:
        """Endless segments, an array for each epoch of a stream; begins with `position`'s block."""
        begin, end = self.bounds(stream)
        epoch, offset = divmod(position, end - begin)
        offset -= offset % self.block
        while True:
            yield segments(self.counts, self.files(epoch), begin + offset, end)
            epoch, offset = epoch + 1, 0

    def blocks(self, stream: int, position: int) -> Iterator[Block]:
        """Endless blocks of a stream, of which the first begins at `position`."""
        begin, end = self.bounds(stream)
        epoch, offset = divmod(position, end - begin)
        drop = offset % self.block
        while True:
            files = self.files(epoch)
            for low in range(begin + offset - drop, end, self.block):
                reads = segments(self.counts, files, low, min(low + self.block, end))
                ids = numbers(self.counts, reads)
                rows = np.argsort(hash64(self.seed, 2, epoch, ids), kind="stable")[drop:]
                draws = hash64(self.seed, 3, epoch, ids[rows][:, None], np.arange(3))
                yield Block(reads, rows, ids[rows], (draws >> np.uint64(33)).astype(np.int32))
                drop = 0
            epoch, offset = epoch + 1, 0

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
        """int64[n, 3]: segments of the whole blocks that hold the streams' rows of a step."""
        parts = []
        for stream in streams:
            missing, blocks = self.rows, self.blocks(stream, step * self.rows)
            while missing > 0:
                block = next(blocks)
                parts.append(block.reads)
                missing -= len(block.ids)
        return np.concatenate(parts)
