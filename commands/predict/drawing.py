"""Pictures that predict.py draws: boxes on a photo, masks, contact sheets, and their fonts."""

from __future__ import annotations

import colorsys
import functools
import io
import os
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from commands.predict.outputs import say, shown

_OPACITY = 0.45  # of masks
_QUALITY = 92  # of the photos with boxes
_LEAST_SIDE = 640  # pixels of the longer side of a photo with boxes
_SHEET_COLUMNS = 8
_SIDE, _TEXT, _GAP = 160, 52, 12  # pixels: a picture, the lines below it, between pictures
_INK, _GREY, _RED = "#202020", "#707070", "#c01818"
_ALWAYS = {*string.ascii_letters, *string.digits, "…"}  # of which a font has all


def draw_objects(encoded: bytes, objects: Sequence[Any]) -> bytes:
    """A JPEG of the photo with its `boxes.Object`s; the best ones are on top.

    A small photo is enlarged by a whole number, or the names would hide its objects.
    """
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    pixels = np.asarray(image).copy()
    for each in reversed(objects):
        if each.inside:
            inside = each.inside()
            colour = np.array(_colour(each.category_id), np.float32)
            pixels[inside] = (pixels[inside] * (1 - _OPACITY) + colour * _OPACITY).astype(np.uint8)
    image, times = Image.fromarray(pixels), -(-_LEAST_SIDE // max(image.size))
    image = image.resize([times * side for side in image.size], Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(image)
    side = max(image.size)
    line = max(2, side // 400)
    for each in reversed(objects):
        y0, x0, y1, x1 = (times * edge for edge in each.box)
        colour = _colour(each.category_id)
        pen.rectangle((x0, y0, x1, y1), outline=colour, width=line)
        text = f"{drawable(shown(each.label))} {each.score:.0%}"
        font = load_font(max(11, side // 50), text=text)
        left, top, right, bottom = pen.textbbox((x0 + line, y0), text, font)
        lift = min(bottom - top + 2 * line, max(y0, 0))  # above the box, if there is room
        pen.rectangle((x0, top - lift, right + line, bottom - lift + line), fill=colour)
        pen.text((x0 + line, y0 - lift), text, "white", font)
    return _encoded(image, "JPEG", quality=_QUALITY)


def draw_masks(height: int, width: int, objects: Sequence[Any]) -> bytes:
    """A PNG of the photo's size: at each pixel the rank of its object from 1, best first; else 0.

    8 bits per pixel, or 16 where there are more than 255 objects.
    """
    ranks = np.zeros((height, width), np.uint16 if len(objects) > 255 else np.uint8)
    for rank, each in reversed(list(enumerate(objects, 1))):
        if each.inside:
            ranks[each.inside()] = rank
    return _encoded(Image.fromarray(ranks), "PNG")


def _colour(number: int) -> tuple[int, int, int]:
    """A dark colour; neighbours of `number` have other hues."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.85, 0.75)
    return round(255 * red), round(255 * green), round(255 * blue)


def _encoded(image: Image.Image, form: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **settings)
    return file.getvalue()


# Contact sheets.


class Tile(NamedTuple):
    """One picture of a sheet.

    Attributes:
      path: of the file.
      error: why there is no answer; "" if there is one.
      pixels: uint8[s, s, 3], as the model saw it; None if the file could not be read.
      label, value: of the best class, as text.
      folder: the class whose name the folder has, if it is another one; else "".
    """

    path: str
    error: str
    pixels: np.ndarray | None
    label: str
    value: str
    folder: str


def draw_sheet(tiles: Sequence[Tile]) -> bytes:
    """A PNG of some pictures in rows of 8; a class that is not the folder's name is red."""
    columns = min(_SHEET_COLUMNS, len(tiles))
    rows = -(-len(tiles) // columns)
    size = columns * (_SIDE + _GAP) + _GAP, rows * (_SIDE + _TEXT + _GAP) + _GAP
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for i, tile in enumerate(tiles):
        y, x = divmod(i, columns)
        _draw_tile(sheet, pen, tile, _GAP + x * (_SIDE + _GAP), _GAP + y * (_SIDE + _TEXT + _GAP))
    return _encoded(sheet, "PNG")


def _draw_tile(sheet: Image.Image, pen: Any, tile: Tile, x: int, y: int) -> None:
    box = (x, y, x + _SIDE - 1, y + _SIDE - 1)
    if tile.error or tile.pixels is None:
        pen.rectangle(box, fill="#eeeeee", outline=_RED)
        for i, line in enumerate(_wrapped(tile.error, 8)):
            pen.text((x + 6, y + 6 + 16 * i), line, _RED, _font())
        texts = [("no prediction", _RED)]
    else:
        picture = Image.fromarray(tile.pixels)
        sheet.paste(picture.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), (x, y))
        if tile.folder:
            pen.rectangle(box, outline=_RED, width=3)
        value = f" {tile.value}"
        room = _SIDE - pen.textlength(value, _font(bold=True))
        label = _fitting(drawable(shown(tile.label)), room)
        texts = [(label + value, _RED if tile.folder else _INK)]
        if tile.folder:
            texts.append((_fitting(drawable(f"folder: {shown(tile.folder)}"), _SIDE), _RED))
    name = shown(os.path.basename(tile.path))
    texts.append((_fitting(drawable(name), _SIDE), _GREY))
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


# Fonts.


def load_font(size: int, bold: bool = False, text: str = "") -> Any:
    """DejaVu Sans, which comes with matplotlib, or a font of this machine with more of the text."""
    absent = frozenset(text) - _letters(_own(bold))
    return _truetype(absent and _other(absent) or _own(bold), size)


_font = functools.partial(load_font, 13)


def drawable(text: str) -> str:
    """The text with a question mark for each letter that `load_font` would draw as a box."""
    absent = frozenset(text) - _letters(_own(False))
    if not absent or _other(absent):
        return text
    return "".join("?" if c in absent else c for c in text)


_truetype = functools.cache(ImageFont.truetype)
_say_once = functools.cache(say)


@functools.cache
def _letters(path: str) -> frozenset[str]:
    from matplotlib.ft2font import FT2Font

    try:
        ImageFont.truetype(path, 13)  # raises for a font of pictures, such as of emoji
        return frozenset(map(chr, FT2Font(path).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()


def _own(bold: bool) -> str:
    import matplotlib

    file = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return os.path.join(matplotlib.get_data_path(), "fonts", "ttf", file)


@functools.cache
def _other(absent: frozenset[str]) -> str:
    """A font of this machine with these letters; "" if there is none, which is said once."""
    from matplotlib import font_manager

    for font in font_manager.fontManager.ttflist:
        is_boxes = font.name.startswith("Last Resort")  # has all letters; matplotlib brings it
        if not is_boxes and _letters(font.fname) >= absent | _ALWAYS:
            return font.fname
    _say_once("NOTE no font of this machine has some of the letters: ? stands for them in pictures")
    return ""
