"""Shards of text: how full their rows are, and processes that are killed."""

import dataclasses
import hashlib
import os

import numpy as np
import pytest

from benchmarks.translation.preparation import shards
from common.errors import UserError
from tests.benchmarks.translation.preparation.test_packing import wmt_like

LENGTH = 256
# Of the seed 7: which of three shards get the pairs 0, 1, 2 and so on, and 3072, 3073, 3074.
FIRST = [[0, 2, 1], [1, 0, 2], [0, 1, 2], [0, 1, 2]]
LATER = [[0, 1, 2], [2, 0, 1], [1, 2, 0]]
SUMS = ["0175f0e2", "b18986dc", "352be31a"]  # of (seed, shard): (0, 0), (0, 1), (1, 0)


def spooled(folder, pairs):
    """The job of the only shard of these pairs of ids."""
    spool = shards.Spool(str(folder), 1, 0, [0])
    for pair in pairs:
        spool.add(*(shards.as_bytes(np.array(ids)) for ids in pair))
    spool.flush()
    return shards.Job(spool.path(0), "", LENGTH, 80, 0, 0)


def test_rows_are_as_full_as_promised(tmp_path):
    pairs = wmt_like(12_000)
    result = shards.make(spooled(tmp_path, pairs))
    assert result["pairs"] == len(pairs) and result["long"] == 0
    assert result["tokens"] == [sum(len(pair[side]) for pair in pairs) for side in (0, 1)]
    shares = [tokens / (result["examples"] * LENGTH) for tokens in result["tokens"]]
    assert sum(shares) / 2 >= 0.97 and max(shares) >= 0.98


def test_each_shard_gets_one_of_as_many_consecutive_pairs(tmp_path):
    """In an order that is drawn anew, also after 1,024 times as many pairs."""
    spool = shards.Spool(str(tmp_path), 3, 7, [0, 1, 2])
    for number in range(3 * 1024 + 30):
        spool.add(b"%d" % number, b"")
    spool.flush()
    owner = np.full(3 * 1024 + 30, -1)
    for shard in range(3):
        for source, target in shards.read(spool.path(shard)):
            assert owner[int(source)] == -1 and target == b""
            owner[int(source)] = shard
    groups = owner.reshape(-1, 3)
    assert (np.sort(groups, 1) == [0, 1, 2]).all()
    assert groups[[0, 1, 2, 3]].tolist() == FIRST and groups[[1024, 1025, 1026]].tolist() == LATER
    assert len({tuple(group) for group in groups[1024:]}) > 3
    assert spool.path(12).endswith("pairs-00012")


def test_pairs_wait_in_memory_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_BUFFERED", 10)
    spool = shards.Spool(str(tmp_path), 1, 0, [0])
    for number in range(2):
        spool.add(b"12345", b"67890")
        assert os.path.exists(spool.path(0)) == (number > 0)
        spool.add(b"", b"1")
        pairs = list(shards.read(spool.path(0)))
        assert pairs == [(b"12345", b"67890"), (b"", b"1")] * (number + 1)
    half = shards.Spool(str(tmp_path / "half"), 2, 0, [])
    half.add(b"12345", b"67890")  # of a shard that nobody wants
    half.flush()
    assert not (tmp_path / "half").exists()


def test_what_a_shard_holds(tmp_path):
    """Pairs of 80 tokens on a side are kept, pairs of 81 are not."""
    lengths = [(80, 3), (81, 2), (2, 81), (5, 80), (90, 90), (7, 9)]
    pairs = [tuple(np.arange(2, 2 + n) for n in sides) for sides in lengths]
    job = spooled(tmp_path, pairs)
    result = shards.make(job)
    with open(job.records, "rb") as file:
        data = file.read()
    assert result == {
        **{"examples": 1, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        **{"pairs": 3, "tokens": [92, 92], "long": 3, "longest": 90, "read": 6},
    }
    open(job.pairs, "wb").close()
    empty = shards.make(job)
    assert (empty["examples"], empty["bytes"], empty["longest"], empty["read"]) == (0, 0, 0, 0)
    assert empty["tokens"] == [0, 0]


def test_the_order_is_drawn_from_the_seed_and_the_shard(tmp_path):
    """And it does not drift."""
    pairs = wmt_like(60)
    job = spooled(tmp_path, pairs)
    sums = [
        shards.make(dataclasses.replace(job, seed=seed, number=number))["sha256"][:8]
        for seed, number in ((0, 0), (0, 1), (1, 0))
    ]
    assert sums == SUMS


def test_a_killed_process_takes_one_line(tmp_path):
    job = spooled(tmp_path, [([5, 1], [6, 1])])
    with shards.Pool(2) as pool:
        pool._pool.submit(os._exit, 1).exception()
        with pytest.raises(UserError, match="one of --workers=2 processes was killed.* take fewer"):
            pool.make(job)


def test_a_container_without_shared_memory_gets_one_line(monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(shards.futures, "ProcessPoolExecutor", refuse)
    with pytest.raises(UserError, match="^--workers=2: .*/dev/shm .*--workers=1[^\n]*$"):
        shards.Pool(2)
