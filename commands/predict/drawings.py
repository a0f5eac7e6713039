"""Pictures with answers drawn on them, as JPEGs in a folder."""

import functools
import io
import os
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from commands.predict import outputs
from common.text import path_text, shown
from engine.locations import check_folder

_QUALITY = 92
_LEAST_SIDE = 640  # pixels of the longer side of a drawing


class Drawings:
    """The drawings in a folder: one for each picture, with its name; of the second, with _2."""

    def __init__(self, folder: str, flag: str):
        """Makes the folder, which `flag` names; "" if there are no drawings.

        UserError if it cannot be written.
        """
        self.folder, self._flag = folder, flag
        if folder:
            check_folder(folder, f"--{flag}")
        self._stems: dict[str, str] = {}  # the names of the drawings, by the path of the picture
        self._taken: set[str] = set()  # all names of drawings

    def files(self, paths: Sequence[str]) -> list[tuple[str, str]]:
        """(flag, file) of each drawing; [] without a folder."""
        return [(self._flag, self._file(path)) for path in paths if self.folder]

    def save(self, path: str, drawing: Image.Image) -> None:
        """Writes the drawing of the picture `path`; OutputError if that is not possible."""
        file = io.BytesIO()
        drawing.save(file, "JPEG", quality=_QUALITY)
        outputs.save(self._file(path), [file.getvalue()], quiet=True)

    def _file(self, path: str) -> str:
        if path not in self._stems:
            name = stem = path_text(os.path.splitext(os.path.basename(path))[0])
            number = 1
            while name in self._taken:
                number += 1
                name = f"{stem}_{number}"
            self._taken.add(name)
            self._stems[path] = name
        return os.path.join(self.folder, f"{self._stems[path]}.jpg")


def enlarged(image: Image.Image) -> tuple[Image.Image, int]:
    """A small image enlarged by a whole number, which it returns, or texts would hide it."""
    times = -(-_LEAST_SIDE // max(image.size))
    return image.resize([times * side for side in image.size], Image.Resampling.NEAREST), times


class Pen:
    """Draws on an image, with lines and letters that fit it and things of a height in pixels."""

    def __init__(self, image: Image.Image, height: float = 0.0):
        """A `height` of 0 is the image's."""
        self.draw, side = ImageDraw.Draw(image), max(image.size)
        high = round(height) or side
        self.line = max(2, min(side // 400, high // 16))
        self._font = _font(max(11, min(side // 50, high // 2)))

    def tag(self, x: float, y: float, text: str, colour: Any) -> None:
        """Writes a text on a ground of this colour: above the point, if there is space."""
        text, line = shown(text), self.line
        _, top, right, bottom = self.draw.textbbox((x + line, y), text, self._font)
        lift = min(bottom - top + 2 * line, max(y, 0))
        self.draw.rectangle((x, top - lift, right + line, bottom - lift + line), fill=colour)
        self.draw.text((x + line, y - lift), text, "white", self._font)


@functools.cache
def _font(size: int) -> Any:
    """DejaVu Sans, which comes with matplotlib: Latin, Greek, Cyrillic and Arabic letters."""
    import matplotlib

    folder = os.path.join(matplotlib.get_data_path(), "fonts", "ttf")
    return ImageFont.truetype(os.path.join(folder, "DejaVuSans.ttf"), size)
