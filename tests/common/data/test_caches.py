"""Arrays in a file: they are computed once, and again for another key or after damage."""

import dataclasses
import os

import numpy as np
import pytest

from common.data import caches


@dataclasses.dataclass
class Arrays:
    a: np.ndarray
    b: np.ndarray


@pytest.fixture
def cached(tmp_path):
    """(key -> how often the arrays were computed so far, the file of the cache)."""
    path, calls = tmp_path / "folder" / "cache", []

    def compute():
        calls.append(len(calls))
        return Arrays(np.arange(999, dtype=np.uint16), np.ones((2, 2)))

    def cached(key, file=str(path)):
        result = caches.cached_arrays(Arrays, file, key, compute)
        np.testing.assert_array_equal(result.a, np.arange(999))
        np.testing.assert_array_equal(result.b, np.ones((2, 2)))
        assert (result.a.dtype, result.b.dtype) == (np.uint16, np.float64)
        return len(calls)

    return cached, path


def test_arrays_are_computed_once(cached):
    call, path = cached
    assert [call(key) for key in ("1", "1", "2", "2", "1")] == [1, 1, 2, 2, 3]
    assert os.listdir(path.parent) == ["cache"]
    assert [call("1", "") for _ in range(2)] == [4, 5]


@pytest.mark.parametrize("damage", ["cut", "flipped bit", "empty", "no zip", "an array less"])
def test_a_damaged_file_is_replaced(damage, cached):
    call, path = cached
    call("1")
    content, middle = path.read_bytes(), path.stat().st_size // 2
    if damage == "an array less":
        arrays = dict(np.load(path))
        del arrays["b"]
        with path.open("wb") as file:
            np.savez(file, **arrays)
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        damaged = {"cut": content[:-30], "flipped bit": flipped, "empty": b""}
        path.write_bytes({**damaged, "no zip": b"{}\n" + bytes(1000)}[damage])
    assert [call("1"), call("1")] == [2, 2]
