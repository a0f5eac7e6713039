"""What a model should beat: popularity and an item-kNN, ranked by the protocol of the model.

The similarity is the cosine of two sets with shrinkage, shared / (sqrt(n_i) sqrt(n_j) + shrinkage),
as in RecBole's ItemKNN. Cremonesi et al. 2010 (10.1145/1864708.1864721, NNCosNgbr) rank by the
sum of the similarities of a user's items among the neighbours of each item, without a division.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse

from benchmarks.base import HostBatch
from benchmarks.ncf import ranking
from benchmarks.ncf.ratings import Interactions
from common import pools
from common.progress import Progress

LABELS = {"popularity": "popularity", "item_knn": "an item-kNN"}  # the baselines, in messages
# Near the best of ml-100k and ml-latest-small in two protocols; docs/ncf.md has measurements.
NEIGHBOURS, SHRINKAGE = 20, 5.0
_SCORES = 1 << 22  # f32 of users and items that are ranked at a time
_BLOCK = 1 << 23  # similarities, of 8 bytes each, that a thread holds before most are dropped


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """What `common.data.caches` keeps of the baselines."""

    values: np.ndarray  # float64[2, n]: n scores of each of `LABELS`


def choices(data: Interactions) -> Any:
    """csr f32[users, items]: 1 where a user trains on an item."""
    ones = np.ones(data.num_positives, np.float32)
    return sparse.csr_array((ones, data.items, data.starts), (data.num_users, data.num_items))


def neighbours(known: Any, others: Any, count: int, shrinkage: float) -> Any:
    """The most similar columns of `known` for each column of `others`, csr f32[m, n].

    Both are sparse f32[k, n] and f32[k, m] of zeros and ones; transposed, they compare rows. A row
    of the result has the similarities above 0 of at most `count` columns; of equally similar ones
    those with the smallest numbers. If both are the same object, no column is its own neighbour.
    Besides the result and copies of both, each core needs about 100 MB.
    """
    rows: Any = sparse.csr_array(others.T)
    columns: Any = sparse.csr_array(known)
    size, root = np.sqrt(rows.sum(axis=1)), np.sqrt(columns.sum(axis=0))
    total, step = rows.shape[0], max(1, _BLOCK // columns.shape[1])

    def block(first: int) -> Any:
        near = rows[first : first + step] @ columns
        for row, (begin, end) in enumerate(pairwise(near.indptr), first):
            index, values = near.indices[begin:end], near.data[begin:end]  # views
            values /= size[row] * root[index] + np.float32(shrinkage)
            if known is others:
                values[index == row] = 0
            if len(values) > count:
                least = np.partition(values, -count)[-count]
                equal = np.flatnonzero(values == least)
                equal = equal[np.argsort(index[equal])]
                values[equal[count - np.count_nonzero(values > least) :]] = 0
                values[values < least] = 0
        near.eliminate_zeros()
        return near

    progress, blocks = Progress(total), []
    with pools.Threads(pools.cores()) as pool:
        for near in pools.ordered(pool, block, range(0, total, step), 1 + pools.cores()):
            blocks.append(near)
            done = min(total, step * len(blocks))
            progress.at(done, f"looking for neighbours: {done:,} of {total:,}")
    return sparse.vstack(blocks, format="csr")


@jax.jit
def _rank(scores: jax.Array, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The outputs of `Ncf.predict` for scores f32[b, items] of a batch's users."""
    if "items" in batch:
        scores = jnp.take_along_axis(scores, batch["items"], 1)
        return ranking.sampled_ranking(scores, batch["items"])
    return jax.vmap(ranking.full_ranking)(scores, batch["chosen"], batch["relevant"])


def batch_size(data: Interactions) -> int:
    """How many users are ranked at a time."""
    return max(1, _SCORES // data.num_items)


def predictions(
    data: Interactions, batches: Iterable[HostBatch], total: int
) -> dict[str, list[dict[str, np.ndarray]]]:
    """The rows of `Ncf.predict` of each baseline, by its name.

    Args:
      data: the baselines know what it has to train on.
      batches: of an evaluation, all of `total` users.
    """
    matrix = choices(data)
    similar = sparse.csr_array(neighbours(matrix, matrix, NEIGHBOURS, SHRINKAGE).T)
    popularity = matrix.sum(axis=0)
    rows: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in LABELS}
    progress, done = Progress(total), 0

    def scored(batch: HostBatch) -> tuple[HostBatch, np.ndarray]:
        return batch, (matrix[batch["user"]] @ similar).toarray()

    with pools.Threads(pools.cores()) as pool:
        for batch, knn in pools.ordered(pool, scored, batches, 1 + pools.cores()):
            real = batch.pop("mask") > 0
            both = np.broadcast_to(popularity, knn.shape), knn
            for name, scores in zip(LABELS, both, strict=True):
                outputs = jax.device_get(_rank(scores, batch))
                rows[name].append({key: values[real] for key, values in outputs.items()})
            done += int(real.sum())
            progress.at(done, f"scoring popularity and item-kNN: {done:,} of {total:,} users")
    return rows
