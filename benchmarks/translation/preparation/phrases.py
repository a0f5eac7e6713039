"""Makes English sentences about dates, times, numbers and amounts with German translations.

    python -m scripts.prepare phrases --out=data/phrases

20,000 pairs for training and 500 for evaluation come from the words and patterns below, without a
network. One value in 20 is reserved for the evaluation: each evaluation sentence has a date, time,
number or amount that no training sentence has. OUT/raw has the text, a sentence per line, and
`text` makes the records from it. The bytes are always the same. The program does nothing if the
folder is complete.
"""

import argparse
import datetime
import functools
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from random import Random

from benchmarks.translation.preparation import text
from common import cli
from common.preparation import arguments, writing
from common.tensorflow import tensorflow

COUNTS = {"train": 20_000, "eval": 500}
_RESERVED = 20  # one value in 20 is for the evaluation

Pair = tuple[str, str]  # the same in English and in German


def _pairs(entries: Sequence[str]) -> list[Pair]:
    """The two sides of each entry, "English = German"."""
    return [(english, german) for english, _, german in (one.partition(" = ") for one in entries)]


_WORDS = {
    "city": "Vienna = Wien, Munich = München, Cologne = Köln, Zurich = Zürich, Milan = Mailand, "
    "Rome = Rom, Prague = Prag, Warsaw = Warschau, Brussels = Brüssel, Lisbon = Lissabon",
    "event": "the meeting = die Besprechung, the concert = das Konzert, the party = die Feier, "
    "the exam = die Prüfung, the course = der Kurs, the lecture = der Vortrag",
    "house": "the museum = das Museum, the library = die Bibliothek, the bakery = die Bäckerei, "
    "the shop = der Laden, the pharmacy = die Apotheke, the town hall = das Rathaus",
    "good": "the book = das Buch, the coat = der Mantel, the lamp = die Lampe, "
    "the table = der Tisch, the bicycle = das Fahrrad, the ticket = die Fahrkarte",
    "person": "my brother = mein Bruder, my sister = meine Schwester, her son = ihr Sohn, "
    "his daughter = seine Tochter, our neighbor = unser Nachbar, his aunt = seine Tante",
    "group": "readers = Leser, guests = Gäste, visitors = Besucher, children = Kinder",
    "weekday": "Monday = Montag, Tuesday = Dienstag, Wednesday = Mittwoch, "
    "Thursday = Donnerstag, Friday = Freitag, Saturday = Samstag, Sunday = Sonntag",
    "month": "January = Januar, February = Februar, March = März, April = April, May = Mai, "
    "June = Juni, July = Juli, August = August, September = September, October = Oktober, "
    "November = November, December = Dezember",
    # Of a time as people say it, by five minutes.
    "minute": "{this} o'clock = {this} Uhr, five past {this} = fünf nach {this}, "
    "ten past {this} = zehn nach {this}, a quarter past {this} = Viertel nach {this}, "
    "twenty past {this} = zwanzig nach {this}, twenty-five past {this} = fünf vor halb {next}, "
    "half past {this} = halb {next}, twenty-five to {next} = fünf nach halb {next}, "
    "twenty to {next} = zwanzig vor {next}, a quarter to {next} = Viertel vor {next}, "
    "ten to {next} = zehn vor {next}, five to {next} = fünf vor {next}",
    "ones": " = , one = eins, two = zwei, three = drei, four = vier, five = fünf, six = sechs, "
    "seven = sieben, eight = acht, nine = neun, ten = zehn, eleven = elf, twelve = zwölf, "
    "thirteen = dreizehn, fourteen = vierzehn, fifteen = fünfzehn, sixteen = sechzehn, "
    "seventeen = siebzehn, eighteen = achtzehn, nineteen = neunzehn",
    "tens": "twenty = zwanzig, thirty = dreißig, forty = vierzig, fifty = fünfzig, "
    "sixty = sechzig, seventy = siebzig, eighty = achtzig, ninety = neunzig",
}
WORDS = {kind: _pairs(entries.split(", ")) for kind, entries in _WORDS.items()}
PATTERNS = _pairs(  # each has one or several of `VALUES`
    """\
{day} = {day}
{date} = {date}
{event} is on {day} at {time}. = {event} ist am {day} um {time} Uhr.
{event} is on {weekday}, {day}. = {event} ist am {weekday}, dem {day}.
{event} will take place on {date}. = {event} findet am {date} statt.
{person} was born on {date}. = {person} wurde am {date} geboren.
Please reply by {day}. = Bitte antworten Sie bis zum {day}.
{house} is closed on {day}. = {house} ist am {day} geschlossen.
{event} starts at {spoken}. = {event} beginnt um {spoken}.
See you on {weekday} at {spoken}! = Bis {weekday} um {spoken}!
When does {event} end? At {time}. = Wann endet {event}? Um {time} Uhr.
The train to {city} departs at {time}. = Der Zug nach {city} fährt um {time} Uhr ab.
{words} = {words}
{words} {group} = {words} {group}
{house} has {words} {group}. = {house} hat {words} {group}.
{city} has {count} {group}. = {city} hat {count} {group}.
Have you read page {count}? = Hast du Seite {count} gelesen?
{money} = {money}
{good} costs {money}. = {good} kostet {money}.
Can you pay {money} by {day}? = Kannst du {money} bis zum {day} zahlen?
The drive to {city} is {measure} long. = Die Fahrt nach {city} ist {measure} lang.
{percent} of the {group} come from {city}. = {percent} der {group} kommen aus {city}.
""".splitlines()
)


def in_words(number: int) -> Pair:
    """A number below a million; 0 is nothing."""

    before_more = functools.partial(re.sub, "eins$", "ein")  # einundzwanzig
    if number < 20:
        return WORDS["ones"][number]
    if number < 100:
        tens, ones = WORDS["tens"][number // 10 - 2], WORDS["ones"][number % 10]
        german = f"{before_more(ones[1])}und" if ones[1] else ""
        return f"{tens[0]}-{ones[0]}".rstrip("-"), german + tens[1]
    unit, *names = (1000, "thousand", "tausend") if number >= 1000 else (100, "hundred", "hundert")
    first, rest = in_words(number // unit), in_words(number % unit)
    english = f"{first[0]} {names[0]} {rest[0]}".rstrip()
    return english, f"{before_more(first[1])}{names[1]}{rest[1]}"


def _day(draw: Random) -> Pair:
    day = datetime.date(2000, 1, 1) + datetime.timedelta(draw.randrange(366))
    english, german = WORDS["month"][day.month - 1]
    return f"{english} {day.day}", f"{day.day}. {german}"


def _date(draw: Random) -> Pair:
    (english, german), year = _day(draw), draw.randrange(1950, 2040)
    return f"{english}, {year}", f"{german} {year}"


def _time(draw: Random) -> Pair:
    hour, minute = draw.randrange(24), draw.randrange(0, 60, 5)
    half = "PM" if hour >= 12 else "AM"
    return f"{(hour + 11) % 12 + 1}:{minute:02} {half}", f"{hour:02}:{minute:02}"


def _spoken(draw: Random) -> Pair:
    """A time as people say it: "half past seven" is "halb acht"."""
    hour, forms = draw.randrange(1, 13), draw.choice(WORDS["minute"])
    this, after = in_words(hour), in_words(hour % 12 + 1)
    english, german = (forms[i].format(this=this[i], next=after[i]) for i in range(2))
    return english, german.replace("eins Uhr", "ein Uhr")


def _amount(draw: Random, forms: list[Pair], digits: int, most: int) -> Pair:
    """A number from 10 to 10**most in one of the forms; small ones are as frequent as large."""
    number = f"{10 ** draw.uniform(1, most):,.{digits}f}"
    english, german = draw.choice(forms)
    return english.format(number), german.format(number.translate(str.maketrans(",.", ".,")))


_MONEY = [("${}", "{} $"), ("€{}", "{} €"), ("£{}", "{} £")]
_MEASURES = [("{} km", "{} km"), ("{} miles", "{} Meilen"), ("{} hours", "{} Stunden")]
VALUES: dict[str, Callable[[Random], Pair]] = {
    **{"day": _day, "date": _date, "time": _time, "spoken": _spoken},
    "words": lambda draw: in_words(int(10 ** draw.uniform(1.3, 5))),
    "count": lambda draw: _amount(draw, [("{}", "{}")], 0, 6),
    "money": lambda draw: _amount(draw, _MONEY, 2, 5),
    "measure": lambda draw: _amount(draw, _MEASURES, 1, 4),
    "percent": lambda draw: _amount(draw, [("{}%", "{} %")], 1, 2),
}


def is_reserved(german: str) -> bool:
    """Whether a value is for the evaluation, however English writes it."""
    return hashlib.sha256(german.encode()).digest()[0] % _RESERVED == 0


def _sentence(draw: Random) -> tuple[Pair, bool]:
    """A sentence in both languages, and whether a value in it is for the evaluation."""
    pattern = draw.choice(PATTERNS)
    names = re.findall(r"{(\w+)}", pattern[0])
    slots = {
        name: VALUES[name](draw) if name in VALUES else draw.choice(WORDS[name]) for name in names
    }
    english, german = (
        form.format_map({name: pair[i] for name, pair in slots.items()})
        for i, form in enumerate(pattern)
    )
    if english.endswith((".", "?", "!")):
        english, german = english[0].upper() + english[1:], german[0].upper() + german[1:]
    kept = any(is_reserved(slots[name][1]) for name in names if name in VALUES)
    return (english, german), kept


def pairs(split: str, count: int) -> list[Pair]:
    """`count` different sentences in English and German: a function of the arguments."""
    draw, texts = Random(f"phrases {split}"), {}
    while len(texts) < count:
        (english, german), kept = _sentence(draw)
        if kept == (split == "eval"):
            texts[english] = german
    return list(texts.items())


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
    print(f"{sum(COUNTS.values()):,} pairs of sentences into {out}, about 20 s", flush=True)
    flags = [f"--out={out}", "--overwrite", "--vocabulary_size=400", "--length=64"]
    for split, count in COUNTS.items():
        sides = zip(*pairs(split, count), strict=True)
        for (code, side), lines in zip((("en", "source"), ("de", "target")), sides, strict=True):
            writing.save(raw, f"{split}.{code}", "".join(f"{line}\n" for line in lines).encode())
            flags.append(f"--{split}_{side}={raw}/{split}.{code}")
    text.make(text.parse(cli.Parser(), flags))
    return f"wrote: {state}"
