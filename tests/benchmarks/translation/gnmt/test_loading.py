"""GNMT's data: pairs in memory from text and records, what is refused, the cache, and batches."""

import os
import pathlib
import shutil
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.translation import vocabulary
from benchmarks.translation.gnmt import buckets as plans
from benchmarks.translation.gnmt import loading, records, text
from errors import ConfigError, DataError
from tests.benchmarks.translation import bpe_fixture, sentences_fixture


class Patterns(NamedTuple):
    sources: str
    targets: str
    records: str


TRAIN = Patterns("train.tok.clean.bpe.32000.en", "train.tok.clean.bpe.32000.de", "")
EVAL = Patterns("newstest2014.tok.bpe.32000.padded.en", "newstest2014.tok.bpe.32000.padded.de", "")
RECORDS = {"train": Patterns("", "", "*packed-train*"), "eval": Patterns("", "", "*-dev*")}


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
    loaded = vocabulary.load(str(next(pathlib.Path(folder).glob("vocab.*"))))
    split = split or ("eval" if patterns == EVAL else "train")
    return loading.load(settings(folder, patterns, split, longest), split, loaded, most, cache_dir)


def sentences(corpus, side):
    rows = zip(corpus.starts[:, side], corpus.lengths[:, side], strict=True)
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


# --- Text.


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
    with pytest.raises(DataError, match="no train target text in .*de'; set --config.data_dir"):
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
    loaded = vocabulary.load(f"{tiny_sentences}/vocab.toy.subwords")
    with pytest.raises(DataError, match="is text, which needs .* not one of subwords"):
        loading.load(settings(tiny_bpe, TRAIN, "train"), "train", loaded, None, "")


def test_text_in_a_bucket(gcs, tiny_bpe, tmp_path):
    data, cache = gcs.bucket("read"), gcs.bucket()
    for path in pathlib.Path(tiny_bpe).iterdir():
        gcs.write(f"{data}/some/{path.name}", path.read_bytes())
    local = load(tiny_bpe)
    loaded = vocabulary.load(f"{tiny_bpe}/vocab.bpe.32000.en")
    for _ in range(2):
        facts = settings(f"{data}/some", TRAIN, "train")
        remote = loading.load(facts, "train", loaded, None, cache)
        assert sentences(remote, 0) == sentences(local, 0)


# --- Records.


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
    for module in (records, text):
        read = module.read
        monkeypatch.setattr(module, "read", lambda *a, read=read: calls.append(a[0]) or read(*a))
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
    with pytest.raises(ValueError, match="does not fit"):
        corpus.rows(np.array([longest]), 0, size - 1)


def test_training_batches(tiny_bpe):
    corpus = load(tiny_bpe)
    buckets = plans.Buckets.make(corpus.lengths.max(axis=1), (5, 8, 18), 3, 8)
    batches = plans.train_batches(corpus, buckets, 0, 1, start_step=9)
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
