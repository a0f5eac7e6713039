"""Reads the formats of tables, CSV and the like, JSON Lines, Parquet, and guesses their columns."""

import contextlib
import csv
import dataclasses
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.json
from pyarrow import parquet

from benchmarks.ncf.names import is_latin1
from benchmarks.ncf.preparation import values
from common import limits
from common.errors import one_line
from common.preparation.sources import SourceError
from common.tensorflow import read_errors, tensorflow
from common.text import decoded

# What a column holds, by its name in small letters and digits; the first name that is there counts.
GUESSES = {
    "user": "userid user uid reviewerid customerid customer visitorid visitor memberid member "
    "accountid account username reviewer userpseudoid anonymousid domainuserid distinctid clientid "
    "deviceid cookieid steamid sessionid session",
    "item": "itemid item iid movieid productid product parentasin asin sku articleid article "
    "stockcode bookid book isbn trackid track songid song albumid album artistid artist gameid "
    "game appid businessid recipeid videoid animeid newsid venueid poiid courseid movie film title",
    "time": "timestamp unixreviewtime time datetime date ts createdat eventtime reviewtime ratedat "
    "playedat dateadded purchasedat invoicedate eventdate orderdate tdat eventtimestamp servertime "
    "collectortstamp derivedtstamp receivedat viewedat clickedat orderedat ordertime purchasetime "
    "purchasedate visitdate viewdate reviewdate transactiondate utctime created",
    "title": "title itemtitle movietitle producttitle booktitle itemname moviename productname "
    "artistname trackname songname name",
}
_MISSING = ["", "NULL", "null", "None", "NaN", "nan", "NA", "N/A", "\\N"]
_HEAD, _ROWS = 1 << 16, 20  # bytes and rows to look at
_BLOCK = 4 << 20  # bytes that are parsed at a time
_COLONS = "\x1f"  # in place of "::", as pyarrow's delimiters have one character
_DELIMITERS = ("\t", _COLONS, ",", ";", "|", " ")
_LIST = re.compile(r"[\[({].*[\])}]", re.DOTALL)
_VALUE = re.compile(r"[-+]?\d[\d.,:/TZ +eE-]*")  # a number or a date, which no header has
_DATE = re.compile(r"\d+([-/.])\d+\1\d.*|(19|20)\d{6}")  # perhaps with the time of day
_AMAZON = re.compile(r"[\dB][\dA-Z]{9} A[\dA-Z]{9,}")  # a product and a user
_NO_TABLE = {
    b"PK\3\4": "is an archive or Excel's: unpack it, or save it as CSV",
    b"\xff\xfe": "is UTF-16: save it as UTF-8",
    b"\xfe\xff": "is UTF-16: save it as UTF-8",
    b"[": "is one JSON list: write one object in each line",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table whose head is known."""

    path: str  # local or gs://
    names: tuple[str, ...]  # the columns' names; without a header their numbers from 1
    rows: Sequence[Sequence[str]] = ()  # the first rows, as text
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

    def cells(self, column: int) -> list[str]:
        """The values of a column in the first rows, without missing ones."""
        return [row[column] for row in self.rows if row[column] not in _MISSING]

    def guesses(self) -> dict[str, int]:
        """The columns by what they hold: a key of `GUESSES`.

        Of several with such names the first one with values counts; of times, the finest one. A
        column of lists is none. Without a header they have MovieLens' order, user, item, rating,
        time, if the values fit; Amazon's ids say that the item is the first.
        """
        columns: dict[str, int] = {}
        for what, present in named_columns(self.names).items():
            free = (column for column in present if column not in columns.values())
            several = [column for column in free if not are_lists(self.cells(column))]
            if len(several) > 1 and what == "time":
                grains = {column: values.grain(self.cells(column)) for column in several}
                columns[what] = min(several, key=lambda column: grains[column])
            elif several:
                columns[what] = next(filter(self._has_values, several[:-1]), several[-1])
        width = len(self.names)
        if self.has_header or width not in (3, 4):
            return columns
        is_rated = all(_VALUE.fullmatch(row[2]) for row in self.rows)
        are_dates = all(_DATE.fullmatch(row[-1]) for row in self.rows)
        is_timed = are_dates and values.grain(self.cells(width - 1)) < values.CLOCK
        is_timed |= all(re.fullmatch(r"\d{9,10}(\d{3}){0,3}", row[-1]) for row in self.rows)
        is_whole = all(cell.isdecimal() for row in self.rows for cell in row[:2])
        is_whole &= is_timed or not all(re.fullmatch(r"1(\d{3}){3,5}", row[1]) for row in self.rows)
        if is_rated and (is_whole or (is_timed and width == 4)):
            first = int(all(_AMAZON.fullmatch(" ".join(row[:2])) for row in self.rows))
            columns = {"user": first, "item": 1 - first}
            columns |= {"time": width - 1} if is_timed else {}
        return columns

    def _has_values(self, column: int) -> bool:
        """Whether a column has any value; reads all of it if the first rows have none."""
        return bool(self.cells(column) or self.read({"": column})[""].drop_null())

    def read(self, columns: dict[str, int]) -> pyarrow.Table:
        """The columns by what they hold: times as they are, others as text; null where missing."""
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
                parse = pyarrow.json.ParseOptions(schema, unexpected_field_behavior="ignore")
                blocks = pyarrow.json.ReadOptions(block_size=_BLOCK)
                rows = pyarrow.json.read_json(file, blocks, parse)
            else:
                rows = parquet.read_table(file, columns=keys)
            if not len(rows):
                raise SourceError(f"{self.path} has a header and no rows")
            found = {}
            for what, key in zip(columns, keys, strict=True):
                is_time = what == "time" and pyarrow.types.is_temporal(rows[key].type)
                found[what] = rows[key] if is_time else self._text(rows[key])
            return pyarrow.table(found)

    def _text(self, column: Any) -> Any:
        """A column as text; SourceError, with the line, if it is not UTF-8 and no `is_latin1`."""
        if not pyarrow.types.is_binary(column.type):
            column = column.cast("string").cast("binary")  # JSON's are not checked
        with contextlib.suppress(pyarrow.ArrowInvalid):
            return column.cast("string")
        cells = column.to_pylist()
        text = b"\n".join(cell or b"" for cell in cells)
        if is_latin1(self.path, text):
            print(f"{self.path} is not UTF-8: read as Latin-1, as MovieLens writes it")
            return pyarrow.chunked_array([[c and c.decode("latin-1") for c in cells]], "string")
        return decoded(text, self.path, SourceError, self.skip + 1)

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


def open_table(path: str, wanted: Sequence[str] = ()) -> Table:
    """Looks at the head of a file; SourceError if it cannot be read, or is no table.

    A first row with one of the names of columns in `wanted`, which the user gave, is a header.
    """
    with _open(path) as file:
        head = file.read(_HEAD)
        if head.startswith(b"PAR1"):
            with parquet.ParquetFile(file, buffer_size=_HEAD) as table:
                rows = next(table.iter_batches(_ROWS), None)
                return Table(path, tuple(table.schema_arrow.names), _texts(rows))
    problem = next((text for start, text in _NO_TABLE.items() if head.startswith(start)), "")
    problem = problem or ("is not text" if b"\0" in head else "")
    if len(head) >= _HEAD:
        head = head[: head.rfind(b"\n") + 1]  # without the part of a line
    if problem or not head.strip():
        raise SourceError(f"{path} {problem or 'is empty, or its first line is too long'}")
    if not head.lstrip().startswith(b"{"):
        return _csv_table(path, head.decode("utf-8-sig", "surrogateescape"), wanted)
    decoded(head, path, SourceError)
    try:
        rows = pyarrow.json.read_json(io.BytesIO(head))
    except pyarrow.ArrowInvalid as error:
        raise SourceError(f"{path} has no JSON object in each line: {_reason(error)}") from error
    return Table(path, tuple(rows.schema.names), _texts(rows[:_ROWS]), types=rows.schema)


def _texts(rows: Any) -> list[list[str]]:
    """The cells of rows as text."""
    columns = [column.to_pylist() for column in rows.columns] if rows else []
    return [["" if v is None else str(v) for v in row] for row in zip(*columns, strict=True)]


def _csv_table(path: str, text: str, wanted: Sequence[str]) -> Table:
    try:
        tables = {d: _cells(text.replace("::", _COLONS), d) for d in _DELIMITERS}
    except csv.Error as error:
        raise SourceError(f"{path} is not a table: {error}") from error
    widths = {d: [len(row) for _, row in rows] for d, rows in tables.items()}
    occur = [d for d in _DELIMITERS if max(widths[d]) > 1] or _DELIMITERS
    fit = [d for d in occur if len({*widths[d]}) == 1]
    # Names have blanks in them, but neither tabs nor "::".
    delimiter = max(fit or occur, key=lambda d: (d != " ", d in "\t" + _COLONS, widths[d][-1]))
    width = widths[delimiter][-1]
    for line, row in tables[delimiter]:
        if len(row) != width:
            raise SourceError(
                f"{path}, line {line} has {len(row)} columns, and others {width}: remove lines "
                "that are neither the header nor a row; if a line has a user and all their items, "
                "write a line for each item"
            )
    line, first = tables[delimiter][0]
    others = [row for _, row in tables[delimiter][1:]]
    given = {_short(name) for name in wanted if name and not name.isdecimal()}
    named = named_columns(first)
    is_header = bool(given & {*map(_short, first)} or (named["user"] and named["item"]))
    is_header |= any(_short(first[c]).endswith("id") for cs in named.values() for c in cs)
    is_header |= [any(map(_VALUE.fullmatch, row)) for row in (first, *others[:1])] == [False, True]
    quoted = _is_quoted(text, delimiter)
    if is_header:
        decoded(" ".join(first).encode(errors="surrogateescape"), path, SourceError, line)
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


def are_lists(cells: Sequence[str]) -> bool:
    """Whether cells hold lists of ids, such as "[1, 2, 3]" or "i1 i2 i3", and no titles."""
    parts = [re.split(r"[\s,;|]+", cell) for cell in cells]
    sizes = {*map(len, parts)}
    have_digits = all(re.search(r"\d", part) for row in parts for part in row)
    are_ids = have_digits and (len(sizes) > 1 or max(sizes, default=0) > 4)
    return bool(cells) and (are_ids or all(map(_LIST.fullmatch, cells)))


def named_columns(header: Sequence[str]) -> dict[str, list[int]]:
    """The columns with known names by what they hold, the likeliest first."""
    names = [re.sub("[^a-z0-9]", "", _short(name)) for name in header]
    return {
        what: [names.index(name) for name in text.split() if name in names]
        for what, text in GUESSES.items()
    }


def _short(name: str) -> str:
    """The name of a column in small letters, without the type in RecBole's `user_id:token`."""
    return name.strip(' "\r').partition(":")[0].lower()


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
    """Opens a file for pyarrow, unpacked if it is in gzip; SourceError if it cannot be read."""
    limits.check_file(path, SourceError)
    gfile = tensorflow().io.gfile
    try:
        if gfile.isdir(path):
            raise SourceError(
                f"{path} is a folder: python -m scripts.prepare {path} finds its tables"
            )
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
