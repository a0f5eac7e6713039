"""Answers of predict.py: rows as CSV, JSON, JSON lines and tables, printed or in files.

A file is complete or not there.
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.exhibits import csv_text
from common import entry
from common.data import storage
from common.errors import OutputError, is_of_files, one_line, visible
from common.text import shown

FORMATS = ("csv", "json", "jsonl")


@dataclasses.dataclass(frozen=True)
class Row:
    """The answer for one input."""

    source: Mapping[str, Any]  # the input, by its names in JSON and in the columns of a CSV
    error: str = ""  # why there is no answer, in one line
    content: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by its names in JSON

    def as_json(self) -> dict[str, Any]:
        """The object of a JSON file."""
        return {**self.source, **({"error": self.error} if self.error else self.content)}


def say(text: str) -> None:
    """Writes a line for the user; the standard output has the results."""
    print(visible(text), file=sys.stderr, flush=True)


def write_rows(
    out: str,
    form: str,
    rows: Iterable[Row],
    columns: Sequence[str],
    cells: Callable[[Row], Sequence[Mapping[str, Any]]],
    table: Callable[[Iterable[Row], int], Iterator[str]],
) -> None:
    """Writes a row for each input to the file `out`, in one of `FORMATS`, else as a table.

    Args:
      columns: the columns of a CSV.
      cells: makes the lines of a CSV for an answer: values by column, without its `source`.
      table: makes lines for a terminal of that many columns.
    """

    def lines() -> Iterator[str]:  # a row without an answer has one, too
        yield csv_text([columns])
        for row in rows:
            answers = [] if row.error else cells(row)
            every = [{**row.source, "error": row.error, **answer} for answer in answers or [{}]]
            yield csv_text([line.get(name, "") for name in columns] for line in every)

    if form == "csv":
        text = lines()
    elif form == "json":
        text = json_array(row.as_json() for row in rows)
    elif form == "jsonl":
        text = (f"{json.dumps(row.as_json(), ensure_ascii=False)}\n" for row in rows)
    else:
        text = table(rows, shutil.get_terminal_size().columns)
    write(out, text)


def json_array(objects: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A JSON array with one object on each line, piece by piece."""
    start = "[\n"
    for item in objects:
        yield start + json.dumps(item, ensure_ascii=False)
        start = ",\n"
    yield "[]\n" if start == "[\n" else "\n]\n"


def shortest(value: float) -> float:
    """The number with the fewest digits that is the same float32."""
    return float(str(np.float32(value)))


def path_cell(path: str, width: int) -> str:
    """The end of a path, which says more than its beginning."""
    text = shown(path)
    return text if len(text) <= width else f"…{text[1 - width :]}"


def text_cell(text: str, width: int) -> str:
    """The beginning of a text, without control characters."""
    text = shown(text)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def write(out: str, text: Iterable[str]) -> None:
    """Writes the pieces of a text to the file `out`; "" is the standard output.

    OutputError if it cannot be written.
    """
    if out:
        save(out, (piece.encode() for piece in text))
        return
    for piece in text:
        entry.result(piece)


def save(path: str, parts: Iterable[bytes], quiet: bool = False) -> None:
    """Writes a file and, unless `quiet`, says so; OutputError if it cannot be written."""
    try:
        storage.write(path, parts)
    except Exception as error:
        if not is_of_files(error):
            raise
        raise OutputError(f"cannot write {path}: {one_line(error)}") from error
    if not quiet:
        say(f"wrote {path}")
