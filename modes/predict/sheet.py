"""Draws a contact sheet: each picture as the model sees it, with its class and probability."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from modes.predict import fonts
from modes.predict.class_rows import Classes, Row
from modes.predict.rows import name_of
from modes.predict.sources import shown

PER_SHEET = 80
_COLUMNS = 8
_SIDE, _TEXT, _GAP = 160, 52, 12  # pixels: a picture, the lines below it, between pictures
_INK, _GREY, _RED = "#202020", "#707070", "#c01818"
_font = functools.partial(fonts.load, 13)


class Tile(NamedTuple):
    """One picture of a sheet; `pixels` uint8[s, s, 3], or None if the file has an error."""

    row: Row
    pixels: np.ndarray | None


def draw(tiles: Sequence[Tile], classes: Classes) -> bytes:
    """A PNG of up to `PER_SHEET` pictures; a class that is not the folder's name is red."""
    columns = min(_COLUMNS, len(tiles))
    rows = -(-len(tiles) // columns)
    size = columns * (_SIDE + _GAP) + _GAP, rows * (_SIDE + _TEXT + _GAP) + _GAP
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for i, tile in enumerate(tiles):
        y, x = divmod(i, columns)
        corner = _GAP + x * (_SIDE + _GAP), _GAP + y * (_SIDE + _TEXT + _GAP)
        _draw_one(sheet, pen, tile, corner, classes)
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def _draw_one(
    sheet: Image.Image, pen: Any, tile: Tile, corner: tuple[int, int], classes: Classes
) -> None:
    row, (x, y) = tile.row, corner
    box = (x, y, x + _SIDE - 1, y + _SIDE - 1)
    if tile.pixels is None:
        pen.rectangle(box, fill="#eeeeee", outline=_RED)
        for i, line in enumerate(_wrapped(row.error, 8)):
            pen.text((x + 6, y + 6 + 16 * i), line, _RED, _font())
        texts = [("no prediction", _RED)]
    else:
        picture = Image.fromarray(tile.pixels)
        sheet.paste(picture.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), (x, y))
        if row.is_wrong:
            pen.rectangle(box, outline=_RED, width=3)
        value = f" {classes.shown(row.values[0])}"
        label = _fitting(
            fonts.drawable(shown(row.labels[0])), _SIDE - pen.textlength(value, _font(bold=True))
        )
        texts = [(label + value, _RED if row.is_wrong else _INK)]
        if row.is_wrong:
            texts.append((_fitting(fonts.drawable(f"folder: {shown(row.truth)}"), _SIDE), _RED))
    texts.append((_fitting(fonts.drawable(name_of(row.path)), _SIDE), _GREY))
    for i, (text, colour) in enumerate(texts):
        pen.text((x, y + _SIDE + 2 + 16 * i), text, colour, _font(i == 0, text))


def _fitting(text: str, width: float) -> str:
    """The text, shortened in its middle to `width` pixels of the bold font."""
    length, short = len(text), text
    while _font(True, text).getlength(short) > width and length > 1:
        length -= 1
        short = f"{text[: length - length // 2]}…{text[len(text) - length // 2 :]}"
    return short


def _wrapped(text: str, most: int) -> list[str]:
    """Up to `most` lines that fit into a picture."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if _font().getlength(longer) <= _SIDE - 12:
            lines[-1] = longer
        else:
            lines.append(_fitting(word, _SIDE - 12))
    return [line for line in lines if line][:most]
