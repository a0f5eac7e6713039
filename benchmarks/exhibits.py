"""What the exhibits of several benchmarks have in common: tables, pictures, groups of examples."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from common.images import pixels

CLASSES = 50  # rows of a table of classes


def csv_file(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """UTF-8 with a line of names, then a line for each row."""
    return csv_text([columns, *rows]).encode()


def thumbnail(encoded: bytes, side: int) -> Any:
    """A PIL image of at most `side` pixels a side; smaller images keep their size.

    `encoded` is a JPEG, PNG, BMP or GIF that evaluation has decoded before.
    """
    from PIL import Image

    image = Image.fromarray(pixels.decode(encoded).numpy())
    image.thumbnail((side, side))
    return image


def even_groups(values: np.ndarray, max_groups: int) -> list[np.ndarray]:
    """The indices of values int[n] in at most `max_groups` groups, the least values first.

    Equal values stay together. So groups may differ in size, and there may be fewer of them; none
    is empty.
    """
    order = np.argsort(values, kind="stable")
    ordered, n = values[order], len(values)
    if not n:
        return []
    lasts = [max(n * (i + 1) // max_groups, 1) - 1 for i in range(max_groups)]
    ends = np.unique(np.searchsorted(ordered, ordered[lasts], side="right"))
    return np.split(order, ends[:-1])


def percent(share: float) -> str:
    """A share in per cent with one decimal; a dash for nan."""
    return "–" if math.isnan(share) else f"{100 * share:.1f}\u00a0%"


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """The lines of rows of cells."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
