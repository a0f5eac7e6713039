"""The fonts of pictures that predict.py draws."""

from __future__ import annotations

import functools
import os
import string
from typing import Any

from PIL import ImageFont

from commands.predict.model import say

_ALWAYS = {*string.ascii_letters, *string.digits, "…"}  # of which a font has all


def load(size: int, bold: bool = False, text: str = "") -> Any:
    """DejaVu Sans, which comes with matplotlib, or a font of this machine with more of the text."""
    if absent := {c for c in text if c not in _letters(_own(bold))}:
        return _truetype(_other(frozenset(absent)) or _own(bold), size)
    return _truetype(_own(bold), size)


def drawable(text: str) -> str:
    """The text with a question mark for each letter that `load` would draw as a box."""
    absent = frozenset(c for c in text if c not in _letters(_own(False)))
    if not absent or _other(absent):
        return text
    return "".join("?" if c in absent else c for c in text)


_truetype = functools.cache(ImageFont.truetype)


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
    """A font of this machine with these letters; "" if there is none, which is said."""
    from matplotlib import font_manager

    for font in font_manager.fontManager.ttflist:
        is_boxes = font.name.startswith("Last Resort")  # has all letters; matplotlib brings it
        if not is_boxes and _letters(font.fname) >= absent | _ALWAYS:
            return font.fname
    _note()
    return ""


@functools.cache
def _note() -> None:
    """Says once that letters are missing."""
    say("NOTE no font of this machine has some of the letters: ? stands for them in pictures")
