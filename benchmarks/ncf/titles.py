"""Reads MovieLens' titles: movies.csv of ml-20m, movies.dat of ml-1m, or either in the zip."""

from __future__ import annotations

import csv
import io
import zipfile
import zlib
from typing import Any

from benchmarks.ncf import ratings
from errors import DataError, one_line
from ops import limits
from ops.shards import read_errors, tensorflow

_NAMES = ("movies.csv", "movies.dat")


def read(data_dir: str) -> dict[int, str]:
    """The titles of items by their ids; {} if there is no list where the ratings are.

    Args:
      data_dir: see `ratings.locate`.

    Raises:
      DataError: the list cannot be read.
    """
    path = ratings.locate(data_dir)
    try:
        name, data = _find(path)
    except (*read_errors(), zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"cannot read the titles beside {path}: {one_line(error)}") from error
    try:
        return _parse(name, data) if name else {}
    except (ValueError, IndexError, csv.Error) as error:
        raise DataError(f"{name} of {path} is no list of titles: {one_line(error)}") from error


def _find(path: str) -> tuple[str, bytes]:
    """The name and the bytes of the list that belongs to the ratings in `path`; ("", b"")."""
    gfile = tensorflow().io.gfile
    if path.endswith(".zip"):
        with gfile.GFile(path, "rb") as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.filename.endswith(_NAMES):
                    limits.check_size(member.filename, member.file_size, limits.TEXT_BYTES)
                    return member.filename, archive.read(member)
        return "", b""
    for name in _NAMES:
        beside = f"{path.rpartition('/')[0] or '.'}/{name}"
        if gfile.exists(beside):
            limits.check_file(beside)
            limits.check_size(beside, gfile.stat(beside).length, limits.TEXT_BYTES)
            with gfile.GFile(beside, "rb") as file:
                return name, file.read()
    return "", b""


def _parse(name: str, data: bytes) -> dict[int, str]:
    """The titles in a list; ValueError or IndexError if it has another form."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:  # as in ml-1m
        text = data.decode("latin-1")
    rows: Any
    if name.endswith(".dat"):  # without a header
        rows = (line.split("::") for line in limits.text_lines(text) if line)
    else:
        rows = csv.reader(io.StringIO(text, newline=""))
        next(rows, None)
    return {int(row[0]): row[1] for row in rows if row}
