"""Writes tables as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """The lines of rows of cells."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
