"""GNMT's data: pairs in memory from text and records, what is refused, the cache, and batches.

Text as ids is the same as line by line in Python, whatever the blocks and odd characters. Pairs
from single records and packed rows are the same; faults are named.
"""

import os
import pathlib
import shutil
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.translation import vocabulary
from benchmarks.translation.gnmt import loader
from benchmarks.translation.gnmt.corpus import Buckets, bucket_batches, id_type
from benchmarks.translation.preparation import examples
from benchmarks.translation.schema import FEATURES
from common.data import records as shard_files
from common.errors import ConfigError, DataError
from tests.benchmarks.translation import bpe_fixture, sentences_fixture
from tests.benchmarks.translation.transformer.test_records import google_row, single


class Patterns(NamedTuple):
    sources: str
    targets: str
    records: str


TRAIN = Patterns("train.tok.clean.bpe.32000.en", "train.tok.clean.bpe.32000.de", "")
EVAL = Patterns("newstest2014.tok.bpe.32000.padded.en", "newstest2014.tok.bpe.32000.padded.de", "")
RECORDS = {"train": Patterns("", "", "*packed-train*"), "eval": Patterns("", "", "*-dev*")}
VOCAB = 50  # of the records that a test writes
# The text that a test writes has words of the vocabulary and others.
WORDS = ["a", "bc@@", "d", "é", "\u2028", "x\ry", "&quot;"]
PIECES = [*WORDS, "unknown", "b", "a\u00a0a", "\t", "ü", "<s>"]


@pytest.fixture
def folder(tiny_bpe, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(tiny_bpe, tmp_path / "data")


def settings(folder, patterns, split, longest=99) -> Any:
    names = (f"{split}_{part}" for part in ("source", "target", "files"))
    lengths = {"bucket_lengths": (longest,), "eval_lengths": (longest,)}
    files = dict(zip(names, patterns, strict=True))
    return types.SimpleNamespace(data_dir=str(folder), **files, **lengths)


def load(folder, patterns=TRAIN, split="", longest=99, most=None, cache_dir=""):
    loaded = vocabulary.load_vocabulary(str(next(pathlib.Path(folder).glob("vocab.*"))))
    split = split or ("eval" if patterns == EVAL else "train")
    return loader.load(settings(folder, patterns, split, longest), split, loaded, most, cache_dir)


def sentences(corpus, side, longest=10**9):
    sizes = np.where(corpus.lengths <= longest, corpus.lengths, 0)[:, side]
    rows = zip(corpus.starts[:, side], sizes, strict=True)
    return [corpus.ids[start : start + length].tolist() for start, length in rows]


def text_of(folder, name):
    """The sentences of a file as ids, by a loop over its lines."""
    ids = {word: i for i, word in enumerate(bpe_fixture.VOCABULARY, 3)}
    return [
        [*(ids[word] for word in line.split()), 1]
        for line in pathlib.Path(folder, name).read_text().splitlines()
    ]


def assert_same(one, two):
    for name, value in vars(one).items():
        other = getattr(two, name)
        np.testing.assert_array_equal(value, other)
        assert getattr(value, "dtype", None) == getattr(other, "dtype", None)


# --- Splits of text.


def test_text_to_train_on(tiny_bpe):
    corpus = load(tiny_bpe)
    for side, name in enumerate((TRAIN.sources, TRAIN.targets)):
        assert sentences(corpus, side) == text_of(tiny_bpe, name)
    assert len(corpus) == 90 and corpus.numbers.tolist() == list(range(90))
    assert corpus.describe(16) == f"{tiny_bpe}/{TRAIN.sources}, line 17"
    assert corpus.ids.dtype == np.uint16 and corpus.counts == ()


def test_long_and_empty_sides_are_left_out(folder, caplog):
    target = folder / TRAIN.targets
    changed = target.read_text().split("\n")
    changed[4] = ""
    target.write_text("\n".join(changed))
    with caplog.at_level("INFO", "tpu_suite"):
        corpus = load(folder, longest=6)
    both = list(
        zip(*(text_of(folder, name) for name in (TRAIN.sources, TRAIN.targets)), strict=True)
    )
    usable = [i for i, pair in enumerate(both) if all(1 < len(side) <= 6 for side in pair)]
    assert 4 not in usable and 20 < len(usable) < 80
    assert corpus.numbers.tolist() == usable
    for side in range(2):
        assert sentences(corpus, side) == [both[i][side] for i in usable]
    assert corpus.describe(len(usable) - 1).endswith(f"line {usable[-1] + 1}")
    fact = f"{90 - len(usable)} of 90 train pairs have an empty side or one of more than 6 tokens"
    assert [fact in record.getMessage() for record in caplog.records] == [True]


def test_filling_is_not_evaluated(tiny_bpe):
    corpus = load(tiny_bpe, EVAL, most=23)
    assert len(corpus) == 23
    assert sentences(corpus, 1) == text_of(tiny_bpe, EVAL.targets)[:23]
    assert len(load(tiny_bpe, EVAL)) == 23 + bpe_fixture.FILLER


@pytest.mark.parametrize(("lines", "most"), [(32, 33), (32, 200), (152, 23)])
def test_other_numbers_of_lines_than_references(folder, lines, most):
    for name in (EVAL.sources, EVAL.targets):
        (folder / name).write_text("a\n" * lines)
    fault = f"has {lines} lines, and {most} sentences are to be evaluated"
    with pytest.raises(DataError, match=fault):
        load(folder, EVAL, most=most)
    assert len(load(folder, EVAL, most=24)) == 24


def test_sources_to_evaluate_may_not_be_empty_or_too_long(folder):
    source = folder / EVAL.sources
    content = source.read_text().split("\n")
    longest = max(range(23), key=lambda i: len(content[i].split()))
    size = len(content[longest].split()) + 1
    assert len(load(folder, EVAL, longest=size)) == 32
    with pytest.raises(DataError, match=f"line {longest + 1}: the sentence has {size} tokens"):
        load(folder, EVAL, longest=size - 1)
    source.write_text("\n".join([*content[:6], " ", *content[7:]]))
    with pytest.raises(DataError, match=f"{source}, line 7: the sentence to translate is empty"):
        load(folder, EVAL)
    (folder / EVAL.targets).write_text("\n" * 32)  # translations are not needed
    source.write_text("a\n" * 32)
    assert len(load(folder, EVAL)) == 32


def test_files_of_other_lengths(folder):
    with (folder / TRAIN.targets).open("a") as file:
        file.write("a\n")
    fault = f"{TRAIN.sources} has 90 lines and .*{TRAIN.targets} 91: "
    with pytest.raises(DataError, match=fault):
        load(folder)


def test_missing_files_and_half_a_config(folder):
    with pytest.raises(ConfigError, match="config.train_target='': text needs train_source and"):
        load(folder, Patterns(TRAIN.sources, "", "*"))
    with pytest.raises(ConfigError, match="config.eval_source=''"):
        load(folder, Patterns("", TRAIN.targets, "*"), split="eval")
    os.remove(folder / TRAIN.targets)
    with pytest.raises(DataError, match=r"no train target text in .*\.de'"):
        load(folder)
    with pytest.raises(DataError, match="config.eval_source='vocab.*' matches 2 files"):
        load(folder, Patterns("vocab.*", "vocab.*", ""), split="eval")


def test_no_pair_is_left(folder):
    with pytest.raises(DataError, match="no pairs to train on: 90 of 90 .*config.bucket_lengths"):
        load(folder, longest=2)
    for name in (TRAIN.sources, TRAIN.targets, EVAL.sources, EVAL.targets):
        (folder / name).write_text("")
    with pytest.raises(DataError, match="no pairs to train on: the files are empty"):
        load(folder)
    with pytest.raises(DataError, match="no sentences to evaluate: it is empty"):
        load(folder, EVAL)


def test_text_needs_a_vocabulary_of_words(tiny_bpe, tiny_sentences):
    loaded = vocabulary.load_vocabulary(f"{tiny_sentences}/vocab.toy.subwords")
    with pytest.raises(DataError, match="is text, which needs .* not one of subwords"):
        loader.load(settings(tiny_bpe, TRAIN, "train"), "train", loaded, None, "")


# --- Splits of records.


def test_records_to_evaluate(tiny_sentences):
    corpus = load(tiny_sentences, RECORDS["eval"], split="eval", most=5)
    assert len(corpus) == 23  # records have no filling
    assert corpus.describe(4).endswith("00000-of-00001, record 4 (counted from 0)")
    references = pathlib.Path(tiny_sentences, "references.txt").read_text().splitlines()
    assert [sentences_fixture.text(ids[:-1]) for ids in sentences(corpus, 1)] == references
    size = int(corpus.lengths[:, 0].max())
    with pytest.raises(DataError, match=f"record .*has {size} tokens, .*config.eval_lengths"):
        load(tiny_sentences, RECORDS["eval"], split="eval", longest=size - 1)


# --- The cache.


@pytest.fixture
def reads(monkeypatch):
    """What was read, and not taken from the cache."""
    calls = []
    for name in ("read_records", "read_text"):
        read = getattr(loader, name)
        monkeypatch.setattr(loader, name, lambda *a, read=read: calls.append(a[0]) or read(*a))
    return calls


def test_records_are_read_once(tiny_sentences, tmp_path, reads):
    plain = load(tiny_sentences, RECORDS["train"])
    for _ in range(3):
        assert_same(load(tiny_sentences, RECORDS["train"], cache_dir=str(tmp_path)), plain)
    assert len(reads) == 2 and os.listdir(tmp_path) == ["train.npz"]


def test_other_files_or_settings_replace_the_cache(folder, tmp_path, reads):
    cache = str(tmp_path / "cache")

    def is_read(patterns=TRAIN, **arguments):
        del reads[:]
        actual = load(folder, patterns, cache_dir=cache, **arguments)
        assert_same(actual, load(folder, patterns, **arguments))
        return len(reads) == 2

    assert is_read() and not is_read()
    assert is_read(longest=6) and is_read()
    assert is_read(EVAL, most=23) and is_read(EVAL, most=20)
    assert not is_read()
    vocabularies = [folder / f"vocab.bpe.32000.{language}" for language in ("en", "de")]
    for path in vocabularies:
        path.write_text(path.read_text() + "more\n")
    assert is_read() and not is_read()
    path = folder / TRAIN.sources
    stat = os.stat(path)
    path.write_text(path.read_text().replace("a", "b"))
    os.utime(path, (stat.st_atime, stat.st_mtime + 2))  # TensorFlow sees whole seconds
    assert is_read() and not is_read()


# --- Batches.


def test_rows(tiny_bpe):
    corpus = load(tiny_bpe)
    which = np.array([7, 3, 3, 80])
    for side, name in enumerate((TRAIN.sources, TRAIN.targets)):
        expected = text_of(tiny_bpe, name)
        rows = corpus.rows(which, side, 20)
        assert rows.dtype == np.int32 and rows.shape == (4, 20)
        for row, i in zip(rows.tolist(), which, strict=True):
            assert row == expected[i] + [0] * (20 - len(expected[i]))
    assert corpus.rows(which[:0], 0, 5).shape == (0, 5)
    longest = int(corpus.lengths[:, 0].argmax())
    size = int(corpus.lengths[longest, 0])
    assert corpus.rows(np.array([longest]), 0, size).all()


def test_training_batches(tiny_bpe):
    corpus = load(tiny_bpe)
    buckets = Buckets.make(corpus.lengths.max(axis=1), (5, 8, 18), 3, 8)
    batches = bucket_batches(corpus, buckets, 0, 1, start_step=9)
    for step, batch in zip(range(9, 25), batches, strict=False):
        size, which, seeds = buckets.batch(step)
        assert {name: (v.shape, v.dtype) for name, v in batch.items()} == {
            **dict.fromkeys(("inputs", "targets"), ((8, size), np.int32)),
            **dict.fromkeys(("dropout", "id"), ((8,), np.int32)),
        }
        np.testing.assert_array_equal(batch["id"], which)
        np.testing.assert_array_equal(batch["dropout"], seeds)
        for i, *rows in zip(which, batch["inputs"], batch["targets"], strict=True):
            for side, row in enumerate(rows):
                assert row[row > 0].tolist() == sentences(corpus, side)[i]


# --- Text as ids.


@pytest.fixture(scope="module")
def words():
    return vocabulary.Words("\n".join(("<unk>", "<s>", "</s>", *WORDS)).encode(), "vocab")


def read_file(path, words):
    return loader.read_text_side(str(path), words, lambda size: None)


def by_lines(text, words):
    """The sentences in Python, with EOS."""
    return [
        [*words.encode(line.removesuffix("\r")), vocabulary.EOS]
        for line in text.removesuffix("\n").split("\n")
    ]


def assert_sentences(actual, sentences):
    assert actual.lengths.tolist() == [len(ids) for ids in sentences]
    assert actual.ids.tolist() == [i for ids in sentences for i in ids]
    assert actual.lengths.dtype == np.int32


@pytest.mark.parametrize("block", [5, 64, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "", "\r\n", "\r"])
def test_ids_of_random_text(tmp_path, monkeypatch, words, block, end):
    monkeypatch.setattr(loader, "_BLOCK", block)
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(60):
        picked = [PIECES[i] for i in draw.integers(0, len(PIECES), draw.integers(0, 9))]
        gaps = draw.choice(["", " ", "  "], 2)
        rows.append(gaps[0] + draw.choice([" ", "  "]).join(picked) + gaps[1])
    text = draw.choice(["\n", "\r\n"]).join(rows) + "\na" + end
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    sizes = []
    actual = loader.read_text_side(str(path), words, sizes.append)
    assert_sentences(actual, by_lines(text, words))
    assert actual.ids.dtype == np.uint16
    assert sum(sizes) - len(text.encode()) in (0, 1)  # the last line may lack its end


def test_empty_files_and_lines(tmp_path, words):
    path = tmp_path / "text"
    path.write_bytes(b"")
    assert [len(part) for part in read_file(path, words)] == [0, 0]
    path.write_bytes(b"\n\r\n  \n\n")
    assert_sentences(read_file(path, words), [[1], [1], [1], [1]])


def test_large_vocabularies_need_wide_ids(tmp_path):
    words = vocabulary.Words("\n".join(f"w{i}" for i in range(70_000)).encode(), "vocab")
    path = tmp_path / "text"
    path.write_text("w0 w69999 w70000\n")
    actual = read_file(path, words)
    assert actual.ids.tolist() == [3, 70_002, 2, 1] and actual.ids.dtype == np.int32
    assert [id_type(n) for n in (1 << 16, (1 << 16) + 1)] == [np.uint16, np.int32]


def test_bytes_that_are_not_utf8(tmp_path, monkeypatch, words):
    monkeypatch.setattr(loader, "_BLOCK", 16)
    path = tmp_path / "text"
    path.write_bytes(b"a d\n" * 30 + b"d\nd \xff\nd\n")
    with pytest.raises(DataError, match=f"^{path}, line 32 is not UTF-8 .*iconv .* {path} "):
        read_file(path, words)


# --- Records, of single pairs and of packed rows.


def draw_pairs(count, seed=0):
    draw = np.random.default_rng(seed)

    def side():
        return [*draw.integers(2, VOCAB, draw.integers(0, 7)).tolist(), 1]

    return [(side(), side()) for _ in range(count)]


def write_rows(path, rows):
    shard_files.write_shard(str(path), [examples.serialize_example(row) for row in rows])
    return str(path)


def read_rows(paths, split="train", vocab_size=VOCAB, longest=None):
    return loader.read_records(tuple(map(str, paths)), split, vocab_size, longest)


def pairs_of(corpus, longest=10**9):
    """The pairs as lists; sentences that were cut are empty."""
    sides = [sentences(corpus, side, longest) for side in range(2)]
    return list(zip(*sides, strict=True))


def test_single_pairs_come_back(tmp_path):
    data = draw_pairs(600)  # more than the reader looks at at a time
    halves = data[:280], data[280:]
    paths = [write_rows(tmp_path / f"{i}", map(single, half)) for i, half in enumerate(halves)]
    actual = read_rows(paths)
    assert actual.paths == tuple(paths) and actual.counts == (280, 320)
    assert actual.numbers.tolist() == list(range(600))
    assert pairs_of(actual) == data
    assert actual.ids.dtype == np.uint16
    assert read_rows(paths, vocab_size=1 << 17).ids.dtype == np.int32
    cut = read_rows(paths, longest=4)
    assert pairs_of(cut, 4) == [tuple(s if len(s) <= 4 else [] for s in pair) for pair in data]
    assert cut.lengths.tolist() == actual.lengths.tolist()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_packed_rows_are_cut_into_their_pairs(tmp_path, order):
    """Also Google's rows, with zeros between the pairs and none at the end."""
    members = [draw_pairs(n, n) for n in (3, 1, 2)]
    rows = [examples.row(row, 24) for row in members]
    padding = dict.fromkeys(FEATURES, [0] * 5)
    files = [[*rows, padding], [google_row(), rows[0]]]
    paths = [write_rows(tmp_path / f"{i}", files[k]) for i, k in enumerate(order)]
    actual = read_rows(paths)
    google = [([7, 8, 1], [9, 1]), ([5, 1], [6, 7, 8, 1])]
    wanted = [[members[0], members[1], members[2], []], [google, members[0]]]
    wanted = [row for k in order for row in wanted[k]]
    numbers = [i for i, row in enumerate(wanted) for _ in row]
    assert actual.numbers.tolist() == numbers
    assert pairs_of(actual) == [pair for row in wanted for pair in row]


def test_an_empty_file_among_others(tmp_path):
    paths = [write_rows(tmp_path / "0", []), write_rows(tmp_path / "1", map(single, draw_pairs(2)))]
    assert read_rows(paths).counts == (0, 2)
    empty = read_rows(paths[:1])
    assert empty.counts == (0,) and not len(empty.numbers) and not len(empty.ids)


def test_evaluation_reads_single_pairs_beside_packed_rows(tmp_path):
    data = draw_pairs(3)
    paths = [
        write_rows(tmp_path / "a", [examples.row(data, 40)]),
        write_rows(tmp_path / "b", map(single, data)),
    ]
    actual = read_rows(paths, "eval")
    assert actual.paths == (paths[1],) and actual.counts == (3,)
    assert pairs_of(actual) == data
    with pytest.raises(DataError, match="a holds packed rows and .*b single pairs; name one"):
        read_rows(paths, "train")
    with pytest.raises(DataError, match="a holds packed rows; an evaluation needs one sentence"):
        read_rows(paths[:1], "eval")


def changed_row(**features):
    return {**examples.row([([5, 6, 1], [7, 1]), ([8, 1], [9, 9, 1])], 6), **features}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (single(([5, 6], [7, 1])), "inputs does not end with 1"),
        (single(([5, 1], [7, VOCAB, 1])), "targets has the id 50, and the vocabulary 50"),
        (single(([5, 0, 1], [7, 1])), "id 0 .padding. inside of the sentence"),
        ({"inputs": [5, 1]}, "it has no targets"),
        (changed_row(inputs=[5, 6, 1, 8, 1]), "differ in length"),
        (changed_row(inputs=[5, 6, 1, 8, 1, 9]), "not positive exactly where"),
        (changed_row(inputs_segmentation=[1, 1, 1, 1, 1, 0]), "different numbers of segments"),
        (changed_row(targets_segmentation=[1, 1, 3, 3, 3, 0]), "different numbers of segments"),
    ],
)
def test_faults_name_the_record(tmp_path, row, fault):
    packed = bool(len(row.get("targets_segmentation", ())))
    good = changed_row() if packed else single(([5, 1], [6, 1]))
    path = write_rows(tmp_path / "x", [good] * 3 + [row, good])
    with pytest.raises(DataError, match=f"{path}, record 3 .counted from 0.: .*{fault}") as caught:
        read_rows([path])
    assert "\n" not in str(caught.value)


def test_mixed_and_foreign_records(tmp_path):
    path = write_rows(tmp_path / "x", [single(([5, 1], [6, 1]))] * 300 + [changed_row()])
    with pytest.raises(DataError, match="record 300 .* are mixed in this file"):
        read_rows([path])
    shard_files.write_shard(path, [b"oops"])
    with pytest.raises(DataError, match="record 0 .* not in the schema of translation"):
        read_rows([path])
