"""What a model should beat: popularity and an item-kNN, ranked by the protocol of the model.

The similarity is the cosine of two sets with shrinkage, shared / (sqrt(n_i) sqrt(n_j) + shrinkage),
as in RecBole's ItemKNN. Cremonesi et al. 2010 (10.1145/1864708.1864721, section 3.1) rank by the
sum of the similarities of a user's items among the neighbours of each item, without a division.
"""

import os
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import sparse

from benchmarks.ncf.ratings import Interactions
from common import pools
from common.progress import Progress

# Near the best of ml-100k and ml-latest-small in three protocols; docs/ncf.md has measurements.
NEIGHBOURS, SHRINKAGE = 100, 10.0
_BLOCK = 1 << 23  # similarities, of 8 bytes each, that a thread holds before most are dropped


def choices(data: Interactions) -> Any:
    """csr f32[users, items]: 1 where a user trains on an item."""
    ones = np.ones(data.num_positives, np.float32)
    return sparse.csr_array((ones, data.items, data.starts), (data.num_users, data.num_items))


def neighbours(
    known: Any, others: Any, count: int = NEIGHBOURS, shrinkage: float = SHRINKAGE
) -> Any:
    """The most similar columns of `known` for each column of `others`, csr f32[m, n].

    Both are sparse f32[k, n] and f32[k, m] of zeros and ones; transposed, they compare rows. A row
    of the result has the similarities above 0 of at most `count` columns; of equally similar ones
    those with the smallest numbers. If both are the same object, no column is its own neighbour.
    Besides the result and copies of both, each core needs about 100 MB.
    """
    rows, columns = sparse.csr_array(others.T), sparse.csr_array(known)
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
    with pools.Threads(os.cpu_count()) as pool:
        for near in pools.ordered(pool, block, range(0, total, step), 1 + (os.cpu_count() or 1)):
            blocks.append(near)
            done = min(total, step * len(blocks))
            progress.at(done, f"looking for neighbours: {done:,} of {total:,}")
    return sparse.vstack(blocks, format="csr")
