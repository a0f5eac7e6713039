"""Sentences about dates, times, numbers and amounts: patterns in English and in German."""

import dataclasses
import functools
import random
import re
from collections.abc import Callable

from benchmarks.translation.preparation import phrase_values as values

_SPACES = str.maketrans(dict.fromkeys("\u00a0\u2009\u202f", " "))  # CLDR has several kinds


@dataclasses.dataclass(frozen=True)
class Phrase:
    """A sentence in both languages, and the values in it."""

    en: str
    de: str
    slots: tuple[values.Slot, ...]


def phrase(draw: random.Random, pattern: int) -> Phrase:
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


def _pairs(text: str) -> values.Words:
    """Words in both languages: "EN=DE, EN=DE"; "NAME" is the same in both."""
    rows = [word.strip().split("=") for word in text.split(",")]
    return [(row[0], row[-1]) for row in rows]


_CITIES = _pairs(
    "Vienna=Wien, Munich=München, Cologne=Köln, Zurich=Zürich, Geneva=Genf, Milan=Mailand, "
    "Rome=Rom, Venice=Venedig, Prague=Prag, Warsaw=Warschau, Copenhagen=Kopenhagen, Berlin, "
    "Brussels=Brüssel, Nuremberg=Nürnberg, Hanover=Hannover, Lisbon=Lissabon, Athens=Athen, "
    "Moscow=Moskau, Paris, London, Hamburg, Belgrade=Belgrad, Krakow=Krakau, Dresden"
)
_EVENTS = _pairs(
    "the meeting=die Besprechung, the concert=das Konzert, the course=der Kurs, "
    "the exam=die Prüfung, the lecture=der Vortrag, the party=die Feier, the game=das Spiel, "
    "the trip=die Reise, the tour=die Führung, the interview=das Gespräch"
)
_HOUSES = _pairs(
    "the museum=das Museum, the library=die Bibliothek, the bakery=die Bäckerei, "
    "the office=das Büro, the shop=der Laden, the pharmacy=die Apotheke, the zoo=der Zoo, "
    "the town hall=das Rathaus, the swimming pool=das Schwimmbad"
)
_GOODS = _pairs(
    "the ticket=die Fahrkarte, the book=das Buch, the coat=der Mantel, the car=das Auto, "
    "the table=der Tisch, the room=das Zimmer, the repair=die Reparatur, the lamp=die Lampe, "
    "the ring=der Ring, the bicycle=das Fahrrad"
)
_PEOPLE = _pairs(
    "my brother=mein Bruder, my sister=meine Schwester, her son=ihr Sohn, "
    "his daughter=seine Tochter, our neighbor=unser Nachbar, my teacher=meine Lehrerin, "
    "his aunt=seine Tante, her uncle=ihr Onkel, our dog=unser Hund"
)
_GROUPS = _pairs(
    "readers=Leser, pupils=Schüler, guests=Gäste, residents=Einwohner, visitors=Besucher, "
    "members=Mitglieder, doctors=Ärzte, children=Kinder"
)
_TERRITORIES = values.names(
    "territories",
    "AT BE BR CA CL CN CU DE DK EE EG ES FI FR GB GR HR HU IE IN IS IT JP KE MA MX NO NZ PE PL PT "
    "RO SE TH TN UG VN ZA",
)
_LANGUAGES = values.names(
    "languages", "cs da de el en es fi fr hu it ja ko nl no pl pt ru sv tr uk"
)


SLOTS: dict[str, Callable[[random.Random], values.Slot]] = {
    "weekday_date": values.weekday_date,
    "full_date": functools.partial(values.date, form="full"),
    "long_date": functools.partial(values.date, form="long"),
    "numeric_date": values.numeric_date,
    "day": values.day_of_year,
    "interval": values.interval,
    "time": values.time,
    "spoken_time": values.spoken_time,
    "past": functools.partial(values.relative, sign=-1),
    "future": functools.partial(values.relative, sign=1),
    "duration": values.duration,
    "count": values.count,
    "small": functools.partial(values.count, most=99),
    "decimal": values.decimal,
    "compact": values.compact,
    "words": values.words,
    "year": values.year,
    "year_in_words": values.year_in_words,
    "ordinal": values.ordinal,
    "percent": values.percent,
    **{kind: functools.partial(values.measure, kind=kind) for kind in values.UNITS},
    "money": values.money,
    "temperature": values.temperature,
    "hours": values.hours,
    "pages": values.pages,
    "territories": functools.partial(values.several, words=_TERRITORIES),
    "language": functools.partial(values.one, words=_LANGUAGES),
    "city": functools.partial(values.one, words=_CITIES),
    "event": functools.partial(values.one, words=_EVENTS),
    "house": functools.partial(values.one, words=_HOUSES),
    "good": functools.partial(values.one, words=_GOODS),
    "person": functools.partial(values.one, words=_PEOPLE),
    "group": functools.partial(values.one, words=_GROUPS),
    "weekdays": functools.partial(values.one, words=values.weekdays()),
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
