"""Times in a table: dates in several forms, and numbers since 1970, as whole seconds."""

from __future__ import annotations

import calendar

import numpy as np
import pyarrow

from benchmarks.ncf.preparation.tables import MISSING, pc
from common.preparation.sources import SourceError

_CLOCK = (
    r"(?P<h>\d{1,2}):(?P<m>\d{2})(?::(?P<s>\d{2})(?:[.,]\d+)?)?"
    r"(?: ?(?:(?P<am>[Aa])|(?P<pm>[Pp]))[Mm])?"
)
_ZONE = r" ?(?:Z|UTC|GMT|(?:\+|(?P<west>-))(?P<zh>\d{2}):?(?P<zm>\d{2})?)?"
_AFTER = f"(?:[T ]+{_CLOCK}{_ZONE})?"
_MONTHS = pyarrow.array(list(calendar.month_abbr)[1:])
# Without a zone, times are UTC. Of two forms that fit, the first counts.
FORMS = {
    "year-month-day": r"(?P<Y>\d{4})[-/.](?P<M>\d{1,2})[-/.](?P<D>\d{1,2})" + _AFTER,
    "yearmonthday": r"(?P<Y>(?:19|20)\d{2})(?P<M>\d{2})(?P<D>\d{2})"
    r"(?:(?P<h>\d{2})(?P<m>\d{2})(?P<s>\d{2}))?",
    "day.month.year": r"(?P<D>\d{1,2})\.(?P<M>\d{1,2})\.(?P<Y>\d{4})" + _AFTER,
    "day/month/year": r"(?P<D>\d{1,2})[/-](?P<M>\d{1,2})[/-](?P<Y>\d{4})" + _AFTER,
    "month/day/year": r"(?P<M>\d{1,2})[/-](?P<D>\d{1,2})[/-](?P<Y>\d{4})" + _AFTER,
    "Weekday Month day time year": r"\w{3} (?P<name>\w{3}) (?P<D>\d{2}) "
    rf"{_CLOCK}{_ZONE} (?P<Y>\d{{4}})",
    "number": r"(?P<number>[-+]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)",
}
ORDERS = ("day/month/year", "month/day/year")  # both fit 03/04/2024
# From which number on it counts smaller units than seconds: as seconds that is the year 5138.
_UNITS = {1e17: ("nanoseconds", 1e9), 1e14: ("microseconds", 1e6), 1e11: ("milliseconds", 1e3)}


class Times:
    """The times of a file, whose form is known once all of its rows are read."""

    def __init__(self, path: str, skip: int, order: str = ""):
        """`skip` is the number of lines above the first row; `order` one of `ORDERS`, or ""."""
        self._path, self._skip, self._rows, self._example = path, skip, 0, ""
        forms = [form for form in FORMS if not order or form == order or form not in ORDERS]
        self._parts: dict[str, list[np.ndarray]] = {form: [] for form in forms}

    def add(self, column: pyarrow.Array) -> None:
        """Reads times [n].

        Raises:
          SourceError: a time has no form that all times before have, too.
        """
        if pyarrow.types.is_timestamp(column.type) or pyarrow.types.is_date(column.type):
            column = column.cast(pyarrow.timestamp("s"), safe=False).cast("int64").cast("string")
        encoded = pc.fill_null(column.cast("string"), "").dictionary_encode()
        texts, codes = pc.utf8_trim_whitespace(encoded.dictionary), encoded.indices.to_numpy()
        empty = pc.is_in(texts, MISSING).to_numpy(zero_copy_only=False)[codes]
        columns = {form: _seconds(texts, FORMS[form])[codes] for form in self._parts}
        bad = {form: np.isnan(values) & ~empty for form, values in columns.items()}
        form = min(bad, key=lambda form: int(bad[form].sum()))
        if not empty.all():
            self._example = self._example or texts[int(codes[~empty][0])].as_py()
        if bad[form].any():
            row = int(np.argmax(bad[form]))
            line, text = self._skip + self._rows + row + 1, texts[int(codes[row])].as_py()
            raise SourceError(
                f"{self._path}, line {line:,}: the time {text[:80]!r} cannot be read: write "
                "2024-01-31 10:00:00 or seconds since 1970, or give --time=none"
            )
        self._rows += len(column)
        self._parts = {f: [*self._parts[f], columns[f]] for f in columns if not bad[f].any()}

    def seconds(self) -> tuple[np.ndarray, str]:
        """Seconds since 1970, float64[n] without fractions and nan where missing; and their form.

        Raises:
          SourceError: it is not known whether the day or the month comes first, or a time is
            before 1970 or after 2105.
        """
        form, *others = self._parts
        seconds = np.concatenate(self._parts.pop(form))
        if (
            form == ORDERS[0]
            and ORDERS[1] in others
            and not np.array_equal(seconds, np.concatenate(self._parts[ORDERS[1]]), True)
        ):
            raise SourceError(
                f"{self._path}: the times, such as {self._example!r}, may have the day or the "
                f"month first: give --dates={ORDERS[0]} or --dates={ORDERS[1]}"
            )
        if form == "number":
            most = np.nanmax(seconds, initial=0)
            unit, factor = next((u for n, u in _UNITS.items() if most >= n), ("seconds", 1))
            form = f"{unit} since 1970"
            seconds /= factor
        np.floor(seconds, out=seconds)
        if (bad := (seconds < 0) | (seconds >= 1 << 32)).any():
            line = self._skip + int(np.argmax(bad)) + 1
            raise SourceError(f"{self._path}, line {line:,}: the time is not from 1970 to 2105")
        return seconds, form


def _seconds(texts: pyarrow.Array, pattern: str) -> np.ndarray:
    """float64[n]: seconds, or the numbers; nan where a text has not the form."""
    fields = pc.extract_regex(texts, f"^{pattern}$")
    matched = fields.is_valid().to_numpy(zero_copy_only=False)

    def field(name: str) -> pyarrow.Array:
        is_there = f"(?P<{name}>" in pattern
        return pc.fill_null(fields.field(name), "") if is_there else pyarrow.repeat("", len(texts))

    def has(name: str) -> np.ndarray:
        return pc.not_equal(field(name), "").to_numpy(zero_copy_only=False)

    def numbers(name: str, kind: str = "int64") -> np.ndarray:
        return pc.replace_substring_regex(field(name), "^$", "0").cast(kind).to_numpy()

    if "<number>" in pattern:
        return np.where(matched, numbers("number", "float64"), np.nan)
    month, hour, minute, second = map(numbers, "Mhms")
    if "<name>" in pattern:
        month = pc.fill_null(pc.index_in(field("name"), _MONTHS), -1).to_numpy() + 1
    months = (numbers("Y") - 1970).astype("M8[Y]").astype("M8[M]") + (month - 1)
    days = months.astype("M8[D]") + (numbers("D") - 1)
    hour = np.where(has("am") | has("pm"), hour % 12 + 12 * has("pm"), hour)
    zone = np.where(has("west"), -1, 1) * (60 * numbers("zh") + numbers("zm"))
    valid = matched & (month >= 1) & (month <= 12) & (days.astype("M8[M]") == months)
    valid &= (hour < 24) & (minute < 60) & (second <= 60)
    seconds = days.astype("M8[s]").astype(np.int64) + 3600 * hour + 60 * (minute - zone) + second
    return np.where(valid, seconds, np.nan)
