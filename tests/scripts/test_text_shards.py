"""Shards of text: how full their rows are, and processes that are killed."""

import os

import numpy as np
import pytest

from errors import UserError
from scripts.data import text_shards
from tests.ops.text.test_packing import wmt_like

LENGTH = 256


def spooled(folder, pairs):
    """The job of the only shard of these pairs of ids."""
    spool = text_shards.Spool(str(folder), 1, 0, [0])
    for pair in pairs:
        spool.add(*(text_shards.as_bytes(np.array(ids)) for ids in pair))
    spool.flush()
    return text_shards.Job(spool.path(0), "", LENGTH, 80, 0, 0)


def test_rows_are_as_full_as_promised(tmp_path):
    pairs = wmt_like(12_000)
    result = text_shards.make(spooled(tmp_path, pairs))
    assert result["pairs"] == len(pairs) and result["long"] == 0
    assert result["tokens"] == [sum(len(pair[side]) for pair in pairs) for side in (0, 1)]
    shares = [tokens / (result["examples"] * LENGTH) for tokens in result["tokens"]]
    assert sum(shares) / 2 >= 0.97 and max(shares) >= 0.98


def test_a_killed_process_takes_one_line(tmp_path):
    job = spooled(tmp_path, [([5, 1], [6, 1])])
    with text_shards.Pool(2) as pool:
        assert pool._pool
        pool._pool.submit(os._exit, 1).exception()
        with pytest.raises(UserError, match="one of --workers=2 processes was killed.* take fewer"):
            pool.make(job)
