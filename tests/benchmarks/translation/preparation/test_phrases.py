"""Made sentences: their German, which values are kept for the evaluation, and their records."""

import hashlib
import itertools
import random
import re

import pytest

from benchmarks.translation.preparation import phrases, text
from benchmarks.translation.preparation.phrases import Slot, is_reserved
from common.errors import UserError
from scripts import prepare

COUNTS = {"train": 600, "eval": 100}
# SHA-256 of these sentences, with the Babel and num2words of the lock.
SUMS = {
    "train": "424b1fc2ac40da31119f7f90fb6ed9197220569fc3ed55b1ab4bba49cf329d0e",
    "eval": "2d5f04c34c83733ca8bde4c7f6765340613dadedcfc66f81c4ac437c4245ff95",
}


@pytest.fixture(scope="module")
def pairs():
    """{split: [(English, German)]}."""
    return {split: phrases.pairs(split, count) for split, count in COUNTS.items()}


def test_all_sentences_differ_and_none_is_in_both_splits(pairs):
    english = [en for rows in pairs.values() for en, _ in rows]
    assert len(set(english)) == len(english) == 700
    # German times and dates have fewer forms, yet no translation was trained on either.
    german = [{de for _, de in pairs[split]} for split in COUNTS]
    assert not german[0] & german[1]


def test_the_sentences_do_not_change(pairs):
    for split, rows in pairs.items():
        text = "".join(f"{en}\t{de}\n" for en, de in rows)
        assert hashlib.sha256(text.encode()).hexdigest() == SUMS[split], rows[:3]


def test_one_value_in_twenty_is_reserved():
    """An open value everywhere, a combination in any order, and a word of few alone never."""
    numbers = [Slot("", "", f"number {i}") for i in range(4000)]
    words = [Slot("", "", f"city {i}", is_open=False) for i in range(60)]
    kept = [number for number in numbers if is_reserved([number])]
    assert 140 < len(kept) < 260
    assert is_reserved([words[0], kept[0]])
    assert not any(is_reserved([word]) for word in words)
    combined = list(itertools.combinations(words, 2))
    assert 50 < sum(map(is_reserved, combined)) < 130
    assert all(is_reserved(pair) == is_reserved(pair[::-1]) for pair in combined)


def test_the_same_words_have_the_same_value():
    """Else a kept value would be in training sentences under another name."""
    draw, values = random.Random(0), {}
    for slot in (phrases.make_slot(draw, kind) for kind in phrases.KINDS for _ in range(600)):
        family = slot.value.split(" ")[0]  # which several kinds share: "number", "date", "EUR"
        if slot.is_open:
            assert values.setdefault((family, slot.en, slot.de), slot.value) == slot.value


def test_every_evaluation_sentence_has_a_new_value(monkeypatch):
    """A value, or the combination of all its values, that no training sentence has."""
    values, make = {}, phrases._make_sentence

    def record(draw, pattern):
        texts, slots = make(draw, pattern)
        own = {slot.value for slot in slots if slot.is_open}
        own |= {part for slot in slots for part in slot.parts}
        values[texts[0]] = own | {tuple(sorted(slot.value for slot in slots))}
        return texts, slots

    monkeypatch.setattr(phrases, "_make_sentence", record)
    trained = set().union(*(values[en] for en, _ in phrases.pairs("train", 3000)))
    for en, _ in phrases.pairs("eval", 100):
        assert values[en] - trained, en


KNOWN = [  # the kind, English, German
    ("full_date", r"\w+day, (May 3|3 May),? \d+", r"\w+tag, 3\. Mai \d+"),
    ("weekday_date", r"Monday, (May 3|3 May),? \d+", r"Montag, dem 3\. Mai \d+"),
    ("time", "12:30 AM", "00:30"),
    ("time", "1:30 PM", "13:30"),
    ("spoken_time", "half past twelve in the afternoon", "halb eins nachmittags"),
    ("spoken_time", "one o'clock at night", "ein Uhr nachts"),
    ("spoken_time", "twenty-five to eight in the evening", "fünf nach halb acht abends"),
    ("past", "3 days ago", "vor 3 Tagen"),
    ("future", "in 1 month", "in 1 Monat"),
    ("duration", r"2 hours and \d\d minutes", r"2 Stunden und \d\d Minuten"),
    ("words", "twenty-one", "einundzwanzig"),
    ("compact", r"12.\d billion", r"12,\d Milliarden"),
    ("money", r"\$1\d.50", r"1\d,50 \$"),
    ("percent", "50%", "50 %"),
]


@pytest.mark.parametrize(("kind", "english", "german"), KNOWN)
def test_both_languages_say_the_same(kind, english, german):
    """German as the grammar has it: searched for among many values of the kind."""
    draw = random.Random(0)
    slots = (phrases.make_slot(draw, kind) for _ in range(20_000))
    spaces = str.maketrans("\u00a0\u202f", "  ")
    actual = next((s for s in slots if re.fullmatch(english, s.en.translate(spaces))), None)
    assert actual and re.fullmatch(german, actual.de.translate(spaces)), actual


def test_every_pattern_uses_the_same_values_in_both_languages():
    used = set()
    for pair in phrases.WORDS["sentence"]:
        english, german = (sorted(re.findall(r"\{(\w+)\}", text)) for text in pair)
        assert english == german and len(set(english)) == len(english)
        used |= {name.rstrip("2") for name in english}
    assert used == set(phrases.KINDS)


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
