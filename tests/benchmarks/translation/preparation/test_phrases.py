"""Made sentences: their German, which values are kept for the evaluation, and their records."""

import hashlib
import json
import random
import re

import pytest

from benchmarks.translation.preparation import phrase_values, phrases, text
from benchmarks.translation.preparation.phrase_values import Slot
from benchmarks.translation.preparation.phrases import Phrase
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


def phrase(*slots):
    return Phrase("", "", tuple(Slot("", "", value, is_open) for value, is_open in slots))


def test_one_value_in_twenty_is_reserved():
    """An open value everywhere, a combination in any order, and a word of few alone never."""
    numbers = [f"number {i}" for i in range(4000)]
    kept = [value for value in numbers if phrases.is_reserved(phrase((value, True)))]
    assert 140 < len(kept) < 260
    assert phrases.is_reserved(phrase(("city", False), (kept[0], True)))
    words = [f"city {i}" for i in range(100)]
    assert not any(phrases.is_reserved(phrase((word, False))) for word in words)
    combined = 0
    for i, word in enumerate(words[:50]):
        for other in words[i + 1 :]:
            both = phrases.is_reserved(phrase((word, False), (other, False)))
            assert both == phrases.is_reserved(phrase((other, False), (word, False)))
            combined += both
    assert 130 < combined < 260


@pytest.mark.parametrize(("length", "is_ours"), [(40, True), (39, False), (0, False)])
def test_text_of_another_version_is_ours(length, is_ours, tmp_path):
    about = {"description": f"{phrases._DESCRIPTION[:length]}?"}
    (tmp_path / "about.json").write_text(json.dumps(about))
    assert phrases._raw_state(str(tmp_path)) == (False, is_ours)


@pytest.fixture(scope="module")
def slots():
    """600 slots of every kind, by kind."""
    draw = random.Random(0)
    return {kind: [make(draw) for _ in range(600)] for kind, make in phrases.SLOTS.items()}


def is_reserved(slot):
    return phrases.is_reserved(Phrase("", "", (slot,)))


def family(slot):
    """The kind of value, which several kinds of slots share: "number", "date", "EUR"."""
    return slot.value.split(" ")[0]


def plain(text):
    return text.translate(str.maketrans(dict.fromkeys("\u00a0\u2009\u202f", " ")))


def test_the_same_words_have_the_same_value(slots):
    """Else a kept value would be in training sentences under another name."""
    values = {}
    for slot in (slot for rows in slots.values() for slot in rows if slot.is_open):
        assert values.setdefault((family(slot), slot.en, slot.de), slot.value) == slot.value


def test_parts_are_kept_with_the_value_that_has_them(slots):
    for kind, part in (("interval", "date"), ("hours", "time"), ("pages", "number")):
        rows = [slot for slot in slots[kind] if any(phrases._hash(p) % 20 == 0 for p in slot.parts)]
        assert rows and all(map(is_reserved, rows))
        assert all(p.startswith(f"{part} ") for slot in slots[kind] for p in slot.parts)
    assert all(len(slot.parts) == 2 for kind in ("interval", "hours") for slot in slots[kind])


def patterns(slots):
    """Regular expressions for the English patterns, with a group for each slot."""
    groups = {}
    for kind, rows in slots.items():
        is_closed = not any(slot.is_open for slot in rows)
        words = "|".join(sorted({re.escape(plain(slot.en)) for slot in rows}))
        groups[kind] = words if is_closed else ".+"

    def group(match):
        return f"(?P<{match[1]}>{groups[match[1].rstrip('2')]})"

    escaped = [re.sub(r"([.?])", r"\\\1", en) for en, _ in phrases.PATTERNS]
    return [re.compile(re.sub(r"\{(\w+)\}", group, en), re.IGNORECASE) for en in escaped]


def test_kept_values_are_in_no_training_sentence(slots):
    """Read from the English sentences, for all kinds of values that are kept."""
    texts = {kind: set() for kind in slots}
    regular = patterns(slots)
    for en, _ in phrases.pairs("train", 3000):
        matches = [match for pattern in regular if (match := pattern.fullmatch(en))]
        assert matches, en
        for name, value in (row for match in matches for row in match.groupdict().items()):
            texts[name.rstrip("2")].add(value)  # an amount alone matches several patterns
    texts["time"] |= {time for hours in texts["hours"] for time in hours.split(" to ")}
    texts["count"] |= {page for pages in texts["pages"] for page in pages.split(" to ")}
    kept = {}
    for slot in (slot for rows in slots.values() for slot in rows if is_reserved(slot)):
        kept.setdefault(family(slot), set()).add(plain(slot.en))
    for kind, rows in slots.items():
        of_kind = set().union(*(kept.get(name, set()) for name in map(family, rows)))
        assert not texts[kind] & of_kind, kind
        assert (texts[kind] and of_kind) or not any(slot.is_open for slot in rows), kind


KNOWN = [  # the value, English, German
    ("date", {"form": "full"}, r"\w+day, (May 3|3 May),? \d+", r"\w+tag, 3\. Mai \d+"),
    ("weekday_date", {}, r"Monday, (May 3|3 May),? \d+", r"Montag, dem 3\. Mai \d+"),
    ("time", {}, "12:30 AM", "00:30"),
    ("time", {}, "1:30 PM", "13:30"),
    ("spoken_time", {}, "half past twelve in the afternoon", "halb eins nachmittags"),
    ("spoken_time", {}, "one o'clock at night", "ein Uhr nachts"),
    ("spoken_time", {}, "twenty-five to eight in the evening", "fünf nach halb acht abends"),
    ("relative", {"sign": -1}, "3 days ago", "vor 3 Tagen"),
    ("relative", {"sign": 1}, "in 1 month", "in 1 Monat"),
    ("duration", {}, r"2 hours and \d\d minutes", r"2 Stunden und \d\d Minuten"),
    ("words", {}, "twenty-one", "einundzwanzig"),
    ("compact", {}, r"12.\d billion", r"12,\d Milliarden"),
    ("money", {}, r"\$1\d.50", r"1\d,50 \$"),
    ("percent", {}, "50%", "50 %"),
]


@pytest.mark.parametrize(("name", "options", "english", "german"), KNOWN)
def test_both_languages_say_the_same(name, options, english, german):
    """German as the grammar has it: searched for among many values of the kind."""
    draw, make = random.Random(0), getattr(phrase_values, name)
    slots = (make(draw, **options) for _ in range(20_000))
    spaces = str.maketrans("\u00a0\u202f", "  ")
    actual = next((s for s in slots if re.fullmatch(english, s.en.translate(spaces))), None)
    assert actual and re.fullmatch(german, actual.de.translate(spaces)), actual


def test_every_pattern_uses_the_same_values_in_both_languages():
    for en, de in phrases.PATTERNS:
        names = [sorted(re.findall(r"\{(\w+)\}", text)) for text in (en, de)]
        assert names[0] == names[1] and len(set(names[0])) == len(names[0])


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(phrases, "COUNTS", {"train": 200, "eval": 40})


def test_a_second_call_does_nothing_and_mends_what_is_missing(few, tmp_path):
    out = tmp_path / "out"
    last = prepare.make("phrases", [f"--out={out}"])
    assert last.startswith("wrote: 200 pairs for training and 40 for evaluation")
    english = (out / "raw" / "eval.en").read_text().split("\n")
    assert (out / "raw" / "about.json").read_text().startswith('{\n "description": "')
    assert english == [en for en, _ in phrases.pairs("eval", 40)] + [""]
    assert (out / "sources.txt").read_bytes() == (out / "raw" / "eval.en").read_bytes()
    assert (out / "references.txt").read_bytes() == (out / "raw" / "eval.de").read_bytes()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    times = {path: path.stat().st_mtime_ns for path in before}
    assert "already complete: 200 pairs" in prepare.make("phrases", [f"--out={out}"])
    assert {path: path.stat().st_mtime_ns for path in times} == times
    records = sorted(path for path in out.iterdir() if "train-0" in path.name)
    records[0].unlink()
    assert "wrote: 200 pairs" in prepare.make("phrases", [f"--out={out}"])
    assert {path: path.read_bytes() for path in records} == {p: before[p] for p in records}


def test_damaged_text_is_written_again_and_prepared_again(few, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(text, "prepare", calls.append)
    raw = tmp_path / "raw"
    prepare.make("phrases", [f"--out={tmp_path}"])
    before = {path: path.read_bytes() for path in raw.iterdir()}
    for name in ("train.de", "eval.en", "about.json"):
        (raw / name).write_text("damaged")
        prepare.make("phrases", [f"--out={tmp_path}"])
        assert {path: path.read_bytes() for path in raw.iterdir()} == before
    assert len(calls) == 4
    assert (calls[0].vocabulary_size, calls[0].length, calls[0].out) == (800, 64, str(tmp_path))
    assert [calls[0].train_source, calls[0].train_target] == [f"{raw}/train.en", f"{raw}/train.de"]
    assert [calls[0].eval_source, calls[0].eval_target] == [f"{raw}/eval.en", f"{raw}/eval.de"]
