"""Made sentences: their German, which values are kept for the evaluation, and their records."""

import hashlib
import random
import re

import pytest

from benchmarks.translation.preparation import phrases, text
from common.errors import UserError
from scripts import prepare

COUNTS = {"train": 600, "eval": 100}
SUMS = {  # SHA-256 of these sentences
    "train": "32e8f5083d3333999d3cc5bb7ead9d499ebd9207a7dc9bbcc220f014ce67160a",
    "eval": "5bee3ae0f9b54ed48548d72c74fcfb98df0b443cab383d5d17a0032eb58a5c52",
}


@pytest.fixture(scope="module")
def pairs():
    """{split: [(English, German)]}."""
    return {split: phrases.pairs(split, count) for split, count in COUNTS.items()}


def test_all_sentences_differ_and_do_not_change(pairs):
    english = [en for rows in pairs.values() for en, _ in rows]
    assert len(set(english)) == len(english) == 700
    for split, rows in pairs.items():
        text = "".join(f"{en}\t{de}\n" for en, de in rows)
        assert hashlib.sha256(text.encode()).hexdigest() == SUMS[split], rows[:3]


def test_every_evaluation_sentence_has_a_value_that_training_lacks(monkeypatch):
    drawn, values, make = [], {}, phrases._sentence

    def record(draw):
        drawn.clear()
        pair, kept = make(draw)
        values[pair[0]] = {german for _, german in drawn}
        return pair, kept

    for kind, value in phrases.VALUES.items():
        remember = lambda draw, value=value: drawn.append(value(draw)) or drawn[-1]  # noqa: E731
        monkeypatch.setitem(phrases.VALUES, kind, remember)
    monkeypatch.setattr(phrases, "_sentence", record)
    trained = set().union(*(values[en] for en, _ in phrases.pairs("train", 3000)))
    for en, _ in phrases.pairs("eval", 100):
        assert values[en] - trained, en


def test_one_value_in_twenty_is_reserved():
    assert 160 < sum(phrases.is_reserved(f"{i},5 km") for i in range(4000)) < 250


KNOWN = [  # the kind, English, German
    ("day", "May 3", "3. Mai"),
    ("date", r"February 29, (\d+)", r"29. Februar \1"),
    ("time", "12:30 AM", "00:30"),
    ("time", "1:30 PM", "13:30"),
    ("spoken", "half past twelve", "halb eins"),
    ("spoken", "one o'clock", "ein Uhr"),
    ("spoken", "twenty-five to eight", "fünf nach halb acht"),
    ("words", "twenty-one", "einundzwanzig"),
    ("money", r"\$1(\d).50", r"1\1,50 $"),
    ("count", r"(\d),(\d+)", r"\1.\2"),
    ("measure", r"1,(\d+).5 miles", r"1.\1,5 Meilen"),
    ("percent", "50.0%", "50,0 %"),
]


@pytest.mark.parametrize(("kind", "english", "german"), KNOWN)
def test_both_languages_say_the_same(kind, english, german):
    """German as the grammar has it: searched for among many values of the kind."""
    draw = random.Random(0)
    values = (phrases.VALUES[kind](draw) for _ in range(20_000))
    match, actual = next((m, de) for en, de in values if (m := re.fullmatch(english, en)))
    assert actual == match.expand(german)


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (100, "one hundred", "einhundert"),
        (101, "one hundred one", "einhunderteins"),
        (1_016, "one thousand sixteen", "eintausendsechzehn"),
        (
            30_671,
            "thirty thousand six hundred seventy-one",
            "dreißigtausendsechshunderteinundsiebzig",
        ),
        (201_000, "two hundred one thousand", "zweihunderteintausend"),
    ],
)
def test_numbers_in_words(number, english, german):
    assert phrases.in_words(number) == (english, german)


def test_every_pattern_has_a_value_and_the_same_words_in_both_languages():
    used = set()
    for pair in phrases.PATTERNS:
        english, german = (sorted(re.findall(r"{(\w+)}", text)) for text in pair)
        assert english == german and len(set(english)) == len(english)
        assert phrases.VALUES.keys() & english
        used |= {*english}
    assert used == {*phrases.VALUES, *phrases.WORDS} - {"month", "minute", "ones", "tens"}


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(phrases, "COUNTS", {"train": 200, "eval": 40})


def test_a_second_call_does_nothing_and_writes_what_is_missing(few, tmp_path):
    out = tmp_path / "out"
    last = prepare.make("phrases", [f"--out={out}"])
    assert last.startswith("wrote: 200 pairs for training and 40 for evaluation")
    english = (out / "raw" / "eval.en").read_text().split("\n")
    assert english == [en for en, _ in phrases.pairs("eval", 40)] + [""]
    assert (out / "sources.txt").read_bytes() == (out / "raw" / "eval.en").read_bytes()
    assert (out / "references.txt").read_bytes() == (out / "raw" / "eval.de").read_bytes()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    times = {path: path.stat().st_mtime_ns for path in before}
    assert "already complete: 200 pairs" in prepare.make("phrases", [f"--out={out}"])
    assert {path: path.stat().st_mtime_ns for path in times} == times
    for path in (next(out.glob("*train-0*")), out / "vocab.subwords", out / "sources.txt"):
        path.unlink()
        assert "wrote: 200 pairs" in prepare.make("phrases", [f"--out={out}"])
        assert path.read_bytes() == before[path]


def test_an_interrupted_call_continues_and_other_records_stay(few, tmp_path, monkeypatch):
    calls, raw = [], tmp_path / "raw"
    monkeypatch.setattr(text, "make", calls.append)
    prepare.make("phrases", [f"--out={tmp_path}"])  # ends before the records
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in raw.iterdir()}
    prepare.make("phrases", [f"--out={tmp_path}"])
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in raw.iterdir()}
    assert after == before and len(calls) == 2
    (tmp_path / "train-00000-of-00001").touch()
    (raw / "train.en").unlink()
    with pytest.raises(UserError, match="already holds train-00000-of-00001 of another data set"):
        prepare.make("phrases", [f"--out={tmp_path}"])
