"""Rows of results as text for programs: CSV, JSON and JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from modes.predict.sources import shown
from ops.tables import csv_text

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


def lines(form: str, rows: Iterable[Row], columns: Sequence[str]) -> Iterator[str]:
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


def cell(path: str, width: int) -> str:
    """The end of a path, which says more than its beginning."""
    text = shown(path)
    return text if len(text) <= width else f"…{text[1 - width :]}"


def cut(text: str, width: int) -> str:
    """The beginning of a text."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def name_width(paths: Sequence[str], width: int) -> int:
    """The columns that the names of files get on a terminal of `width` columns."""
    return min(max([len(shown(path)) for path in paths], default=4), width // 2, 60)


def name_of(path: str) -> str:
    """The name of a file without its folders, as text."""
    return shown(os.path.basename(path))
