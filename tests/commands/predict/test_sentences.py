"""predict.py with translators: sentences in, translations out."""

import csv
import io
import json
import pathlib
from typing import Any

import jax
import ml_collections
import numpy as np
import pytest

import benchmarks
from benchmarks.base import BATCH_AXES
from benchmarks.translation.use import TranslatorUses
from benchmarks.translation.vocabulary import Words
from engine import sharding, step
from engine.checkpoint import model_source
from scripts.demo import make_answer
from tests.benchmarks.translation.test_translators import configure
from tests.commands.predict.test_predict import refusal


@pytest.fixture(params=["transformer", "gnmt"])
def model(request, tiny_sentences, tiny_bpe, opens):
    """(benchmark, its sentences to evaluate, parameters) of a translator."""
    name = request.param
    data = {"transformer": tiny_sentences, "gnmt": tiny_bpe}[name]
    values = configure(name, data, {"compilation_cache": "", "beam_size": 3}).to_dict()
    benchmark: Any = benchmarks.load(ml_collections.ConfigDict(values).lock(), "")
    params = opens(benchmark, values, 0.5).params
    if name == "gnmt":  # the ids are of pieces of words
        path = pathlib.Path(data, "newstest2014.tok.bpe.32000.padded.en")
        return benchmark, path.read_text().split("\n")[:23], params
    sources = [benchmark.vocabulary.decode(ids) for ids in benchmark.eval_pairs[0].tolist()]
    return benchmark, sources, params


def evaluated(benchmark, params):
    """The translations of an evaluation."""
    score = step.make_predict_step(benchmark.predict, sharding.make(BATCH_AXES, 1))
    rows = []
    for batch in benchmark.eval_batches(8, 0, 1):
        row = jax.tree.map(np.asarray, score(params, {}, batch))
        rows.append({name: values[row["mask"] > 0] for name, values in row.items()})
    return benchmark.translations(iter(rows))


@pytest.mark.long
def test_the_translations_are_those_of_evaluation_in_every_format(call, model, tmp_path):
    """Whatever the batch, the order and the ends of lines are; an empty line stays empty."""
    benchmark, sources, params = model
    expected = evaluated(benchmark, params)
    assert len(set(expected)) > 3
    path = tmp_path / "in.txt"
    path.write_bytes("\ufeff".encode() + "\r\n".join([*sources[::-1], "", sources[0]]).encode())
    code, out, err = call(path)
    texts = [*expected[::-1], "", expected[0]]
    assert code == 0 and out.split("\n") == [*texts, ""] and "25 lines in" in err
    rows = json.loads(call(path, "--format=json", "--batch_size=99")[1])
    assert [row["source"] for row in rows] == [*sources[::-1], "", sources[0]]
    assert [row["line"] for row in rows] == list(range(1, 26))
    written = [row["translations"][0]["text"] if row["translations"] else "" for row in rows]
    assert written == texts
    jsonl = [json.loads(line) for line in call(path, "--format=jsonl")[1].splitlines()]
    assert jsonl == rows
    call(path, f"--out={tmp_path}/out.csv")
    table = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert [row["translation"] for row in table] == texts
    assert float(table[0]["score"]) == rows[0]["translations"][0]["score"] < 0


@pytest.mark.long
def test_the_best_translations_have_scores(call, model):
    _, sources, _ = model
    flags = "--n-best=3", "--format=json"
    three = json.loads(call(sources[0], sources[1], *flags)[1])
    (one,) = json.loads(call("-", "--format=json", stdin=sources[0].encode())[1])
    assert three[0]["translations"][0] == one["translations"][0]
    for row in three:
        scores = [each["score"] for each in row["translations"]]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    *lines, last = call("-", "--n_best=3", stdin=f"{sources[1]}\n\n".encode())[1].split("\n")
    first = three[1]["translations"][0]
    assert lines[0] == f"{first['score']:.4f}\t{first['text']}" and lines[3:] == [""] * 3
    assert last == "" and all("\t" in line for line in lines[:3])
    greedy, wide = (json.loads(call(sources[0], f"--beams={n}", flags[1])[1]) for n in (1, 5))
    best = [rows[0]["translations"][0]["score"] for rows in (greedy, three, wide)]
    assert len(set(best)) > 1  # the beams do something


@pytest.mark.parametrize("model", ["transformer"], indirect=True)
@pytest.mark.parametrize("n_best", [1, 3])
def test_a_lower_translation_that_keeps_the_placeholders_comes_first(
    call, model, monkeypatch, tmp_path, n_best
):
    _, sources, _ = model
    path, texts = tmp_path / "in.txt", [f"{sources[0]} {{x}}", "{n}", sources[1], "%s"]
    path.write_text("".join(f"{line}\n" for line in texts))
    before = json.loads(call(path, "--n_best=3", "--format=json")[1])
    good, decode = before[0]["translations"][1]["text"], TranslatorUses.text

    def text(self, tokens):
        return decode(self, tokens) + " {x}" * (decode(self, tokens) == good)

    monkeypatch.setattr(TranslatorUses, "text", text)
    code, out, err = call(path, f"--n_best={n_best}", "--format=json")
    rows, marks = json.loads(out), ["", "lacks {n}", "", "lacks %s"]
    assert code == 0 and [row.get("placeholders", "") for row in rows] == marks
    scores, old = (
        [[each["score"] for each in row["translations"]] for row in some] for some in (rows, before)
    )
    old[0].insert(0, old[0].pop(1))
    assert scores == [row[:n_best] for row in old]
    assert rows[0]["translations"][0]["text"] == f"{good} {{x}}"
    assert "line 2: the translation lacks {n}" in err and "line 4" in err
    assert "1 line repaired" in err and "2 whose placeholders differ" in err
    table = list(csv.DictReader(io.StringIO(call(path, "--format=csv")[1])))
    assert [row["placeholders"] for row in table] == marks


def test_what_cannot_be_translated_has_a_row(call, model, tmp_path):
    _, sources, _ = model
    bad = b"\xff\xfea\0", b"a " * 2100
    path = tmp_path / "in.txt"
    path.write_bytes(b"\n".join([*bad, sources[0].encode()]))
    code, out, err = call(path, "--format=jsonl")
    *faults, good = [json.loads(line) for line in out.splitlines()]
    texts = ["not UTF-8: byte 0xff", "tokens, more than 2,048"]
    assert code == 1 and good["translations"]
    for row, text in zip(faults, texts, strict=True):
        assert text in row["error"] and "translations" not in row
    assert "line 1: not UTF-8" in err and "2 of 3 lines have no translation" in err
    code, out, _ = call(path)
    assert code == 1 and out.split("\n")[:2] == [""] * 2 and out.count("\n") == 3


def test_segments_are_translated_and_text_has_any_name(call, model, tmp_path):
    _, sources, _ = model
    segments = "".join(f'<seg id="{i}">{line}</seg>\n' for i, line in enumerate(sources[:3], 1))
    for name in ("set.sgm", "SET.SGML"):
        (tmp_path / name).write_text(f'<srcset><doc docid="a"><p>\n{segments}</p></doc></srcset>')
        assert call(tmp_path / name, f"--out={tmp_path}/hyp.de")[0] == 0
        _, out, _ = call(*sources[:3])
        assert (tmp_path / "hyp.de").read_text() == out and out.count("\n") == 3


def test_a_person_types_at_a_terminal(call, model):
    _, sources, _ = model
    code, out, err = call(stdin=f"{sources[0]}\n{sources[1]}\n".encode(), is_typed=True)
    assert code == 0 and out.count("\n") == 2
    assert "Ctrl-D" in err and err.count("> ") == 3


def test_mistakes(model, capsys, tmp_path, tiny_ratings):
    benchmark, _, _ = model
    (tmp_path / "none.sgm").write_text("<doc>a b c</doc>")
    for argv, text in [
        ([tmp_path / "none.sgm"], "none.sgm has no <seg>"),
        (["not/here"], "not/here: there is no such file"),
        (["gone.txt"], "gone.txt: there is no such file"),
        ([tmp_path], "is a folder: name the files in it"),
        (["a b", "--n_best=4"], "--n_best=4: the search has 3 beams"),
        (["a b", "--draw=x"], "it has --beams, --n_best, --data_dir"),
        (["a b", "--out=x.coco.json"], ".txt, .csv, .json, .jsonl"),
        (["a b", f"--data_dir={tmp_path}/gone"], "there is no such folder; the model translates"),
        (["a b", f"--data_dir={tiny_ratings}"], "no vocabulary in"),
    ]:
        assert text in refusal(capsys, *argv, "--workdir=any"), argv
    own = next(pathlib.Path(benchmark.settings.data_dir).glob("vocab.*"))
    (tmp_path / "vocab.other").write_text(own.read_text().replace("b", "q", 1))
    text = refusal(capsys, "a b", f"--data_dir={tmp_path}", "--workdir=any")
    assert "is not the one of" in text
    path = tmp_path / "in.txt"
    path.write_text("a b\n")
    assert "would be overwritten" in refusal(capsys, path, f"--out={path}", "--workdir=any")


def test_words_are_joined_as_in_their_language():
    words = Words(b"<unk>\nl&apos;\nhomme\nun\n", "vocab")
    ids = words.encode("l&apos; homme")
    assert words.decode(ids) == "l' homme"
    words.language = "fr"
    assert words.decode(ids) == "l'homme"


def test_the_page_answers_as_predict_py(model, call):
    answer = make_answer(model_source.load("any"))
    lines = call("a b c", "--n_best=3")[1].splitlines()
    assert answer(" a b  c\n").split("\n") == [line.split("\t")[1] for line in lines]
    assert answer("") == ""
