"""Opening of pairs of sentences: packed and single records, and one line for each fault."""

import json
import logging

import numpy as np
import pytest

from benchmarks.records import RecordFiles
from benchmarks.translation import schema
from benchmarks.translation.preparation import examples
from benchmarks.translation.schema import FEATURES
from benchmarks.translation.transformer import records
from benchmarks.translation.vocabulary import Vocabulary
from common.data import records as shard_files
from common.errors import DataError
from common.tensorflow import tensorflow

LENGTH, VOCAB = 12, 50
PAIRS = [([7, 8, 1], [9, 1]), ([5, 1], [6, 7, 8, 1]), ([40, 41, 42, 43, 1], [3, 1])]
NAME = "x_packed-train-{:05d}-of-00002"


def write(path, rows):
    shard_files.write_shard(str(path), [examples.serialize_example(row) for row in rows])


def packed_rows(pairs=PAIRS, length=LENGTH):
    return [examples.row(members, length) for members in examples.pack(pairs, length)]


def single(pair):
    return {"inputs": pair[0], "targets": pair[1]}


def google_row():
    """A row as tensor2tensor's packer writes it: two zeros between pairs, no padding."""
    return {
        "inputs": [7, 8, 1, 0, 0, 5, 1],
        "inputs_segmentation": [1, 1, 1, 0, 0, 2, 2],
        "inputs_position": [0, 1, 2, 0, 0, 0, 1],
        "targets": [9, 1, 0, 0, 6, 7, 8, 1],
        "targets_segmentation": [1, 1, 0, 0, 2, 2, 2, 2],
        "targets_position": [0, 1, 0, 0, 0, 1, 2, 3],
    }


def opened(folder, split="train", patterns="*train-*", length=LENGTH, vocab_size=VOCAB):
    cache = f"{folder}/cache/{split}.json"
    where = RecordFiles(str(folder), patterns, split, cache)
    return records.open_records(where, length, vocab_size)


def parsed(source):
    """{name: int32[n, length]} of all records."""
    dataset = tensorflow().data.TFRecordDataset(list(source.shards.paths)).map(source.parse)
    rows = list(dataset.as_numpy_iterator())
    assert all(v.dtype == np.int32 and v.shape == (LENGTH,) for row in rows for v in row.values())
    return {name: np.stack([row[name] for row in rows]) for name in FEATURES}


def refusal(folder, *rows, **arguments):
    write(folder / NAME.format(0), [*packed_rows(), *rows])
    write(folder / NAME.format(1), [])
    with pytest.raises(DataError) as caught:
        opened(folder, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_packed_rows(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rows = packed_rows()
    write(tmp_path / NAME.format(0), rows)
    write(tmp_path / NAME.format(1), [google_row()])
    source = opened(tmp_path)
    assert source.packed and source.shards.counts == (1, 1)
    assert source.pairs == 5 and source.tokens == (15, 14)
    assert source.fill == 29 / 48
    values = parsed(source)
    for name in FEATURES:
        assert values[name][0].tolist() == rows[0][name].tolist()
        padded = [*google_row()[name], *[0] * 12][:LENGTH]
        assert values[name][1].tolist() == padded
    assert "2 train rows hold 5 pairs and use 60.4% of their positions" in caplog.text
    again = opened(tmp_path)  # from the cache
    assert (again.shards, again.pairs, again.tokens) == (source.shards, 5, source.tokens)
    kept = json.loads((tmp_path / "cache" / "train.json").read_text())  # `facts`: of this form
    expected = {"length": LENGTH, "vocab_size": VOCAB, "split": "train", "facts": 2}
    assert kept["key"]["settings"] == expected


def test_single_pairs_are_rows_of_one_segment(tmp_path, caplog):
    long = ([3] * LENGTH + [1], [1])
    write(tmp_path / NAME.format(0), map(single, [PAIRS[0], long]))
    write(tmp_path / NAME.format(1), map(single, PAIRS[1:]))
    source = opened(tmp_path)
    assert not source.packed and source.shards.counts == (1, 2)
    assert source.shards.left_out == ((1,), ())
    assert source.pairs == 3 and source.tokens == (10, 8)
    values = parsed(opened(tmp_path, patterns=NAME.format(1)))
    for row, pair in enumerate(PAIRS[1:]):
        expected = examples.row([pair], LENGTH)
        for name in FEATURES:
            assert values[name][row].tolist() == expected[name].tolist()
    assert "1 of 4 train pairs have more than 12 tokens" in caplog.text
    assert "hold one pair each" in caplog.text


def test_evaluation_takes_the_single_records_with_long_targets(tmp_path):
    write(tmp_path / "x_packed-dev-00000-of-00001", packed_rows())
    long = ([7, 1], [9] * (LENGTH + 4) + [1])
    write(tmp_path / "x-dev-00000-of-00001", map(single, PAIRS))
    assert opened(tmp_path, "eval", "*-dev*").target_length == LENGTH
    write(tmp_path / "x-dev-00000-of-00001", map(single, [*PAIRS, long]))
    source = opened(tmp_path, "eval", "*-dev*")
    assert source.shards.counts == (4,) and source.target_length == LENGTH + 5
    *_, last = tensorflow().data.TFRecordDataset(list(source.shards.paths)).map(source.parse)
    assert last["inputs"].shape == (LENGTH,) and last["targets"].numpy().tolist() == long[1]
    assert last["targets_position"].numpy().tolist() == list(range(LENGTH + 5))
    assert source.shards.paths == (f"{tmp_path}/x-dev-00000-of-00001",) and not source.packed
    with pytest.raises(DataError, match="one sentence per record"):
        opened(tmp_path, "eval", "*_packed-dev*")
    with pytest.raises(DataError, match="config.eval_lengths to 5"):
        opened(tmp_path, "eval", "*-dev*", length=4)
    assert opened(tmp_path, "eval", "*-dev*", length=5).length == 5


def google_rows(*sizes):
    """Rows of one pair and of these lengths, which no padding makes equal."""
    return [examples.row([([5] * (size - 1) + [1], [6, 1])], size) for size in sizes]


def test_a_few_packed_rows_that_are_too_long_are_left_out(tmp_path, caplog):
    write(tmp_path / NAME.format(0), google_rows(*[LENGTH - 1, LENGTH] * 75, 19))
    write(tmp_path / NAME.format(1), google_rows(*[LENGTH] * 50, 30))
    source = opened(tmp_path)
    assert source.shards.counts == (150, 50) and source.shards.left_out == ((150,), (50,))
    assert source.pairs == 200 and source.tokens == (200 * LENGTH - 75, 400)
    (warning,) = [row.message for row in caplog.records if row.levelname == "WARNING"]
    assert warning.startswith("2 of 202 train rows have more than 12 tokens on a side")
    write(tmp_path / NAME.format(1), google_rows(*[LENGTH] * 48, 30))  # 2 of 200 are 1 %
    assert opened(tmp_path).shards.counts == (150, 48)
    write(tmp_path / NAME.format(1), google_rows(*[LENGTH] * 49, 30, 30))  # 3 of 202 are more
    with pytest.raises(DataError, match="packed for 19 positions, not 12"):
        opened(tmp_path)


def test_the_length_of_rows_without_padding(tmp_path):
    write(tmp_path / NAME.format(0), google_rows(*[10, 11, 12] * 70, 40))
    write(tmp_path / NAME.format(1), google_rows(7))
    with pytest.raises(DataError, match=r"packed for 12 positions, not 10: set .*row_length=12"):
        opened(tmp_path, length=10)
    assert opened(tmp_path, length=13).shards.counts == (210, 1)


def test_a_faulty_row_is_named(tmp_path):
    message = refusal(tmp_path, google_row() | {"inputs": [7, 8, 1, 0, 0, 60, 1]})
    assert "has the id 60, and the vocabulary 50 entries" in message
    assert f"{NAME.format(0)}, record 1 (counted from 0): " in message


def test_other_faults(tmp_path):
    message = refusal(tmp_path, single(PAIRS[0]))
    assert "packed rows and single pairs are mixed" in message
    (tmp_path / NAME.format(1)).unlink()
    with pytest.raises(DataError, match="1 of 2 files are missing"):
        opened(tmp_path)
    with pytest.raises(DataError, match="set --config.data_dir"):
        opened(tmp_path / "nowhere")
    shard_files.write_shard(str(tmp_path / NAME.format(1)), [b"\xff\xff no example"])
    write(tmp_path / NAME.format(0), packed_rows())
    with pytest.raises(DataError, match="schema of translation"):
        opened(tmp_path)


def manifest_of(folder, **changed):
    shards = [
        {"name": NAME.format(k), "examples": 1, "bytes": (folder / NAME.format(k)).stat().st_size}
        | {"sha256": "", "pairs": 3, "tokens": [10, 8]}
        for k in range(2)
    ]
    content = {
        "kind": "translation",
        "length": LENGTH,
        "vocabulary": {"file": "vocab.subwords", "sha256": "ab" * 32, "size": VOCAB},
        "splits": {"train": {"shards": shards}},
    }
    (folder / "manifest.json").write_text(json.dumps(content | changed))


def test_the_manifest_spares_the_scan(tmp_path):
    for k in range(2):
        write(tmp_path / NAME.format(k), packed_rows())
    scanned = opened(tmp_path)
    manifest_of(tmp_path)
    where = RecordFiles(str(tmp_path), "*train-*", "train", "/nowhere/x")
    source = records.open_records(where, LENGTH, VOCAB)
    assert source.shards.counts == scanned.shards.counts and source.packed
    assert (source.pairs, source.tokens) == (scanned.pairs, scanned.tokens) == (6, (20, 16))
    with pytest.raises(DataError, match="packed for 12 positions, not 16"):
        opened(tmp_path, length=16)
    manifest_of(tmp_path, vocabulary={})
    with pytest.raises(DataError, match="move it away"):
        opened(tmp_path)


def test_a_vocabulary_that_is_another_s(tmp_path):
    for k in range(2):
        write(tmp_path / NAME.format(k), packed_rows())
    vocabulary = Vocabulary(b"", "")
    vocabulary.digest = "cd" * 32
    schema.check_vocabulary(str(tmp_path), vocabulary, "other")
    manifest_of(tmp_path)
    words = f"^other is not .* {tmp_path}/ .*cdcdcdcdcdcd, .*abababababab.* use {tmp_path}/vocab."
    with pytest.raises(DataError, match=words):
        schema.check_vocabulary(f"{tmp_path}/", vocabulary, "other")
    vocabulary.digest = "ab" * 32
    schema.check_vocabulary(str(tmp_path), vocabulary, "other")
