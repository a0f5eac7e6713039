"""Makes batches of sentences to translate, sorted by length: a batch needs one of few shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ops import padding
from ops.decoding import Batch


def eval_batches(
    sentences: np.ndarray, sizes: Sequence[int], batch_size: int, shard: int, num_shards: int
) -> Iterator[Batch]:
    """Every sentence once over all shards: see `base.Benchmark.eval_batches`.

    Yields inputs int32[h, size], where `size` is the least of `sizes` that fits all of the global
    batch; id int32[h], the row of `sentences`; and mask float32[h].

    Args:
      sentences: int32[n, sizes[-1]] with zeros at the end.
      sizes: rising; the last one fits every sentence.
      batch_size: over all hosts.
      shard: which host this is.
      num_shards: how many hosts there are.
    """
    lengths = np.count_nonzero(sentences, axis=1)
    order = np.argsort(lengths, kind="stable")
    rows = batch_size // num_shards
    for begin in range(0, len(order), batch_size):
        batch = order[begin : begin + batch_size]
        size = next(size for size in sizes if size >= lengths[batch[-1]])
        mine = batch[shard * rows : (shard + 1) * rows]
        arrays = {"inputs": sentences[mine, :size], "id": mine.astype(np.int32)}
        yield padding.pad(arrays, len(mine), rows)
