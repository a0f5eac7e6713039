"""Writes tables as CSV that spreadsheets only show."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """The lines of rows of cells."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_no_formula, row) for row in rows)
    return text.getvalue()


def _no_formula(cell: Any) -> Any:
    """The text of a cell; spreadsheets would compute one that begins with "=", "+", "-" or "@"."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in tuple("=+-@\t\r") else cell
