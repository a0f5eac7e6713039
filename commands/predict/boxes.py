"""Finds objects on pictures: what predict.py does with a detector.

Objects become rows for programs, lines for the user, and drawings: the photo with boxes, names and
scores, or the pixels of the masks.
"""

from __future__ import annotations

import colorsys
import dataclasses
import functools
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from commands.predict import fonts, outputs, sources
from commands.predict.model import Leaves, Predictor, Request, say
from commands.predict.outputs import (
    FORMATS,
    format_rows,
    json_array,
    path_cell,
    path_text,
    shortest,
    shown,
    text_cell,
)
from commands.predict.sources import Picture, Tally
from common.console import Progress
from common.images.photos import Jpeg
from engine import model_source
from engine.locations import check_folder

COLUMNS = ("path", "label", "category_id", "score", "x", "y", "width", "height", "error")
_MIN_SCORE = 0.3  # weaker detections are mostly wrong; COCO's score wants them all the same
_OPACITY = 0.45  # of masks
_QUALITY = 92  # of the drawings
_LEAST_SIDE = 640  # pixels of the longer side of a drawing


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for detectors."""

    formats = (*FORMATS, "coco")
    files = ()  # flags that name a file to write

    min_score: float | None = None
    max_detections: int = 100
    draw: str = ""
    masks: str = ""

    def least(self, form: str) -> float:
        """The least score of a detection in this format."""
        if self.min_score is not None:
            return self.min_score
        return 0.0 if form == "coco" else _MIN_SCORE


def run(request: Request, options: Options, model: model_source.Model, stdin: Iterable[str]) -> int:
    """Writes the objects of each picture; see `commands.predict.run`."""
    started = time.monotonic()
    uses: Any = model.benchmark.uses
    model.check_finite()
    drawer = Drawer(options)
    paths = sources.find_pictures(request, stdin)
    written = [(flag, path) for path in paths for flag, path in drawer.files(path)]
    outputs.check_apart(paths, [*written, ("out", request.out)])

    predictor, inputs = opened(model, request.batch_size)
    blank = sources.warm_up(inputs)
    loaded = time.monotonic()
    predictor.compile(blank)
    compiled = time.monotonic()
    names = [name for _, name in model.manifest["categories"]]
    say(
        f"{model.source}: {sum(map(bool, names)):,} classes; loaded in {loaded - started:.1f} s, "
        f"compiled in {compiled - loaded:.1f} s"
    )
    tally = Tally()
    results = sources.predicted(paths, inputs, predictor, tally, request.threads)
    found = Finder(uses, model.manifest["categories"], options, request.form)
    rows = _rows(results, found, drawer, tally, len(paths))
    _write(request, paths, rows, uses)
    sources.summarize(tally, time.monotonic() - compiled, request.threads, lambda: "")
    return 1 if tally.errors else 0


def opened(model: model_source.Model, batch_size: int) -> tuple[Predictor, sources.Prepare]:
    """The detector of objects on pictures, and what makes its inputs of a photo."""
    benchmark: Any = model.benchmark
    uses = benchmark.uses

    def predict(params: Any, model_state: Any, batch: Any) -> Any:
        rows = benchmark.predict(params, model_state, batch)
        return {name: values for name, values in rows.items() if name != "image_id"}

    def inputs(photo: Jpeg) -> Leaves:
        return uses.inputs(photo.encoded, photo.height, photo.width)

    return Predictor(predict, model, batch_size, uses.at_once), inputs


@dataclasses.dataclass(frozen=True)
class Finder:
    """Makes the row of a picture of what the model predicts.

    Attributes:
      uses: the detector's `benchmarks.detection.use.DetectorUses`.
      categories: (id, name) of each class; "" where the data had no such class.
    """

    uses: Any
    categories: Sequence[tuple[int, str]]
    options: Options
    form: str

    def row(self, picture: Picture, result: Leaves | None) -> Row:
        """The row of a picture; `result` is None where it has an error."""
        if result is None or picture.photo is None:
            return Row(picture.path, error=picture.error)
        height, width = picture.photo.height, picture.photo.width
        found = self.uses.detections(result, height, width)
        objects = []
        for i, (score, number) in enumerate(zip(found.scores, found.classes, strict=True)):
            category, name = self.categories[number - 1]
            outline, inside = None, None
            if found.outlines:
                outline, inside = found.outlines[i], functools.partial(found.inside, i)
            if name and score >= self.options.least(self.form):
                box = tuple(map(float, found.boxes[i]))
                objects.append(Object(name, category, float(score), box, outline, inside))
        return Row(picture.path, height, width, tuple(objects[: self.options.max_detections]))


class Drawer:
    """Writes the pictures with boxes, and the masks, into folders."""

    def __init__(self, options: Options):
        """Makes the folders; ConfigError if one cannot be written."""
        self._least = options.least("")
        self._folders = {"draw": options.draw, "masks": options.masks}
        for flag, folder in self._folders.items():
            if folder:
                check_folder(folder, f"--{flag}")
        self._names: dict[str, str] = {}

    def files(self, path: str) -> Iterator[tuple[str, str]]:
        """(flag, file) of each file that is written for a picture; two of one name get numbers."""
        if path not in self._names:
            stem = os.path.splitext(os.path.basename(path))[0]
            taken, name, number = set(self._names.values()), stem, 1
            while name in taken:
                number += 1
                name = f"{stem}_{number}"
            self._names[path] = name
        for flag, folder in self._folders.items():
            if folder:
                end = ".jpg" if flag == "draw" else ".png"
                yield flag, os.path.join(folder, self._names[path] + end)

    def write(self, picture: Picture, row: Row) -> None:
        """Writes the files of a picture that has no error."""
        if row.error or picture.photo is None:
            return
        for flag, path in self.files(picture.path):
            if flag == "draw":  # the weak ones, which COCO's score wants, would hide the photo
                seen = [each for each in row.objects if each.score >= self._least]
                content = draw_objects(picture.photo.encoded, seen)
            else:
                content = draw_masks(row)
            outputs.save(path, [content], quiet=True)


def _rows(
    results: Iterable[tuple[Picture, Leaves | None]],
    found: Finder,
    drawer: Drawer,
    tally: Tally,
    total: int,
) -> Iterator[Row]:
    progress = Progress(total)
    for done, (picture, result) in enumerate(results, 1):
        row = found.row(picture, result)
        drawer.write(picture, row)
        tally.add(picture, row.error)
        progress.log(done, f"{done:,} of {total:,} files")
        yield row


def _write(request: Request, paths: Sequence[str], rows: Iterator[Row], uses: Any) -> None:
    if request.form != "coco":
        width = shutil.get_terminal_size().columns
        is_table = request.form == "table"
        text = table(rows, width) if is_table else format_rows(request.form, rows, COLUMNS)
        return outputs.write(request.out, text)
    source, listed = uses.listed(paths)
    numbers, odd = image_ids(paths, source, listed), 0

    def objects() -> Iterator[dict[str, Any]]:
        nonlocal odd
        for i, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            odd += i in listed and not row.error and listed[i][1:] != (row.height, row.width)
            yield from coco(row, number)

    outputs.write(request.out, json_array(objects()))
    if odd:
        say(
            f"NOTE {odd:,} pictures have another size in {source}, perhaps because EXIF turns "
            "them: their boxes are in pixels of the upright photo, not of those annotations"
        )


def image_ids(
    paths: Sequence[str], source: str, listed: Mapping[int, tuple[int, int, int]]
) -> list[int]:
    """COCO's ids of images, with NOTES that say where they are from.

    They are those of the annotations `source` for the pictures that it lists, see
    `benchmarks.detection.use.DetectorUses.listed`; else the numbers at the ends of the names; if
    these are not of their own, numbers that count on.
    """
    ids = {i: number for i, (number, *_) in listed.items()}
    others = [i for i in range(len(paths)) if i not in ids]
    names = [os.path.splitext(os.path.basename(paths[i]))[0] for i in others]
    matches = [re.search(r"[0-9]{1,18}$", name) for name in names]
    numbers = [int(match[0]) for match in matches if match]
    text = "the number at the end of its name"
    if len({*ids.values(), *numbers}) < len(paths):
        first = max(ids.values(), default=0) + 1
        numbers = list(range(first, first + len(others)))
        text = f"{first}, {first + 1}, ..., as not all names end with numbers of their own"
    if ids:
        say(f"NOTE image_id is that of {source} for {len(ids):,} pictures, which it lists")
    if others:
        which = "other pictures" if ids else "pictures, which no annotations of the run list"
        say(f"NOTE image_id of {len(others):,} {which}: {text}")
    ids |= dict(zip(others, numbers, strict=True))
    return [ids[i] for i in range(len(paths))]


# Rows and lines.


@dataclasses.dataclass(frozen=True)
class Object:
    """One object.

    Attributes:
      label: the name of its class.
      category_id: of its class in the data.
      score: from 0 to 1.
      box: (y0, x0, y1, x1) in pixels of the photo.
      outline: run lengths of its mask, as COCO has them; None without masks.
      inside: makes bool[height, width], the pixels of the photo in its mask.
    """

    label: str
    category_id: int
    score: float
    box: tuple[float, ...]
    outline: Mapping[str, Any] | None = None
    inside: Callable[[], np.ndarray] | None = None

    @property
    def bbox(self) -> list[float]:
        """x, y, width and height in pixels, as COCO has them."""
        y0, x0, y1, x1 = self.box
        return [x0, y0, x1 - x0, y1 - y0]


@dataclasses.dataclass(frozen=True)
class Row:
    """The objects on a photo of `height` x `width` pixels, the best first, or an error."""

    path: str
    height: int = 0
    width: int = 0
    objects: tuple[Object, ...] = ()
    error: str = ""

    def content(self) -> dict[str, Any]:
        """See `outputs.Row`."""
        content: dict[str, Any] = {"path": path_text(self.path)}
        if self.error:
            return content | {"error": self.error}
        objects = []
        for each in self.objects:
            values = {"label": each.label, "category_id": each.category_id}
            values |= {"score": shortest(each.score), "bbox": list(map(shortest, each.bbox))}
            outline = {"segmentation": each.outline} if each.outline else {}
            objects.append({**values, **outline})
        return content | {"height": self.height, "width": self.width, "objects": objects}

    def cells(self) -> list[dict[str, Any]]:
        """See `outputs.Row`: a line for each object; a picture without any has one line."""
        common = {"path": path_text(self.path), "error": self.error}
        lines = []
        for each in self.objects:
            cells = (each.label, each.category_id, *map(shortest, (each.score, *each.bbox)))
            lines.append(common | dict(zip(COLUMNS[1:-1], cells, strict=True)))
        return lines or [common]


def coco(row: Row, image_id: int) -> Iterator[dict[str, Any]]:
    """The objects of a picture in COCO's form of results."""
    for each in row.objects:
        values = {"image_id": image_id, "category_id": each.category_id, "score": each.score}
        outline = {"segmentation": each.outline} if each.outline else {}
        yield {**values, "bbox": each.bbox, **outline}


def table(rows: Iterable[Row], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns: one for each picture, one for each object."""
    for row in rows:
        name = path_cell(row.path, max(width - 30, 20))
        if row.error:
            yield f"{name}  ERROR {row.error}\n"
            continue
        count = len(row.objects)
        found = "no objects" if not count else f"{count} object{'s' * (count > 1)}"
        yield f"{name}  {row.width} x {row.height}, {found}\n"
        for each in row.objects:
            x, y, wide, high = each.bbox
            label = text_cell(shown(each.label), 24)
            yield f"  {label:24} {each.score:6.1%}  at {x:.0f}, {y:.0f}: {wide:.0f} x {high:.0f}\n"


# Drawings.


def draw_objects(encoded: bytes, objects: Sequence[Object]) -> bytes:
    """A JPEG of the photo with its objects; the best ones are on top.

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
        text = f"{fonts.drawable(shown(each.label))} {each.score:.0%}"
        font = fonts.load(max(11, side // 50), text=text)
        left, top, right, bottom = pen.textbbox((x0 + line, y0), text, font)
        lift = min(bottom - top + 2 * line, max(y0, 0))  # above the box, if there is room
        pen.rectangle((x0, top - lift, right + line, bottom - lift + line), fill=colour)
        pen.text((x0 + line, y0 - lift), text, "white", font)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def draw_masks(row: Row) -> bytes:
    """A PNG of the photo's size: at each pixel the rank of its object from 1, best first; else 0.

    8 bits per pixel, or 16 where there are more than 255 objects.
    """
    wide = len(row.objects) > 255
    ranks = np.zeros((row.height, row.width), np.uint16 if wide else np.uint8)
    for rank, each in reversed(list(enumerate(row.objects, 1))):
        if each.inside:
            ranks[each.inside()] = rank
    file = io.BytesIO()
    Image.fromarray(ranks).save(file, "PNG")
    return file.getvalue()


def _colour(number: int) -> tuple[int, int, int]:
    """A dark colour; neighbours of `number` have other hues."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.85, 0.75)
    return round(255 * red), round(255 * green), round(255 * blue)
