"""Popularity and item-kNN against plain loops, and where a run says that they are better."""

import numpy as np
import pytest
from scipy import sparse

from benchmarks.ncf import baselines


def plain_neighbours(known, others, count, shrinkage):
    """float64[m, n] of dense matrices, pair by pair; of equal ones the first stay."""
    near = np.zeros((others.shape[1], known.shape[1]))
    for a in range(others.shape[1]):
        for b in range(known.shape[1]):
            if known is others and a == b:
                continue
            shared = sum(x and y for x, y in zip(others[:, a], known[:, b], strict=True))
            sizes = others[:, a].sum() ** 0.5 * known[:, b].sum() ** 0.5
            near[a, b] = shared / (sizes + shrinkage) if shared else 0
        kept = sorted(range(known.shape[1]), key=lambda b: (-near[a, b].round(6), b))[:count]
        near[a, [b for b in range(known.shape[1]) if b not in kept]] = 0
    return near


@pytest.mark.parametrize(("count", "shrinkage"), [(1, 0), (4, 10), (100, 2.5)])
@pytest.mark.parametrize("block", [1, 40, 10_000])  # similarities at a time
def test_neighbours_are_those_of_plain_loops(count, shrinkage, block, monkeypatch):
    monkeypatch.setattr(baselines, "_BLOCK", block)
    draw = np.random.default_rng(0)
    known = (draw.random((12, 17)) < 0.3).astype(np.float32)
    known[:, 3] = 0  # a column that nobody has
    others = (draw.random((12, 5)) < 0.4).astype(np.float32)
    of_known = sparse.csr_array(known)
    own = baselines.neighbours(of_known, of_known, count, shrinkage)
    np.testing.assert_allclose(
        own.toarray(), plain_neighbours(known, known, count, shrinkage), rtol=1e-6
    )
    foreign = baselines.neighbours(of_known, sparse.csr_array(others), count, shrinkage)
    np.testing.assert_allclose(
        foreign.toarray(), plain_neighbours(known, others, count, shrinkage), rtol=1e-6
    )
    assert foreign.dtype == np.float32 and np.diff(own.indptr).max() <= count


def test_rows_are_compared_when_both_are_transposed():
    """The nearest users of two new ones: of {0, 1} and {4}, among {0, 1}, {1, 2} and {3}."""
    known = sparse.csr_array(np.float32([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0]]))
    new = sparse.csr_array(np.float32([[1, 1, 0, 0, 0], [0, 0, 0, 0, 1]]))
    near = baselines.neighbours(known.T, new.T, count=2, shrinkage=0)
    np.testing.assert_allclose(near.toarray(), [[1, 0.5, 0], [0, 0, 0]], rtol=1e-6)
