"""Reading MovieLens' ratings: ratings.csv of ml-20m, ratings.dat of ml-1m, or the zip of either.

Files are cut into blocks of lines that are parsed on all cores by NumPy, without a Python object
per line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from errors import one_line
from ops import files, parallel, progress
from ops.shards import DataError, tensorflow

_BLOCK = 4 << 20  # bytes that one thread parses at a time
_LINE = 1 << 16  # no line of ratings is longer
_LARGEST = 2**32 - 1
# Where a data folder may have them, the best first.
PLACES = (
    *("ratings.csv", "ml-20m/ratings.csv", "ratings.dat", "ml-1m/ratings.dat"),
    *("ml-20m.zip", "ml-1m.zip"),
)
# Names of the columns, as MovieLens has them and as MLPerf's converter writes them.
_NAMES = {
    "user": ("userid", "user_id"),
    "item": ("movieid", "item_id"),
    "time": ("timestamp",),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Ratings:
    """uint32[n] each, in the order of the file; what the rating was does not matter here."""

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the lines of a file are made: columns in all, and which of them are wanted."""

    separator: bytes
    width: int
    wanted: dict[str, int]
    first: int  # the line of the first rating, from 1


class _Fault(Exception):
    """A line that cannot be read: its number in the block from 0, and why."""

    def __init__(self, row: int, text: str):
        super().__init__(text)
        self.row = row


def locate(data_dir: str) -> str:
    """The file of ratings in a folder, or the one that `data_dir` itself names.

    Raises:
      DataError: there is none, or the folder cannot be read.
    """
    tf, folder = tensorflow(), data_dir.rstrip("/")
    named = folder.endswith((".csv", ".dat", ".zip"))
    places = [folder] if named else [f"{folder}/{place}" for place in PLACES]
    try:
        for place in places:
            if tf.io.gfile.exists(place) and not tf.io.gfile.isdir(place):
                return place
    except tf.errors.OpError as error:
        raise DataError(f"cannot look for ratings in {data_dir}: {one_line(error)}") from error
    what = "no such file" if named else f"it has none of {', '.join(PLACES)}"
    raise DataError(
        f"no ratings in {data_dir!r}: {what}. ml-20m.zip is at grouplens.org; "
        "scripts/data/ratings.py makes a set up"
    )


def read(path: str) -> Ratings:
    """All ratings of a file, which is local or in a bucket.

    Raises:
      DataError: it cannot be read, or a line of it is none of MovieLens'; the line is named.
    """
    tf, columns = tensorflow(), []
    try:
        with files.reading(lambda: [path]), _lines(path) as (name, blocks):
            layout, blocks = _layout(path, name, blocks)
            done = layout.first
            for found in parallel.in_order(functools.partial(_try, layout), blocks):
                if isinstance(found, _Fault):
                    raise DataError(f"{path}, line {done + found.row:,}: {found}")
                columns.append(found)
                done += len(found[0])
                progress.report(f"reading ratings, {done:,} so far")
    except tf.errors.OpError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}): fetch it again") from error
    if not sum(len(part[0]) for part in columns):
        raise DataError(f"{path} holds no ratings, only a header")
    return Ratings(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))


@contextlib.contextmanager
def _lines(path: str) -> Iterator[tuple[str, Iterator[bytes]]]:
    """(name of the text file, its blocks of whole lines)."""
    with tensorflow().io.gfile.GFile(path, "rb") as file:
        if not path.endswith(".zip"):
            yield path, _blocks(path, file)
            return
        if file.read(4) != b"PK\3\4":
            raise DataError(f"{path} is no zip file: fetch it again")
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            names = [n for n in archive.namelist() if n.endswith(("ratings.csv", "ratings.dat"))]
            if not names:
                raise DataError(f"{path} has no ratings.csv or ratings.dat in it")
            with archive.open(names[0]) as text:
                yield names[0], _blocks(path, text)


def _blocks(path: str, file: Any) -> Iterator[bytes]:
    """Pieces of about 4 MiB that end where a line ends."""
    rest = b""
    while block := file.read(_BLOCK):
        cut = block.rfind(b"\n") + 1
        if not cut and len(block) > _LINE:
            raise DataError(f"{path} is no text of ratings: it has no lines")
        whole, rest = (rest + block[:cut], b"") if cut else (b"", rest)
        if lines := whole.rstrip(b"\r\n"):
            yield lines + b"\n"
            whole = whole[len(lines) :].partition(b"\n")[2]
        rest += whole + block[cut:]  # with blank lines, which at the end of a file say nothing
    if rest.strip():
        yield rest + b"\n"


def _layout(path: str, name: str, blocks: Iterator[bytes]) -> tuple[_Layout, Iterator[bytes]]:
    """The layout of a file, and the blocks without its header."""
    first = next(blocks, b"")
    if not first.strip():
        raise DataError(f"{path} is empty: fetch it again")
    if name.endswith(".dat"):  # has no header
        if b"::" not in first.split(b"\n", 1)[0]:
            form = "UserID::MovieID::Rating::Timestamp"
            raise DataError(f"{path}, line 1: is not {form}, as in ml-1m")
        return _Layout(b"::", 4, {"user": 0, "item": 1, "time": 3}, 1), _chain(first, blocks)
    header, rest = first.split(b"\n", 1)
    names = [n.strip().strip('"').lower() for n in header.decode("utf-8-sig", "replace").split(",")]
    wanted = {}
    for column, known in _NAMES.items():
        there = [names.index(n) for n in known if n in names]
        if not there:
            shown = header.decode(errors="replace").strip()[:80]
            raise DataError(
                f"{path}, line 1: no column {' or '.join(known)} in {shown!r}; MovieLens has "
                "userId,movieId,rating,timestamp"
            )
        wanted[column] = there[0]
    return _Layout(b",", len(names), wanted, 2), _chain(rest, blocks)


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest


def _try(layout: _Layout, block: bytes) -> Any:
    """[users, items, times] uint32[n] of a block, or what is wrong with it."""
    try:
        return _parse(layout, block)
    except _Fault as fault:
        return fault


def _parse(layout: _Layout, block: bytes) -> list[np.ndarray]:
    block = block.replace(b"\r\n", b"\n").replace(layout.separator, b",")
    text = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero((text == ord(",")) | (text == ord("\n"))).astype(np.int32)
    lines = np.flatnonzero(text[ends] == ord("\n"))
    if not np.array_equal(lines, np.arange(layout.width - 1, len(ends), layout.width)):
        raise _ragged(block, layout.width)
    begins = np.concatenate([np.zeros(1, np.int32), ends[:-1] + np.int32(1)])
    begins, ends = begins.reshape(-1, layout.width), ends.reshape(-1, layout.width)
    found = []
    for column, place in layout.wanted.items():
        values, good = _numbers(text, begins[:, place], ends[:, place])
        if not good.all():
            row = int(np.argmin(good))
            said = block[begins[row, place] : ends[row, place]].decode(errors="replace")[:40]
            raise _Fault(row, f"the {column} is {said!r}, not a whole number up to {_LARGEST:,}")
        found.append(values.astype(np.uint32))
    return found


def _ragged(block: bytes, width: int) -> _Fault:
    """The first line that has not `width` values."""
    lines = block.split(b"\n")
    row = next(i for i, line in enumerate(lines) if line.count(b",") != width - 1)
    said, count = lines[row].decode(errors="replace")[:40], lines[row].count(b",") + 1
    return _Fault(row, f"{said!r} has {count} values, not {width}; is the file cut off?")


def _numbers(
    text: np.ndarray, begins: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(values int64[n], good bool[n]) of the decimals in text[begins:ends]."""
    lengths = ends - begins
    good = (lengths > 0) & (lengths <= 10)
    values = np.zeros(len(begins), np.int64)
    for place in range(min(int(lengths.max()), 10)):
        inside = lengths > place
        digits = text[np.where(inside, begins + np.int32(place), 0)] - np.uint8(ord("0"))
        good &= ~inside | (digits <= 9)  # below "0", uint8 wraps around
        values = np.where(inside, values * 10 + digits, values)
    return values, good & (values <= _LARGEST)
