"""--mode=export --format=ctranslate2: a script without this program translates as predict.py."""

import importlib.util
import json
import random
import shutil
import subprocess
import sys

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


def script(path=translators._SCRIPT):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("exported", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@pytest.mark.parametrize("name", ["usual", "own"])
def test_sentencepiece(make, models, name, tiny_sentences, tmp_path):  # noqa: F811
    shutil.copytree(tiny_sentences, tmp_path / "data")
    shutil.copy(models[name], tmp_path / "data" / "sp.model")
    for file in ("newstest2014.en", "newstest2014.de"):
        (tmp_path / "data" / file).write_text("".join(f"{line}\n" for line in LINES[:9]))
    make(tmp_path / "data", vocabulary_file="sp.model", eval_lengths=(64,))
    export.run("any", "latest", "ctranslate2", str(tmp_path / "out"))
    folder = tmp_path / "out" / "ctranslate2"
    assert (folder / "sp.model").read_bytes() == models[name].read_bytes()
    loaded = load_vocabulary(str(models[name]))
    pieces = script().Pieces([models[name]], loaded.pieces, loaded.pieces[loaded.unknown])
    for text in (*LINES, "an é and 😀 日本"):
        ids = loaded.encode(text)
        names = pieces.split(text)
        assert names == [loaded.pieces[i] for i in ids] and pieces.join(names) == text


def test_subwords(models):  # noqa: F811
    """Any text, and what a model may write: any subwords in any order."""
    loaded, draw = load_vocabulary(str(models["subwords"])), random.Random(0)
    subwords = script().Subwords(loaded.pieces)
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
