"""What the exhibits of several benchmarks have in common: confused classes, files, pictures."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from common.images import pixels
from common.text import csv_text, percent

MATRIX = 50  # classes; of more, the commonest confusions are listed
CLASSES = 50  # rows of a table of classes
_PAIRS = 30


def csv_file(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """UTF-8 with a line of names, then a line for each row."""
    return csv_text([columns, *rows]).encode()


def confused_classes(counts: np.ndarray, names: Sequence[str]) -> list[tuple[str, ...]]:
    """(true class, taken for, how often, which share of the class) of the commonest confusions.

    `counts` is int[K or more, K or more]: how often a class (row) was taken for another (column);
    what lies beyond the `names` of the K classes counts for the shares only.
    """
    size = len(names)
    between = counts[:size, :size] * ~np.eye(size, dtype=bool)
    order = np.argsort(-between, axis=None, kind="stable")[:_PAIRS]
    pairs = [divmod(int(cell), size) for cell in order]
    return [
        (names[a], names[b], f"{between[a, b]:,}", percent(between[a, b] / counts[a].sum()))
        for a, b in pairs
        if between[a, b]
    ]


def thumbnail(encoded: bytes, side: int) -> Any:
    """A PIL image of at most `side` pixels a side; smaller images keep their size.

    Args:
      encoded: a JPEG, PNG, BMP or GIF that evaluation has decoded before.
      side: of the square that the picture fits into.
    """
    from PIL import Image

    image = Image.fromarray(pixels.decode(encoded).numpy())
    image.thumbnail((side, side))
    return image


def png(figure: Any) -> bytes:
    """A figure of matplotlib as a PNG."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()
