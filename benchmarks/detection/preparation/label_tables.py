"""What tables of boxes and VIA's files say about images; all forms of labels.

Tables of boxes are Open Images', TensorFlow's (Roboflow names them _annotations.csv), VoTT's,
RetinaNet's and AutoML's. VIA writes a JSON, or a table whose cells are JSON.
"""

import collections
import contextlib
import csv
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks.detection.preparation import label_files
from benchmarks.detection.preparation.label_files import (
    CVAT,
    LABELME,
    NUMBERS,
    VOC,
    YOLO,
    Entry,
    NoBoxError,
    Object,
    beside,
    check_shares,
    entry,
    size_of,
    split_of,
    whole_split,
)
from common.data.shards import tensorflow
from common.errors import parse_json, some
from common.images import photos
from common.preparation.sources import SourceError
from common.text import decoded

_COLUMNS = {  # their names, the likeliest first
    "file": "filename fname file_name image_name image_path filepath file image path img frame "
    "image_id imageid",
    "label": "class label class_name label_name category name class_id classid labelname",
    "x0": "xmin x_min x1 left",
    "y0": "ymin y_min y1 top",
    "x1": "xmax x_max x2 right",
    "y1": "ymax y_max y2 bottom",
    "width": "width image_width",
    "height": "height image_height",
    "split": "split set subset",
    "crowd": "isgroupof",
}
_SIDES = ("x0", "y0", "x1", "y1")
_RETINANET = ("file", *_SIDES, "label", "width", "height")  # the last two are often missing
_AUTOML = ("split", "file", "label", "x0", "y0", "", "", "x1", "y1")  # the first one, too
_UNSAID = ("", None, {}, "not_defined", "unknown")  # the last ones are VIA's own
# Of VIA's regions, the likeliest to be the category first.
_ATTRIBUTES = ("label", "class", "class_name", "name", "type", "category", "object")


class Reader(label_files.Reader):
    """Reads all forms of labels."""

    def openimages(self, file: str) -> Iterator[Entry]:
        """Only rows of images that are there are kept, a few of millions."""
        has_image = functools.cache(self._has_image)
        rows = (row for row in self._rows(file, _OPEN) if has_image(row[1]["file"]))
        titles = self._titles
        rows = [(i, {**row, "label": titles.get(row["label"], row["label"])}) for i, row in rows]
        yield from self._table(file, rows, True)

    @functools.cached_property
    def _titles(self) -> dict[str, str]:
        """The names of Open Images' classes."""
        files = (n for n in self._folder.named(".csv") if "class" in os.path.basename(n).lower())
        rows = (row for name in files for _, row in self._cells(name))
        return {row[0]: row[1] for row in rows if len(row) == 2}

    def table(self, file: str) -> Iterator[Entry]:
        """A row is a box, or an image without one."""
        rows = [*self._rows(file, _TABLE)]
        if rows and "region_shape_attributes" in rows[0][1]:
            yield from self._regions(file, _via_images(row for _, row in rows))
            return
        sides = (row[side] for _, row in rows for side in _SIDES)
        yield from self._table(file, rows, all(map(_is_share, sides)))

    def _cells(self, file: str) -> Iterator[tuple[int, list[str]]]:
        """(number of its line, cells) of each row of a table with commas, tabs or semicolons."""
        path = self._folder.full(file)
        with tensorflow().io.gfile.GFile(path, "rb") as data:
            lines = (decoded(line, path, SourceError, i) for i, line in enumerate(data, 1))
            first = next(lines, "")
            delimiter = max(",\t;", key=first.count)
            reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter)
            for cells in reader:
                if any(cells := [cell.strip() for cell in cells]):
                    yield reader.line_num, cells

    def _rows(self, file: str, pattern: re.Pattern[bytes]) -> Iterator[tuple[int, dict[str, str]]]:
        """(number of its line, cells by the keys of _COLUMNS, or by VIA's names) of each row."""
        if not pattern.match(self._folder.head(file)):
            return
        cells = self._cells(file)
        line, first = next(cells)
        header = [re.sub(r"\W+", "_", cell.lower()).strip("_") for cell in first]
        ends = {name.rpartition("_")[2]: name for name in header}  # of bbox_x1 and Roi.X1
        ends |= {name: name for name in header}
        keys = {k: next((ends[n] for n in v.split() if n in ends), "") for k, v in _COLUMNS.items()}
        if "region_shape_attributes" in header:
            yield from ((i, dict(zip(header, row, strict=False))) for i, row in cells)
        elif all(keys[key] for key in ("file", *_SIDES)):
            label = {} if keys["label"] else {"label": self._nameless(file)}
            for i, row in cells:
                named = dict(zip(header, row, strict=False)) | {"": ""}
                yield i, {key: named.get(name, "") for key, name in keys.items()} | label
        else:
            for i, row in itertools.chain([(line, first)], cells):
                names = _RETINANET if len(row) < 9 else _AUTOML["." in row[0] :]
                yield i, dict.fromkeys(_COLUMNS, "") | dict(zip(names, row, strict=False))

    def _table(
        self, file: str, rows: Iterable[tuple[int, dict[str, str]]], relative: bool
    ) -> Iterator[Entry]:
        images = collections.defaultdict(list)
        for line, row in rows:
            images[row["file"]].append((line, row))
        for image, rows in images.items():
            first, names = rows[0][1], (beside(file, image), image)
            boxes = [(line, row) for line, row in rows if any(row[side] for side in _SIDES)]
            split = whole_split(first["split"]) or split_of(file)
            size = size_of(first["height"], first["width"])
            read = functools.partial(self._row, relative)
            yield entry(file, names, boxes, read, size=size, split=split, relative=relative)

    def _row(self, relative: bool, row: dict[str, str]) -> Object:
        sides = tuple(float(row[side]) for side in _SIDES)
        if relative:
            check_shares(sides)
        box = self._boxes.create(label=row["label"], coords=sides)
        return Object(row["label"], box.ltwh, crowd=row["crowd"] == "1")

    def via(self, file: str) -> Iterator[Entry]:
        """Of VIA 1 and 2: an export, or a project."""
        content = self._json(file, _VIA)
        images = content.get("_via_img_metadata", content) if isinstance(content, dict) else {}
        images = [image for image in images.values() if isinstance(image, dict)]
        yield from self._regions(file, [image for image in images if "regions" in image])

    def _regions(self, file: str, images: list[dict[str, Any]]) -> Iterator[Entry]:
        """The entries of VIA's images; the attribute that names the regions is their category."""
        regions = [image["regions"] for image in images]  # a list, or a dict by numbers
        regions = [[*each.values()] if isinstance(each, dict) else each for each in regions]
        attributes = [each.get("region_attributes") or {} for each in itertools.chain(*regions)]
        pairs = ((key, value) for each in attributes for key, value in each.items())
        keys = dict.fromkeys(key for key, value in pairs if value not in _UNSAID)
        known = [key for word in _ATTRIBUTES for key in keys if key.lower() == word]
        if len(keys) > 1 and not known:
            problem = f"has regions with the attributes {some(keys)}"
            fix = "call the one with the category 'label'"
            raise SourceError(f"{self._folder.full(file)} {problem}: {fix}")
        key = [*known, *keys, ""][0]
        if rest := [name for name in keys if name != key]:
            self.notes[f"{file}: the attribute '{key}' is the category, not {some(rest)}"] = None
        nameless = self._nameless(file) if attributes and not key else ""
        read = functools.partial(self._region, key, nameless)
        for name, rows in zip((image["filename"] for image in images), regions, strict=True):
            rows = [(f"{name}, region {i}", region) for i, region in enumerate(rows, 1)]
            yield entry(file, (beside(file, name), name), rows, read, split=split_of(file))

    def _region(self, key: str, nameless: str, region: dict[str, Any]) -> Object:
        shape = region["shape_attributes"]
        if shape["name"] not in ("rect", "polygon"):
            raise NoBoxError(shape["name"])
        label = nameless or region["region_attributes"][key]
        if isinstance(label, dict):  # of boxes to tick
            (label,) = (name for name, is_ticked in label.items() if is_ticked)
        label = "" if label is None else str(label)
        if shape["name"] == "polygon":
            points = [*zip(shape["all_points_x"], shape["all_points_y"], strict=True)]
            return self._outlined(label, points, [points])
        region = {"region_attributes": {key: label}, "shape_attributes": shape}
        return Object(label, self._boxes.from_via_json(region, label_key=key).ltwh)

    def _nameless(self, file: str) -> str:
        self.notes[f"{file} names no categories: all objects are 'object'"] = None
        return "object"


def _via_images(rows: Iterable[dict[str, str]]) -> list[dict[str, Any]]:
    """The rows of VIA's table as in its JSON."""
    images: dict[str, dict[str, Any]] = {}
    for row in rows:
        image = images.setdefault(row["filename"], {"filename": row["filename"], "regions": []})
        if shape := parse_json(row["region_shape_attributes"]):
            attributes = parse_json(row["region_attributes"])
            image["regions"].append({"shape_attributes": shape, "region_attributes": attributes})
    return [*images.values()]


def _is_share(side: str) -> bool:
    with contextlib.suppress(ValueError):  # `entry` says it
        return not side or -0.01 <= float(side) <= 1.01
    return True


class Kind(NamedTuple):
    """How a form of labels is known and read."""

    title: str  # in messages
    ending: str  # of its label files
    read: Callable[[Reader, str], Iterator[Entry]]
    head: bytes | re.Pattern[bytes]  # the pattern of what a label file begins with
    shape: bytes = b"(?!)"  # of a box or a polygon; of a polygon it has a group


_LINES = rb"(?m)^\s*\d+(?:\.0*)?" + NUMBERS + rb"{4,5}(" + NUMBERS + rb"{5,})?[ \t]*\r?$"
_OPEN = re.compile(rb"^(?:\xef\xbb\xbf)?ImageID,.*LabelName,.*XMin")
_SHAPES = rb'"shape_type"\s*:\s*"(?:rectangle|(polygon))"'
_VIA = rb'"(?:_via_img_metadata|file_attributes|shape_attributes)"'
_VIA_SHAPES = rb'"name"+\s*:\s*"+(?:rect|(polygon))"'
_FILE = rb"[^,;\t\r\n]+\.(?:" + "|".join(photos.SUFFIXES).replace(".", "").encode() + rb")\"?"
# With a header that names an image and two sides, or VIA's; RetinaNet's rows; AutoML's rows.
_TABLE = re.compile(
    rb"^(?:\xef\xbb\xbf)?(?:"
    rb"(?![^\r\n]*LabelName)(?=[^\r\n]*(?:file|fname|image|img|path|frame))"
    rb"(?=[^\r\n]*(?:\b|_)(?:x_?min|x1|left)\b)[^\r\n]*(?:\b|_)(?:y_?max|y2|bottom)\b"
    rb"|[^\r\n]*region_shape_attributes"
    rb"|" + _FILE + rb",(?:(?:-?[\d.]+,){4}[^,\r\n]|,,,,)"
    rb"|[A-Z]*,?" + _FILE + rb",[^,\r\n]*,(?:[\d.]+,){2}(?:[\d.]*,){4}[\d.]*)",
    re.IGNORECASE,
)
FORMS = {
    "yolo": Kind("YOLO's", ".txt", Reader.yolo, YOLO, _LINES),
    "voc": Kind("Pascal VOC's", ".xml", Reader.voc, VOC),
    "cvat": Kind("CVAT's", ".xml", Reader.cvat, CVAT, rb"<(?:box|(polygon))\s"),
    "labelme": Kind("LabelMe's", ".json", Reader.labelme, LABELME, _SHAPES),
    "via": Kind("VIA's", ".json", Reader.via, _VIA, _VIA_SHAPES),
    "openimages": Kind("Open Images'", ".csv", Reader.openimages, _OPEN),
    "csv": Kind("a box table's", ".csv", Reader.table, _TABLE, _VIA_SHAPES),
}
