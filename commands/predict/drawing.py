"""Photos with the objects that predict.py has found on them."""

import colorsys
import functools
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from commands.predict.outputs import shown

_OPACITY = 0.45  # of masks
_QUALITY = 92  # of the photos with boxes
_LEAST_SIDE = 640  # pixels of the longer side of a photo with boxes


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
    line, font = max(2, side // 400), _font(max(11, side // 50))
    for each in reversed(objects):
        y0, x0, y1, x1 = (times * edge for edge in each.box)
        colour = _colour(each.category_id)
        pen.rectangle((x0, y0, x1, y1), outline=colour, width=line)
        text = f"{shown(each.label)} {each.score:.0%}"
        left, top, right, bottom = pen.textbbox((x0 + line, y0), text, font)
        lift = min(bottom - top + 2 * line, max(y0, 0))  # above the box, if there is space
        pen.rectangle((x0, top - lift, right + line, bottom - lift + line), fill=colour)
        pen.text((x0 + line, y0 - lift), text, "white", font)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _colour(number: int) -> tuple[int, int, int]:
    """A dark colour; neighbours of `number` have other hues."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.85, 0.75)
    return round(255 * red), round(255 * green), round(255 * blue)


@functools.cache
def _font(size: int) -> Any:
    """DejaVu Sans, which comes with matplotlib: Latin, Greek, Cyrillic and Arabic letters."""
    import matplotlib

    folder = os.path.join(matplotlib.get_data_path(), "fonts", "ttf")
    return ImageFont.truetype(os.path.join(folder, "DejaVuSans.ttf"), size)
