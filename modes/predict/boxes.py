"""Finds objects on pictures: what predict.py does with a detector."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
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
    _write(request, paths, _rows(results, found, drawer, tally, len(paths)))
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
            if flag == "draw":
                content = drawing.photo(picture.photo.encoded, row.objects)
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


def _write(request: Request, paths: Sequence[str], rows: Iterator[Row]) -> None:
    if request.form == "coco":
        numbers = image_ids(paths)
        numbered = zip(rows, numbers, strict=True)
        text = json_array(each for row, number in numbered for each in coco(row, number))
    elif request.form == "table":
        text = table(rows, shutil.get_terminal_size().columns)
    else:
        text = lines(request.form, rows, COLUMNS)
    outputs.write(request.out, text)


def image_ids(paths: Sequence[str]) -> list[int]:
    """COCO's ids of images: the numbers at the ends of their names, else 1, 2, ... with a NOTE."""
    names = [os.path.splitext(os.path.basename(path))[0] for path in paths]
    matches = [re.search(r"[0-9]{1,18}$", name) for name in names]
    numbers = [int(match[0]) for match in matches if match]
    if len(set(numbers)) == len(paths):
        return numbers
    say("NOTE the pictures' names do not end with numbers of their own: image_id is 1, 2, ...")
    return list(range(1, len(paths) + 1))
