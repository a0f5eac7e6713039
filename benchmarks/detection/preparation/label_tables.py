"""What tables of boxes and VIA's files say about images; all forms of labels.

Tables of boxes are Open Images', TensorFlow's (Roboflow names them _annotations.csv), VoTT's,
RetinaNet's and AutoML's. VIA writes a JSON, or a table whose cells are JSON.
"""

import collections
import csv
import functools
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    text,
    whole_split,
)
from common.data.shards import tensorflow
from common.errors import parse_json, some
from common.images import photos
from common.preparation.sources import SourceError
from common.text import decoded

_COLUMNS = {  # their names, the likeliest first
    "file": "filename file_name image_name image_path filepath file image path img frame image_id",
    "label": "class label class_name label_name category name class_id",
    "x0": "xmin x_min x1 left",
    "y0": "ymin y_min y1 top",
    "x1": "xmax x_max x2 right",
    "y1": "ymax y_max y2 bottom",
    "width": "width image_width",
    "height": "height image_height",
    "split": "split set subset",
}
_SIDES = ("x0", "y0", "x1", "y1")
# Of VIA's regions, the likeliest to be the category first.
_ATTRIBUTES = ("label", "class", "class_name", "name", "type", "category", "object")
_NAMELESS = "object"  # the category of boxes without one


class Reader(label_files.Reader):
    """Reads all forms of labels."""

    def openimages(self, file: str) -> Iterator[Entry]:
        """A row is an object; only those of images that are there are kept, a few of millions."""
        rows: dict[str, list[tuple[int, dict[str, str]]]] = {}
        path = self._folder.full(file)
        with tensorflow().io.gfile.GFile(path, "rb") as data:
            table = csv.DictReader(
                decoded(line, path, SourceError, i) for i, line in enumerate(data, 1)
            )
            if not {"ImageID", "LabelName", "XMin"} <= {*(table.fieldnames or ())}:
                return
            has_image = functools.cache(self._has_image)
            for i, row in enumerate(table, 2):
                if has_image(row["ImageID"]):
                    rows.setdefault(row["ImageID"], []).append((i, row))
        more = {"split": split_of(file), "relative": True}
        for image, objects in rows.items():
            yield entry(file, (image,), objects, self._openimages, **more)

    def _openimages(self, row: dict[str, str]) -> Object:
        sides = tuple(float(row[side]) for side in ("XMin", "YMin", "XMax", "YMax"))
        check_shares(sides)
        label = self._titles.get(row["LabelName"], row["LabelName"])
        box = self._boxes.create(label=label, coords=sides)
        return Object(label, box.ltwh, crowd=row.get("IsGroupOf") == "1")

    @functools.cached_property
    def _titles(self) -> dict[str, str]:
        """The names of Open Images' classes."""
        files = (n for n in self._folder.named(".csv") if "class" in os.path.basename(n).lower())
        rows = (row for name in files for _, row in _cells(text(self._folder, name)))
        return {row[0]: row[1] for row in rows if len(row) == 2}

    def table(self, file: str) -> Iterator[Entry]:
        """A row is a box, or an image without one."""
        if not re.match(_TABLE, self._folder.head(file)):
            return
        lines = _cells(text(self._folder, file))
        header = [re.sub(r"\W+", "_", cell.lower()).strip("_") for cell in lines[0][1]]
        if "region_shape_attributes" in header:
            cells = (dict(zip(header, row, strict=False)) for _, row in lines[1:])
            yield from self._regions(file, _via_images(cells))
            return
        keys = {k: next((n for n in v.split() if n in header), "") for k, v in _COLUMNS.items()}
        if all(keys[key] for key in ("file", *_SIDES)):
            dicts = ((line, dict(zip(header, row, strict=False))) for line, row in lines[1:])
            rows = [(line, {key: row.get(keys[key], "") for key in keys}) for line, row in dicts]
            if not keys["label"]:
                rows = [(line, {**row, "label": self._nameless(file)}) for line, row in rows]
        else:
            rows = [(line, _headless(row)) for line, row in lines]
        relative = all(_is_share(row[side]) for _, row in rows for side in _SIDES)
        images = collections.defaultdict(list)
        for line, row in rows:
            images[row["file"]].append((line, row))
        for image, rows in images.items():
            first, boxes = rows[0][1], [row for row in rows if any(row[1][side] for side in _SIDES)]
            size = size_of(first["height"], first["width"])
            more = {
                "size": size,
                "split": whole_split(first["split"]) or split_of(file),
                "relative": relative,
            }
            yield entry(file, (beside(file, image), image), boxes, self._table, **more)

    def _table(self, row: Mapping[str, str]) -> Object:
        sides = tuple(float(row[side]) for side in _SIDES)
        return Object(row["label"], self._boxes.create(label=row["label"], coords=sides).ltwh)

    def via(self, file: str) -> Iterator[Entry]:
        """Of VIA 1 and 2: an export, or a project."""
        content = self._json(file, _VIA)
        images = content.get("_via_img_metadata", content) if isinstance(content, dict) else {}
        yield from self._regions(file, [image for image in images.values() if "regions" in image])

    def _regions(self, file: str, images: list[dict[str, Any]]) -> Iterator[Entry]:
        """The entries of VIA's images; the attribute that names the regions is their category."""
        parts = [(image["filename"], image["regions"]) for image in images]
        parts = [
            (name, [*rows.values()] if isinstance(rows, dict) else rows) for name, rows in parts
        ]
        values = collections.Counter(
            key
            for _, regions in parts
            for region in regions
            for key, value in (region.get("region_attributes") or {}).items()
            if value
        )
        known = [key for word in _ATTRIBUTES for key in values if key.lower() == word]
        if len(values) > 1 and not known:
            problem = f"has regions with the attributes {some(values)}"
            fix = "call the one with the category 'label'"
            raise SourceError(f"{self._folder.full(file)} {problem}: {fix}")
        key = [*known, *values, ""][0]
        if rest := [name for name in values if name != key]:
            self.notes[f"{file}: the attribute '{key}' is the category, not {some(rest)}"] = None
        nameless = "" if key or not any(rows for _, rows in parts) else self._nameless(file)
        for name, regions in parts:
            rows = ((f"{name}, region {i}", region) for i, region in enumerate(regions, 1))
            read = functools.partial(self._region, key, nameless)
            yield entry(file, (beside(file, name), name), rows, read, split=split_of(file))

    def _region(self, key: str, nameless: str, region: dict[str, Any]) -> Object:
        shape = region["shape_attributes"]
        if shape["name"] not in ("rect", "polygon"):
            raise NoBoxError(shape["name"])
        label = nameless or region["region_attributes"][key]
        if isinstance(label, dict):  # of boxes to tick
            (label,) = (name for name, is_ticked in label.items() if is_ticked)
        if shape["name"] == "polygon":
            points = [*zip(shape["all_points_x"], shape["all_points_y"], strict=True)]
            return self._outlined(label, points, [points])
        region = {"region_attributes": {key: label}, "shape_attributes": shape}
        return Object(label, self._boxes.from_via_json(region, label_key=key).ltwh)

    def _nameless(self, file: str) -> str:
        self.notes[f"{file} names no categories: all objects are '{_NAMELESS}'"] = None
        return _NAMELESS


def _cells(content: str) -> list[tuple[int, list[str]]]:
    """(number of its line, cells) of each row of a table with commas, tabs or semicolons."""
    delimiter = max(",\t;", key=content[:4096].count)
    reader = csv.reader(io.StringIO(content, ""), delimiter=delimiter)
    rows = ([cell.strip() for cell in row] for row in reader)
    return [(reader.line_num, row) for row in rows if any(row)]


def _headless(cells: list[str]) -> dict[str, str]:
    """A row of RetinaNet's table (file, four sides, class) or AutoML's, by the columns' names."""
    split, row = "", dict.fromkeys(_COLUMNS, "")
    if len(cells) > 8 and (whole_split(cells[0]) or cells[0] in ("", "UNASSIGNED")):
        split, *cells = cells
    if len(cells) < 9:  # RetinaNet's, sometimes with the size of the image
        cells += [""] * (8 - len(cells))
        names = ("file", *_SIDES, "label", "width", "height")
        return row | dict(zip(names, cells, strict=False))
    row |= {"file": cells[0], "label": cells[1], "split": split}
    for axis, values in (("x", cells[2::2]), ("y", cells[3::2])):  # of corners; some are left out
        values = sorted(filter(None, values), key=float)
        row |= {f"{axis}0": [*values, ""][0], f"{axis}1": ["", *values][-1]}
    return row


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
    try:
        return not side or -0.01 <= float(side) <= 1.01
    except ValueError:  # `entry` says it
        return True


class Kind(NamedTuple):
    """How a form of labels is known and read."""

    title: str  # in messages
    ending: str  # of its label files
    read: Callable[[Reader, str], Iterator[Entry]]
    head: bytes | re.Pattern[bytes]  # the pattern of what a label file begins with
    shape: bytes = b"(?!)"  # of a box or a polygon; of a polygon it has a group


_LINES = rb"(?m)^\s*\d+(?:\.0*)?" + NUMBERS + rb"{4,5}(" + NUMBERS + rb"{5,})?[ \t]*\r?$"
_OPEN = rb"^(?:\xef\xbb\xbf)?ImageID,.*LabelName,.*XMin"
_SHAPES = rb'"shape_type"\s*:\s*"(?:rectangle|(polygon))"'
_VIA = rb'"(?:_via_img_metadata|file_attributes|shape_attributes)"'
_VIA_SHAPES = rb'"name"+\s*:\s*"+(?:rect|(polygon))"'
_FILE = rb"[^,;\t\r\n]+\.(?:" + "|".join(photos.SUFFIXES).replace(".", "").encode() + rb")\"?"
# With a header that names an image and two sides, or VIA's; RetinaNet's rows; AutoML's rows.
_TABLE = re.compile(
    rb"(?:\xef\xbb\xbf)?(?:"
    rb"(?![^\r\n]*LabelName)(?=[^\r\n]*(?:file|image|img|path|frame))"
    rb"(?=[^\r\n]*\b(?:x_?min|x1|left)\b)[^\r\n]*\b(?:y_?max|y2|bottom)\b"
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
