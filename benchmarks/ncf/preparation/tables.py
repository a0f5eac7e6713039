"""Tables: CSV and the like, JSON lines and Parquet, perhaps in gzip; and the times in them."""

import contextlib
import csv
import dataclasses
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.csv
import pyarrow.json
from pyarrow import parquet

from common import limits
from common.data.shards import read_errors, tensorflow
from common.errors import one_line
from common.preparation.sources import SourceError

pc: Any = pyarrow.compute  # its functions are made when it is imported
# What a column holds, by its name in small letters and digits; the first name that is there counts.
GUESSES = {
    "user": "userid user uid reviewerid customerid customer visitorid visitor memberid member "
    "accountid account username reviewer clientid sessionid session",
    "item": "itemid item iid movieid productid product parentasin asin sku articleid article "
    "stockcode bookid book isbn trackid track songid song albumid album artistid artist gameid "
    "game businessid recipeid videoid animeid newsid venueid poiid courseid movie film title",
    "time": "timestamp unixreviewtime time datetime date ts createdat eventtime reviewtime ratedat "
    "playedat dateadded purchasedat invoicedate eventdate orderdate tdat",
    "title": "title itemtitle movietitle producttitle booktitle itemname moviename productname "
    "artistname trackname songname name",
}
_MISSING = ["", "NULL", "null", "None", "NaN", "nan", "NA", "N/A", "\\N"]
_HEAD, _ROWS = 1 << 16, 20  # bytes and rows to look at
_BLOCK = 4 << 20  # bytes that are parsed at a time
_COLONS = "\x1f"  # in place of "::", as pyarrow's delimiters have one character
_DELIMITERS = ("\t", ",", ";", "|", _COLONS, " ")
_VALUE = re.compile(r"[-+]?\d[\d.:/TZ +eE-]*")  # a number or a date, which no header has
_NO_TABLE = {
    b"PK\3\4": "is an archive or Excel's: unpack it, or save it as CSV",
    b"\xff\xfe": "is UTF-16: save it as UTF-8",
    b"[": "is one JSON list: write one object in each line",
}
# strptime's forms of dates, and of the time of day behind them. Without a zone, times are UTC.
_DATES = (
    "%Y-%m-%d",
    "%Y/%m/%d",
    "%Y%m%d",
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d-%m-%Y",
    "%m-%d-%Y",
    "%d %b %Y",
    "%b %d %Y",
    "%m %d %Y",
)
_CLOCKS = ("%H:%M:%S", "%H:%M", "%I:%M:%S %p", "%I:%M %p")
_FORMS = (
    *_DATES,
    *map("".join, itertools.product(_DATES, " T", _CLOCKS, ("", "%z"))),
    "%a %b %d %H:%M:%S %z %Y",
    "number",
)
# From which number on it counts smaller units than seconds: as seconds that is the year 5138.
_UNITS = {1e17: ("nanoseconds", 1e9), 1e14: ("microseconds", 1e6), 1e11: ("milliseconds", 1e3)}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table whose head is known."""

    path: str  # local or gs://
    names: tuple[str, ...]  # the columns' names; without a header their numbers from 1
    rows: Sequence[Sequence[str]] = ()  # the first rows of a CSV, as text
    skip: int = 0  # lines above the first row
    delimiter: str = ""  # "" for JSON and Parquet
    quoted: bool = False
    types: pyarrow.Schema | None = None  # the columns' types in JSON

    @property
    def has_header(self) -> bool:
        """Whether the first line of the file names the columns."""
        return self.names[:1] != ("1",)

    def find(self, name: str) -> int | None:
        """The column that a user means by a name or by a number from 1; None if there is none."""
        names = [*map(_short, self.names)]
        if _short(name) in names:
            return names.index(_short(name))
        is_number = name.isdecimal() and 0 < int(name) <= len(names)
        return int(name) - 1 if is_number else None

    def guesses(self) -> dict[str, int]:
        """The columns by what they hold, a key of `GUESSES`.

        Without a header they have MovieLens' order, user, item, rating, time, if the values fit.
        """
        if self.has_header:
            return _guesses(self.names)
        width = len(self.names)
        is_timed = width > 2 and all(re.fullmatch(r"\d{9,10}", row[-1]) for row in self.rows)
        is_whole = all(cell.isdecimal() for row in self.rows for cell in row[:2])
        is_rated = width in (3, 4) and all(_VALUE.fullmatch(row[2]) for row in self.rows)
        if not is_rated or not (is_whole or (is_timed and width == 4)):
            return {}
        return {"user": 0, "item": 1} | ({"time": width - 1} if is_timed else {})

    def read(self, columns: dict[str, int]) -> pyarrow.Table:
        """The columns by what they hold: times as they are, others as bytes; null where missing."""
        # The columns of a CSV are called by their numbers, as a header may have a name twice.
        keys = [str(i) if self.delimiter else self.names[i] for i in columns.values()]
        with _open(self.path) as file:
            if self.delimiter:
                rows = self._read_csv(file, keys)
            elif self.types:
                # Times are read as they are written.
                types = {"timestamp[s]": "string", "null": "string"}
                fields = [self.types.field(key) for key in keys]
                schema = pyarrow.schema([(f.name, types.get(str(f.type), f.type)) for f in fields])
                rows = pyarrow.json.read_json(
                    file,
                    pyarrow.json.ReadOptions(block_size=_BLOCK),
                    pyarrow.json.ParseOptions(schema, unexpected_field_behavior="ignore"),
                )
            else:
                rows = parquet.read_table(file, columns=keys)
            if not len(rows):
                raise SourceError(f"{self.path} has a header and no rows")
            found = {}
            for what, key in zip(columns, keys, strict=True):
                column = rows[key]
                if what != "time" and not pyarrow.types.is_binary(column.type):
                    column = column.cast("string").cast("binary")
                found[what] = column
            return pyarrow.table(found)

    def _read_csv(self, file: Any, keys: Sequence[str]) -> pyarrow.Table:
        if self.delimiter == _COLONS:
            file = pyarrow.BufferReader(file.read().replace(b"::", _COLONS.encode()))
        return pyarrow.csv.read_csv(
            file,
            pyarrow.csv.ReadOptions(
                use_threads=False,  # so that messages name the row
                block_size=_BLOCK,
                column_names=[str(i) for i in range(len(self.names))],
                skip_rows=self.skip,
            ),
            pyarrow.csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char='"' if self.quoted else False,
                newlines_in_values=self.quoted,
            ),
            pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(keys, pyarrow.binary()),
                include_columns=keys,
                null_values=_MISSING,
                strings_can_be_null=True,
            ),
        )

    def seconds(self, column: pyarrow.ChunkedArray) -> tuple[np.ndarray, str]:
        """Seconds since 1970 of times, float64[n], nan where missing; and the form of the times.

        Raises SourceError if the times have no form in common, or two, or are not from 1970 on.
        """
        if pyarrow.types.is_temporal(column.type):
            column = column.cast(pyarrow.timestamp("s"), safe=False).cast("int64").cast("string")
        seconds, form = self._parse(column)
        if form == "number":
            most = np.nanmax(seconds, initial=0)
            unit, factor = next((u for n, u in _UNITS.items() if most >= n), ("seconds", 1))
            form = f"{unit} since 1970"
            seconds = np.floor(seconds / factor)
        if (bad := (seconds < 0) | (seconds >= 1 << 32)).any():
            line = self.skip + int(np.argmax(bad)) + 1
            raise SourceError(f"{self.path}, line {line:,}: the time is not from 1970 to 2105")
        return seconds, form

    def _parse(self, column: pyarrow.ChunkedArray) -> tuple[np.ndarray, str]:
        """The numbers or seconds, and the form that all texts have."""
        example = _tidy(column.drop_null()[:1])
        forms = [form for form in _FORMS if _parsed(example, form).null_count == 0]
        if len(forms) > 1 and forms[-1] == "number":
            forms.pop()
        parts: dict[str, list[np.ndarray]] = {form: [] for form in forms or ["number"]}
        line = self.skip + 1
        for chunk in column.chunks:
            texts, errors = _tidy(chunk), {}
            for form, arrays in parts.items():
                values = _parsed(texts, form)
                arrays.append(values.to_numpy(zero_copy_only=False))
                errors[form] = pc.index(pc.xor(values.is_valid(), texts.is_valid()), True).as_py()
            parts = {form: parts[form] for form, problem in errors.items() if problem < 0}
            if not parts:
                row = max(errors.values())
                problem = (
                    f"{self.path}, line {line + row:,}: unknown time {texts[row].as_py()[:80]!r}"
                )
                raise SourceError(
                    f"{problem}; write 2024-01-31 10:00:00 or seconds since 1970, or --time=none"
                )
            line += len(chunk)
        form, *others = parts
        seconds = np.concatenate(parts[form])
        for other in others:
            if not np.array_equal(seconds, np.concatenate(parts[other]), equal_nan=True):
                raise SourceError(
                    f"{self.path}: the times, such as {example[0].as_py()!r}, may be {form} or "
                    f"{other}: write them as 2024-01-31, or give --time=none"
                )
        return seconds, form


def _tidy(times: Any) -> Any:
    """Times as text without blanks around, commas and parts of a second."""
    texts = pc.utf8_trim_whitespace(times.cast("string"))
    texts = pc.replace_substring_regex(texts, r"(:\d\d)[.,]\d+", r"\1")
    return pc.replace_substring(pc.replace_substring(texts, ",", ""), " UTC", "Z")


def _parsed(texts: Any, form: str) -> Any:
    """Texts of one of `_FORMS` as float64: seconds or numbers; null where the form is another."""
    if form != "number":
        times = pc.strptime(texts, format=form, unit="s", error_is_null=True)
        return times.cast("int64").cast("float64")
    is_number = pc.match_substring_regex(texts, r"^[-+]?\d+(\.\d*)?([eE][+-]?\d+)?$")
    return pc.if_else(is_number, texts, None).cast("float64")


def open_table(path: str, wanted: Sequence[str] = ()) -> Table:
    """Looks at the head of a file; SourceError if it cannot be read, or is no table.

    A first row with one of the names of columns in `wanted`, which the user gave, is a header.
    """
    with _open(path) as file:
        head = file.read(_HEAD)
        if head.startswith(b"PAR1"):
            return Table(path, tuple(parquet.read_schema(file).names))
    problem = next((text for start, text in _NO_TABLE.items() if head.startswith(start)), "")
    problem = problem or ("is not text" if b"\0" in head else "")
    if len(head) >= _HEAD:
        head = head[: head.rfind(b"\n") + 1]  # without the part of a line
    if problem or not head.strip():
        raise SourceError(f"{path} {problem or 'is empty, or its first line is too long'}")
    if not head.lstrip().startswith(b"{"):
        return _csv_table(path, head.decode("utf-8-sig", "replace"), wanted)
    try:
        types = pyarrow.json.read_json(io.BytesIO(head)).schema
    except pyarrow.ArrowInvalid as error:
        raise SourceError(f"{path} has no JSON object in each line: {_reason(error)}") from error
    return Table(path, tuple(types.names), types=types)


def _csv_table(path: str, text: str, wanted: Sequence[str]) -> Table:
    try:
        tables = {d: _cells(text.replace("::", _COLONS), d) for d in _DELIMITERS}
    except csv.Error as error:
        raise SourceError(f"{path} is not a table: {error}") from error
    widths = {d: [len(row) for _, row in rows] for d, rows in tables.items()}
    delimiter = max(widths, key=lambda d: (len({*widths[d]}) == 1 < widths[d][0], widths[d][-1]))
    width = widths[delimiter][-1]
    for line, row in tables[delimiter]:
        if len(row) != width:
            problem = f"{path}, line {line} has {len(row)} columns, and others {width}"
            raise SourceError(f"{problem}: remove lines that are neither the header nor a row")
    line, first = tables[delimiter][0]
    others = [row for _, row in tables[delimiter][1:]]
    given = {_short(name) for name in wanted if name and not name.isdecimal()}
    is_header = {"user", "item"} <= _guesses(first).keys() or bool(given & {*map(_short, first)})
    is_header |= [any(map(_VALUE.fullmatch, row)) for row in (first, *others[:1])] == [False, True]
    quoted = _is_quoted(text, delimiter)
    if is_header:
        return Table(path, tuple(first), others, line, delimiter, quoted)
    numbers = tuple(str(i) for i in range(1, 1 + width))
    return Table(path, numbers, [first, *others], line - 1, delimiter, quoted)


def _cells(text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """The first rows, each with the number of its (last) line."""
    quoting = csv.QUOTE_MINIMAL if _is_quoted(text, delimiter) else csv.QUOTE_NONE
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting)
    cells = ((reader.line_num, [cell.strip() for cell in row]) for row in reader if row)
    return [*itertools.islice(cells, _ROWS)]


def _is_quoted(text: str, delimiter: str) -> bool:
    """Whether `"` encloses values; with tabs, it is often a part of a title."""
    return delimiter in ",;" or any(c[:1] == c[-1:] == '"' for c in text.split(delimiter)[:-1])


def _guesses(header: Sequence[str]) -> dict[str, int]:
    names = [re.sub("[^a-z0-9]", "", _short(name)) for name in header]
    columns: dict[str, int] = {}
    for what, known in GUESSES.items():
        present = (names.index(name) for name in known.split() if name in names)
        column = next(present, None)
        if column is not None and column not in columns.values():
            columns[what] = column
    return columns


def _short(name: str) -> str:
    """The name of a column in small letters, without the type in RecBole's `user_id:token`."""
    return name.strip(' "\r').partition(":")[0].lower()


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
    """Opens a file for pyarrow, unpacked if it is in gzip; SourceError if it cannot be read."""
    limits.check_file(path, SourceError)
    gfile = tensorflow().io.gfile
    if gfile.isdir(path):
        raise SourceError(f"{path} is a folder: python -m scripts.prepare {path} finds its tables")
    try:
        with gfile.GFile(path, "rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            methods = {name: getattr(file, name) for name in ("read", "seek", "tell", "size")}
            source: Any = SimpleNamespace(**methods, closed=False, close=lambda: None)
            source = pyarrow.PythonFile(source, "r")
            yield pyarrow.CompressedInputStream(source, "gzip") if is_packed else source
    except (*read_errors(), OSError, pyarrow.ArrowException) as error:
        raise SourceError(f"cannot read {path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """One line; pyarrow counts the rows of JSON from 0."""
    return re.sub(r"in row (\d+)", lambda m: f"in line {int(m[1]) + 1:,}", one_line(error))
