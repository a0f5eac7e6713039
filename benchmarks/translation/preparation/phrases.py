"""Makes English sentences about dates, times, numbers and amounts with German translations.

    python -m scripts.prepare phrases --out=data/phrases

20,000 pairs for training and 500 for evaluation come from Babel (the Unicode locale data, CLDR) and
num2words, without a network, by the patterns and words in phrases.tsv. Every evaluation sentence
has a value, or a combination of values, that no training sentence has: 1 in 20 values are reserved
for the evaluation. OUT/raw has the text, a sentence per line, and `text` makes the records
from it. The same versions of Babel and num2words give the same bytes. The program does nothing if
the folder is complete.
"""

import argparse
import collections
import datetime
import hashlib
import os
import re
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from babel import dates, lists, numbers, units
from num2words import num2words

from benchmarks.translation.preparation import text
from common import console
from common.data.shards import tensorflow
from common.preparation import arguments, writing

COUNTS = {"train": 20_000, "eval": 500}
VOCABULARY, LENGTH = 800, 64  # subwords; tokens of a row
_RESERVED = 20  # one value in 20 is for the evaluation
_TRIES = 1000  # sentences of one pattern
_SPACES = str.maketrans(dict.fromkeys("\u00a0\u2009\u202f", " "))  # CLDR has several kinds
_UNITS = {
    "length": "length-kilometer length-meter length-centimeter length-mile length-foot",
    "mass": "mass-kilogram mass-gram mass-tonne mass-pound",
    "volume": "volume-liter volume-milliliter volume-cubic-meter volume-gallon",
    "area": "area-square-kilometer area-square-meter area-hectare",
    "speed": "speed-kilometer-per-hour speed-meter-per-second speed-mile-per-hour",
    "data": "digital-gigabyte digital-megabyte digital-kilobyte",
    "power": "power-watt power-kilowatt power-megawatt energy-kilowatt-hour electric-volt",
}
# The most of each that a sentence has.
_SPANS = {"second": 59, "minute": 59, "hour": 23, "day": 6, "week": 4, "month": 11, "year": 90}
_DAYTIMES = (5, 9, 12, 18)  # the hours at which the night and the other parts of the day end


def _load_words() -> dict[str, list[tuple[str, str]]]:
    """Words, parts of a time of day and patterns of sentences by kind: (English, German)."""
    words = collections.defaultdict(list)
    for line in Path(__file__).with_name("phrases.tsv").read_text("utf-8").splitlines():
        kind, en, de = line.split("\t")
        words[kind].append((en, de))
    return dict(words)


WORDS = _load_words()


class Slot(NamedTuple):
    """A part of a sentence in both languages."""

    en: str
    de: str
    value: str  # the same for every way to write it
    is_open: bool = True  # whether there are many such values, so that one can be left out
    parts: tuple[str, ...] = ()  # values of other slots that the text contains, each open


def _both(write: Callable[..., str], *args: Any, en: str = "en", **options: Any) -> tuple[str, str]:
    """What a function of Babel or num2words writes in English and in German."""
    return write(*args, locale=en, **options), write(*args, locale="de", **options)


def _in_words(number: int, locale: str, to: str = "cardinal") -> str:
    return num2words(number, lang=locale, to=to)


def _list(pairs: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """A list of words, such as "A, B and C", in English and in German."""
    en, de = zip(*pairs, strict=True)
    return lists.format_list(en, "standard", "en"), lists.format_list(de, "standard", "de")


def _integer(draw: Random, most: int) -> int:
    """A random integer from 2 to `most`; small ones are more frequent."""
    return min(most, int(2 * (most / 2) ** draw.random()))


def _date(draw: Random, kind: str) -> Slot:
    day = datetime.date(1950, 1, 1) + datetime.timedelta(draw.randrange(90 * 365))
    locale = "en"
    match kind:
        case "day":
            day = day.replace(year=2000)
            return Slot(*_both(dates.format_skeleton, "MMMMd", day), f"day {day:%m-%d}")
        case "interval":
            last = day + datetime.timedelta(draw.randrange(1, 50))
            texts = _both(dates.format_interval, day, last, "yMMMd")
            return Slot(*texts, f"interval {day} {last}", parts=(f"date {day}", f"date {last}"))
        case "numeric_date":
            english, german = draw.choice(["M/d/yyyy", "yyyy-MM-dd"]), "dd.MM.yyyy"
        case "weekday_date":  # within a sentence
            english, german = "full", "EEEE, 'dem' d. MMMM y"
            locale = draw.choice(["en_US", "en_GB"])
        case _:  # CLDR's "full" or "long"
            english = german = kind.removesuffix("_date")
            locale = draw.choice(["en_US", "en_GB"])
    en = dates.format_date(day, english, locale)
    return Slot(en, dates.format_date(day, german, "de"), f"date {day}")


def _time(draw: Random, kind: str) -> Slot:
    """A time: in English with 12 hours and AM or PM, or with 24 hours; in German with 24."""
    if kind == "time":
        time = datetime.time(draw.randrange(24), draw.choice([0, 15, 30, draw.randrange(60)]))
        texts = _both(dates.format_time, time, "short", en=draw.choice(["en_US", "en_US", "en_GB"]))
        return Slot(*texts, f"time {time:%H:%M}")
    # From a time in the morning to one later: "9:00 AM to 5:30 PM".
    times = [
        datetime.time(draw.randrange(first, last), draw.choice([0, 15, 30, 45]))
        for first, last in ((6, 12), (14, 23))
    ]
    first, last = (_both(dates.format_time, time, "short", en="en_US") for time in times)
    texts = f"{first[0]} to {last[0]}", f"{first[1]} bis {last[1]}"
    return Slot(*texts, f"hours {times}", parts=tuple(f"time {time:%H:%M}" for time in times))


def _spoken_time(draw: Random, kind: str) -> Slot:
    """A time as people say it: "half past seven in the evening" is "halb acht abends"."""
    hour, minute = draw.randrange(24), draw.randrange(0, 60, 5)
    this, after = (_both(_in_words, n) for n in ((hour + 11) % 12 + 1, hour % 12 + 1))
    if (this[1], minute) == ("eins", 0):
        this = (this[0], "ein")  # Uhr
    forms, suffixes = WORDS["minute"][minute // 5], WORDS["daytime"][bisect(_DAYTIMES, hour)]
    en, de = (f"{forms[i].format(this[i], next=after[i])} {suffixes[i]}" for i in range(2))
    return Slot(en, de, f"time {hour:02}:{minute:02}")


def _span(draw: Random, kind: str) -> Slot:
    if kind == "duration":  # two units that follow each other: "2 hours and 35 minutes"
        large, most, small, least = draw.choice(
            [("hour", 30, "minute", 60), ("minute", 60, "second", 60), ("day", 30, "hour", 24)]
        )
        amounts = (draw.randrange(1, most), draw.randrange(1, least))
        pairs = zip(amounts, (f"duration-{large}", f"duration-{small}"), strict=True)
        texts = _list(_both(units.format_unit, *pair, "long") for pair in pairs)
        return Slot(*texts, f"duration {large} {amounts}")
    unit = draw.choice(list(_SPANS))
    count = draw.randrange(1, _SPANS[unit] + 1) * (-1 if kind == "past" else 1)
    delta = datetime.timedelta(seconds=count * dict(dates.TIMEDELTA_UNITS)[unit])
    texts = _both(dates.format_timedelta, delta, unit, 1e9, add_direction=True)
    return Slot(*texts, f"relative {unit} {count}")


def _number(draw: Random, kind: str) -> Slot:
    match kind:
        case "count" | "small":
            number = _integer(draw, 999 if kind == "count" else 99)
            texts = _both(numbers.format_decimal, number)
        case "decimal":
            number = round(_integer(draw, 999_999) + draw.random(), draw.randrange(4))
            number = int(number) if number == int(number) else number  # the value of `count`
            texts = _both(numbers.format_decimal, number)
        case "compact":  # "1.2 million"
            number = draw.randrange(11, 9999) * 10 ** draw.choice([5, 8])
            options = {"format_type": "long", "fraction_digits": 1}
            texts = _both(numbers.format_compact_decimal, number, **options)
        case "words":
            number = _integer(draw, draw.choice([999, 9_999, 999_999]))
            texts = _both(_in_words, number)
        case "year_in_words":
            number = draw.randrange(1100, 2000)
            texts = _both(_in_words, number, to="year")
        case _:  # year
            number = draw.randrange(1700, 2050)
            texts = str(number), str(number)
    # Too many sentences need the small numbers.
    return Slot(*texts, f"number {number}", is_open=number >= 100 or number != int(number))


def _amount(draw: Random, kind: str) -> Slot:
    match kind:
        case "ordinal":
            value = draw.randrange(2, 100)
            texts = num2words(value, to="ordinal_num"), f"{value}."
            if draw.random() >= 0.5:
                texts = _both(_in_words, value, to="ordinal")
        case "pages":
            first = draw.randrange(1, 900)
            last = first + draw.randrange(1, 90)
            texts = f"{first} to {last}", f"{first} bis {last}"
            parts = tuple(f"number {page}" for page in (first, last) if page >= 100)
            return Slot(*texts, f"pages {first} {last}", parts=parts)
        case "percent":
            value = draw.randrange(1, 1000) / 10
            share = round(value / 100, 3)
            texts = _both(numbers.format_percent, share, decimal_quantization=False)
        case "money":
            kind = draw.choice(["EUR", "USD", "GBP", "CHF", "JPY", "SEK", "PLN", "INR"])
            value = _integer(draw, 99_999)
            value += 0 if kind == "JPY" else draw.choice([0, 0.5, 0.9, 0.25])
            form = draw.choice(["standard", "name"])
            texts = _both(numbers.format_currency, value, kind, format_type=form)
        case "temperature":
            value, form = draw.randrange(-25, 45), draw.choice(["long", "short"])
            texts = _both(units.format_unit, value, "temperature-celsius", form)
        case _:
            kind, value = draw.choice(_UNITS[kind].split()), float(_integer(draw, 9_999))
            if draw.random() >= 0.5:
                value = round(value + draw.random(), draw.choice([1, 2]))
            texts = _both(units.format_unit, value, kind, draw.choice(["long", "long", "short"]))
    return Slot(*texts, f"{kind} {value}", is_open=kind not in ("ordinal", "temperature"))


def _word(draw: Random, kind: str) -> Slot:
    if kind == "countries":
        chosen = draw.sample(WORDS["country"], draw.choice([2, 3]))
        return Slot(*_list(chosen), f"several {sorted(en for en, _ in chosen)}")
    en, de = draw.choice(WORDS[kind])
    return Slot(en, de, en, is_open=False)


KINDS = {  # what draws a slot, by its name in phrases.tsv
    kind: draw_slot
    for draw_slot, kinds in {
        _date: "full_date long_date weekday_date numeric_date day interval",
        _time: "time hours",
        _spoken_time: "spoken_time",
        _span: "past future duration",
        _number: "count small decimal compact words year year_in_words",
        _amount: f"ordinal pages percent money temperature {' '.join(_UNITS)}",
        _word: "countries language weekdays city event house good person group",
    }.items()
    for kind in kinds.split()
}


def make_slot(draw: Random, name: str) -> Slot:
    """A value for a name in a pattern, such as "city" or "city2"."""
    kind = name.rstrip("2")
    return KINDS[kind](draw, kind)


def is_reserved(slots: Sequence[Slot]) -> bool:
    """Whether a value, or the combination of all of a sentence, is for the evaluation.

    A value has parts, such as the two times of opening hours. The day of a date is no part of it.
    """
    values = [slot.value for slot in slots if slot.is_open]
    values += [part for slot in slots for part in slot.parts]
    if len(slots) > 1:
        values.append(" | ".join(sorted(slot.value for slot in slots)))
    digests = (hashlib.sha256(value.encode()).digest()[:8] for value in values)
    return any(int.from_bytes(digest, "big") % _RESERVED == 0 for digest in digests)


def _make_sentence(draw: Random, pattern: tuple[str, str]) -> tuple[list[str], list[Slot]]:
    """A sentence in English and in German, with values that `draw` decides."""
    names = re.findall(r"\{(\w+)\}", pattern[0])
    slots = {name: make_slot(draw, name) for name in names}
    for name in names:  # "from Rome to Rome" is no journey
        while name.endswith("2") and slots[name].value == slots[name[:-1]].value:
            slots[name] = make_slot(draw, name)
    texts = []
    for i, form in enumerate(pattern):
        line = form.format_map({name: slot[i] for name, slot in slots.items()}).translate(_SPACES)
        texts.append(line[0].upper() + line[1:] if line.endswith((".", "?", "!")) else line)
    return texts, list(slots.values())


def pairs(split: str, count: int) -> list[tuple[str, str]]:
    """`count` different sentences in English and German: a function of the arguments.

    Values and combinations are common for "train"; for "eval", one of each sentence is reserved.
    """
    draw, texts = Random(f"phrases {split}"), {}
    patterns = list(WORDS["sentence"])
    tries = _TRIES if split == "eval" else 1  # few sentences have a reserved value
    while len(texts) < count:
        draw.shuffle(patterns)
        for pattern in patterns:
            for _ in range(tries):
                (en, de), slots = _make_sentence(draw, pattern)
                if is_reserved(slots) == (split == "eval") and en not in texts:
                    texts[en] = de
                    break
    return list(texts.items())[:count]


def prepare(args: argparse.Namespace) -> str:
    """Makes the text and the records if they are not complete; returns the last line to print."""
    out, raw = args.out, os.path.join(args.out, "raw")
    state = (
        f"{COUNTS['train']:,} pairs for training and {COUNTS['eval']:,} for evaluation are in "
        f"{out}; train on them: {arguments.train_command('phrases', out)}"
    )
    beside = ("raw/eval.de", "vocab.subwords", "sources.txt", "references.txt")
    if writing.is_complete(out, *beside):
        return f"already complete: {state}"
    writing.State(out).refuse_others(tensorflow().io.gfile.exists(f"{raw}/train.en"))
    print(f"{sum(COUNTS.values()):,} pairs of sentences into {out}, about 30 s", flush=True)
    for split, count in COUNTS.items():
        sides = zip(*pairs(split, count), strict=True)
        for code, lines in zip(("en", "de"), sides, strict=True):
            writing.save(raw, f"{split}.{code}", "".join(f"{line}\n" for line in lines).encode())
    flags = [
        f"--train_source={raw}/train.en",
        f"--train_target={raw}/train.de",
        f"--eval_source={raw}/eval.en",
        f"--eval_target={raw}/eval.de",
        f"--vocabulary_size={VOCABULARY}",
        f"--length={LENGTH}",
        f"--out={out}",
        "--overwrite",
    ]
    text.make(text.parse(console.Parser(), flags))
    return f"wrote: {state}"
