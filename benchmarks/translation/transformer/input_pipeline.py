"""Makes batches of token ids from records; each host makes its share of a global batch.

A training row holds several sentences, see `benchmarks.translation.packing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.translation.records import Source
from ops.decoding import Batch, Reader
from ops.order import Order

_READ = 1024  # sentences that are read at a time


def train_batches(
    source: Source, order: Order, shard: int, num_shards: int, start_step: int
) -> Iterator[Batch]:
    """Endless training batches: see `base.Benchmark.train_batches`.

    Yields the six leaves of `packing.pack`, int32[h, length]; dropout int32[h], the seed
    of the row's dropout in this epoch; id int32[h]; and host_seconds float32[h].

    Raises:
      DataError: the streams cannot be shared by so many hosts, or a record cannot be used.
    """

    def decode(serialized: Any, seeds: Any) -> dict[str, Any]:
        return {**source.parse(serialized), "dropout": seeds[2]}

    reader = Reader(source.shards, [decode], source.check)
    return reader.train_batches(order, order.share(shard, num_shards), start_step)


def read_sides(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """The (inputs, targets) of all sentences in file order, int32[n, length] with zeros behind.

    Raises:
      DataError: a record cannot be used; the file and record are named.
    """
    reader = Reader(source.shards, [source.parse], source.check)
    batches = [
        [batch[side][batch["mask"] > 0] for side in ("inputs", "targets")]
        for batch in reader.eval_batches(_READ, 0, 1)
    ]
    inputs, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return inputs, targets
