"""Finds objects on pictures: what predict.py does with a detector."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import start
from modes import trained
from modes.predict import drawing, outputs, pictures, sources
from modes.predict.box_rows import COLUMNS, Object, Row, coco, table
from modes.predict.pictures import Tally
from modes.predict.predictor import Leaves, Predictor
from modes.predict.request import Request, say
from modes.predict.rows import FORMATS, json_array, lines
from modes.predict.sources import Picture
from ops.images.photos import Jpeg
from ops.progress import Progress

_MIN_SCORE = 0.3  # weaker detections are mostly wrong; COCO's score wants them all the same


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


def run(request: Request, options: Options, model: trained.Trained, stdin: Iterable[str]) -> int:
    """Writes the objects of each picture; see `modes.predict.run`."""
    started = time.monotonic()
    uses: Any = model.benchmark.uses
    model.check_finite()
    drawer = Drawer(options)
    paths = pictures.find(request, stdin)
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
    results = pictures.predicted(paths, inputs, predictor, tally, request.threads)
    found = Finder(uses, model.manifest["categories"], options, request.form)
    rows = _rows(results, found, drawer, tally, len(paths))
    _write(request, paths, rows, uses)
    pictures.summarize(tally, time.monotonic() - compiled, request.threads, lambda: "")
    return 1 if tally.errors else 0


def opened(model: trained.Trained, batch_size: int) -> tuple[Predictor, sources.Prepare]:
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
                start.check_folder(folder, f"--{flag}")
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
                content = drawing.photo(picture.photo.encoded, seen)
            else:
                content = drawing.masks(row)
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
        text = table(rows, width) if is_table else lines(request.form, rows, COLUMNS)
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
