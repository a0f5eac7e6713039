"""Makes English sentences about dates, times, numbers and amounts with German translations.

    python -m scripts.prepare phrases --out=data/phrases

20,000 pairs for training and 500 for evaluation come from Babel (the Unicode locale data, CLDR) and
num2words, without a network. In every evaluation sentence, a value or the combination of values is
one that no training sentence has: 1 in 20 are reserved for the evaluation. OUT/raw has the text, a
sentence per line, and `text` makes the records of it. The same versions of Babel and num2words give
the same bytes. The program does nothing if the folder is complete.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import random
import re
from collections.abc import Callable, Iterator

from benchmarks.translation import rows
from benchmarks.translation.preparation import phrase_values, text
from common import console
from common.data import files
from common.data.shards import tensorflow
from common.errors import DataError, parse_json
from common.preparation import arguments, writing

COUNTS = {"train": 20_000, "eval": 500}
VOCABULARY, LENGTH = 800, 64  # subwords; tokens of a row
_RESERVED = 20  # 1 of so many values is for the evaluation
_TRIES = 1000  # sentences of one pattern
_ABOUT = "about.json"  # in OUT/raw, written last
# Folders of earlier versions have this text, whose end was the name of the program.
_DESCRIPTION = "English sentences with German translations by scripts.data.phrases, version 2"
_SPACES = str.maketrans(dict.fromkeys("\u00a0\u2009\u202f", " "))  # CLDR has several kinds


def _word_pairs(text: str) -> phrase_values.Words:
    """Words in both languages: "EN=DE, EN=DE"; "NAME" is the same in both."""
    rows = [word.strip().split("=") for word in text.split(",")]
    return [(row[0], row[-1]) for row in rows]


_CITIES = _word_pairs(
    "Vienna=Wien, Munich=München, Cologne=Köln, Zurich=Zürich, Geneva=Genf, Milan=Mailand, "
    "Rome=Rom, Venice=Venedig, Prague=Prag, Warsaw=Warschau, Copenhagen=Kopenhagen, Berlin, "
    "Brussels=Brüssel, Nuremberg=Nürnberg, Hanover=Hannover, Lisbon=Lissabon, Athens=Athen, "
    "Moscow=Moskau, Paris, London, Hamburg, Belgrade=Belgrad, Krakow=Krakau, Dresden"
)
_EVENTS = _word_pairs(
    "the meeting=die Besprechung, the concert=das Konzert, the course=der Kurs, "
    "the exam=die Prüfung, the lecture=der Vortrag, the party=die Feier, the game=das Spiel, "
    "the trip=die Reise, the tour=die Führung, the interview=das Gespräch"
)
_HOUSES = _word_pairs(
    "the museum=das Museum, the library=die Bibliothek, the bakery=die Bäckerei, "
    "the office=das Büro, the shop=der Laden, the pharmacy=die Apotheke, the zoo=der Zoo, "
    "the town hall=das Rathaus, the swimming pool=das Schwimmbad"
)
_GOODS = _word_pairs(
    "the ticket=die Fahrkarte, the book=das Buch, the coat=der Mantel, the car=das Auto, "
    "the table=der Tisch, the room=das Zimmer, the repair=die Reparatur, the lamp=die Lampe, "
    "the ring=der Ring, the bicycle=das Fahrrad"
)
_PEOPLE = _word_pairs(
    "my brother=mein Bruder, my sister=meine Schwester, her son=ihr Sohn, "
    "his daughter=seine Tochter, our neighbor=unser Nachbar, my teacher=meine Lehrerin, "
    "his aunt=seine Tante, her uncle=ihr Onkel, our dog=unser Hund"
)
_GROUPS = _word_pairs(
    "readers=Leser, pupils=Schüler, guests=Gäste, residents=Einwohner, visitors=Besucher, "
    "members=Mitglieder, doctors=Ärzte, children=Kinder"
)
_TERRITORIES = phrase_values.names(
    "territories",
    "AT BE BR CA CL CN CU DE DK EE EG ES FI FR GB GR HR HU IE IN IS IT JP KE MA MX NO NZ PE PL PT "
    "RO SE TH TN UG VN ZA",
)
_LANGUAGES = phrase_values.names(
    "languages", "cs da de el en es fi fr hu it ja ko nl no pl pt ru sv tr uk"
)

SLOTS: dict[str, Callable[[random.Random], phrase_values.Slot]] = {
    "weekday_date": phrase_values.weekday_date,
    "full_date": functools.partial(phrase_values.date, form="full"),
    "long_date": functools.partial(phrase_values.date, form="long"),
    "numeric_date": phrase_values.numeric_date,
    "day": phrase_values.day_of_year,
    "interval": phrase_values.interval,
    "time": phrase_values.time,
    "spoken_time": phrase_values.spoken_time,
    "past": functools.partial(phrase_values.relative, sign=-1),
    "future": functools.partial(phrase_values.relative, sign=1),
    "duration": phrase_values.duration,
    "count": phrase_values.count,
    "small": functools.partial(phrase_values.count, most=99),
    "decimal": phrase_values.decimal,
    "compact": phrase_values.compact,
    "words": phrase_values.words,
    "year": phrase_values.year,
    "year_in_words": phrase_values.year_in_words,
    "ordinal": phrase_values.ordinal,
    "percent": phrase_values.percent,
    **{kind: functools.partial(phrase_values.measure, kind=kind) for kind in phrase_values.UNITS},
    "money": phrase_values.money,
    "temperature": phrase_values.temperature,
    "hours": phrase_values.hours,
    "pages": phrase_values.pages,
    "territories": functools.partial(phrase_values.several, words=_TERRITORIES),
    "language": functools.partial(phrase_values.one, words=_LANGUAGES),
    "city": functools.partial(phrase_values.one, words=_CITIES),
    "event": functools.partial(phrase_values.one, words=_EVENTS),
    "house": functools.partial(phrase_values.one, words=_HOUSES),
    "good": functools.partial(phrase_values.one, words=_GOODS),
    "person": functools.partial(phrase_values.one, words=_PEOPLE),
    "group": functools.partial(phrase_values.one, words=_GROUPS),
    "weekdays": functools.partial(phrase_values.one, words=phrase_values.weekdays()),
}

PATTERNS = [  # English, German
    ("{full_date}", "{full_date}"),
    ("{numeric_date}", "{numeric_date}"),
    ("{interval}", "{interval}"),
    ("{event} is on {weekday_date}.", "{event} ist am {weekday_date}."),
    ("{event} is on {day} at {time}.", "{event} ist am {day} um {time} Uhr."),
    ("{event} will take place on {long_date}.", "{event} findet am {long_date} statt."),
    ("{event} in {city}: {interval}", "{event} in {city}: {interval}"),
    ("Please reply by {long_date}.", "Bitte antworten Sie bis zum {long_date}."),
    ("Can you pay {money} by {day}?", "Kannst du {money} bis zum {day} zahlen?"),
    ("{person} was born on {long_date}.", "{person} wurde am {long_date} geboren."),
    ("See you at {spoken_time}!", "Bis {spoken_time}!"),
    ("{event} starts at {spoken_time}.", "{event} beginnt um {spoken_time}."),
    ("When does {event} end? At {time}.", "Wann endet {event}? Um {time} Uhr."),
    ("The train to {city} departs at {time} from platform {small}.",
     "Der Zug nach {city} fährt um {time} Uhr von Gleis {small} ab."),
    ("The flight from {city} lands in {city2} at {time}.",
     "Der Flug aus {city} landet um {time} Uhr in {city2}."),
    ("{house} is open from {hours} {weekdays}.",
     "{house} ist {weekdays} von {hours} Uhr geöffnet."),
    ("{house} is closed on {day}.", "{house} ist am {day} geschlossen."),
    ("The letter was written {past}.", "Der Brief wurde {past} geschrieben."),
    ("{event} was {past}.", "{event} war {past}."),
    ("{event} begins {future}.", "{event} beginnt {future}."),
    ("{house} closes {future}.", "{house} schließt {future}."),
    ("{duration}", "{duration}"),
    ("The drive from {city} to {city2} takes {duration}.",
     "Die Fahrt von {city} nach {city2} dauert {duration}."),
    ("Wait for {duration}, please.", "Warten Sie bitte {duration}."),
    ("{words}", "{words}"),
    ("{decimal}", "{decimal}"),
    ("{words} {group}", "{words} {group}"),
    ("in the year {year_in_words}", "im Jahr {year_in_words}"),
    ("{house} was built in {year}.", "{house} wurde {year} gebaut."),
    ("{city} has {compact} {group}.", "{city} hat {compact} {group}."),
    ("the {ordinal} anniversary of {city}", "das {ordinal} Jubiläum von {city}"),
    ("The {ordinal} prize goes to {city}.", "Der {ordinal} Preis geht an {city}."),
    ("{person} is {small} years old.", "{person} ist {small} Jahre alt."),
    ("Please read pages {pages}.", "Bitte lesen Sie die Seiten {pages}."),
    ("Have you read page {count}?", "Hast du Seite {count} gelesen?"),
    ("{percent} of the {group} speak {language}.", "{percent} der {group} sprechen {language}."),
    ("{percent} of all books are in {language}.",
     "{percent} aller Bücher sind auf {language}."),
    ("{good} costs {money}.", "{good} kostet {money}."),
    ("How much is {good}? {money}.", "Wie viel kostet {good}? {money}."),
    ("{money}", "{money}"),
    ("The river is {length} long.", "Der Fluss ist {length} lang."),
    ("It is {length} from {city} to {city2}.", "Von {city} nach {city2} sind es {length}."),
    ("The parcel weighs {mass}.", "Das Paket wiegt {mass}."),
    ("The tank holds {volume}.", "Der Tank fasst {volume}."),
    ("The field covers {area}.", "Das Feld umfasst {area}."),
    ("The top speed is {speed}.", "Die Höchstgeschwindigkeit beträgt {speed}."),
    ("The file takes up {data}.", "Die Datei belegt {data}."),
    ("The device shows {power}.", "Das Gerät zeigt {power} an."),
    ("{territories}", "{territories}"),
    ("We traveled through {territories}.", "Wir sind durch {territories} gereist."),
    ("It is {temperature} in {city}.", "In {city} sind es {temperature}."),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Phrase:
    """A sentence in both languages, and the values in it."""

    en: str
    de: str
    slots: tuple[phrase_values.Slot, ...]


def _make_phrase(draw: random.Random, pattern: int) -> Phrase:
    """A sentence by the pattern of this number, with values that `draw` decides."""
    texts = PATTERNS[pattern]
    names = re.findall(r"\{(\w+)\}", texts[0])
    slots = {name: SLOTS[name.rstrip("2")](draw) for name in names}
    for name in names:  # "from Rome to Rome" is none
        while name.endswith("2") and slots[name].value == slots[name[:-1]].value:
            slots[name] = SLOTS[name[:-1]](draw)
    en = texts[0].format_map({name: slot.en for name, slot in slots.items()})
    de = texts[1].format_map({name: slot.de for name, slot in slots.items()})
    return Phrase(_clean(en), _clean(de), tuple(slots.values()))


def _clean(text: str) -> str:
    """With plain spaces; a sentence begins with a capital letter."""
    text = text.translate(_SPACES)
    return text[0].upper() + text[1:] if text.endswith((".", "?", "!")) else text


def pairs(split: str, count: int) -> list[tuple[str, str]]:
    """Sentences in English and German, all different: a function of the arguments.

    Args:
        split: "train", whose values and combinations are common, or "eval", where one is reserved.
        count: how many.
    """
    draw, texts = random.Random(f"phrases {split}"), {}
    patterns = _patterns(draw)
    while len(texts) < count:
        pattern = next(patterns)
        for _ in range(_TRIES if split == "eval" else 1):  # few sentences have a reserved value
            phrase = _make_phrase(draw, pattern)
            if is_reserved(phrase) == (split == "eval") and phrase.en not in texts:
                texts[phrase.en] = phrase.de
                break
    return list(texts.items())


def is_reserved(phrase: Phrase) -> bool:
    """Whether a value of the sentence, or the combination of all of them, is for the evaluation.

    A value has parts, such as the two times of opening hours. The day of a date is no part of it.
    """
    values = [slot.value for slot in phrase.slots if slot.is_open]
    values += [part for slot in phrase.slots for part in slot.parts]
    if len(phrase.slots) > 1:
        values.append(" | ".join(sorted(slot.value for slot in phrase.slots)))
    return any(_hash(value) % _RESERVED == 0 for value in values)


def _write_raw(folder: str) -> None:
    """Writes train.en, train.de, eval.en and eval.de, and then about.json."""
    about = {"description": _DESCRIPTION, "libraries": {}, "sha256": {}}
    for library in ("Babel", "num2words"):
        about["libraries"][library] = importlib.metadata.version(library)
    for split, count in COUNTS.items():
        for language, lines in zip(
            ("en", "de"), zip(*pairs(split, count), strict=True), strict=True
        ):
            data = "".join(f"{line}\n" for line in lines).encode()
            about["sha256"][f"{split}.{language}"] = hashlib.sha256(data).hexdigest()
            files.write(os.path.join(folder, f"{split}.{language}"), [data])
    files.write(os.path.join(folder, _ABOUT), [json.dumps(about, indent=1).encode() + b"\n"])


def prepare(args: argparse.Namespace) -> str:
    """Makes the text and the records that are missing; returns the last line to print.

    Raises:
        UserError: the folder holds other records.
    """
    out, folder = args.out, os.path.join(args.out, "raw")
    state = (
        f"{COUNTS['train']:,} pairs for training and {COUNTS['eval']:,} for evaluation are in "
        f"{out}; train on them: {arguments.train_command('phrases', out)}"
    )
    raw_is_complete, is_ours = _raw_state(folder)
    if raw_is_complete and _has_records(out):
        return f"already complete: {state}"
    writing.State(out).refuse_others(is_ours)
    print(f"{sum(COUNTS.values()):,} pairs of sentences into {out}, about 30 s", flush=True)
    if not raw_is_complete:
        _write_raw(folder)
    _prepare(out, folder)
    return f"wrote: {state}"


def _patterns(draw: random.Random) -> Iterator[int]:
    """Endless patterns: all of them in a new order, again and again."""
    order = list(range(len(PATTERNS)))
    while True:
        draw.shuffle(order)
        yield from order


def _hash(value: str) -> int:
    return int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "big")


def _prepare(out: str, folder: str) -> None:
    """Makes the vocabulary and the records of the text in `folder`."""
    flags = [
        f"--{split}_{side}={folder}/{split}.{language}"
        for split in COUNTS
        for side, language in (("source", "en"), ("target", "de"))
    ]
    flags += [f"--vocabulary_size={VOCABULARY}", f"--length={LENGTH}"]
    text.prepare(text.parse(console.Parser(), [*flags, f"--out={out}", "--overwrite"]))


def _raw_state(folder: str) -> tuple[bool, bool]:
    """Whether all text is in the folder, and whether this program wrote it, in any version."""
    gfile = tensorflow().io.gfile

    def read(name: str) -> bytes:
        path = os.path.join(folder, name)
        if not gfile.exists(path):
            return b""
        with gfile.GFile(path, "rb") as file:
            return file.read()

    try:
        about = parse_json(read(_ABOUT) or b"{}")
    except ValueError:
        about = {}
    description = str(about.get("description", ""))
    if description != _DESCRIPTION:
        return False, description.startswith(_DESCRIPTION[:40])
    sums = about["sha256"].items()
    return all(hashlib.sha256(read(name)).hexdigest() == digest for name, digest in sums), True


def _has_records(out: str) -> bool:
    """Whether the files that the manifest lists are there, and no others."""
    try:
        content = rows.load_manifest(out)
    except DataError:  # damaged
        return False
    if not content:
        return False
    names = [content.vocabulary_file, "sources.txt", "references.txt"]
    if not all(tensorflow().io.gfile.exists(os.path.join(out, name)) for name in names):
        return False
    return writing.are_complete(out, {name: row.bytes for name, row in content.shards.items()})
