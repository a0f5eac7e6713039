"""Cuts an evaluation into batches of one shape, a share for each host."""

from __future__ import annotations

import numpy as np


def slices(total: int, batch_size: int, shard: int, num_shards: int) -> list[range]:
    """The examples in each of a host's batches; every host has the same number of batches.

    Hosts take consecutive shares of `total` examples. A host's last slices may be short or empty.
    """
    rows, batches = batch_size // num_shards, -(-total // batch_size)
    begin, end = shard * total // num_shards, (shard + 1) * total // num_shards
    starts = range(begin, begin + batches * rows, rows)
    return [range(min(start, end), min(start + rows, end)) for start in starts]


def mask(real: int, rows: int) -> np.ndarray:
    """float32[rows]: 1 for the `real` examples at the front, 0 for the others."""
    return (np.arange(rows) < real).astype(np.float32)


def pad(batch: dict[str, np.ndarray], real: int, rows: int) -> dict[str, np.ndarray]:
    """The arrays of `batch` with zeros appended up to `rows` rows, and their `mask`."""
    widths = {k: [(0, rows - len(v)), *[(0, 0)] * (v.ndim - 1)] for k, v in batch.items()}
    return {k: np.pad(v, widths[k]) for k, v in batch.items()} | {"mask": mask(real, rows)}
