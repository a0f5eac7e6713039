"""Pairs of sentences in memory, as token ids, and the batches of length buckets to train on.

The pairs of sentences of a step are a function of (seed, step). They have similar lengths, so that
one of few shapes holds them without much padding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.base import HostBatch
from common.data.order import hash64
from common.data.shards import Shards
from common.errors import DataError

_PAIRS, _BATCHES, _SEEDS = 21, 22, 23  # hashed with the seed, so that draws are independent
_PLANS = 2  # epochs in memory: two threads may be in two of them


class Sentences(NamedTuple):
    """Sentences as ids, EOS included, one after the other."""

    ids: np.ndarray  # [tokens], of the type of `id_type`
    lengths: np.ndarray  # int32[sentences]


def id_type(vocab_size: int) -> type[np.generic]:
    """The smallest of NumPy's integers, uint16 or int32, that holds all ids."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Pairs of sentences; side 0 is the sources, side 1 their translations."""

    paths: tuple[str, ...]  # the two files of text, or the files of records
    counts: tuple[int, ...]  # the records in each file; () for text
    ids: np.ndarray  # uint16 or int32[tokens], every sentence with EOS at its end
    lengths: np.ndarray  # int32[n, 2], tokens of each side, EOS included
    starts: np.ndarray  # int64[n, 2], where each sentence begins in `ids`
    # int64[n], the line or record of each pair, counted from 0 before any were left out. The pairs
    # of a packed row share its number.
    numbers: np.ndarray

    @classmethod
    def make(
        cls,
        paths: tuple[str, ...],
        counts: tuple[int, ...],
        numbers: np.ndarray,
        sides: tuple[Sentences, Sentences],
        longest: int | None,
    ) -> Corpus:
        """Joins both sides; keeps only the lengths of sentences of more than `longest` tokens."""
        lengths = np.stack([side.lengths for side in sides])
        is_kept = lengths <= (np.inf if longest is None else longest)
        ids = np.concatenate([side.ids for side in sides])
        sizes = np.where(is_kept, lengths, 0).ravel()
        starts = np.cumsum(sizes, dtype=np.int64) - sizes
        return cls(
            paths,
            counts,
            ids[np.repeat(is_kept.ravel(), lengths.ravel())],
            lengths.T.copy(),
            starts.reshape(2, -1).T.copy(),
            numbers,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(a.nbytes for a in (self.ids, self.lengths, self.starts, self.numbers))

    def rows(self, pairs: np.ndarray, side: int, size: int) -> np.ndarray:
        """int32[m, size]: one side of the `pairs`, int64[m], padded with zeros.

        No sentence has more than `size` tokens.
        """
        lengths = self.lengths[pairs, side]
        rows = np.zeros((len(pairs), size), np.int32)
        is_token = np.arange(size) < lengths[:, None]
        positions = self.starts[pairs, side][:, None] + np.arange(size)
        rows[is_token] = self.ids[positions[is_token]]
        return rows

    def describe(self, i: int) -> str:
        """The file and line or record of a pair, for messages; text names the source's file."""
        number = int(self.numbers[i])
        if self.counts:
            return Shards(self.paths, self.counts).where(number)
        return f"{self.paths[0]}, line {number + 1}"

    def take(self, pairs: np.ndarray) -> Corpus:
        """The `pairs`, int64[m], of the same `ids`."""
        arrays = {name: getattr(self, name)[pairs] for name in ("lengths", "starts", "numbers")}
        return dataclasses.replace(self, **arrays)


class Batch(NamedTuple):
    """One global batch; `size` is the length that all its sentences are padded to."""

    size: int
    pairs: np.ndarray  # int64[batch_size]
    seeds: np.ndarray  # int32[batch_size], of the pairs' dropout in this epoch


class Epoch(NamedTuple):
    """An epoch's batches: batch k has the pairs [k * batch_size, (k + 1) * batch_size)."""

    pairs: np.ndarray  # int64[n], shorter buckets first
    batches: np.ndarray  # int64[steps], the order in which the batches are used


@dataclasses.dataclass(frozen=True, eq=False)
class Buckets:
    """Batches of pairs of similar lengths, every pair at most once per epoch.

    An epoch puts the pairs in an order drawn from (seed, epoch) and fills the buckets in it. Pairs
    that do not fill a batch move up into the next larger bucket. What is left of the last bucket,
    fewer than `batch_size` pairs, is not used in this epoch. The batches come in an order drawn
    from (seed, epoch).
    """

    bounds: tuple[int, ...]  # the lengths of the buckets, rising
    bucket: np.ndarray  # int16[n], of each pair
    seed: int  # the run's seed
    batch_size: int  # over all hosts

    @classmethod
    def make(
        cls, lengths: np.ndarray, bounds: Sequence[int], seed: int, batch_size: int
    ) -> Buckets:
        """Puts each pair into the first bucket that holds it.

        `lengths` int[n] are of the longer side of each pair, at most the last of `bounds`.
        """
        if len(lengths) < batch_size:
            raise DataError(
                f"config.train_batch_size={batch_size}: there are only {len(lengths):,} pairs to "
                "train on; set a smaller one"
            )
        bucket = np.searchsorted(bounds, lengths).astype(np.int16)
        return cls(tuple(bounds), bucket, seed, batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in each epoch."""
        return len(self.bucket) // self.batch_size

    def batch(self, step: int) -> Batch:
        """The global batch of a step, counted from 0 over all epochs."""
        epoch, position = divmod(step, self.steps_per_epoch)
        plan = self._plan(epoch)
        begin = int(plan.batches[position]) * self.batch_size
        pairs = plan.pairs[begin : begin + self.batch_size]
        seeds = (hash64(self.seed, _SEEDS, epoch, pairs) >> np.uint64(33)).astype(np.int32)
        return Batch(self.bounds[self.bucket[pairs[-1]]], pairs, seeds)

    @functools.cached_property
    def _plan(self) -> Callable[[int], Epoch]:
        return functools.lru_cache(_PLANS)(self._draw)

    def _draw(self, epoch: int) -> Epoch:
        """Plans an epoch.

        All pairs lie in one sequence, sorted by bucket. Cutting it into batches moves leftovers
        up: a batch has the bucket of its last pair.
        """
        draws = hash64(self.seed, _PAIRS, epoch, np.arange(len(self.bucket)))
        shuffled = np.argsort(draws, kind="stable")
        pairs = shuffled[np.argsort(self.bucket[shuffled], kind="stable")]
        draws = hash64(self.seed, _BATCHES, epoch, np.arange(self.steps_per_epoch))
        return Epoch(pairs, np.argsort(draws, kind="stable"))


def bucket_batches(
    corpus: Corpus, buckets: Buckets, shard: int, num_shards: int, start_step: int
) -> Iterator[HostBatch]:
    """Endless training batches of a host.

    Yields inputs and targets, int32[h, size] padded with zeros, where `size` is the length of the
    step's bucket; dropout int32[h], the seed of the pair's dropout in this epoch; and id int32[h],
    the pair in the corpus. A host has a contiguous share of the global batch.
    """
    rows = buckets.batch_size // num_shards
    share = slice(shard * rows, (shard + 1) * rows)
    for step in itertools.count(start_step):
        size, pairs, seeds = buckets.batch(step)
        yield {
            "inputs": corpus.rows(pairs[share], 0, size),
            "targets": corpus.rows(pairs[share], 1, size),
            "dropout": seeds[share],
            "id": pairs[share].astype(np.int32),
        }
