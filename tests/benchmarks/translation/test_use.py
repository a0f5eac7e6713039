"""The tables of translations, and what a translator's report shows.

The report is checked against sacrebleu and against decoding token by token.
"""

import csv
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu
from PIL import Image

from benchmarks.translation import use
from benchmarks.translation.transformer import models
from benchmarks.translation.vocabulary import EOS
from tests.benchmarks.translation.test_translators import data, make, perfect  # noqa: F401

ROWS = [
    ("on 3 May", "am 3. Mai", "am 3. Mai"),
    ("at noon", "mittags", "um zwölf Uhr"),
    ("two\tthings\nhere", "", "zwei Dinge"),
]
SENTENCES = [
    ("a", "the cat sat on the mat today", "the cat sat on the mat"),
    ("b c", "A dog barked", "a dog barks loudly at night"),
    ("d e", "", "nothing was translated"),
    ("f g h", "it is the same", "it is the same"),
    ("i j k", "wholly different words", "no word of it"),
    ("l m n o", "the train leaves at noon", "the train leaves at noon today"),
]
LENGTHS = np.array([1, 2, 2, 3, 3, 4])


def csv_rows(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode())))


def test_exact_translations_are_marked_and_not_repeated():
    text = use.sentence_table(ROWS, 2)
    first, second = text.split("\n\n")[:2]
    assert "= translation  am 3. Mai" in first and "reference" not in first
    assert "! translation  mittags\n  reference    um zwölf Uhr" in second
    assert "1 of 3 translations equal their reference (=); the first 2" in text
    assert use.sentence_table(ROWS, 3) == use.sentence_table(ROWS, 9)
    assert use.sentence_table([], 5).startswith("0 of 0 translations equal")


def test_the_file_for_programs_has_a_line_for_each_sentence():
    lines = use.sentence_tsv(ROWS).decode().split("\n")
    assert lines == [
        "source\ttranslation\treference\texact",
        "on 3 May\tam 3. Mai\tam 3. Mai\t1",
        "at noon\tmittags\tum zwölf Uhr\t0",
        "two things here\t\tzwei Dinge\t0",
        "",
    ]


def test_the_worst_sentences_have_the_lowest_bleu():
    shown = use.worst_sentences(SENTENCES)
    rows = csv_rows(shown.files["worst.csv"])
    assert [int(row["sentence"]) for row in rows] == [5, 3, 2, 1, 6]  # of equal ones the longest
    scores = [float(row["BLEU"]) for row in rows]
    assert scores == sorted(scores) and scores[1] == 0 < scores[2]
    for row in rows:
        _, line, true = SENTENCES[int(row["sentence"]) - 1]
        own = sacrebleu.sentence_bleu(line, [true], lowercase=True, tokenize="intl")
        assert float(row["BLEU"]) == pytest.approx(own.score, abs=0.05)
    assert [row[1:] for row in shown.rows] == [SENTENCES[i] for i in (4, 2, 1, 0, 5)]
    assert "5 translations differ" in shown.text


def test_no_translation_is_wrong():
    right = [(source, true, true) for source, _, true in SENTENCES]
    shown = use.worst_sentences(right)
    assert shown.rows == [] and shown.text == "Every translation equals its reference."


def test_bleu_by_length_is_the_corpus_s_of_those_sentences():
    shown = use.bleu_by_length(SENTENCES, LENGTHS)
    assert [(bar.label, bar.count) for bar in shown.bars] == [
        ("1", 1),
        ("2", 2),
        ("3", 2),
        ("4", 1),
    ]
    for bar, row in zip(shown.bars, csv_rows(shown.files["bleu_by_length.csv"]), strict=True):
        some = [s for s, n in zip(SENTENCES, LENGTHS, strict=True) if str(n) == bar.label]
        lines, truth = [s[1] for s in some], [s[2] for s in some]
        corpus = sacrebleu.corpus_bleu(lines, [truth], lowercase=True, tokenize="intl")
        assert bar.value == pytest.approx(corpus.score / 100, abs=1e-9)
        assert float(row["BLEU"]) == pytest.approx(bar.value, abs=1e-6)
        assert int(row["least_tokens"]) == int(row["most_tokens"]) == int(bar.label)
    every = [s[1] for s in SENTENCES], [[s[2] for s in SENTENCES]]
    whole = sacrebleu.corpus_bleu(*every, lowercase=True, tokenize="intl").score / 100
    assert [bar.ideal for bar in shown.bars] == [pytest.approx(whole)] * 4


def decoded(name: str, benchmark: Any, params: Any, source: Any, target: Any, patch: Any) -> Any:
    """float32[T, S], the attention of a search that is led along `target`, token by token."""
    model, variables, seen = benchmark.network, {"params": params}, []
    memory = model.apply(variables, source[None], method="encode")
    before = np.concatenate([[0], target[:-1]]).astype(np.int32)
    if name == "gnmt":
        cache, rows = model.start(1, 1), []
        for token in before:
            ids = jnp.full((1, 1), token)
            _, weights, cache = model.apply(variables, ids, cache, memory, method="step")
            rows.append(np.asarray(weights)[0, 0])
        return np.stack(rows)
    softmax = models._softmax
    patch.setattr(models, "_softmax", lambda *x: seen.append(softmax(*x)) or seen[-1])
    cache, rows = model.start(memory, 1, len(target)), []
    for position, token in enumerate(before):
        ids = jnp.full((1, 1), token)
        _, cache = model.apply(variables, ids, jnp.int32(position), cache, memory, method="step")
        rows.append(np.asarray(seen[-1])[0].mean(axis=(0, 1)))  # the last layer's to the source
    return np.stack(rows)


@pytest.mark.long
@pytest.mark.parametrize("name", ["transformer", "gnmt"])
def test_the_attention_is_that_of_decoding(name, data, monkeypatch):  # noqa: F811 (the fixture)
    benchmark = make(name, data[name], **({"num_layers": 2} if name == "transformer" else {}))
    params, _ = jax.jit(benchmark.init)(jax.random.key(1))
    params = jax.tree.map(np.asarray, params)
    source, target = np.array([5, 3, 9, 4, EOS], np.int32), np.array([7, 2, 8, EOS], np.int32)
    weights = benchmark.uses.attention(params, source, target)
    assert weights.shape == (4, 5) and weights.sum(axis=1) == pytest.approx(np.ones(4))
    expected = decoded(name, benchmark, params, source, target, monkeypatch)
    np.testing.assert_allclose(weights, expected, atol=1e-5)
    assert np.ptp(weights) > 0.01


def test_the_attention_of_the_longest_sentence_is_drawn(data, monkeypatch):  # noqa: F811
    benchmark = make("transformer", data["transformer"])
    uses, drawn = benchmark.uses, []

    def attention(params, source, target):
        drawn.append((params, source.tolist(), target.tolist()))
        return np.full((len(target), len(source)), 1 / len(source), np.float32)

    monkeypatch.setattr(uses, "attention", attention)
    rows = list(perfect(benchmark, data["transformer"], wrong=1))
    (shown,) = uses.insights("params", {}, iter(rows))
    ((params, source, target),) = drawn
    sources = benchmark.eval_pairs[0]
    lengths = np.count_nonzero(sources[1:], axis=1)  # the first has no translation
    assert params == "params" and len(source) == len(target) == lengths.max()
    assert source == sources[1:][lengths.argmax(), : len(source)].tolist()
    assert source == [*target[-2::-1], EOS]
    assert Image.open(io.BytesIO(shown.pictures[0].data)).format == "PNG"
    assert shown.rows == [(uses.text(np.array(source)), uses.text(np.array(target)))]
    empty = {"id": np.array([0]), "tokens": np.zeros((1, 12), np.int32)}
    for nothing in ([], [empty]):
        assert uses.insights("params", {}, iter(nothing)) == []
