"""Results in files: of a scan of each file, and arrays; made once, and again after a change."""

import dataclasses
import logging
import os

import numpy as np
import pytest

from common import progress
from common.data import caches
from common.errors import DataError
from common.progress import set_progress_listener


def never(path):
    raise AssertionError(f"{path} was read again")


def lengths(path):
    """A `scan` that can be checked without TensorFlow."""
    with open(path, "rb") as file:
        return {"count": len(file.read()), "names": {"3": "x"}}


@pytest.fixture
def counted(tmp_path):
    """Two files that were scanned, and where the results are."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    for i, path in enumerate(paths):
        with open(path, "wb") as file:
            file.write(b"." * (i + 1))
    cache = tmp_path / "made" / "when needed" / "train.json"
    expected = [{"count": i + 1, "names": {"3": "x"}} for i in range(2)]
    assert caches.scan_files(paths, lengths, str(cache), {"n": 7}) == expected
    return paths, cache, expected


def test_index_is_kept(counted):
    paths, cache, expected = counted
    assert caches.scan_files(paths, never, str(cache), {"n": 7}) == expected
    assert [file.name for file in cache.parent.iterdir()] == ["train.json"]


def test_index_of_other_files_sizes_or_settings_is_made_again(counted):
    paths, cache, expected = counted
    for some, settings in [(paths[:1], {"n": 7}), (paths[::-1], {"n": 7}), (paths, {"n": 8})]:
        with pytest.raises(AssertionError, match="was read again"):
            caches.scan_files(some, never, str(cache), settings)
    with open(paths[0], "ab") as file:
        file.write(b"....")
    changed = [{**expected[0], "count": 5}, expected[1]]
    for scan in (lengths, never):  # the new result takes the old one's place
        assert caches.scan_files(paths, scan, str(cache), {"n": 7}) == changed


@pytest.mark.parametrize(
    "damage",
    [lambda _, new=new: new for new in (b"", b"[]", b"\xff\xfe", b'{"results": []}')]
    + [
        lambda data: data.replace(b'"count": 2', b'"count": 1'),
        lambda data: data.replace(b'"names"', b'"naMes"', 1),
        lambda data: data.replace(b'"n": 7', b'"n": 8'),
        lambda data: data.replace(b'/b", 2', b'/b", 3'),
        lambda data: data.replace(b'"sha', b'"sHa'),
        lambda data: data[:-9],
    ],
)
def test_damaged_index_is_made_again(counted, damage, caplog):
    """A count that is taken from it would hide examples from training or evaluation."""
    paths, cache, expected = counted
    caplog.set_level(logging.INFO, "tpu_suite")
    changed = damage(cache.read_bytes())
    assert changed != cache.read_bytes()
    cache.write_bytes(changed)
    assert caches.scan_files(paths, lengths, str(cache), {"n": 7}) == expected
    assert [f"NOTE {cache} is damaged" in line for line in caplog.messages] == [True]
    assert caches.scan_files(paths, never, str(cache), {"n": 7}) == expected
    assert len(caplog.messages) == 1


def test_index_keeps_nothing_of_a_failed_scan(counted, tmp_path):
    paths, cache, _ = counted
    other = tmp_path / "other.json"

    def scan(path):
        raise DataError(f"{path} has a fault")

    with pytest.raises(DataError, match="/a has a fault"):
        caches.scan_files(paths, scan, str(other), {})
    assert not other.exists() and cache.exists()


def test_counting_reports_its_progress(counted, monkeypatch):
    paths, cache, _ = counted
    texts = []
    monkeypatch.setattr(progress, "_listener", None)
    set_progress_listener(texts.append)
    caches.scan_files(paths, lengths, str(cache), {"n": 9})
    looking, reading, *counts, writing = texts
    assert f"2 files, {paths[0]} first" in looking
    assert all(str(cache) in text for text in (reading, writing))
    assert [text.split(": ")[1] for text in counts] == [f"{n} of 2 files" for n in range(3)]


# --- Arrays.


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
