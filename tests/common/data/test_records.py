"""Writing of shards: names, runs, frames, and what else lies in a folder."""

import hashlib

import pytest

from common.data import records, storage
from tests.benchmarks.resnet.preparation.test_digits import frames

ROWS = [b"", b"one", bytes(range(256)) * 2]


def test_a_frame_by_published_figures():
    """RFC 3720, appendix B.4: the CRC-32C of 32 zeros is 0x8a9136aa.

    Rotated to the right by 15 bits, and with 0xa282ead8 added, it is 0x0fd7fffa.
    """
    assert records.checksum(bytes(32)) == bytes.fromhex("faffd70f")
    frame = records.frame(bytes(32))
    assert (len(frame), frame[:8], frame[12:]) == (
        48,
        bytes([32, *[0] * 7]),
        bytes(32) + bytes.fromhex("faffd70f"),
    )
    assert frame[8:12] == records.checksum(frame[:8])


def test_a_shard_as_it_was_written(tmp_path):
    path = tmp_path / "x"
    content = b"".join(map(records.frame, ROWS))
    written = records.write_shard(str(path), ROWS)
    digest = hashlib.sha256(content).hexdigest()
    assert written == {"examples": 3, "bytes": len(content), "sha256": digest}
    assert path.read_bytes() == content and len(content) == 3 * 16 + 3 + 512
    assert frames(path) == list(records.read_shard(str(path))) == ROWS


def test_names_and_runs():
    assert records.shard_name("train", 0, 1024) == "train-00000-of-01024"
    assert records.shard_name("validation", 127, 128) == "validation-00127-of-00128"
    original = [len(run) for run in records.shard_runs(1_281_167, 1024)]
    assert original == [1252] * 1023 + [371]
    assert [len(run) for run in records.shard_runs(50_000, 128)] == [391] * 127 + [343]
    assert [len(run) for run in records.shard_runs(6, 4)] == [1, 2, 1, 2]  # not 2, 2, 2, 0
    for n, m in [(9, 8), (8, 8), (1, 1), (1437, 8), (1025, 1024)]:
        runs = records.shard_runs(n, m)
        assert len(runs) == m and all(runs)
        assert [i for run in runs for i in run] == list(range(n))
    for n, m in [(7, 8), (0, 1), (5, 0)]:
        with pytest.raises(ValueError, match=f"^cannot fill {m} shards with {n} examples$"):
            records.shard_runs(n, m)
    for split, i, n in [("test", 0, 1), ("train", 4, 4), ("train", -1, 4), ("test", 4, 4)]:
        with pytest.raises(ValueError, match=f"^no such shard: {split} {i} of {n}$"):
            records.shard_name(split, i, n)


def test_other_files_of_a_folder(tmp_path):
    shards = ["train-00000-of-00002", "val-00001-of-00032.tfrecord", "translate-dev-00000-of-00001"]
    shards += ["val-00000-of-00002"]  # of COCO, by others
    unfinished = [f"tmp.{shards[0]}.0123abcd", "tmp.manifest.json.00000000"]
    stray = ["train-00000-of-00002.bak", "val-1", "validation-x"]
    others = ["manifest.json", f"tmp.{shards[0]}.0123abc", "notes"]
    for name in (*shards, *unfinished, *stray, *others):
        (tmp_path / name).touch()
    out = str(tmp_path)
    assert records.existing_shards(out) == sorted(shards)
    assert records.existing_shards(f"{out}/absent") == storage.list_folder(f"{out}/absent") == []
    assert storage.is_folder(out) and not storage.is_folder(f"{out}/notes")
    records.remove_unfinished(out)
    assert {path.name for path in tmp_path.iterdir()} == {*shards, *stray, *others}
    (tmp_path / unfinished[0]).touch()
    records.remove_shards(out)
    assert {path.name for path in tmp_path.iterdir()} == {*stray, *others}
