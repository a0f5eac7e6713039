"""Makes training batches: which pairs of sentences a step has is a function of (seed, step).

The pairs of a step have similar lengths, so that one of few shapes holds them without much padding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.base import HostBatch
from benchmarks.translation.gnmt.corpus import Corpus
from errors import DataError
from ops.order import hash64

_PAIRS, _BATCHES, _SEEDS = 21, 22, 23  # hashed with the seed, so that draws are independent
_PLANS = 2  # epochs in memory: two threads may be in two of them


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

    An epoch puts the pairs in an order drawn from (seed, epoch) and fills the buckets in it. What
    does not fill a batch moves up into the next larger bucket. What is left of the last one, fewer
    than `batch_size` pairs, is not used in this epoch. The batches come in an order drawn from
    (seed, epoch).

    Attributes:
      bounds: the lengths of the buckets, rising.
      which: int16[n], the bucket of each pair.
      seed: of the run.
      batch_size: over all hosts.
    """

    bounds: tuple[int, ...]
    which: np.ndarray
    seed: int
    batch_size: int

    @classmethod
    def make(
        cls, lengths: np.ndarray, bounds: Sequence[int], seed: int, batch_size: int
    ) -> Buckets:
        """Puts each pair into the first bucket that holds it.

        Args:
          lengths: int[n], of the longer side of each pair; at most the last of `bounds`.
          bounds: rising.
          seed: of the run.
          batch_size: over all hosts.

        Raises:
          DataError: there are fewer pairs than a batch has.
        """
        if len(lengths) < batch_size:
            raise DataError(
                f"config.train_batch_size={batch_size}: there are only {len(lengths):,} pairs to "
                "train on; set a smaller one"
            )
        which = np.searchsorted(bounds, lengths).astype(np.int16)
        if which.max() >= len(bounds):
            raise ValueError(f"a pair of {lengths.max()} tokens, buckets up to {bounds[-1]}")
        return cls(tuple(bounds), which, seed, batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in each epoch."""
        return len(self.which) // self.batch_size

    def batch(self, step: int) -> Batch:
        """The global batch of a step, counted from 0 over all epochs."""
        epoch, position = divmod(step, self.steps_per_epoch)
        plan = self._plan(epoch)
        begin = int(plan.batches[position]) * self.batch_size
        pairs = plan.pairs[begin : begin + self.batch_size]
        seeds = (hash64(self.seed, _SEEDS, epoch, pairs) >> np.uint64(33)).astype(np.int32)
        return Batch(self.bounds[self.which[pairs[-1]]], pairs, seeds)

    @functools.cached_property
    def _plan(self) -> Callable[[int], Epoch]:
        return functools.lru_cache(_PLANS)(self._draw)

    def _draw(self, epoch: int) -> Epoch:
        """Plans an epoch.

        All pairs lie in one sequence, sorted by bucket. Cutting it into batches moves leftovers
        up: the bucket of a batch is that of its last pair.
        """
        draws = hash64(self.seed, _PAIRS, epoch, np.arange(len(self.which)))
        shuffled = np.argsort(draws, kind="stable")
        pairs = shuffled[np.argsort(self.which[shuffled], kind="stable")]
        draws = hash64(self.seed, _BATCHES, epoch, np.arange(self.steps_per_epoch))
        return Epoch(pairs, np.argsort(draws, kind="stable"))


def train_batches(
    corpus: Corpus, buckets: Buckets, shard: int, num_shards: int, start_step: int
) -> Iterator[HostBatch]:
    """Endless training batches: see `base.Benchmark.train_batches`.

    Yields inputs and targets, int32[h, size] padded with zeros, where `size` is that of the step's
    bucket; dropout int32[h], the seed of the pair's dropout in this epoch; and id int32[h], the
    pair in the corpus. A host has a contiguous share of the global batch.
    """
    rows = buckets.batch_size // num_shards
    mine = slice(shard * rows, (shard + 1) * rows)
    for step in itertools.count(start_step):
        size, pairs, seeds = buckets.batch(step)
        yield {
            "inputs": corpus.rows(pairs[mine], 0, size),
            "targets": corpus.rows(pairs[mine], 1, size),
            "dropout": seeds[mine],
            "id": pairs[mine].astype(np.int32),
        }
