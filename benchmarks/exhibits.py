"""What the exhibits of several benchmarks have in common: tables, pictures, groups of examples."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

from common.images import pixels
from common.text import csv_text

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


def png(figure: Any) -> bytes:
    """A figure of matplotlib as a PNG."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()
