"""Records of sentence pairs: their data manifest, and the vocabulary that they belong to."""

import collections
import copy
import importlib
import io
import json
import logging
import random
from typing import Any

import pytest
import sentencepiece

import benchmarks
from benchmarks.translation import schema, vocabulary
from benchmarks.translation.preparation import examples, vocabularies
from benchmarks.translation.vocabulary import EOS, split_tokens
from common.data import data_manifest, records
from common.errors import DataError
from tests.conftest import opened

ROWS = [
    {"name": "a", "examples": 3, "bytes": 2, "sha256": "f0", "pairs": 7, "tokens": [10, 8]},
    {"name": "b", "examples": 1, "bytes": 4, "sha256": "f1", "pairs": 2, "tokens": [6, 5]},
]
CONTENT = {
    "kind": "translation",
    "length": 256,
    "vocabulary": {"file": "vocab.subwords", "sha256": "ab", "size": 33708},
    "splits": {"train": {"shards": ROWS[:1]}, "dev": {"shards": ROWS[1:]}},
}


def write(folder, content):
    (folder / "manifest.json").write_text(json.dumps(content))
    return str(folder)


def test_everything_that_it_says(tmp_path):
    loaded: Any = schema.load_text_manifest(write(tmp_path, CONTENT))
    shards = {"a": schema.ManifestShard(3, 7, (10, 8)), "b": schema.ManifestShard(1, 2, (6, 5))}
    assert loaded == schema.TextManifest(256, "vocab.subwords", "ab", shards)
    paths = [f"{tmp_path}/b", f"{tmp_path}/a"]
    listed = data_manifest.listed_rows
    assert listed(shards, f"{tmp_path}/", paths) == [shards["b"], shards["a"]]
    assert listed(shards, str(tmp_path), [*paths, f"{tmp_path}/c"]) is None


def test_none_and_those_of_other_data(tmp_path):
    assert schema.load_text_manifest(str(tmp_path)) is None
    assert (
        schema.load_text_manifest(write(tmp_path, {"num_label_classes": 4, "classes": []})) is None
    )
    assert schema.load_text_manifest(write(tmp_path, CONTENT | {"kind": "speech"})) is None


@pytest.mark.parametrize("missing", ["length", "vocabulary", "splits", "tokens"])
def test_another_form_is_one_line(tmp_path, missing):
    content = copy.deepcopy(CONTENT)
    del (content["splits"]["train"]["shards"][0] if missing == "tokens" else content)[missing]
    with pytest.raises(DataError, match=f"^{tmp_path}/manifest.json was not .*'{missing}'"):
        schema.load_text_manifest(write(tmp_path, content))


# --- Records and a vocabulary that do not belong together: MLPerf's reference's folder in small.

WORDS = (
    *("the", "cats,", "sat", "(on)", "a", "mat.", "and", "saw-one", "small"),
    *("bird;", "over", "there:", "Ähre", "Übung", "straße"),
)
TRAIN, DEV = "wmt32k-encoded-train-00001-of-00001", "wmt32k-encoded-dev-00001-of-00001"
RECORDS = dict.fromkeys(("train_source", "train_target", "eval_source", "eval_target"), "")


def sentences(count, seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randrange(5, 12))) for _ in range(count)]


LINES = {"train": sentences(60, 0), "eval": sentences(24, 1), "other": sentences(30, 2)}


def backwards(line):
    return " ".join(line.split()[::-1])


def learn(size, lines):
    """The bytes of a file: as MLPerf's copy it begins with '<pad>_' and '<EOS>_'."""
    counts = collections.Counter(token for line in lines for token in split_tokens(line))
    return vocabularies.learn_subwords(counts, size).encode()


FILE = learn(90, LINES["train"] + LINES["eval"])
OTHER = learn(70, LINES["other"])
LOADED = b"<pad>\n<EOS>\n" + FILE  # what the reference's loader makes of the file


def encoded(data, split):
    """(source, target) of each pair; a target is its source in another order."""
    encode = vocabulary.parse_vocabulary(data, "vocab").encode
    return [([*encode(s), EOS], [*encode(backwards(s)), EOS]) for s in LINES[split]]


def write_records(folder, made_with, file, packed=False):
    """The folder of the reference; `made_with` is the vocabulary of the records."""
    assert FILE.startswith(b"'<pad>_'\n'<EOS>_'\n")
    for name, split in ((TRAIN, "train"), (DEV, "eval")):
        pairs = encoded(made_with, split)
        rows = [{"inputs": source, "targets": target} for source, target in pairs]
        if packed and split == "train":
            rows = [examples.row(members, 128) for members in examples.pack(pairs, 128)]
        records.write_shard(f"{folder}/{name}", map(examples.serialize_example, rows))
    (folder / "vocab.ende.32768").write_bytes(file)


def fault(folder, split="eval"):
    path = f"{folder}/{TRAIN if split == 'train' else DEV}"
    loaded = vocabulary.load_vocabulary(f"{folder}/vocab.ende.32768")
    return schema.vocabulary_error(loaded, [path])


@pytest.mark.parametrize(("made_with", "file"), [(FILE, FILE), (LOADED, LOADED)])
@pytest.mark.parametrize("packed", [False, True])
def test_records_of_the_vocabulary_pass(tmp_path, made_with, file, packed):
    write_records(tmp_path, made_with, file, packed)
    assert fault(tmp_path) == fault(tmp_path, "train") == ("", False)


def test_ids_that_are_two_higher(tmp_path):
    write_records(tmp_path, LOADED, FILE)
    text, is_certain = fault(tmp_path)
    assert is_certain and "\n" not in text
    assert " of the first 20 pairs have the same ids" in text and "and 20 with all ids" in text
    assert f"sed '1i<pad>\\n<EOS>' {tmp_path}/vocab.ende.32768 > vocab.reference" in text


def test_another_vocabulary(tmp_path):
    write_records(tmp_path, FILE, OTHER)
    text, is_certain = fault(tmp_path, "train")
    assert not is_certain and "give the vocabulary of the records as --config.vocab" in text


@pytest.mark.parametrize("name", ["transformer", "gnmt"])
def test_a_run_is_refused_or_warned(tmp_path, name, caplog):
    def warned(**changes):
        config = importlib.import_module(f"configs.{name}").get_config()
        config.update((RECORDS if name == "gnmt" else {}) | changes | {"data_dir": str(tmp_path)})
        config.train_batch_size = 8
        benchmark = benchmarks.load(config.lock(), "")
        assert [benchmark.open(split) for split in ("train", "eval")][1] == 24
        return [row[0] for split in ("train", "eval") for row in benchmark.data_warnings(split)]

    caplog.set_level(logging.WARNING)
    write_records(tmp_path, FILE, OTHER)
    assert warned() == ["warn", "warn"]
    assert sum("does not belong to" in record.message for record in caplog.records) == 2
    write_records(tmp_path, LOADED, FILE)
    with pytest.raises(DataError, match="20 with all ids 2 lower"):
        warned()
    (tmp_path / "vocab.reference").write_bytes(LOADED)
    assert warned(vocabulary_file="vocab.reference") == []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["transformer", "gnmt"])
def test_sentences_of_the_evaluation_among_those_of_training(tmp_path, monkeypatch, name, packed):
    """The doctor reads all records anyway; repeated sentences count once."""
    leaked = LINES["train"][5:9]
    monkeypatch.setitem(LINES, "eval", [*LINES["eval"], *leaked, *leaked[:2], backwards(leaked[0])])
    write_records(tmp_path, LOADED, LOADED, packed)
    config = importlib.import_module(f"configs.{name}").get_config()
    config.update((RECORDS if name == "gnmt" else {}) | {"data_dir": str(tmp_path)})
    config.update({"row_length": 128} if name == "transformer" else {"train_batch_size": 8})
    benchmark = opened(benchmarks.load(config.lock(), ""))
    assert benchmark.data_warnings("train") == []
    ((status, text, _),) = benchmark.data_warnings("eval")
    count = len({*LINES["eval"]})
    assert status == "warn" and f"4 of {count} sentences to evaluate on are among" in text


def test_sentencepiece_without_the_letters_of_the_text(tmp_path):
    """Unknown text decodes as a sign of its own: that is no other vocabulary."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES["train"]), model_writer=model, vocab_size=40, minloglevel=2
    )
    made = vocabulary.parse_vocabulary(model.getvalue(), "vocab.model")
    pairs = [([*made.encode(line.upper()), EOS],) * 2 for line in LINES["eval"]]
    assert all(made.unknown in source for source, _ in pairs)
    data = [examples.serialize_example({"inputs": s, "targets": t}) for s, t in pairs]
    records.write_shard(f"{tmp_path}/{DEV}", data)
    assert schema.vocabulary_error(made, [f"{tmp_path}/{DEV}"]) == ("", False)
