"""Reads the label formats of other tools; each has a method of `Reader` and a row of `FORMATS`.

To add a label format, write a method like `voc` and name it in `FORMATS`; --labels=NAME and
`scripts.prepare PATH` then know it. A method yields an `Entry` for each image in a file, in pixels,
or `relative`; polygons make masks where the row has a `shape`. `label_folders` finds the images and
their splits; `tfrecords` reads records.

globox parses the boxes. Its readers of folders drop polygons, take local paths only, and end at the
first mistake without naming its file.
"""

import collections
import csv
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from benchmarks.detection.coco import normal
from benchmarks.detection.preparation import yolo
from common import limits
from common.errors import one_line, parse_json, some
from common.preparation import folders
from common.preparation.folders import Folder
from common.preparation.sources import SourceError
from common.tensorflow import tensorflow
from common.text import decoded, text_lines

# What the files of a format begin with.
_VOC, _CVAT, _LABELME = rb"<annotation[\s>]", rb"<annotations[\s>]", rb'"shapes"\s*:\s*\['
_OPEN = rb"^(?:\xef\xbb\xbf)?ImageID,.*LabelName,.*XMin"
_VIA = rb'"(?:_via_img_metadata|file_attributes|shape_attributes)"'
_TABLE = (  # a header that names an image and two sides
    rb"(?i)^(?:\xef\xbb\xbf)?(?![^\r\n]*LabelName)(?=[^\r\n]*(?:file|fname|image|img|path|frame))"
    rb"(?=[^\r\n]*(?:\b|_)(?:x_?min|x1|left)\b)[^\r\n]*(?:\b|_)(?:y_?max|y2|bottom)\b"
)
_COLUMNS = {  # their names, the likeliest first
    "file": "filename fname file_name image_name image_path filepath file image path img frame "
    "image_id imageid",
    "label": "class label class_name label_name category name class_id classid labelname type "
    "species breed target object",
    "x0": "xmin x_min x1 left",
    "y0": "ymin y_min y1 top",
    "x1": "xmax x_max x2 right",
    "y1": "ymax y_max y2 bottom",
    "width": "width image_width",
    "height": "height image_height",
    "split": " ".join(folders.COLUMNS),
    "crowd": "isgroupof",
}
_SIDES = ("x0", "y0", "x1", "y1")
# Of VIA's regions, the likeliest to be the category first.
_ATTRIBUTES = ("label", "class", "class_name", "name", "type", "category", "object")
_UNSAID = ("", None, {}, "not_defined", "unknown")  # the last ones are VIA's own


class Object(NamedTuple):
    """An object in pixels, or in shares of the image's width and height."""

    label: str  # the name of its category
    box: Sequence[float]  # x, y, width, height
    polygons: Sequence[list[float]] = ()  # x, y, x, y ... of each
    crowd: bool = False  # whether it counts neither for nor against a model


class Entry(NamedTuple):
    """The labels of an image."""

    file: str
    names: Sequence[str]  # of the image, the likeliest first; with or without an ending
    objects: Sequence[Object] = ()
    problems: Sequence[str] = ()  # "FILE:PLACE: REASON" of each object that cannot be read
    skipped: Sequence[str] = ()  # the kinds of shapes that are neither upright boxes nor polygons
    size: tuple[int, int] | None = None  # height, width in pixels, if the file has it
    split: str = ""  # "train", "validation" or "test", if the file says it
    relative: bool = False  # whether the objects are in shares


class NoBoxError(Exception):
    """A shape that is neither an upright box nor a polygon; the message names it."""


class Reader:
    """Reads label files; each format has a method, which yields the entries of a file.

    `has_image` tells whether a name is that of an image; `settings` are YOLO's.
    """

    def __init__(self, folder: Folder, has_image: Callable[[str], Any], settings: yolo.Settings):
        try:
            from globox import BoundingBox
        except ImportError as error:
            text = "globox reads such labels and is missing: pip install globox"
            raise SourceError(text) from error
        self._boxes: Any = BoundingBox
        self._folder, self._has_image, self._settings = folder, has_image, settings
        self.notes: dict[str, None] = {}  # what is odd about the files, each a line, in order

    def _parsed(self, file: str, pattern: bytes, parse: Callable[[str], Any]) -> Any:
        """The content of a file with the pattern, else None; SourceError if it is not decoded."""
        data = self._folder.head(file, limits.ANNOTATION_BYTES)
        if not re.search(pattern, data):
            return None
        return parse(decoded(data, self._folder.full(file), SourceError))

    def yolo(self, file: str) -> Iterator[Entry]:
        """A line is a class number and x, y (of the middle), width, height, or a polygon."""
        if re.match(yolo.LINE, self._folder.head(file)) or self._has_image(file):
            lines = text_lines(self._folder.text(file))
            rows = [(i, line) for i, line in enumerate(lines, 1) if line]
            yield entry(file, (file,), rows, self._yolo, relative=True)

    def _yolo(self, line: str) -> Object:
        file, names, _, shapes = self._settings
        number, *values = map(float, line.split())
        if names and number not in names:
            raise ValueError(f"class {number:.0f} is not among the {len(names)} of {file}")
        if shapes == "key points":
            values = values[:4]
        is_box = len(values) < 6
        read = self._boxes.from_yolo_v5 if is_box else self._boxes.from_yolo_seg
        box = read(" ".join(map(str, (0, *values))), image_size=(1, 1))
        label = names[int(number)] if names else f"{number:.0f}"
        return Object(label, box.ltwh, [] if is_box else [values])

    def voc(self, file: str) -> Iterator[Entry]:
        root = self._parsed(file, _VOC, ElementTree.fromstring)
        if root is not None and root.tag == "annotation":
            names = file, beside(file, root.findtext("filename", ""))
            rows = ((f"object {i}", node) for i, node in enumerate(root.iter("object"), 1))
            size = size_of(root.findtext("size/height"), root.findtext("size/width"))
            yield entry(file, names, rows, self._voc, size=size)

    def _voc(self, node: ElementTree.Element) -> Object:
        """A difficult object counts neither for nor against a model, as a crowd in COCO's score."""
        box, difficult = self._boxes.from_xml(node), node.findtext("difficult", "")
        return Object(box.label, box.ltwh, crowd=difficult.strip() == "1")

    def cvat(self, file: str) -> Iterator[Entry]:
        """Of "CVAT for images 1.1"."""
        root = self._parsed(file, _CVAT, ElementTree.fromstring)
        if root is None or root.tag != "annotations":
            return
        if root.find("track") is not None:
            fix = "export it again as 'CVAT for images 1.1'"
            raise SourceError(f"{self._folder.full(file)} is 'CVAT for video': {fix}")
        for image in root.iter("image"):
            name, subset = image.get("name", ""), image.get("subset", "")
            names = [beside(file, f"{subset}/{name}"), beside(file, name), name]
            shapes = [node for node in image if node.tag != "tag"]  # a tag is of the image
            rows = ((f"image {name}, shape {i}", node) for i, node in enumerate(shapes, 1))
            size = size_of(image.get("height"), image.get("width"))
            yield entry(file, names, rows, self._cvat, size=size, split=folders.split_of(subset))

    def _cvat(self, node: ElementTree.Element) -> Object:
        if node.tag == "polygon":
            points = [[*map(float, point.split(","))] for point in node.attrib["points"].split(";")]
            return self._outlined(node.attrib["label"], points, [points])
        if node.tag != "box" or float(node.get("rotation", 0)):
            raise NoBoxError("turned box" if node.tag == "box" else node.tag)
        box = self._boxes.from_cvat(node)
        return Object(box.label, box.ltwh)

    def labelme(self, file: str) -> Iterator[Entry]:
        content = self._parsed(file, _LABELME, parse_json)
        shapes = content.get("shapes") if isinstance(content, dict) else None
        if not isinstance(shapes, list):
            return
        groups = collections.defaultdict(list)
        for i, shape in enumerate(shapes, 1):  # those of one label and one group are an object
            group = shape.get("shape_type"), shape.get("label"), shape.get("group_id")
            groups[f"shape {i}" if group[-1] is None else f"group {group}"].append(shape)
        names = file, beside(file, content.get("imagePath") or "")
        size = size_of(content.get("imageHeight"), content.get("imageWidth"))
        yield entry(file, names, groups.items(), self._labelme, size=size)

    def _labelme(self, shapes: list[dict[str, Any]]) -> Object:
        label, shape_type = shapes[0]["label"], shapes[0].get("shape_type") or "polygon"
        if shape_type not in ("polygon", "rectangle") or label == "__ignore__":
            raise NoBoxError("__ignore__" if label == "__ignore__" else shape_type)
        outlines = [shape["points"] for shape in shapes]
        points = [point for outline in outlines for point in outline]
        return self._outlined(label, points, outlines if shape_type == "polygon" else [])

    def _outlined(self, label: str, points: list, outlines: list[list]) -> Object:
        box = self._boxes.from_labelme({"label": label, "points": points})
        polygons = [[float(x) for point in outline for x in point] for outline in outlines]
        return Object(box.label, box.ltwh, polygons)

    def openimages(self, file: str) -> Iterator[Entry]:
        """Only rows of images that are there are kept, a few of millions."""
        has_image, titles = functools.cache(self._has_image), self._titles
        rows = (row for row in self._rows(file, _OPEN) if has_image(row[1]["file"]))
        rows = ((i, {**row, "label": titles.get(row["label"], row["label"])}) for i, row in rows)
        yield from self._table(file, rows, True)

    @functools.cached_property
    def _titles(self) -> dict[str, str]:
        """The names of Open Images' classes."""
        files = (n for n in self._folder.named(".csv") if "class" in os.path.basename(n).lower())
        rows = (row for name in files for _, row in self._cells(name))
        return {row[0]: row[1] for row in rows if len(row) == 2}

    def table(self, file: str) -> Iterator[Entry]:
        """A row is a box in pixels, or an image without one."""
        yield from self._table(file, self._rows(file, _TABLE), False)

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

    def _rows(self, file: str, pattern: bytes) -> Iterator[tuple[int, dict[str, str]]]:
        """(number of its line, cells by the keys of _COLUMNS) of each row."""
        if not re.match(pattern, self._folder.head(file)):
            return
        rows = self._cells(file)
        header = [re.sub(r"\W+", "_", cell.lower()).strip("_") for cell in next(rows)[1]]
        ends = {name.rpartition("_")[2]: name for name in header}  # of bbox_x1 and Roi.X1
        ends |= {name: name for name in header}
        keys = {k: next((ends[n] for n in v.split() if n in ends), "") for k, v in _COLUMNS.items()}
        others = [name for name in header if name not in keys.values()]
        label = {} if keys["label"] else {"label": self._nameless(file, others)}
        for i, row in rows:
            named = dict(zip(header, row, strict=False)) | {"": ""}
            yield i, {key: named.get(name, "") for key, name in keys.items()} | label

    def _table(
        self, file: str, rows: Iterable[tuple[int, dict[str, str]]], relative: bool
    ) -> Iterator[Entry]:
        images = collections.defaultdict(list)
        for line, row in rows:
            images[row["file"]].append((line, row))
        for image, rows in images.items():
            first, names = rows[0][1], (beside(file, image), image)
            boxes = [(line, row) for line, row in rows if any(row[side] for side in _SIDES)]
            split = folders.split_of(first["split"]) or folders.split_of(file)
            size = size_of(first["height"], first["width"])
            yield entry(file, names, boxes, self._row, size=size, split=split, relative=relative)

    def _row(self, row: dict[str, str]) -> Object:
        sides = tuple(float(row[side]) for side in _SIDES)
        box = self._boxes.create(label=row["label"], coords=sides)
        return Object(row["label"], box.ltwh, crowd=row["crowd"] == "1")

    def via(self, file: str) -> Iterator[Entry]:
        """Of VIA 1 and 2: an export, or a project; one attribute of the regions is the category."""
        content = self._parsed(file, _VIA, parse_json)
        images = content.get("_via_img_metadata", content) if isinstance(content, dict) else {}
        images = [x for x in images.values() if isinstance(x, dict) and "regions" in x]
        regions = [image["regions"] for image in images]  # a list, or a dict by numbers
        regions = [[*each.values()] if isinstance(each, dict) else each for each in regions]
        attributes = [each.get("region_attributes") or {} for each in itertools.chain(*regions)]
        pairs = ((key, value) for each in attributes for key, value in each.items())
        keys = dict.fromkeys(key for key, value in pairs if value not in _UNSAID)
        likely = [key for word in _ATTRIBUTES for key in keys if key.lower() == word]
        if len(keys) > 1 and not likely:
            problem = f"has regions with the attributes {some(keys)}"
            fix = "call the one with the category 'label'"
            raise SourceError(f"{self._folder.full(file)} {problem}: {fix}")
        key = [*likely, *keys, ""][0]
        if others := [name for name in keys if name != key]:
            self.notes[f"{file}: the attribute '{key}' is the category, not {some(others)}"] = None
        nameless = self._nameless(file) if attributes and not key else ""
        read, split = functools.partial(self._region, key, nameless), folders.split_of(file)
        for name, rows in zip((image["filename"] for image in images), regions, strict=True):
            rows = [(f"{name}, region {i}", region) for i, region in enumerate(rows, 1)]
            names = (beside(file, name), name)
            yield entry(file, names, rows, read, split=split)

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

    def _nameless(self, file: str, others: Collection[str] = ()) -> str:
        aside = f" (not taken: {some(others)})" if others else ""
        self.notes[f"{file} names no categories{aside}: all objects are 'object'"] = None
        return "object"


def beside(file: str, name: str) -> str:
    """The path of another file, which `file` names relative to its own folder."""
    return os.path.join(os.path.dirname(file), normal(name.strip()))


def size_of(height: Any, width: Any) -> tuple[int, int] | None:
    """A size in pixels; None if it is missing or 0, as some tools write it."""
    try:
        size = int(float(height)), int(float(width))
    except (TypeError, ValueError):
        return None
    return size if min(size) > 0 else None


def entry(
    file: str, names: Sequence[str], rows: Iterable[tuple[Any, Any]], parse: Callable, **more: Any
) -> Entry:
    """The entry with the objects of rows (position, content); `more` are its last fields."""
    objects, problems, skipped = [], [], []
    for position, row in rows:
        try:
            each: Object = parse(row)
            values = [*each.box, *itertools.chain(*each.polygons)]
            if not all(map(math.isfinite, values)):
                raise ValueError("a coordinate is not a number")
            if more.get("relative") and not all(-0.52 < value < 1.02 for value in values):
                raise ValueError("the numbers are no shares of the image, from 0 to 1")
            if not each.label.strip():
                raise ValueError("it has no label")
            if any(len(polygon) < 6 for polygon in each.polygons):
                raise ValueError("a polygon of fewer than 3 points")
            objects.append(each)
        except NoBoxError as error:
            skipped.append(str(error))
        except Exception as error:  # globox asserts, and its parsers raise what odd rows lead to
            what = f"{row:.60}: " if isinstance(row, str) else ""
            what += "it has no " if isinstance(error, KeyError) else ""
            problems.append(f"{file}:{position}: {what}{one_line(error)}")
    return Entry(file, names, objects, problems, skipped, **more)


class LabelFormat(NamedTuple):
    """How label files of a format are recognised and read."""

    title: str  # in messages
    ending: str  # of its label files
    read: Callable[[Any, str], Iterator[Entry]]  # a method of a reader
    head: bytes  # the pattern of what a label file begins with
    shape: bytes = b"(?!)"  # of a box or a polygon; of a polygon it has a group


_CVAT_SHAPES = rb"<(?:box|(polygon))\s"
_LABELME_SHAPES = rb'"shape_type"\s*:\s*"(?:rectangle|(polygon))"'
_VIA_SHAPES = rb'"name"\s*:\s*"(?:rect|(polygon))"'
FORMATS = {
    "yolo": LabelFormat("YOLO's", ".txt", Reader.yolo, yolo.LINE, yolo.SHAPES),
    "voc": LabelFormat("Pascal VOC's", ".xml", Reader.voc, _VOC),
    "cvat": LabelFormat("CVAT's", ".xml", Reader.cvat, _CVAT, _CVAT_SHAPES),
    "labelme": LabelFormat("LabelMe's", ".json", Reader.labelme, _LABELME, _LABELME_SHAPES),
    "via": LabelFormat("VIA's", ".json", Reader.via, _VIA, _VIA_SHAPES),
    "openimages": LabelFormat("Open Images'", ".csv", Reader.openimages, _OPEN),
    "csv": LabelFormat("a box table's", ".csv", Reader.table, _TABLE),
}
