"""The tables of translations, and what a translator's report shows, against sacrebleu."""

import csv
import io

import numpy as np
import pytest
import sacrebleu

from benchmarks.translation import use

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


def test_other_placeholders_are_listed_where_the_sources_have_any():
    assert use.other_placeholders(SENTENCES) == []
    rows = [*SENTENCES, ("%s of {n}", "{n} von %s", "x"), ("<b>a</b> & b", "<b>a b", "x")]
    (shown,) = use.other_placeholders(rows)
    assert "2 sentences" in shown.text and "1 translations" in shown.text
    assert shown.rows == [("lacks </b>", *rows[-1])]
    (row,) = csv_rows(shown.files["placeholders.csv"])
    assert row["sentence"] == "8" and [*row.values()][1:] == [*shown.rows[0]]
    (kept,) = use.other_placeholders(rows[:-1])
    assert kept.rows == [] and "0 translations" in kept.text


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
