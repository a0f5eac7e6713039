"""Finds objects on pictures: what predict.py does with a detector.

Objects become rows, and drawings: the photo with boxes, names and scores, or the pixels of masks.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from commands.predict import drawing, outputs, sources
from commands.predict.model import Leaves, Request, flag
from commands.predict.outputs import FORMATS, Row, path_cell, say, shortest, text_cell
from commands.predict.sources import Picture
from common import console
from common.images.photos import Jpeg
from engine import model_source
from engine.locations import check_folder

_MIN_SCORE = 0.3  # weaker detections are mostly wrong; COCO's score wants them all the same
_flag = functools.partial(flag, "detectors")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for detectors."""

    formats = (*FORMATS, "coco")

    min_score: float | None = _flag(
        None, "the least score of a detection (0.3; .coco.json: 0)", console.share
    )
    max_detections: int = _flag(100, "the best of each picture (100)", console.integer(1))
    draw: str = _flag("", "folder for the pictures with boxes and outlines")
    masks: str = _flag(
        "", "folder for a PNG per picture: the number of the detection at each pixel"
    )

    def least(self, form: str) -> float:
        """The least score of a detection in this format."""
        if self.min_score is not None:
            return self.min_score
        return 0.0 if form == "coco" else _MIN_SCORE


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

    @property
    def segmentation(self) -> dict[str, Any]:
        """The outline as an entry of COCO's results; {} without masks."""
        return {"segmentation": self.outline} if self.outline else {}


def run(request: Request, options: Options, model: model_source.Model, stdin: Iterable[str]) -> int:
    """Writes the objects of each picture; see `commands.predict.run`."""
    load = functools.partial(Detector, model, options, request.format)
    return sources.answer(load, request, stdin)


class Detector(sources.PictureModel):
    """Finds the objects on pictures, and writes the pictures with boxes, and the masks."""

    columns = ("path", "label", "category_id", "score", "x", "y", "width", "height", "error")

    def __init__(self, model: model_source.Model, options: Options, form: str = ""):
        """Makes the folders of drawings.

        Raises:
          UserError: a weight is not finite, or a folder cannot be written.
        """
        super().__init__(model)
        self._uses: Any = model.benchmark.uses
        model.check_finite()
        # (id, name) of each class; "" where the data had no such class
        self._categories = model.manifest["categories"]
        self._options, self._form, self.at_once = options, form, self._uses.at_once
        folders = {"draw": (options.draw, ".jpg"), "masks": (options.masks, ".png")}
        self._folders = {option: each for option, each in folders.items() if each[0]}
        for option, (folder, _) in self._folders.items():
            check_folder(folder, f"--{option}")
        self._stems: dict[str, str] = {}  # of the files of drawings, by the path of the picture
        self._taken: set[str] = set()  # all of them

    @property
    def summary(self) -> str:
        return f"{sum(bool(name) for _, name in self._categories):,} classes"

    def files(self, paths: Sequence[str]) -> list[tuple[str, str]]:
        return [(option, file) for path in paths for option, file in self._files(path)]

    def _files(self, path: str) -> Iterator[tuple[str, str]]:
        """(flag, file) of each file that is written for a picture; two of one name get numbers."""
        if self._folders and path not in self._stems:
            name = stem = os.path.splitext(os.path.basename(path))[0]
            number = 1
            while name in self._taken:
                number += 1
                name = f"{stem}_{number}"
            self._taken.add(name)
            self._stems[path] = name
        for option, (folder, end) in self._folders.items():
            yield option, os.path.join(folder, self._stems[path] + end)

    def predict(self, params: Any, model_state: Any, batch: Any) -> Any:
        benchmark: Any = self.model.benchmark
        rows = benchmark.predict(params, model_state, batch)
        return {name: values for name, values in rows.items() if name != "image_id"}

    def inputs(self, photo: Jpeg) -> Leaves:
        return self._uses.inputs(photo.encoded, photo.height, photo.width)

    def row(self, picture: Picture, result: Leaves | None) -> Row:
        if result is None or picture.photo is None:
            return Row(picture.source, picture.error)
        height, width = picture.photo.height, picture.photo.width
        found = self._uses.detections(result, height, width)
        objects = []
        for i, (score, number) in enumerate(zip(found.scores, found.classes, strict=True)):
            category, name = self._categories[number - 1]
            outline, inside = None, None
            if found.outlines:
                outline, inside = found.outlines[i], functools.partial(found.inside, i)
            if name and score >= self._options.least(self._form):
                box = tuple(map(float, found.boxes[i]))
                objects.append(Object(name, category, float(score), box, outline, inside))
        objects = objects[: self._options.max_detections]
        self.draw(picture, objects)
        return make_row(picture, objects)

    def draw(self, picture: Picture, objects: Sequence[Object]) -> None:
        """Writes the drawings of a picture that could be read."""
        assert picture.photo is not None
        for option, path in self._files(picture.path):
            if option == "draw":  # the weak ones, which COCO's score wants, would hide the photo
                seen = [each for each in objects if each.score >= self._options.least("")]
                content = drawing.draw_objects(picture.photo.encoded, seen)
            else:
                content = drawing.draw_masks(picture.photo.height, picture.photo.width, objects)
            outputs.save(path, [content], quiet=True)

    def write(self, request: Request, paths: Sequence[str], rows: Iterator[Row]) -> None:
        if request.format == "coco":
            write_coco(request.out, paths, rows, *self._uses.listed(paths))
        else:
            outputs.write_rows(request.out, request.format, rows, self.columns, table)


def make_row(picture: Picture, objects: Sequence[Object]) -> Row:
    """The row of a picture with objects, the best first; without any it has one line in a CSV."""
    assert picture.photo is not None
    entries, lines = [], []
    for each in objects:
        score, bbox = shortest(each.score), list(map(shortest, each.bbox))
        named = {"label": each.label, "category_id": each.category_id, "score": score}
        entries.append({**named, "bbox": bbox, **each.segmentation})
        lines.append(named | dict(zip(("x", "y", "width", "height"), bbox, strict=True)))
    size = {"height": picture.photo.height, "width": picture.photo.width}
    return Row(picture.source, "", {**size, "objects": entries}, lines or [{}], objects)


def table(rows: Iterable[Row], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns: one for each picture, one for each object."""
    for row in rows:
        name = path_cell(row.source["path"], max(width - 30, 20))
        if row.error:
            yield f"{name}  ERROR {row.error}\n"
            continue
        count = len(row.answers)
        found = "no objects" if not count else f"{count} object{'s' * (count > 1)}"
        yield f"{name}  {row.content['width']} x {row.content['height']}, {found}\n"
        for each in row.answers:
            x, y, wide, high = each.bbox
            label = text_cell(each.label, 24)
            yield f"  {label:24} {each.score:6.1%}  at {x:.0f}, {y:.0f}: {wide:.0f} x {high:.0f}\n"


# COCO's form of results.


def write_coco(
    out: str,
    paths: Sequence[str],
    rows: Iterable[Row],
    source: str,
    listed: Mapping[int, tuple[int, int, int]],
) -> None:
    """Writes the objects in COCO's form of results.

    `source` and `listed` are those of `benchmarks.detection.use.DetectorUses.listed`.
    """
    numbers, odd = image_ids(paths, source, listed), 0

    def objects() -> Iterator[dict[str, Any]]:
        nonlocal odd
        for i, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            if i in listed and not row.error:
                odd += listed[i][1:] != (row.content["height"], row.content["width"])
            for each in row.answers:
                values = {"category_id": each.category_id, "score": each.score, "bbox": each.bbox}
                yield {"image_id": number, **values, **each.segmentation}

    outputs.write(out, outputs.json_array(objects()))
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
