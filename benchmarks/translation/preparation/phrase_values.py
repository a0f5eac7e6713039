"""Draws dates, times, numbers and amounts, and writes them in English and in German.

Babel (the Unicode locale data, CLDR) and num2words know how both languages write them.
"""

import dataclasses
import datetime
import random
from collections.abc import Sequence
from typing import Literal

from babel import Locale, dates, lists, numbers, units
from num2words import num2words


@dataclasses.dataclass(frozen=True)
class Slot:
    """A part of a sentence in both languages.

    Attributes:
        en: in English.
        de: in German.
        value: the same for every way to write it.
        is_open: whether there are many such values, so that one of them can be left out.
        parts: values of other slots that the text contains, each open.
    """

    en: str
    de: str
    value: str
    is_open: bool = True
    parts: tuple[str, ...] = ()


# Dates and times.


def _day(draw: random.Random) -> datetime.date:
    return datetime.date(1950, 1, 1) + datetime.timedelta(draw.randrange(90 * 365))


def date(draw: random.Random, form: str) -> Slot:
    """A date in the form "full" or "long" of CLDR."""
    day, english = _day(draw), draw.choice(["en_US", "en_GB"])
    en, de = (dates.format_date(day, form, locale) for locale in (english, "de"))
    return Slot(en, de, f"date {day}")


def weekday_date(draw: random.Random) -> Slot:
    """A full date within a sentence, where German writes "Montag, dem 3. Mai 2021"."""
    day = _day(draw)
    en = dates.format_date(day, "full", draw.choice(["en_US", "en_GB"]))
    de = dates.format_date(day, "EEEE, 'dem' d. MMMM y", "de")
    return Slot(en, de, f"date {day}")


def numeric_date(draw: random.Random) -> Slot:
    day = _day(draw)
    form = draw.choice(["M/d/yyyy", "yyyy-MM-dd"])
    de = dates.format_date(day, "dd.MM.yyyy", "de")
    return Slot(dates.format_date(day, form, "en"), de, f"date {day}")


def day_of_year(draw: random.Random) -> Slot:
    day = _day(draw).replace(year=2000)
    en, de = (dates.format_skeleton("MMMMd", day, locale=locale) for locale in ("en", "de"))
    return Slot(en, de, f"day {day:%m-%d}")


def interval(draw: random.Random) -> Slot:
    first = _day(draw)
    last = first + datetime.timedelta(draw.randrange(1, 50))
    en, de = (dates.format_interval(first, last, "yMMMd", locale=name) for name in ("en", "de"))
    parts = (f"date {first}", f"date {last}")
    return Slot(en, de, f"interval {first} {last}", parts=parts)


def time(draw: random.Random) -> Slot:
    """12 hours with AM or PM, or 24 hours, in English; 24 in German."""
    time = datetime.time(draw.randrange(24), draw.choice([0, 15, 30, draw.randrange(60)]))
    english = draw.choice(["en_US", "en_US", "en_GB"])
    return Slot(_clock(time, english), _clock(time, "de"), f"time {time:%H:%M}")


def _clock(time: datetime.time, locale: str) -> str:
    return dates.format_time(time, "short", locale=locale)


def hours(draw: random.Random) -> Slot:
    """From a time in the morning to one later: "9:00 AM to 5:30 PM"."""
    times = [
        datetime.time(draw.randrange(first, last), draw.choice([0, 15, 30, 45]))
        for first, last in ((6, 12), (14, 23))
    ]
    en, de = ([_clock(time, locale) for time in times] for locale in ("en_US", "de"))
    parts = tuple(f"time {time:%H:%M}" for time in times)
    return Slot(" to ".join(en), " bis ".join(de), f"hours {times}", parts=parts)


_MINUTES = {
    0: ("{} o'clock", "{} Uhr"),
    5: ("five past {}", "fünf nach {}"),
    10: ("ten past {}", "zehn nach {}"),
    15: ("a quarter past {}", "Viertel nach {}"),
    20: ("twenty past {}", "zwanzig nach {}"),
    25: ("twenty-five past {}", "fünf vor halb {next}"),
    30: ("half past {}", "halb {next}"),
    35: ("twenty-five to {next}", "fünf nach halb {next}"),
    40: ("twenty to {next}", "zwanzig vor {next}"),
    45: ("a quarter to {next}", "Viertel vor {next}"),
    50: ("ten to {next}", "zehn vor {next}"),
    55: ("five to {next}", "fünf vor {next}"),
}
_PARTS = [  # the first hour, in English, in German
    (18, "in the evening", "abends"),
    (12, "in the afternoon", "nachmittags"),
    (9, "in the morning", "vormittags"),
    (5, "in the morning", "morgens"),
    (0, "at night", "nachts"),
]


def spoken_time(draw: random.Random) -> Slot:
    """As people say it: "half past seven in the evening" is "halb acht abends"."""
    hour, minute = draw.randrange(24), draw.choice(list(_MINUTES))
    _, *part = next(row for row in _PARTS if hour >= row[0])
    texts = []
    for language, form, suffix in zip(("en", "de"), _MINUTES[minute], part, strict=True):
        this, after = (
            "ein" if language == "de" and (n, minute) == (1, 0) else num2words(n, lang=language)
            for n in ((hour + 11) % 12 + 1, hour % 12 + 1)
        )
        texts.append(f"{form.format(this, next=after)} {suffix}")
    return Slot(texts[0], texts[1], f"time {hour:02}:{minute:02}")


_MOST: dict[Literal["second", "minute", "hour", "day", "week", "month", "year"], int] = {
    "second": 59,
    "minute": 59,
    "hour": 23,
    "day": 6,
    "week": 4,
    "month": 11,
    "year": 90,
}


def relative(draw: random.Random, sign: int) -> Slot:
    """Before now, "3 days ago", if `sign` is -1; after now, "in 3 days", if it is 1."""
    unit = draw.choice(list(_MOST))
    count = draw.randrange(1, _MOST[unit] + 1)
    seconds = count * sign * dict(dates.TIMEDELTA_UNITS)[unit]
    en, de = (
        dates.format_timedelta(
            datetime.timedelta(seconds=seconds), unit, 1e9, add_direction=True, locale=locale
        )
        for locale in ("en", "de")
    )
    return Slot(en, de, f"relative {unit} {count * sign}")


def duration(draw: random.Random) -> Slot:
    """Two units that follow each other: "2 hours and 35 minutes"."""
    large, most, small, least = draw.choice(
        [("hour", 30, "minute", 60), ("minute", 60, "second", 60), ("day", 30, "hour", 24)]
    )
    amounts = (draw.randrange(1, most), draw.randrange(1, least))
    texts = []
    for locale in ("en", "de"):
        parts = [
            units.format_unit(amount, f"duration-{unit}", "long", locale=locale)
            for amount, unit in zip(amounts, (large, small), strict=True)
        ]
        texts.append(lists.format_list(parts, "standard", locale))
    return Slot(texts[0], texts[1], f"duration {large} {amounts}")


# Numbers.


def _integer(draw: random.Random, most: int) -> int:
    """From 2 to `most`, small ones more often."""
    return min(most, int(2 * (most / 2) ** draw.random()))


def _number_value(number: float) -> tuple[str, bool]:
    """The value of a slot, and whether it is open: too many sentences need the small numbers."""
    return f"number {number}", number >= 100 or number != int(number)


def count(draw: random.Random, most: int = 999) -> Slot:
    number = _integer(draw, most)
    en, de = (numbers.format_decimal(number, locale=locale) for locale in ("en", "de"))
    return Slot(en, de, *_number_value(number))


def decimal(draw: random.Random) -> Slot:
    number = round(_integer(draw, 999_999) + draw.random(), draw.randrange(4))
    number = int(number) if number == int(number) else number  # the value of `count`
    en, de = (numbers.format_decimal(number, locale=locale) for locale in ("en", "de"))
    return Slot(en, de, *_number_value(number))


def compact(draw: random.Random) -> Slot:
    """Such as "1.2 million"."""
    number = draw.randrange(11, 9999) * 10 ** draw.choice([5, 8])
    en, de = (
        numbers.format_compact_decimal(number, format_type="long", locale=name, fraction_digits=1)
        for name in ("en", "de")
    )
    return Slot(en, de, f"number {number}")


def words(draw: random.Random) -> Slot:
    number = _integer(draw, draw.choice([999, 9_999, 999_999]))
    return Slot(num2words(number), num2words(number, lang="de"), *_number_value(number))


def year(draw: random.Random) -> Slot:
    number = draw.randrange(1700, 2050)
    return Slot(str(number), str(number), f"number {number}")


def year_in_words(draw: random.Random) -> Slot:
    year = draw.randrange(1100, 2000)
    en, de = (num2words(year, lang=language, to="year") for language in ("en", "de"))
    return Slot(en, de, f"number {year}")


def pages(draw: random.Random) -> Slot:
    first = draw.randrange(1, 900)
    last = first + draw.randrange(1, 90)
    parts = [value for value, is_open in map(_number_value, (first, last)) if is_open]
    en, de = f"{first} to {last}", f"{first} bis {last}"
    return Slot(en, de, f"pages {first} {last}", parts=tuple(parts))


def ordinal(draw: random.Random) -> Slot:
    number = draw.randrange(2, 100)
    if draw.random() < 0.5:
        return Slot(num2words(number, to="ordinal_num"), f"{number}.", f"ordinal {number}", False)
    en, de = (num2words(number, lang=language, to="ordinal") for language in ("en", "de"))
    return Slot(en, de, f"ordinal {number}", False)


def percent(draw: random.Random) -> Slot:
    number = draw.randrange(1, 1000) / 10
    digits = "#,##0.0" if number % 1 else "#,##0"
    en = numbers.format_percent(number / 100, f"{digits}%", "en")
    return Slot(en, numbers.format_percent(number / 100, f"{digits} %", "de"), f"percent {number}")


# Amounts.

UNITS = {
    "length": ["length-kilometer", "length-meter", "length-centimeter", "length-mile",
               "length-foot"],
    "mass": ["mass-kilogram", "mass-gram", "mass-tonne", "mass-pound"],
    "volume": ["volume-liter", "volume-milliliter", "volume-cubic-meter", "volume-gallon"],
    "area": ["area-square-kilometer", "area-square-meter", "area-hectare"],
    "speed": ["speed-kilometer-per-hour", "speed-meter-per-second", "speed-mile-per-hour"],
    "data": ["digital-gigabyte", "digital-megabyte", "digital-kilobyte"],
    "power": ["power-watt", "power-kilowatt", "power-megawatt", "energy-kilowatt-hour",
              "electric-volt"],
}  # fmt: skip


def measure(draw: random.Random, kind: str) -> Slot:
    unit, number = draw.choice(UNITS[kind]), float(_integer(draw, 9_999))
    number = number if draw.random() < 0.5 else round(number + draw.random(), draw.choice([1, 2]))
    length: Literal["long", "short"] = draw.choice(["long", "long", "short"])
    en, de = (units.format_unit(number, unit, length, locale=locale) for locale in ("en", "de"))
    return Slot(en, de, f"{unit} {number}")


def money(draw: random.Random) -> Slot:
    currency = draw.choice(["EUR", "USD", "GBP", "CHF", "JPY", "SEK", "PLN", "INR"])
    amount = _integer(draw, 99_999) + (0 if currency == "JPY" else draw.choice([0, 0.5, 0.9, 0.25]))
    form: Literal["standard", "name"] = draw.choice(["standard", "name"])
    en, de = (
        numbers.format_currency(amount, currency, locale=locale, format_type=form)
        for locale in ("en", "de")
    )
    return Slot(en, de, f"{currency} {amount}")


def temperature(draw: random.Random) -> Slot:
    degrees = draw.randrange(-25, 45)
    length: Literal["long", "short"] = draw.choice(["long", "short"])
    en, de = (
        units.format_unit(degrees, "temperature-celsius", length, locale=locale)
        for locale in ("en", "de")
    )
    return Slot(en, de, f"temperature {degrees}", is_open=False)


# Words.

Words = Sequence[tuple[str, str]]  # in English and German


def names(kind: str, codes: str) -> Words:
    """CLDR's names of "territories" or "languages", whose codes have spaces between them."""
    en, de = (getattr(Locale(language), kind) for language in ("en", "de"))
    return [(en[code], de[code]) for code in codes.split()]


def weekdays() -> Words:
    """Every Monday to every Sunday: "on Mondays"."""
    en, de = (dates.get_day_names(locale=language) for language in ("en", "de"))
    return [(f"on {en[i]}s", f"{de[i].lower()}s") for i in range(7)]


def several(draw: random.Random, words: Words) -> Slot:
    """A list of two or three."""
    chosen = draw.sample(words, draw.choice([2, 3]))
    en, de = (
        lists.format_list([word[i] for word in chosen], "standard", language)
        for i, language in enumerate(("en", "de"))
    )
    return Slot(en, de, f"several {sorted(word[0] for word in chosen)}")


def one(draw: random.Random, words: Words) -> Slot:
    """A word."""
    en, de = draw.choice(words)
    return Slot(en, de, en, is_open=False)
