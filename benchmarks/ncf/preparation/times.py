"""Times in tables: dates, numbers since 1970, and what spreadsheets make of them."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute

from common.preparation.sources import SourceError

pc: Any = pyarrow.compute  # its functions are made when it is imported
# strptime's forms of dates, and of the time of day behind them. Without a zone, times are UTC.
_DATES = ("%Y-%m-%d", "%Y/%m/%d", "%Y%m%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y")
_DATES += ("%m-%d-%Y", "%d %b %Y", "%b %d %Y", "%m %d %Y")
_CLOCKS = ("%H:%M:%S", "%H:%M", "%I:%M:%S %p", "%I:%M %p")
_FORMS = (
    *_DATES,
    *map("".join, itertools.product(_DATES, " T", _CLOCKS, ("", "%z"))),
    "%a %b %d %H:%M:%S %z %Y",
    "number",
)
_CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d)?( ?[AP]M)?", re.IGNORECASE)
_LIKE_A_TIME = re.compile(r"1\d{9}(\d{3}|\d{6})?|.*\d[-/:]\d\d.*")
# From which number on it counts smaller units than seconds: as seconds that is the year 5138.
_UNITS = {1e17: ("nanoseconds", 1e9), 1e14: ("microseconds", 1e6), 1e11: ("milliseconds", 1e3)}
CUT = r"^\d([.,]\d{0,8})?[eE]\+(9|09|[12]\d)$"  # a long number, as a spreadsheet shows it
_DAY, _ROWS = 86_400, 1000  # seconds; rows that are looked at
# Days since 1900 in a spreadsheet, 1954 to 2119; as seconds they are one day of 1970.
_SERIALS, _SERIAL_OF_1970 = (20_000, 80_000), 25_569
FINE, MIDNIGHT, DAY, CLOCK, UNKNOWN = range(5)  # grains of times


def grain(cells: Sequence[str]) -> int:
    """How finely a column tells times, by some of its cells; a CLOCK tells no day."""
    texts = _tidy(pyarrow.array([cell for cell in cells if cell and cell.isascii()], "string"))
    if len(texts) and all(map(_CLOCK.fullmatch, texts.to_pylist())):
        return CLOCK
    for form in _FORMS if len(texts) else ():
        if not (values := _parsed(texts, form)).null_count:
            times = values.to_numpy()
            times = _since_1970(times)[0] if form == "number" else times
            return FINE if (times % _DAY).any() else MIDNIGHT if "H" in form else DAY
    return UNKNOWN


def are_times(cells: Sequence[str]) -> bool:
    """Whether all cells look like times, in a column whose name says nothing."""
    return bool(cells) and all(map(_LIKE_A_TIME.fullmatch, cells))


def joined(days: Any, clocks: Any = None) -> Any:
    """Times of one column, or of two, of days and of hours; a day's own midnight is left out."""
    if clocks is None:
        return days
    days = pc.replace_substring_regex(days.cast("string"), r"[ T]0?0:00(:00)?(\.0+)?$", "")
    return pc.binary_join_element_wise(days, clocks.cast("string"), " ")


def seconds(column: pyarrow.ChunkedArray, path: str, skip: int) -> tuple[np.ndarray, str]:
    """Seconds since 1970 of times, float64[n], nan where missing; and the form of the times.

    `skip` is the number of lines above the first row of the file. Raises SourceError if the times
    have no form in common, or two, or are not from 1970 on.
    """
    if pyarrow.types.is_temporal(column.type):
        column = column.cast(pyarrow.timestamp("s"), safe=False).cast("int64").cast("string")
    values, form = _parse(column, path, skip)
    if form == "number":
        values, form = _since_1970(values)
        if pc.any(pc.match_substring_regex(column[:_ROWS].cast("string"), CUT)).as_py():
            form += ", without their last digits, by a spreadsheet: export them as text"
    if (bad := (values < 0) | (values >= 1 << 32)).any():
        line = skip + int(np.argmax(bad)) + 1
        raise SourceError(f"{path}, line {line:,}: the time is not from 1970 to 2105")
    return values, form


def _since_1970(numbers: np.ndarray) -> tuple[np.ndarray, str]:
    """Numbers as seconds since 1970, and what they count, by the largest."""
    least, most = np.nanmin(numbers, initial=np.inf), np.nanmax(numbers, initial=0)
    if _SERIALS[0] <= least and most < _SERIALS[1]:
        return np.rint((numbers - _SERIAL_OF_1970) * _DAY), "days since 1900, of a spreadsheet"
    unit, factor = next((u for n, u in _UNITS.items() if most >= n), ("seconds", 1))
    return np.floor(numbers / factor), f"{unit} since 1970"


def _parse(column: pyarrow.ChunkedArray, path: str, skip: int) -> tuple[np.ndarray, str]:
    """The numbers or seconds, and the form that all texts have."""
    texts = _tidy(column)
    example = texts.drop_null()[:1]
    forms = [form for form in _FORMS if _parsed(example, form).null_count == 0]
    if len(forms) > 1 and forms[-1] == "number":
        forms.pop()
    parts: dict[str, np.ndarray] = {}
    row = 0
    for form in forms or ["number"]:
        values = _parsed(texts, form)
        wrong = pc.index(pc.xor(values.is_valid(), texts.is_valid()), True).as_py()
        if wrong < 0:
            parts[form] = values.to_numpy()
        row = max(row, wrong)
    if not parts:
        raise SourceError(
            f"{path}, line {skip + 1 + row:,}: unknown time {texts[row].as_py()[:80]!r}; write "
            "2024-01-31 10:00:00 or seconds since 1970, or --time=none"
        )
    (form, seconds), *others = parts.items()
    for other, values in others:
        if not np.array_equal(seconds, values, equal_nan=True):
            raise SourceError(
                f"{path}: the times, such as {example[0].as_py()!r}, may be {form} or "
                f"{other}: write them as 2024-01-31, or give --time=none"
            )
    return seconds, form


def _tidy(times: Any) -> Any:
    """Times as text without blanks around, commas and parts of a second."""
    texts = pc.utf8_trim_whitespace(times.cast("string"))
    texts = pc.replace_substring_regex(texts, r"(:\d\d)[.,]\d+", r"\1")
    texts = pc.replace_substring_regex(texts, r"^(\d{4,}),(\d+)$", r"\1.\2")  # a decimal comma
    return pc.replace_substring(pc.replace_substring(texts, ",", ""), " UTC", "Z")


def _parsed(texts: Any, form: str) -> Any:
    """Texts of one of `_FORMS` as float64: seconds or numbers; null where the form is another."""
    if form != "number":
        times = pc.strptime(texts, format=form, unit="s", error_is_null=True)
        return times.cast("int64").cast("float64")
    is_number = pc.match_substring_regex(texts, r"^[-+]?\d+(\.\d*)?([eE][+-]?\d+)?$")
    return pc.if_else(is_number, texts, None).cast("float64")
