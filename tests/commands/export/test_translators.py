"""--mode=export --format=ctranslate2: a script without this program translates as predict.py."""

import json
import random
import runpy
import shutil
import subprocess
import sys
from typing import Any

import ml_collections
import pytest

import benchmarks
from benchmarks.translation.transformer import ctranslate
from benchmarks.translation.vocabulary import load_vocabulary
from commands import export
from commands.export import translators
from common.errors import ConfigError, OutputError
from tests.benchmarks.translation.test_translators import configure
from tests.benchmarks.translation.test_vocabulary import LINES, models  # noqa: F401 (fixture)

ctranslate2 = pytest.importorskip("ctranslate2")


@pytest.fixture
def make(opens):
    """Makes a Transformer that is open; returns the benchmark and its parameters."""

    def make(data, name="transformer", **changes):
        changes = {"compilation_cache": "", "beam_size": 3, **changes}
        values = configure(name, str(data), changes).to_dict()
        benchmark = benchmarks.load(ml_collections.ConfigDict(values).lock(), "")
        return benchmark, opens(benchmark, values, 0.5).params

    return make


def sentences(benchmark):
    return [benchmark.vocabulary.decode(ids) for ids in benchmark.eval_pairs[0].tolist()]


@pytest.mark.parametrize(
    "changes",
    [{}, {"variant": "marian", "activation": "swish"}, {"beam_size": 1, "length_penalty": 0.0}],
)
def test_the_translations_are_those_of_predict(make, call, changes, tiny_sentences, tmp_path):
    """In a process that has nothing of this program; lines may be empty or too long."""
    benchmark, _ = make(tiny_sentences, **changes)
    export.run("any", "latest", "ctranslate2", str(tmp_path / "out"))
    listed = json.loads((tmp_path / "out" / "export.json").read_text())
    assert listed["formats"]["ctranslate2"]["error"] < 1e-5
    folder = (tmp_path / "out" / "ctranslate2").rename(tmp_path / "elsewhere")
    files = {"model.bin", "config.json", "shared_vocabulary.json", "vocab.toy.subwords"}
    assert {path.name for path in folder.iterdir()} == {*files, "translate.py"}
    lines = [*sentences(benchmark), "", "  a c\r", "\ufeffd e", "a " * 2100, "日 \\_u;"]
    (tmp_path / "in.txt").write_bytes("\n".join(lines).encode())
    call(tmp_path / "in.txt", f"--out={tmp_path}/out.txt")
    wanted = (tmp_path / "out.txt").read_text().split("\n")
    command = [sys.executable, "-P", f"{folder}/translate.py"]
    with open(tmp_path / "in.txt") as file:
        done = subprocess.run(command, cwd=tmp_path, stdin=file, capture_output=True, check=True)
    found = done.stdout.decode().split("\n")
    assert done.stderr.decode().startswith("too long: a a") and len(found) == len(wanted) == 29
    assert [i for i in range(29) if not found[i]] == [23, 26, 28]
    assert sum(map(str.__ne__, found, wanted)) <= 3  # the searches have other rules


@pytest.mark.parametrize("name", ["usual", "own", "marian"])
def test_sentencepiece(make, models, name, tiny_sentences, tmp_path):  # noqa: F811
    """The folder has the models; of Marian's vocabulary both, and its code of a language."""
    data, own, texts = tmp_path / "data", str(models.get(name)), [*LINES, "an é and 😀 日本"]
    shutil.copytree(tiny_sentences, data)
    changes = {}
    if name == "marian":
        parts = {"source.spm": models["usual"], "target.spm": models["own"]}
        for file, path in parts.items():
            shutil.copy(path, data / file)
        usual: Any = load_vocabulary(str(models["usual"]))
        names = usual.pieces[5:-40]
        ids = {each: i for i, each in enumerate(["</s>", "<unk>", ">>en<<", *names, "<pad>"])}
        (data / "vocab.json").write_text(json.dumps(ids))
        own, changes = str(data / "vocab.json"), {"variant": "marian", "activation": "swish"}
        texts = [f">>en<<{line}" for line in texts]
    loaded: Any = load_vocabulary(own)
    (data / "sp.model").write_bytes(loaded.data)
    for file in ("newstest2014.en", "newstest2014.de"):
        (data / file).write_text("".join(f"{line}\n" for line in LINES[:9]))
    make(data, vocabulary_file="sp.model", eval_lengths=(64,), **changes)
    export.run("any", "latest", "ctranslate2", str(tmp_path / "out"))
    folder = tmp_path / "out" / "ctranslate2"
    if name != "marian":
        assert (folder / "sp.model").read_bytes() == models[name].read_bytes()
    text = runpy.run_path(f"{folder}/translate.py")["Translator"](folder).text
    for line in texts:
        ids = loaded.encode(line)
        pieces = [loaded.pieces[i] for i in ids]
        assert text.split(line) == pieces and text.join(pieces) == loaded.decode(ids)


def test_subwords(models):  # noqa: F811
    """Any text, and what a model may write: any subwords in any order."""
    loaded: Any = load_vocabulary(str(models["subwords"]))
    draw = random.Random(0)
    subwords = runpy.run_path(str(translators._SCRIPT))["Subwords"](loaded.pieces)
    ids = {name: i for i, name in enumerate(loaded.pieces)}
    for _ in range(2000):
        text = "".join(draw.choices("ab Z,._\\u09;\n\u0301ß日😀 ", k=draw.randrange(1, 20)))
        pieces = subwords.split(text)
        assert [ids[name] for name in pieces] == loaded.encode(text)
        assert subwords.join(pieces) == loaded.decode(loaded.encode(text)) == text
        pieces = draw.choices(loaded.pieces[2:], k=draw.randrange(1, 20))
        pieces += draw.choice([[], [*"\\065;_"], [*"\\99999999;_"], [*"\\55296;_"], [*"\\\\_"]])
        assert subwords.join(pieces) == loaded.decode([ids[name] for name in pieces])


@pytest.mark.parametrize("part", ["weights", "search", "text"])
def test_what_is_off_is_not_written(make, part, tiny_sentences, tmp_path, monkeypatch):
    make(tiny_sentences)
    if part == "weights":
        good = ctranslate.models.positional_encoding
        monkeypatch.setattr(
            ctranslate.models,
            "positional_encoding",
            lambda length, *a: good(length, *a) * (0.99 if length > 2048 else 1),
        )
    else:
        text = translators._SCRIPT.read_text()
        bad = {"search": ("(offset + size)", "(4 + size)"), "text": ('+ "_"', '+ "__"')}[part]
        monkeypatch.setattr(translators, "_SCRIPT", tmp_path / "translate.py")
        (tmp_path / "translate.py").write_text(text.replace(*bad))
    with pytest.raises(OutputError, match="--format=ctranslate2: .*nothing is exported"):
        export.run("any", "latest", "ctranslate2", str(tmp_path / "out"))
    assert not [*(tmp_path / "out").iterdir()]


def test_mistakes_take_one_line(make, tiny_sentences, tiny_bpe, tmp_path):
    def refused(text):
        with pytest.raises(ConfigError, match=f"^--format=ctranslate2: .*{text}"):
            export.run("any", "latest", "ctranslate2", str(tmp_path / "out"))

    make(tiny_bpe, "gnmt")
    refused("'gnmt', which is exported as savedmodel, stablehlo$")
    shutil.copytree(tiny_sentences, tmp_path / "data")
    vocabulary = tmp_path / "data" / "vocab.toy.subwords"
    vocabulary.write_text("".join(f"{word}\n" for word in "abcdefghijklmnopqrstuvwxyz"))
    make(tmp_path / "data")
    refused("vocab.toy.subwords is a vocabulary of words")
