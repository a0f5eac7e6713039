"""The names of users and the titles of items: reads the lists, and finds who or what a text names.

`python -m scripts.prepare interactions` writes users.csv and items.csv beside the ratings;
MovieLens has the titles of items, as movies.csv, movies.dat or u.item.
"""

import csv
import difflib
import io
import logging
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.ncf.ratings import locate
from common import limits
from common.errors import DataError, one_line
from common.tensorflow import read_errors, tensorflow
from common.text import decoded, normal_name, text_lines

_log = logging.getLogger("tpu_suite")

TITLES = ("items.csv", "movies.csv", "movies.dat", "u.item")
NAMES = ("users.csv",)
_LATIN1 = ("movies.dat", "u.item")
_COLUMNS = {".dat": "::", ".item": "|"}  # the delimiters of lists without a header
# What no Latin-1 has: its control characters, and three of its letters with accents in a row.
_OTHER_CODE = re.compile(rb"[\x80-\x9f]|[\xa0-\xff]{3}")


class Finder:
    """Finds rows of the model's tables by the ids or the names of users or items.

    `ids` are uint32[rows], rising; `names` has names by id. `noun` is "user" or "item", for
    messages.
    """

    def __init__(self, noun: str, ids: np.ndarray, names: Mapping[int, str]):
        self.noun, self.ids, self.names = noun, ids, names
        self._rows: dict[str, list[int]] = {}
        for number, name in names.items():
            if _key(name) and (row := self._position(number)) is not None:
                self._rows.setdefault(_key(name), []).append(row)
        self._parts = 1 + max((name.count(",") for name in self._rows), default=0)

    def name(self, row: int) -> str:
        """The name of the user or item in a row of the table; "" if it has none."""
        return self.names.get(int(self.ids[row]), "")

    def find(self, text: str) -> Iterator[tuple[str, int | str]]:
        """Looks up each part of a text: (the part, its row or the reason why it has none).

        Commas separate names. A name may contain commas too: the longest one that exists is taken,
        and quotes are ignored. A name takes precedence over an id. Blanks and semicolons also
        separate ids.
        """
        parts = text.split(",")
        while parts:
            count = min(len(parts), self._parts)
            while (row := self._row(name := ",".join(parts[:count]).strip())) is None and count > 1:
                count -= 1
            del parts[:count]
            words = re.split(r"[;\s]+", name.strip("; "))
            if row is None and len(words) > 1 and all(map(re.compile("[0-9]+").fullmatch, words)):
                parts = words + parts
            elif name:
                yield name, self._closest(name) if row is None else row

    def _row(self, name: str) -> int | str | None:
        """The row of a name or an id; a reason if several have that name; None if nothing has."""
        rows = self._rows.get(_key(name), [])
        wanted = normal_name(name)  # names may differ in capitals only
        rows = [row for row in rows if normal_name(self.name(row)) == wanted] or rows
        if len(rows) > 1:
            numbers = ", ".join(str(self.ids[row]) for row in rows[:5])
            return f"the {self.noun}s {numbers} have this name: give the id of one"
        return rows[0] if rows else self._position(int(name)) if _is_id(name) else None

    def _position(self, number: int) -> int | None:
        if number > np.iinfo(np.uint32).max:
            return None
        i = int(np.searchsorted(self.ids, number))
        return i if i < len(self.ids) and self.ids[i] == number else None

    def _closest(self, name: str) -> str:
        """A message that nothing has this name, with the names that are most similar."""
        if _is_id(name):
            return f"the model does not have this {self.noun}"
        if not self._rows:
            return f"no id of a{'n' * (self.noun == 'item')} {self.noun}: give an integer"
        key = _key(name)
        similar = sorted((name for name in self._rows if key in name), key=len)[:3]
        similar = similar or difflib.get_close_matches(key, self._rows, 3)
        like = "; ".join(self.name(self._rows[name][0]) for name in similar)
        closest = f"; the closest: {like}" if like else ""
        return f"the model has no {self.noun} of this name{closest}"


def _key(name: str) -> str:
    return normal_name(name.strip().strip('"')).casefold()


def _is_id(name: str) -> bool:
    return re.fullmatch("[0-9]{1,18}", name) is not None


def read_names(data_dir: str, lists: Sequence[str]) -> dict[int, str]:
    """The names in a list by ids; {} if there is no list where the ratings of `data_dir` are.

    `lists` are `TITLES` or `NAMES`; the first file that exists counts.
    """
    path = locate(data_dir)
    try:
        name, data = _find_list(path, lists)
    except (*read_errors(), zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"cannot read the names beside {path}: {one_line(error)}") from error
    try:
        return _parse_list(name, data) if name else {}
    except (ValueError, IndexError, csv.Error) as error:
        raise DataError(f"{name} of {path} is not a list of names: {one_line(error)}") from error


def _find_list(path: str, lists: Sequence[str]) -> tuple[str, bytes]:
    """The name and the bytes of the list that belongs to the ratings in `path`; ("", b"")."""
    gfile = tensorflow().io.gfile
    if path.endswith(".zip"):
        with gfile.GFile(path, "rb") as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if os.path.basename(member.filename) in lists:
                    limits.check_size(member.filename, member.file_size, limits.TEXT_BYTES)
                    return member.filename, archive.read(member)
        return "", b""
    for name in lists:
        beside = f"{path.rpartition('/')[0] or '.'}/{name}"
        if gfile.exists(beside):
            limits.check_file(beside)
            limits.check_size(beside, gfile.stat(beside).length, limits.TEXT_BYTES)
            with gfile.GFile(beside, "rb") as file:
                return name, file.read()
    return "", b""


def is_latin1(path: str, data: bytes) -> bool:
    """Whether a list of titles that is not UTF-8 is Latin-1, as MovieLens' ml-100k and ml-1m."""
    return os.path.basename(path) in _LATIN1 and not _OTHER_CODE.search(data)


def _parse_list(name: str, data: bytes) -> dict[int, str]:
    """The names in a list; ValueError or IndexError if it has another form."""
    try:
        text = decoded(data, name)
    except DataError:
        if not is_latin1(name, data):
            raise
        _log.info("NOTE %s is not UTF-8: read as Latin-1, as MovieLens writes it", name)
        text = data.decode("latin-1")
    rows: Any
    if between := _COLUMNS.get(os.path.splitext(name)[1]):
        rows = (line.split(between) for line in text_lines(text) if line)
    else:
        rows = csv.reader(io.StringIO(text, newline=""))
        next(rows, None)
    return {int(row[0]): row[1] for row in rows if row}
