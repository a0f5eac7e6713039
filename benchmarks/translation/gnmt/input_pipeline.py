"""Makes training batches of token ids from a corpus in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from benchmarks.base import HostBatch
from benchmarks.translation.gnmt.buckets import Buckets
from benchmarks.translation.gnmt.corpus import Corpus


def train_batches(
    corpus: Corpus, buckets: Buckets, shard: int, num_shards: int, start_step: int
) -> Iterator[HostBatch]:
    """Endless training batches: see `base.Benchmark.train_batches`.

    Yields inputs and targets, int32[h, size] with zeros behind, where `size` is that of the step's
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
