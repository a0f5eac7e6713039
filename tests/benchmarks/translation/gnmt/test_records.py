"""Pairs of sentences from records: the same from single pairs and packed rows; faults are named."""

import numpy as np
import pytest

from benchmarks.translation.gnmt import records
from benchmarks.translation.preparation import examples, packing
from benchmarks.translation.rows import FEATURES
from errors import DataError
from ops import records as shard_files
from tests.benchmarks.translation.transformer.test_records import google_row, single

VOCAB = 50


def draw_pairs(count, seed=0):
    draw = np.random.default_rng(seed)

    def side():
        return [*draw.integers(2, VOCAB, draw.integers(0, 7)).tolist(), 1]

    return [(side(), side()) for _ in range(count)]


def write(path, rows):
    shard_files.write_shard(str(path), [examples.serialize(row) for row in rows])
    return str(path)


def read(paths, split="train", vocab_size=VOCAB, longest=None):
    return records.read(tuple(map(str, paths)), split, vocab_size, longest)


def sentences(corpus, longest=10**9):
    """The pairs as lists; sentences that were cut are empty."""
    sizes = np.where(corpus.lengths <= longest, corpus.lengths, 0)
    return [
        tuple(corpus.ids[begin : begin + size].tolist() for begin, size in zip(*row, strict=True))
        for row in zip(corpus.starts, sizes, strict=True)
    ]


def test_single_pairs_come_back(tmp_path):
    data = draw_pairs(600)  # more than the reader looks at at a time
    halves = data[:280], data[280:]
    paths = [write(tmp_path / f"{i}", map(single, half)) for i, half in enumerate(halves)]
    actual = read(paths)
    assert actual.paths == tuple(paths) and actual.counts == (280, 320)
    assert actual.numbers.tolist() == list(range(600))
    assert sentences(actual) == data
    assert actual.ids.dtype == np.uint16
    assert read(paths, vocab_size=1 << 17).ids.dtype == np.int32
    cut = read(paths, longest=4)
    assert sentences(cut, 4) == [tuple(s if len(s) <= 4 else [] for s in pair) for pair in data]
    assert cut.lengths.tolist() == actual.lengths.tolist()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_packed_rows_are_cut_into_their_pairs(tmp_path, order):
    """Also Google's rows, with zeros between the pairs and none at the end."""
    members = [draw_pairs(n, n) for n in (3, 1, 2)]
    rows = [packing.row(row, 24) for row in members]
    padding = dict.fromkeys(FEATURES, [0] * 5)
    files = [[*rows, padding], [google_row(), rows[0]]]
    paths = [write(tmp_path / f"{i}", files[k]) for i, k in enumerate(order)]
    actual = read(paths)
    google = [([7, 8, 1], [9, 1]), ([5, 1], [6, 7, 8, 1])]
    wanted = [[members[0], members[1], members[2], []], [google, members[0]]]
    wanted = [row for k in order for row in wanted[k]]
    numbers = [i for i, row in enumerate(wanted) for _ in row]
    assert actual.numbers.tolist() == numbers
    assert sentences(actual) == [pair for row in wanted for pair in row]


def test_an_empty_file_among_others(tmp_path):
    paths = [write(tmp_path / "0", []), write(tmp_path / "1", map(single, draw_pairs(2)))]
    assert read(paths).counts == (0, 2)
    empty = read(paths[:1])
    assert empty.counts == (0,) and not len(empty.numbers) and not len(empty.ids)


def test_evaluation_reads_single_pairs_beside_packed_rows(tmp_path):
    data = draw_pairs(3)
    paths = [
        write(tmp_path / "a", [packing.row(data, 40)]),
        write(tmp_path / "b", map(single, data)),
    ]
    actual = read(paths, "eval")
    assert actual.paths == (paths[1],) and actual.counts == (3,)
    assert sentences(actual) == data
    with pytest.raises(DataError, match="a holds packed rows and .*b single pairs; name one"):
        read(paths, "train")
    with pytest.raises(DataError, match="a holds packed rows; an evaluation needs one sentence"):
        read(paths[:1], "eval")


def changed(**features):
    return {**packing.row([([5, 6, 1], [7, 1]), ([8, 1], [9, 9, 1])], 6), **features}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (single(([5, 6], [7, 1])), "inputs does not end with 1"),
        (single(([5, 1], [7, VOCAB, 1])), "targets has the id 50, and the vocabulary 50"),
        (single(([5, 0, 1], [7, 1])), "id 0 .padding. inside of a sentence"),
        ({"inputs": [5, 1]}, "it has no targets"),
        (changed(inputs=[5, 6, 1, 8, 1]), "differ in length"),
        (changed(inputs=[5, 6, 1, 8, 1, 9]), "not positive exactly where"),
        (changed(inputs=[5, 6, 2, 8, 1, 0]), "segment 1 of inputs has no 1 .EOS. at its end"),
        (changed(inputs_segmentation=[1, 1, 1, 1, 1, 0]), "different numbers of segments"),
        (changed(inputs_segmentation=[2, 2, 2, 1, 1, 0]), "inputs do not count from 1"),
        (changed(targets_segmentation=[1, 1, 3, 3, 3, 0]), "different numbers of segments"),
        (changed(inputs_segmentation=[1, 2, 2, 1, 1, 0]), "inputs do not count from 1"),
    ],
)
def test_faults_name_the_record(tmp_path, row, fault):
    packed = bool(len(row.get("targets_segmentation", ())))
    good = changed() if packed else single(([5, 1], [6, 1]))
    path = write(tmp_path / "x", [good] * 3 + [row, good])
    with pytest.raises(DataError, match=f"{path}, record 3 .counted from 0.: .*{fault}") as caught:
        read([path])
    assert "\n" not in str(caught.value)


def test_mixed_and_foreign_records(tmp_path):
    path = write(tmp_path / "x", [single(([5, 1], [6, 1]))] * 300 + [changed()])
    with pytest.raises(DataError, match="record 300 .* are mixed in this file"):
        read([path])
    shard_files.write_shard(path, [b"oops"])
    with pytest.raises(DataError, match="record 0 .* not in the schema of translation"):
        read([path])
