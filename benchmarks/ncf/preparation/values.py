"""Values in tables: names, times, and what spreadsheets make of them."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute

from common.data.order import hash64
from common.preparation.sources import SourceError
from common.text import alike, normal_name

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
# From which number on it counts smaller units than seconds: as seconds that is the year 5138.
_UNITS = {1e17: ("nanoseconds", 1e9), 1e14: ("microseconds", 1e6), 1e11: ("milliseconds", 1e3)}
_CUT = r"^\d([.,]\d{0,8})?[eE]\+(9|09|[12]\d)$"  # a long number, as a spreadsheet shows it
_DAY, _ROWS = 86_400, 1000  # seconds; rows that are looked at
# Days since 1900 in a spreadsheet, 1954 to 2119; as seconds they are one day of 1970.
_SERIALS, _SERIAL_OF_1970 = (20_000, 80_000), 25_569
FINE, MIDNIGHT, DAY, CLOCK, UNKNOWN = range(5)  # grains of times


def encode(kind: str, arrays: list[pyarrow.Array]) -> tuple[np.ndarray, pyarrow.Array]:
    """int32[n] of an encoded column: the numbers of its names or -1; and the names.

    The numbers are by first appearance. Names that look the same are one: says how many.
    """
    column: Any = pyarrow.chunked_array(arrays).unify_dictionaries().combine_chunks()
    arrays.clear()
    texts = normal(column.dictionary)
    if joined := len(texts) - len(texts.unique()):
        print(
            f"warning: {kind}s whose names look like another's, joined with it: {joined:,} "
            "(blanks, signs without width or Unicode's forms, NFC and NFD, are different)"
        )
    # pandas writes 7.0 where a column has empty cells.
    texts = pc.replace_substring_regex(texts, r"^(0|[1-9]\d*)\.0$", r"\1")
    names = texts.unique()
    names = names.filter(pc.not_equal(names, ""))
    _warn_of_names(kind, names)
    codes = pc.index_in(texts, value_set=names).take(column.indices)
    return codes.fill_null(-1).to_numpy(), names


def normal(texts: Any) -> pyarrow.Array:
    """Names in `normal_name`'s form, which most have already."""
    is_odd = pc.fill_null(pc.match_substring_regex(texts, r"[^\x21-\x7e]"), False)
    return pc.replace_with_mask(
        texts, is_odd, pyarrow.array(map(normal_name, texts.filter(is_odd).to_pylist()), "string")
    )


def _warn_of_names(kind: str, names: pyarrow.Array) -> None:
    """Warns about names that look alike, and about numbers that have lost their digits."""
    if len(pc.utf8_lower(pc.utf8_normalize(names, form="NFKC")).unique()) < len(names):
        groups = alike(names.to_pylist())
        print(
            f"warning: {kind}s whose names look alike, such as {groups[0][0]} and {groups[0][1]}, "
            f"stay apart: {sum(map(len, groups)):,}; write those alike that are one"
        )
    is_cut = pc.match_substring_regex(names, _CUT)
    if number := pc.sum(is_cut).as_py():
        print(
            f"warning: {kind}s that are numbers without their last digits, such as "
            f"{names.filter(is_cut)[0]}, by a spreadsheet: {number:,}. Several may have become "
            "one: export the table again, with this column as text"
        )


def grain(cells: Sequence[str]) -> int:
    """How finely a column tells times, by some of its cells; a CLOCK tells no day."""
    texts = _tidy(pyarrow.array(filter(str.isascii, cells), "string"))
    for form in (*_FORMS, *_CLOCKS) if len(texts) else ():
        if (times := _parsed(texts, form)).null_count:
            continue
        if form in _CLOCKS:
            return CLOCK
        times = _since_1970(times.to_numpy())[0] if form == "number" else times.to_numpy()
        return FINE if (times % _DAY).any() else MIDNIGHT if "H" in form else DAY
    return UNKNOWN


def seconds(column: Any, path: str, skip: int) -> tuple[np.ndarray, str]:
    """Seconds since 1970, float64[n], nan where missing; and the form of the times.

    `skip` is the number of lines above the first row of the file. Raises SourceError if the times
    have no form in common, or two, or are not from 1970 on.
    """
    if pyarrow.types.is_temporal(column.type):
        column = column.cast(pyarrow.timestamp("s"), safe=False).cast("int64").cast("string")
    values, form = _parse(column, path, skip)
    if form == "number":
        values, form = _since_1970(values)
        if pc.any(pc.match_substring_regex(column[:_ROWS].cast("string"), _CUT)).as_py():
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


def unique(numbers: np.ndarray) -> np.ndarray:
    """Sorts int64[n], n > 0, and returns each once; np.unique takes ten times as long."""
    numbers.sort()
    return numbers[np.append(True, numbers[1:] != numbers[:-1])]


def are_repeated(*columns: np.ndarray) -> np.ndarray:
    """bool[n], the rows that a later one equals, as in folds; says how many."""
    _, last = np.unique(hash64(*columns)[::-1], return_index=True)
    repeated = np.ones(len(columns[0]), np.bool_)
    repeated[len(repeated) - 1 - last] = False
    if repeated.any():
        print(f"warning: rows that others repeat, as folds do, left out: {repeated.sum():,}")
    return repeated
