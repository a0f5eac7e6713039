"""Finds objects on pictures: what predict.py does with a detector.

Objects become rows, and drawings: the photo with boxes, names, scores and the pixels of masks.
"""

import argparse
import colorsys
import dataclasses
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from benchmarks.uses import LEAST_TILE, Boxes
from commands.predict import outputs, sources
from commands.predict.drawings import Drawings, Pen, enlarged
from commands.predict.model import Batch, Leaves, Part, Request
from commands.predict.outputs import Row, path_cell, say, shortest, text_cell
from commands.predict.sources import Picture
from common import cli
from common.errors import count
from common.images.photos import Jpeg
from engine.checkpoint import model_source

FORMATS = (*outputs.FORMATS, "coco")
COLUMNS = ("path", "label", "category_id", "score", "x", "y", "width", "height", "error")
_OPACITY = 0.45  # of masks
_MOST, _MOST_IN_TILES = 100, 1000  # objects of a picture
_MIN_SCORE = 0.3  # weaker detections are mostly wrong; COCO's score wants them all the same


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for detectors."""

    min_score: float | None = None
    max_detections: int = 0
    draw: str = ""
    tiles: int | str = 0  # pixels of a tile's side, "auto" or 0 for none

    @property
    def most(self) -> int:
        """The most objects of a picture."""
        return self.max_detections or (_MOST_IN_TILES if self.tiles else _MOST)

    def least(self, form: str) -> float:
        """The least score of a detection in this format."""
        if self.min_score is not None:
            return self.min_score
        return 0.0 if form == "coco" else _MIN_SCORE


class Object(NamedTuple):
    """One object: box (y0, x0, y1, x1) in pixels of the photo, and its mask, if it has one.

    `outline` are the mask's run lengths, as COCO has them; `inside` makes bool[height, width].
    """

    label: str
    category_id: int
    score: float
    box: tuple[float, ...]
    outline: Mapping[str, Any] | None = None
    inside: Callable[[], np.ndarray] | None = None

    def entry(self) -> dict[str, Any]:
        """The object in JSON; `bbox` is x, y, width and height, as COCO has them."""
        y0, x0, y1, x1 = self.box
        entry = {
            "label": self.label,
            "category_id": self.category_id,
            "score": shortest(self.score),
            "bbox": [shortest(value) for value in (x0, y0, x1 - x0, y1 - y0)],
        }
        return entry | ({"segmentation": self.outline} if self.outline else {})


def tile_side(text: str) -> int | str:
    """The type of --tiles."""
    try:
        return "auto" if text == "auto" else cli.integer(LEAST_TILE, 65536)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"'auto', or the pixels of a side: {error}") from error


def run(request: Request, options: Options, model: model_source.Model) -> int:
    """Writes the objects of each picture; returns the exit code."""
    return sources.answer(lambda: Detector(model, options, request.format), request)


class Detector(sources.PictureModel):
    """Finds the objects on pictures, and writes the pictures with boxes."""

    def __init__(self, model: model_source.Model, options: Options, form: str = ""):
        """Makes the folder of drawings; UserError if it or a weight cannot be used."""
        # (id, name) of each class; "" where the data had no such class
        self._categories = model.manifest["categories"]
        uses = model.benchmark.uses
        assert isinstance(uses, Boxes)
        self._uses = uses
        classes = sum(bool(name) for _, name in self._categories)
        super().__init__(model, f"{classes:,} classes", self._uses.at_once)
        model.check_finite()
        self._options, self._form = options, form
        self._drawings = Drawings(options.draw, "draw")
        self._tile = self._uses.tile_side if options.tiles == "auto" else int(options.tiles)
        self.has_parts = bool(self._tile)
        self._cut = self._tiles = self._cropped = 0

    def files(self, paths: Sequence[str]) -> list[tuple[str, str]]:
        return self._drawings.files(paths)

    def predict(self, params: Any, model_state: Any, batch: Batch) -> Batch:
        rows = self.model.benchmark.predict(params, model_state, batch)
        return {name: values for name, values in rows.items() if name != "image_id"}

    def inputs(self, photo: Jpeg) -> Leaves:
        return self._uses.inputs(photo.encoded, photo.height, photo.width)

    def parts(self, photo: Jpeg) -> Sequence[Part]:
        return self._uses.parts(photo.encoded, photo.height, photo.width, self._tile)

    def joined(self, picture: Picture, results: Sequence[Leaves]) -> Leaves:
        """Joins the parts' objects, and leaves out weak ones, whose outlines would take long."""
        if not self._tile:
            return results[0]
        assert picture.photo is not None
        self._cut, self._tiles = self._cut + (len(results) > 1), self._tiles + len(results) - 1
        row = self._uses.join(results, picture.photo.height, picture.photo.width, self._tile)
        strong = row["score"] >= np.float32(self._options.least(self._form))
        return {name: values[strong] for name, values in row.items()}

    def row(self, picture: Picture, result: Leaves | None) -> Row:
        if result is None or picture.photo is None:
            return Row(picture.source, picture.error)
        objects = self.objects(picture.photo, result)
        if self._options.draw:  # without weak objects, which only COCO's form keeps
            strong = [each for each in objects if each.score >= self._options.least("")]
            self._drawings.save(picture.path, draw_objects(picture.photo.encoded, strong))
        size = {"height": picture.photo.height, "width": picture.photo.width}
        return Row(picture.source, "", {**size, "objects": [each.entry() for each in objects]})

    def objects(self, photo: Jpeg, result: Leaves) -> list[Object]:
        """The objects on a photo, the best first."""
        objects, least = [], np.float32(self._options.least(self._form))  # as scores are
        for each in self._uses.detections(result, photo.height, photo.width):
            category, name = self._categories[each.number - 1]
            if name and each.score >= least:
                objects.append(Object(name, category, *each[1:]))
        self._cropped += len(objects) > self._options.most
        return objects[: self._options.most]

    def score(self) -> str:
        """What was cut into tiles; and where, for once, there were more objects than kept."""
        if not self._tile:
            return ""
        text = f"{count(self._cut, 'picture')} in {count(self._tiles, 'tile')}"
        text = text if self._cut else "no picture is larger, so that none was cut"
        text = f"tiles of {self._tile} pixels: {text}"
        if self._cropped:
            text += (
                f"; of {count(self._cropped, 'picture')} the best {self._options.most:,} objects "
                "are kept, --max_detections=N keeps more"
            )
        return text

    def write(self, request: Request, paths: Sequence[str], rows: Iterator[Row]) -> None:
        if request.format != "coco":
            outputs.write_rows(request.out, request.format, rows, COLUMNS, _cells, table)
            return
        numbers = image_ids(paths, *self._uses.listed(paths))

        def objects() -> Iterator[dict[str, Any]]:  # in COCO's form of results
            for row, number in zip(rows, numbers, strict=True):
                for each in row.content.get("objects", ()):
                    values = {name: value for name, value in each.items() if name != "label"}
                    yield {"image_id": number, **values}

        outputs.write(request.out, outputs.json_array(objects()))


def _cells(row: Row) -> list[dict[str, Any]]:
    """The lines of a CSV for a picture, one for each object."""
    lines = []
    for each in row.content["objects"]:
        x, y, width, height = each["bbox"]
        lines.append({**each, "x": x, "y": y, "width": width, "height": height})
    return lines


def table(rows: Iterable[Row], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns: one for each picture, one for each object."""
    for row in rows:
        name = path_cell(row.source["path"], max(width - 30, 20))
        if row.error:
            yield f"{name}  ERROR {row.error}\n"
            continue
        objects = row.content["objects"]
        found = count(len(objects), "object") if objects else "no objects"
        yield f"{name}  {row.content['width']} x {row.content['height']}, {found}\n"
        for each in objects:
            x, y, w, h = (f"{side:.0f}" for side in each["bbox"])
            label = text_cell(each["label"], 24)
            yield f"  {label:24} {each['score']:6.1%}  at {x}, {y}: {w} x {h}\n"


def image_ids(
    paths: Sequence[str], source: str, listed: Mapping[int, tuple[int, ...]]
) -> list[int]:
    """COCO's ids of the images `paths`, with NOTES that say where they are from.

    `source` is the file of annotations of the run's data, or ""; a picture that is `listed` there,
    by its index in `paths`, has the (id, height, width) from there. The others have the numbers at
    the ends of their names; if two would be the same, they are numbered from the largest id on.
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
        text = f"{first}, {first + 1}, ..., as not all names end with different numbers"
    if ids:
        say(f"NOTE image_id is from {source} for {len(ids):,} pictures, which it lists")
    if others:
        which = "other pictures" if ids else "pictures, which no annotations of the run list"
        say(f"NOTE image_id of {len(others):,} {which}: {text}")
    ids |= dict(zip(others, numbers, strict=True))
    return [ids[i] for i in range(len(paths))]


# Drawings.


def draw_objects(encoded: bytes, objects: Sequence[Object]) -> Image.Image:
    """The photo with its objects; the best ones are on top."""
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    pixels = np.asarray(image).copy()
    for each in reversed(objects):
        if each.inside:
            inside = each.inside()
            colour = np.array(_colour(each.category_id), np.float32)
            pixels[inside] = (pixels[inside] * (1 - _OPACITY) + colour * _OPACITY).astype(np.uint8)
    image, times = enlarged(Image.fromarray(pixels))
    # Names of small objects are small, or they would hide others.
    pen = Pen(image, times * float(np.median([each.box[2] - each.box[0] for each in objects] or 0)))
    for each in reversed(objects):
        y0, x0, y1, x1 = (times * edge for edge in each.box)
        colour = _colour(each.category_id)
        pen.draw.rectangle((x0, y0, x1, y1), outline=colour, width=pen.line)
        pen.tag(x0, y0, f"{each.label} {each.score:.0%}", colour)
    return image


def _colour(number: int) -> tuple[int, int, int]:
    """A dark colour; neighbours of `number` have other hues."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.85, 0.75)
    return round(255 * red), round(255 * green), round(255 * blue)
