"""Records and a vocabulary that do not belong together: MLPerf's reference's folder in small."""

import collections
import importlib
import io
import logging
import random

import pytest
import sentencepiece

import benchmarks
from benchmarks.translation import agreement, vocabulary
from benchmarks.translation.preparation import packing, vocabularies
from benchmarks.translation.vocabulary import EOS, split_tokens
from common.data import records
from common.errors import DataError
from scripts import prepare

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


def write(folder, made_with, file, packed=False):
    """The folder of the reference; `made_with` is the vocabulary of the records."""
    assert FILE.startswith(b"'<pad>_'\n'<EOS>_'\n")
    for name, split in ((TRAIN, "train"), (DEV, "eval")):
        pairs = encoded(made_with, split)
        rows = [{"inputs": source, "targets": target} for source, target in pairs]
        if packed and split == "train":
            rows = [packing.row(members, 128) for members in packing.pack(pairs, 128)]
        records.write_shard(f"{folder}/{name}", map(packing.serialize_example, rows))
    (folder / "vocab.ende.32768").write_bytes(file)


def write_text(folder, name, lines):
    (folder / name).write_text("".join(f"{line}\n" for line in lines))


def fault(folder, split="eval"):
    path = f"{folder}/{TRAIN if split == 'train' else DEV}"
    loaded = vocabulary.load_vocabulary(f"{folder}/vocab.ende.32768")
    return agreement.fault(loaded, [path], split == "eval")


@pytest.mark.parametrize(("made_with", "file"), [(FILE, FILE), (LOADED, LOADED)])
@pytest.mark.parametrize("packed", [False, True])
def test_records_of_the_vocabulary_pass(tmp_path, made_with, file, packed):
    write(tmp_path, made_with, file, packed)
    write_text(tmp_path, "newstest2014.en", LINES["other"])
    assert fault(tmp_path) == fault(tmp_path, "train") == ("", False)
    write_text(tmp_path, "wmt32k-dev.lang1", LINES["eval"])
    assert fault(tmp_path) == ("", False)


@pytest.mark.parametrize("name", ["newstest2013.en", "wmt32k-dev.lang1", "newstest2014.eng"])
def test_ids_that_are_two_higher(tmp_path, name):
    write(tmp_path, LOADED, FILE)
    text, is_certain = fault(tmp_path)
    assert (
        not is_certain and "have the same ids if encoded again (with all ids 2 lower: 20)" in text
    )
    write_text(tmp_path, name, LINES["eval"])
    text, is_certain = fault(tmp_path)
    assert is_certain and "\n" not in text
    assert "0 of the first 20 pairs are lines of the text" in text and "2 lower: 20" in text
    assert f"sed '1i<pad>\\n<EOS>' {tmp_path}/vocab.ende.32768 > vocab.reference" in text


def test_another_vocabulary(tmp_path):
    write(tmp_path, FILE, OTHER)
    text, is_certain = fault(tmp_path, "train")
    assert not is_certain and "give the vocabulary that they were made with" in text
    write_text(tmp_path, "dev.de", [backwards(line) for line in LINES["eval"]])
    assert fault(tmp_path)[1] and "0 of the first 20 pairs are lines" in fault(tmp_path)[0]


@pytest.mark.parametrize("name", ["transformer", "gnmt"])
def test_a_run_is_refused_or_warned(tmp_path, name, caplog):
    def opened(**changes):
        config = importlib.import_module(f"configs.{name}").get_config()
        config.update((RECORDS if name == "gnmt" else {}) | changes | {"data_dir": str(tmp_path)})
        benchmark = benchmarks.load(config.lock(), "")
        counts = [benchmark.num_examples(split) for split in ("train", "eval")]
        remarks.append([row[0] for split in ("train", "eval") for row in benchmark.remarks(split)])
        return counts

    remarks = []

    caplog.set_level(logging.WARNING)
    write(tmp_path, LOADED, FILE)
    assert opened()[1] == 24
    assert sum("with all ids 2 lower" in record.message for record in caplog.records) == 2
    assert remarks == [["warn", "warn"]]
    write_text(tmp_path, "newstest2013.en", LINES["eval"])
    with pytest.raises(DataError, match="0 of the first 20 pairs are lines"):
        opened()
    (tmp_path / "vocab.reference").write_bytes(LOADED)
    caplog.clear()
    assert opened(vocabulary_file="vocab.reference")[1] == 24
    assert not any("belong" in record.message for record in caplog.records)
    assert remarks[-1] == []


def test_the_preparation_packs_no_such_records(tmp_path):
    write(tmp_path, LOADED, FILE)
    write_text(tmp_path, "newstest2013.en", LINES["eval"])
    arguments = [f"--records={tmp_path}", "--workers=1", f"--out={tmp_path}/out"]
    with pytest.raises(DataError, match="give that file .* as --vocabulary"):
        prepare.make("text", arguments)
    (tmp_path / "reference").write_bytes(LOADED)
    prepare.make("text", [*arguments, f"--vocabulary={tmp_path}/reference"])
    assert (tmp_path / "out/sources.txt").read_text().splitlines() == LINES["eval"]


@pytest.mark.parametrize("with_text", [False, True])
def test_sentencepiece_without_the_letters_of_the_text(tmp_path, with_text):
    """Unknown text decodes as a sign of its own: that is no other vocabulary."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES["train"]), model_writer=model, vocab_size=40, minloglevel=2
    )
    made = vocabulary.parse_vocabulary(model.getvalue(), "vocab.model")
    upper = [line.upper() for line in LINES["eval"]]
    pairs = [([*made.encode(line), EOS],) * 2 for line in upper]
    assert all(made.unknown in source for source, _ in pairs)
    rows = [packing.serialize_example({"inputs": s, "targets": t}) for s, t in pairs]
    records.write_shard(f"{tmp_path}/{DEV}", rows)
    if with_text:
        write_text(tmp_path, "references.txt", upper)
    assert agreement.fault(made, [f"{tmp_path}/{DEV}"], True) == ("", False)
