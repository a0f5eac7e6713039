"""Selection without sorting against NumPy's sorts."""

import jax
import numpy as np
import pytest

from benchmarks.detection import selection

LARGEST = jax.jit(selection.largest)
TOP = jax.jit(selection.top_k, static_argnums=1)
COMPACT = jax.jit(selection.compact, static_argnums=1)


def numbers(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Rows >= 0: of all sizes, with many ties, or integers over the whole range."""
    if kind == "floats":
        return np.float32(10.0) ** rng.uniform(-40, 38, shape).astype(np.float32)
    if kind == "ties":
        return rng.integers(0, 4, shape).astype(np.float32) / 3
    return rng.integers(0, 2**31, shape, dtype=np.int64).astype(np.int32)


def mark(values: np.ndarray, eligible: np.ndarray, k: int) -> np.ndarray:
    """The k largest of one row, the first of equal ones, by a stable sort."""
    order = [i for i in np.argsort(-values.astype(np.float64), kind="stable") if eligible[i]]
    marks = np.zeros(len(values), bool)
    marks[order[: max(k, 0)]] = True
    return marks


@pytest.mark.parametrize("kind", ["floats", "ties", "integers"])
@pytest.mark.parametrize("n", [1, 7, 1000])
def test_the_largest_are_those_of_a_stable_sort(kind, n):
    rng = np.random.default_rng(n)
    values = numbers(rng, kind, (20, 15, n))
    eligible = rng.random((20, 15, n)) < rng.choice([0, 0.1, 0.9, 1], (20, 15, 1))
    k = rng.integers(-1, n + 3, (20, 15)).astype(np.int32)
    k[0] = rng.choice([0, n, 2**31 - 1], 15)
    marks = np.asarray(LARGEST(values, eligible, k))
    expected = [[mark(values[i, j], eligible[i, j], k[i, j]) for j in range(15)] for i in range(20)]
    np.testing.assert_array_equal(marks, expected)


def test_negative_zero_counts_as_zero_and_nan_as_the_largest():
    values = np.array([0.0, -0.0, 0.0, np.nan, np.inf, 1], np.float32)
    marks = [np.flatnonzero(LARGEST(values, np.ones(6, bool), k)).tolist() for k in range(7)]
    assert marks == [[], [3], [3, 4], [3, 4, 5], [0, 3, 4, 5], [0, 1, 3, 4, 5], list(range(6))]


@pytest.mark.parametrize(("n", "most"), [(1, 1), (5, 9), (300, 20), (300, 300)])
def test_marked_positions_come_first_in_their_order(n, most):
    rng = np.random.default_rng(n + most)
    marks = rng.random((50, n)) < rng.choice([0, 0.02, 0.5, 1], (50, 1))
    index, valid = map(np.asarray, COMPACT(marks, most))
    assert index.dtype == np.int32 and index.shape == valid.shape == (50, most)
    for i in range(50):
        expected = np.flatnonzero(marks[i])[:most].tolist()
        assert index[i].tolist() == expected + [0] * (most - len(expected))
        assert valid[i].tolist() == [k < len(expected) for k in range(most)]


@pytest.mark.parametrize("kind", ["floats", "ties", "both signs"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (600, 40), (1100, 600)])
def test_top_k_is_that_of_a_stable_sort(kind, n, k):
    rng = np.random.default_rng(n)
    x = numbers(rng, "ties" if kind == "ties" else "floats", (5, n))
    if kind == "both signs":
        x = np.where(rng.random(x.shape) < 0.5, -x, x)
        x[0, : n // 2], x[1, : n // 3] = 0.0, -np.inf
        x[0, : n // 4] = -0.0
    values, index = map(np.asarray, TOP(x, k))
    ordered = np.where((x == 0) & np.signbit(x), -1e-300, x.astype(np.float64))
    expected = np.argsort(-ordered, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(index, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, 1))
