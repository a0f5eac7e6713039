"""Results of predict.py: rows as CSV, JSON and JSON lines, on the standard output or in files.

A file is complete or not there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from commands.predict.model import say
from common.data import files
from common.errors import ConfigError, OutputError, is_of_files, one_line
from common.text import csv_text

FORMATS = ("csv", "json", "jsonl")


class Row(Protocol):
    """The result for one input; each kind of models has its own class."""

    @property
    def error(self) -> str:
        """Why there is no result, in one line; '' if there is one."""
        ...

    def content(self) -> dict[str, Any]:
        """The object of a JSON file."""
        ...

    def cells(self) -> Iterable[dict[str, Any]]:
        """The lines of a CSV: values by the name of their column; others are empty."""
        ...


def format_rows(form: str, rows: Iterable[Row], columns: Sequence[str]) -> Iterator[str]:
    """The text of a file in one of `FORMATS`, piece by piece; `columns` are those of a CSV."""
    if form == "csv":
        return _csv(rows, columns)
    if form == "json":
        return json_array(row.content() for row in rows)
    return (f"{json.dumps(row.content(), ensure_ascii=False)}\n" for row in rows)


def _csv(rows: Iterable[Row], columns: Sequence[str]) -> Iterator[str]:
    yield csv_text([columns])
    for row in rows:
        yield csv_text([cells.get(name, "") for name in columns] for cells in row.cells())


def json_array(objects: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A JSON array with one object on each line, piece by piece."""
    start = "[\n"
    for item in objects:
        yield start + json.dumps(item, ensure_ascii=False)
        start = ",\n"
    yield "[]\n" if start == "[\n" else "\n]\n"


def shortest(value: float) -> float:
    """The number of the fewest digits that is the same float32."""
    return float(str(np.float32(value)))


def shown(path: str) -> str:
    """A path as text for the user: `path_text`, and without control characters."""
    printable = (
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in path_text(path)
    )
    return "".join(printable)


def path_text(path: str) -> str:
    """A path as text for programs; only bytes that are not UTF-8 are written as \\udcXX."""
    return path.encode(errors="backslashreplace").decode()


def path_cell(path: str, width: int) -> str:
    """The end of a path, which says more than its beginning."""
    text = shown(path)
    return text if len(text) <= width else f"…{text[1 - width :]}"


def text_cell(text: str, width: int) -> str:
    """The beginning of a text."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def name_width(paths: Sequence[str], width: int) -> int:
    """The columns that the names of files get on a terminal of `width` columns."""
    return min(max([len(shown(path)) for path in paths], default=4), width // 2, 60)


def name_of(path: str) -> str:
    """The name of a file without its folders, as text."""
    return shown(os.path.basename(path))


def check_apart(paths: Sequence[str], written: Iterable[tuple[str, str]]) -> None:
    """Refuses to write over one of the inputs.

    Raises:
      ConfigError: one of (flag, path) of the files to write is one of `paths`.
    """
    inputs = {_real_path(path) for path in paths}
    for flag, path in written:
        if path and _real_path(path) in inputs:
            raise ConfigError(
                f"--{flag}: {path} is one of the inputs, and would be overwritten; "
                "write to another folder"
            )


def _real_path(path: str) -> str:
    return path if "://" in path else os.path.realpath(path)


def write(out: str, text: Iterable[str]) -> None:
    """Writes the pieces of a text to the file `out`; "" is the standard output.

    Raises:
      OutputError: the file cannot be written.
      BrokenPipeError: nobody reads the standard output any more.
    """
    if out:
        save(out, (piece.encode() for piece in text))
        return
    for piece in text:
        try:
            sys.stdout.buffer.write(piece.encode())
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"cannot write the standard output: {error.strerror}") from error


def save(path: str, parts: Iterable[bytes], quiet: bool = False) -> None:
    """Writes a file and, unless `quiet`, says so; OutputError if it cannot be written."""
    try:
        files.write(path, parts)
    except Exception as error:
        if not is_of_files(error):
            raise
        raise OutputError(f"cannot write {path}: {one_line(error)}") from error
    if not quiet:
        say(f"wrote {path}")
