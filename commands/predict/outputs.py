"""Answers of predict.py: rows as CSV, JSON, JSON lines and tables, printed or in files.

A file is complete or not there.
"""

import dataclasses
import functools
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks.exhibits import csv_text
from common import entry
from common.data import storage
from common.errors import OutputError, is_of_files, one_line, visible
from common.text import path_text, shown
from engine.locations import check_folder

FORMATS = ("csv", "json", "jsonl")


@dataclasses.dataclass(frozen=True)
class Row:
    """The answer for one input."""

    source: Mapping[str, Any]  # the input, by its names in JSON and in the columns of a CSV
    error: str = ""  # why there is no answer, in one line
    content: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by its names in JSON

    def as_json(self) -> dict[str, Any]:
        """The object of a JSON file."""
        return {**self.source, **({"error": self.error} if self.error else self.content)}


def say(text: str) -> None:
    """Writes a line for the user; the standard output has the results."""
    print(visible(text), file=sys.stderr, flush=True)


def write_rows(
    out: str,
    form: str,
    rows: Iterable[Row],
    columns: Sequence[str],
    cells: Callable[[Row], Sequence[Mapping[str, Any]]],
    table: Callable[[Iterable[Row], int], Iterator[str]],
) -> None:
    """Writes a row for each input to the file `out`, in one of `FORMATS`, else as a table.

    Args:
      columns: the columns of a CSV.
      cells: makes the lines of a CSV for an answer: values by column, without its `source`.
      table: makes lines for a terminal of that many columns.
    """

    def lines() -> Iterator[str]:  # a row without an answer has one, too
        yield csv_text([columns])
        for row in rows:
            answers = [] if row.error else cells(row)
            every = [{**row.source, "error": row.error, **answer} for answer in answers or [{}]]
            yield csv_text([line.get(name, "") for name in columns] for line in every)

    if form == "csv":
        text = lines()
    elif form == "json":
        text = json_array(row.as_json() for row in rows)
    elif form == "jsonl":
        text = (f"{json.dumps(row.as_json(), ensure_ascii=False)}\n" for row in rows)
    else:
        text = table(rows, shutil.get_terminal_size().columns)
    write(out, text)


def json_array(objects: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A JSON array with one object on each line, piece by piece."""
    start = "[\n"
    for item in objects:
        yield start + json.dumps(item, ensure_ascii=False)
        start = ",\n"
    yield "[]\n" if start == "[\n" else "\n]\n"


def shortest(value: float) -> float:
    """The number with the fewest digits that is the same float32."""
    return float(str(np.float32(value)))


def path_cell(path: str, width: int) -> str:
    """The end of a path, which says more than its beginning."""
    text = shown(path)
    return text if len(text) <= width else f"…{text[1 - width :]}"


def text_cell(text: str, width: int) -> str:
    """The beginning of a text, without control characters."""
    text = shown(text)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def write(out: str, text: Iterable[str]) -> None:
    """Writes the pieces of a text to the file `out`; "" is the standard output.

    OutputError if it cannot be written.
    """
    if out:
        save(out, (piece.encode() for piece in text))
        return
    for piece in text:
        entry.result(piece)


def save(path: str, parts: Iterable[bytes], quiet: bool = False) -> None:
    """Writes a file and, unless `quiet`, says so; OutputError if it cannot be written."""
    try:
        storage.write(path, parts)
    except Exception as error:
        if not is_of_files(error):
            raise
        raise OutputError(f"cannot write {path}: {one_line(error)}") from error
    if not quiet:
        say(f"wrote {path}")


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
        save(self._file(path), [file.getvalue()], quiet=True)

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
