"""Tables: CSV and the like, JSON lines and Parquet, perhaps in gzip. What their columns hold."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.csv
from pyarrow import parquet

from common import console, limits
from common.data import files
from common.data.shards import read_errors, tensorflow
from common.errors import one_line, parse_json
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
    "artistname trackname songname",
}
WHOLE = re.compile(r"(0|[1-9]\d*)(\.0)?")  # pandas writes 7.0 where a column has empty cells
MISSING = pyarrow.array(["", "NULL", "null", "None", "NaN", "nan", "NA", "N/A", "\\N"])
HEAD, _ROWS = 1 << 16, 20  # bytes and rows to look at
_BLOCK = 4 << 20  # bytes that are parsed at a time
_GZIP = b"\x1f\x8b"
_DELIMITERS = ("\t", ",", ";", "|", "::", " ")
_VALUE = re.compile(r"[-+]?\d[\d.:/TZ +eE-]*")  # a number or a date, which no header has
_NO_TABLE = {
    b"PK\3\4": "is a zip archive: python -m scripts.prepare ARCHIVE unpacks it",
    b"\xff\xfe": "is UTF-16: save it as UTF-8",
    b"[": "is one JSON list: write one object in each line",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table and its first rows.

    Attributes:
      path: local or gs://.
      kind: "csv" (with any delimiter), "json" or "parquet".
      names: of the columns; their numbers from 1 where there is no header.
      rows: the first ones, as text; of a CSV only.
      skip: lines above the first row.
      delimiter: of a CSV.
      quoted: whether `"` encloses values of a CSV.
    """

    path: str
    kind: str
    names: tuple[str, ...]
    rows: Sequence[Sequence[str]] = ()
    skip: int = 0
    delimiter: str = ""
    quoted: bool = False

    @property
    def has_header(self) -> bool:
        """Whether the columns have names of their own."""
        return self.names[:1] != ("1",)

    def find(self, name: str) -> int | None:
        """The column that a user means by a name, or a number from 1."""
        names = [*map(_short, self.names)]
        if _short(name) in names:
            return names.index(_short(name))
        return int(name) - 1 if name.isdecimal() and 0 < int(name) <= len(names) else None

    def guesses(self) -> dict[str, int]:
        """The columns by what they hold, a key of `GUESSES`.

        Without a header they have MovieLens' order, user, item, rating, time, if the values fit.
        """
        if self.has_header:
            return _guesses(self.names)
        width, last = len(self.names), [row[-1] for row in self.rows]
        is_whole = all(WHOLE.fullmatch(cell) for row in self.rows for cell in row[:2])
        is_timed = width > 2 and all(re.fullmatch(r"\d{9,10}", cell) for cell in last)
        is_rated = width > 2 and all(_VALUE.fullmatch(row[2]) for row in self.rows)
        if not is_rated or width > 4 or not (is_whole or (is_timed and width == 4)):
            return {}
        return {"user": 0, "item": 1} | ({"time": width - 1} if is_timed else {})

    def batches(self, columns: Sequence[int]) -> Iterator[list[pyarrow.Array]]:
        """The values of some columns, in batches; those of text are bytes.

        Raises:
          SourceError: a row is not like the others, or the file is damaged.
        """
        is_arrow = self.kind == "csv" and len(self.delimiter) == 1
        read = self._parquet if self.kind == "parquet" else self._csv if is_arrow else self._lines
        with _reading(self.path) as file:
            packed = getattr(file, "fileobj", file)  # of gzip
            title, position = f"reading {os.path.basename(self.path)}", 0
            progress = console.ProgressBar(title, 0, "rows", files.sizes([self.path])[0])
            for batch in read(file, columns):
                progress.add(len(batch[0]), packed.tell() - position)
                position = packed.tell()
                yield batch
            progress.close()

    def _csv(self, file: Any, columns: Sequence[int]) -> Iterator[list[pyarrow.Array]]:
        names = [str(i) for i in range(len(self.names))]  # a header may have a name twice
        used, line = [names[i] for i in columns], self.skip + 1
        types = dict.fromkeys(used, pyarrow.binary())
        read = {"block_size": _BLOCK, "column_names": names, "skip_rows": self.skip}
        parse = {"quote_char": '"' if self.quoted else False, "newlines_in_values": self.quoted}
        for batch in pyarrow.csv.open_csv(
            _for_arrow(file),
            pyarrow.csv.ReadOptions(use_threads=False, **read),  # so that messages name the row
            pyarrow.csv.ParseOptions(delimiter=self.delimiter, **parse),
            pyarrow.csv.ConvertOptions(column_types=types, include_columns=used),
        ):
            values = [batch.column(name) for name in used]
            if self.has_header:
                heads = [pc.equal(v, self.names[i]) for v, i in zip(values, columns, strict=True)]
                if (row := functools.reduce(pc.and_, heads).index(True).as_py()) >= 0:
                    where = f"{self.path}, line {line + row:,}"
                    raise SourceError(f"{where} is the header again: remove it")
            line += len(batch)
            yield values

    def _lines(self, file: Any, columns: Sequence[int]) -> Iterator[list[pyarrow.Array]]:
        """JSON, where an id may be a number in one line and text in the next; and "::"."""
        before = 0
        while block := file.read(_BLOCK) + file.readline():
            lines = block.splitlines()
            rows = [
                self._row(text, line, columns)
                for line, text in enumerate(lines, before + 1)
                if line > self.skip and text.strip()
            ]
            before += len(lines)
            if rows:
                yield [pyarrow.array(column, "binary") for column in zip(*rows, strict=True)]

    def _row(self, text: bytes, line: int, columns: Sequence[int]) -> list[bytes | None]:
        if self.kind == "json":
            row = _json_object(text, self.path, line)
            cells = [row.get(self.names[i]) for i in columns]
            return [None if cell is None else str(cell).encode() for cell in cells]
        cells = text.split(self.delimiter.encode())
        if len(cells) != len(self.names):
            widths = f"{len(cells)} columns, the first one {len(self.names)}"
            raise SourceError(f"{self.path}, line {line:,} has {widths}")
        return [cells[i] for i in columns]

    def _parquet(self, file: Any, columns: Sequence[int]) -> Iterator[list[pyarrow.Array]]:
        names = [self.names[i] for i in columns]
        for batch in parquet.ParquetFile(_for_arrow(file)).iter_batches(columns=names):
            yield [batch.column(name) for name in names]


def open_table(path: str, wanted: Sequence[str] = (), head: bytes = b"") -> Table:
    """Looks at the head of a file.

    Args:
      path: local or gs://.
      wanted: names of columns that the user gave: a first row that has one is a header.
      head: the first `HEAD` bytes of the file, if they are known.

    Raises:
      SourceError: the file cannot be read, or it is no table.
    """
    if not head:
        with _reading(path) as file:
            head = file.read(HEAD)
    elif head.startswith(_GZIP):
        with contextlib.suppress(zlib.error):
            head = zlib.decompressobj(31).decompress(head, HEAD)
    if head.startswith(b"PAR1"):
        with _reading(path) as file:
            return Table(path, "parquet", tuple(parquet.read_schema(_for_arrow(file)).names))
    fault = next((text for start, text in _NO_TABLE.items() if head.startswith(start)), "")
    fault = fault or ("is no text" if b"\0" in head else "")
    if len(head) >= HEAD:
        head = head[: head.rfind(b"\n") + 1]  # without the part of a line
    if fault or not head.strip():
        raise SourceError(f"{path} {fault or 'is empty, or its first line is too long'}")
    text = head.decode("utf-8-sig", "replace")
    if not text.lstrip().startswith("{"):
        return _csv_table(path, text, wanted)
    lines = enumerate(head.splitlines()[:_ROWS], 1)
    rows = [_json_object(line, path, number) for number, line in lines if line.strip()]
    return Table(path, "json", tuple(dict.fromkeys(itertools.chain.from_iterable(rows))))


def _csv_table(path: str, text: str, wanted: Sequence[str]) -> Table:
    tables = {delimiter: _cells(path, text, delimiter) for delimiter in _DELIMITERS}
    # Most columns of those delimiters that make all rows equally wide.
    widths = {delimiter: [*map(len, rows)] for delimiter, rows in tables.items()}
    delimiter = max(widths, key=lambda d: (len({*widths[d]}) == 1, widths[d][0]))
    first, *others = tables[delimiter]
    skip = text[: len(text) - len(text.lstrip())].count("\n")
    given = {_short(name) for name in wanted if not name.isdecimal()}
    is_header = not given.isdisjoint(map(_short, first))
    is_header |= [any(map(_VALUE.fullmatch, row)) for row in (first, *others[:1])] == [False, True]
    for number, line in enumerate(text.split("\n")[:_ROWS], 1):
        # Lines above a header may have other columns, so that the delimiter is not known.
        if any({"user", "item"} <= _guesses(line.split(d)).keys() for d in _DELIMITERS):
            is_header = number == skip + 1
            if not is_header:
                raise SourceError(f"{path}: the header is in line {number}; remove what is above")
            break
    names = first if is_header else [str(i) for i in range(1, 1 + len(first))]
    quoted = delimiter in ",;" or any(c[:1] == c[-1:] == '"' for c in text.split(delimiter)[:-1])
    rows = others if is_header else [first, *others]
    return Table(path, "csv", tuple(names), rows, skip + is_header, delimiter, quoted)


def _cells(path: str, text: str, delimiter: str) -> list[list[str]]:
    """The cells of the first rows."""
    rows: Any = (line.split(delimiter) for line in text.split("\n") if line.strip())
    if len(delimiter) == 1:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        rows = [*itertools.islice(filter(None, rows), _ROWS)]
    except csv.Error as error:
        raise SourceError(f"{path} is no table: {error}") from error
    return [[cell.strip() for cell in row] for row in rows]


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


def _json_object(text: bytes, path: str, line: int) -> dict[str, Any]:
    try:
        if isinstance(row := parse_json(text), dict):
            return row
        fault = "it is no object"
    except ValueError as error:
        fault = str(error)
    raise SourceError(f"{path}, line {line:,} has no JSON object: {fault}")


@contextlib.contextmanager
def _reading(path: str) -> Iterator[Any]:
    """Opens a file, unpacked if it is in gzip; SourceError if it cannot be read."""
    limits.check_file(path, SourceError)
    gfile = tensorflow().io.gfile
    if gfile.isdir(path):
        raise SourceError(f"{path} is a folder: python -m scripts.prepare {path} finds its tables")
    try:
        with gfile.GFile(path, "rb") as file:
            is_packed = file.read(2) == _GZIP
            file.seek(0)
            yield gzip.GzipFile(fileobj=file) if is_packed else file
    except (*read_errors(), OSError, pyarrow.ArrowException, EOFError, zlib.error) as error:
        raise SourceError(f"cannot read {path}: {one_line(error)}") from error


def _for_arrow(file: Any) -> pyarrow.PythonFile:
    methods = {n: getattr(file, n) for n in ("read", "seek", "tell", "size") if hasattr(file, n)}
    source: Any = SimpleNamespace(**methods, closed=False, close=lambda: None)
    return pyarrow.PythonFile(source, "r")


def as_bytes(column: pyarrow.Array) -> pyarrow.Array:
    """A column of text or numbers as bytes."""
    return column if pyarrow.types.is_binary(column.type) else column.cast("string").cast("binary")
