"""Reading of record files: places of examples, records that are left out, the stream of a run."""

import dataclasses

import numpy as np
import pytest

from common.data import records, shards
from common.data.order import Order
from common.data.shards import Shards

RECORDS = ([b"a0", b"bad", b"a1", b"a2", b"bad"], [], [b"bad", b"bad", b"b0"])
LEFT_OUT = ((1, 4), (), (0, 1))
EXAMPLES = [b"a0", b"a1", b"a2", b"b0"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Files of 3, 0 and 1 examples, with four records that are none."""
    folder = tmp_path_factory.mktemp("shards")
    paths = tuple(str(folder / name) for name in "abc")
    for path, rows in zip(paths, RECORDS, strict=True):
        records.write_shard(path, rows)
    return Shards(paths, (3, 0, 1), LEFT_OUT)


def test_places_count_the_records_that_are_left_out(stored):
    a, _, c = stored.paths
    assert stored.total == 4
    assert [stored.place(i) for i in range(4)] == [(a, 0), (a, 2), (a, 3), (c, 2)]
    plain = dataclasses.replace(stored, left_out=())
    assert [plain.place(i) for i in range(4)] == [(a, 0), (a, 1), (a, 2), (c, 0)]
    assert stored.where(2) == f"{a}, record 3 (counted from 0)"


def test_single_examples_in_any_order(stored):
    wanted = [3, 0, 2, 1, 0]
    assert shards.read_some(stored, wanted) == [EXAMPLES[i] for i in wanted]
    assert shards.read_some(stored, []) == []
    whole = Shards(stored.paths, tuple(map(len, RECORDS)))
    assert shards.read_some(whole, [7, 4, 5]) == [b"b0", b"bad", b"bad"]


def test_segments_are_file_skip_and_take(stored):
    rows = [(2, 0, 1, 9), (0, 1, 2, 9), (1, 0, 0, 9), (0, 0, 1, 9)]
    read = list(shards.read_records(stored, np.array(rows, np.int64)).as_numpy_iterator())
    assert read == [b"b0", b"a1", b"a2", b"a0"]


def test_the_first_example_that_cannot_be_read(stored, tmp_path):
    def unreadable(place, rows):
        return shards.unreadable(place, np.array(rows, np.int64))

    assert unreadable(stored, [(0, 0, 3), (2, 0, 1)]) is None
    longer = dataclasses.replace(stored, counts=(4, 0, 2))
    fewer = "its file holds fewer records than when they were counted"
    assert unreadable(longer, [(2, 0, 2), (0, 0, 3)]) == (5, fewer)
    assert unreadable(longer, [(0, 2, 2)]) == (3, fewer)
    path = tmp_path / "x"
    content = b"".join(map(records.frame, [b"one", b"two", b"six"]))
    path.write_bytes(content[:-5] + b"?" + content[-4:])  # the last letter of "six"
    damaged = unreadable(Shards((str(path),), (3,)), [(0, 1, 2)])
    assert damaged is not None and damaged[0] == 2 and "corrupted record" in damaged[1]


@pytest.mark.parametrize("interleaved", [1, 2])
@pytest.mark.parametrize("step", [0, 3])
def test_the_stream_of_a_run_is_its_order(tmp_path, interleaved, step, monkeypatch):
    """From any step; each example is a row of the block that comes with it.

    Files that take turns have small buffers.
    """
    sizes, read = set(), shards.read_records

    def noted(files, segments, buffer_size):
        sizes.add(buffer_size)
        return read(files, segments, buffer_size)

    monkeypatch.setattr(shards, "read_records", noted)
    counts, paths = (4, 0, 3, 5), []
    for i, count in enumerate(counts):
        paths.append(str(tmp_path / str(i)))
        records.write_shard(paths[-1], [b"%d" % (sum(counts[:i]) + k) for k in range(count)])
    order = Order(counts, 7, 2, 3, 4, interleaved=interleaved)
    dataset = shards.train_stream(Shards(tuple(paths), counts), order, range(2), step)
    rows = list(dataset.take(30).as_numpy_iterator())
    expected = [part for _, part in zip(range(5), order.steps(range(2), step), strict=False)]
    assert [int(i) for _, i, _, _ in rows] == np.concatenate([ids for ids, _ in expected]).tolist()
    assert [int(block[row]) for block, _, row, _ in rows] == [int(i) for _, i, _, _ in rows]
    seeds = np.concatenate([seeds for _, seeds in expected])
    np.testing.assert_array_equal([row[3] for row in rows], seeds)
    assert max(len(block) for block, *_ in rows) <= 4
    assert sizes == {4 << 20 if interleaved == 1 else 16 << 10}


def test_a_message_that_quotes_bytes_is_of_no_example():
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    assert shards.read_problem(error) == "not a tf.train.Example"
    assert shards.read_problem(ValueError("one\ntwo")) == "one"
