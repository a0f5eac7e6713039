"""What the label files of YOLO, Pascal VOC, CVAT, LabelMe and Open Images say about images.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from benchmarks.detection.coco import normal
from common import limits
from common.data.shards import tensorflow
from common.errors import one_line, parse_json
from common.preparation.folders import Folder
from common.preparation.sources import SourceError

_SPLIT = re.compile(r"(?<![a-z])(train|val|test)(?:ing|id|idation)?(?![a-z])")


class Object(NamedTuple):
    """An object in pixels; in YOLO and Open Images in shares of the image's width and height."""

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
    split: str = ""  # "train", "val" or "test", if the file says it


class Settings(NamedTuple):
    """YOLO's data.yaml, or a list of classes without one."""

    file: str = ""
    names: Mapping[int, str] = {}  # of the classes
    content: Mapping[str, Any] = {}  # of data.yaml


def split_of(path: str) -> str:
    """The last split that a path names, or ''."""
    return (_SPLIT.findall(path.lower()) or [""])[-1]


def lines(folder: Folder, name: str) -> list[str]:
    """The lines of a text file without spaces around them."""
    return [line.strip() for line in _text(folder, name).splitlines()]


def yolo_settings(folder: Folder) -> Settings:
    """The settings of the uppermost data.yaml with names, else of a list of classes.

    SourceError if a .yaml with names is no YAML.
    """
    import yaml

    lists = folder.named(".names", ".labels", "classes.txt")  # of darknet and LabelImg
    files = [*folder.named(".yaml", ".yml"), *lists]
    for file in sorted(files, key=lambda name: (name in lists, name.count("/"), name)):
        text = _text(folder, file)
        if file in lists:
            return Settings(file, dict(enumerate(map(str.strip, text.strip().splitlines()))))
        try:  # the loader that leaves all values text: `no` is a name
            content = yaml.load(text, Loader=yaml.BaseLoader)
        except yaml.YAMLError as error:
            if "names" not in text:
                continue
            raise SourceError(f"{folder.full(file)} is not YAML: {one_line(error)}") from error
        names = content.get("names") if isinstance(content, dict) else None
        names = dict(enumerate(names)) if isinstance(names, list) else names
        if isinstance(names, dict) and all(str(key).isdigit() for key in names):
            names = {int(key): str(name).strip() for key, name in names.items()}
            return Settings(file, names, content)
    return Settings()


class _NoBoxError(Exception):
    """A shape, whose kind this names, has no place in COCO's form."""


class Reader:
    """Reads label files; each form has a method, which yields the entries of a file.

    `has_image` tells whether a name is that of an image.
    """

    def __init__(self, folder: Folder, has_image: Callable[[str], Any], settings: Settings):
        try:
            from globox import BoundingBox
        except ImportError as error:
            text = "globox reads such labels and is missing: pip install globox"
            raise SourceError(text) from error
        self._boxes: Any = BoundingBox
        self._folder, self._has_image, self._settings = folder, has_image, settings

    def yolo(self, file: str) -> Iterator[Entry]:
        """A line is a class number and x, y (of the middle), width, height, or a polygon."""
        rows = [(i, line) for i, line in enumerate(lines(self._folder, file), 1) if line]
        is_label = rows and re.match(FORMS["yolo"].head, rows[0][1].encode())
        if is_label or self._has_image(file):
            yield _entry(file, (file,), rows, self._yolo)

    def _yolo(self, line: str) -> Object:
        file, names, content = self._settings
        number, *values = map(float, line.split())
        if names and number not in names:
            raise ValueError(f"class {number:.0f} is not among the {len(names)} of {file}")
        if "kpt_shape" in content:  # key points follow the box
            values = values[:4]
        _check_shares(values)
        is_box = len(values) < 6
        read = self._boxes.from_yolo_v5 if is_box else self._boxes.from_yolo_seg
        box = read(" ".join(map(str, (0, *values))), image_size=(1, 1))
        label = names[int(number)] if names else f"{number:.0f}"
        return Object(label, box.ltwh, [] if is_box else [values])

    def voc(self, file: str) -> Iterator[Entry]:
        root = ElementTree.fromstring(self._folder.head(file, limits.TEXT_BYTES))
        if root.tag == "annotation":
            names = file, _beside(file, root.findtext("filename", ""))
            rows = ((f"object {i}", node) for i, node in enumerate(root.iter("object"), 1))
            size = _size(root.findtext("size/height"), root.findtext("size/width"))
            yield _entry(file, names, rows, self._voc, size)

    def _voc(self, node: ElementTree.Element) -> Object:
        """A difficult object counts neither for nor against a model, as a crowd in COCO's score."""
        box, difficult = self._boxes.from_xml(node), node.findtext("difficult", "")
        return Object(box.label, box.ltwh, crowd=difficult.strip() == "1")

    def cvat(self, file: str) -> Iterator[Entry]:
        """Of "CVAT for images 1.1"."""
        root = ElementTree.fromstring(self._folder.head(file, limits.ANNOTATION_BYTES))
        if root.tag != "annotations":
            return
        if root.find("track") is not None:
            fix = "export it again as 'CVAT for images 1.1'"
            raise SourceError(f"{self._folder.full(file)} is 'CVAT for video': {fix}")
        for image in root.iter("image"):
            name, subset = image.get("name", ""), image.get("subset", "")
            names = [_beside(file, f"{subset}/{name}"), _beside(file, name), name]
            shapes = [node for node in image if node.tag != "tag"]  # a tag is of the image
            rows = ((f"image {name}, shape {i}", node) for i, node in enumerate(shapes, 1))
            size = _size(image.get("height"), image.get("width"))
            yield _entry(file, names, rows, self._cvat, size, split_of(subset))

    def _cvat(self, node: ElementTree.Element) -> Object:
        if node.tag == "polygon":
            points = [[*map(float, point.split(","))] for point in node.attrib["points"].split(";")]
            return self._outlined(node.attrib["label"], points, [points])
        if node.tag != "box" or float(node.get("rotation", 0)):
            raise _NoBoxError("turned box" if node.tag == "box" else node.tag)
        box = self._boxes.from_cvat(node)
        return Object(box.label, box.ltwh)

    def labelme(self, file: str) -> Iterator[Entry]:
        content = parse_json(_text(self._folder, file))
        shapes = content.get("shapes") if isinstance(content, dict) else None
        if not isinstance(shapes, list):
            return
        groups = collections.defaultdict(list)
        for i, shape in enumerate(shapes, 1):  # those of one label and one group are an object
            group = shape.get("shape_type"), shape.get("label"), shape.get("group_id")
            groups[f"shape {i}" if group[-1] is None else f"group {group}"].append(shape)
        names = file, _beside(file, content.get("imagePath") or "")
        size = _size(content.get("imageHeight"), content.get("imageWidth"))
        yield _entry(file, names, groups.items(), self._labelme, size)

    def _labelme(self, shapes: list[dict[str, Any]]) -> Object:
        label, kind = shapes[0]["label"], shapes[0].get("shape_type") or "polygon"
        if kind not in ("polygon", "rectangle") or label == "__ignore__":  # which is no object
            raise _NoBoxError("__ignore__" if label == "__ignore__" else kind)
        outlines = [shape["points"] for shape in shapes]
        points = [point for outline in outlines for point in outline]
        return self._outlined(label, points, outlines if kind == "polygon" else [])

    def _outlined(self, label: str, points: list, outlines: list[list[list[float]]]) -> Object:
        box = self._boxes.from_labelme({"label": label, "points": points})
        polygons = [[float(x) for point in outline for x in point] for outline in outlines]
        return Object(box.label, box.ltwh, polygons)

    def openimages(self, file: str) -> Iterator[Entry]:
        """A row is an object; only those of images that are there are kept, a few of millions."""
        rows: dict[str, list[tuple[int, dict[str, str]]]] = {}
        with tensorflow().io.gfile.GFile(self._folder.full(file), "rb") as data:
            table = csv.DictReader(line.decode("utf-8-sig", "replace") for line in data)
            if not {"ImageID", "LabelName", "XMin"} <= {*(table.fieldnames or ())}:
                return
            has_image = functools.cache(self._has_image)
            for i, row in enumerate(table, 2):
                if has_image(row["ImageID"]):
                    rows.setdefault(row["ImageID"], []).append((i, row))
        for image, objects in rows.items():
            yield _entry(file, (image,), objects, self._openimages, None, split_of(file))

    def _openimages(self, row: dict[str, str]) -> Object:
        sides = tuple(float(row[side]) for side in ("XMin", "YMin", "XMax", "YMax"))
        _check_shares(sides)
        label = self._titles.get(row["LabelName"], row["LabelName"])
        box = self._boxes.create(label=label, coords=sides)
        return Object(label, box.ltwh, crowd=row.get("IsGroupOf") == "1")

    @functools.cached_property
    def _titles(self) -> dict[str, str]:
        """The names of Open Images' classes."""
        files = (n for n in self._folder.named(".csv") if "class" in os.path.basename(n).lower())
        rows = (row for name in files for row in csv.reader(lines(self._folder, name)))
        return dict(row for row in rows if len(row) == 2)


def _text(folder: Folder, name: str) -> str:
    """A text file; bytes that are no UTF-8 become characters that no parser takes."""
    return folder.head(name, limits.TEXT_BYTES).decode("utf-8-sig", "replace")


def _beside(file: str, name: str) -> str:
    """The path of another file, which `file` names relative to its own folder."""
    return os.path.join(os.path.dirname(file), normal(name.strip()))


def _check_shares(values: Sequence[float]) -> None:
    if not all(-0.01 <= value <= 1.01 for value in values):
        raise ValueError("the numbers are no shares of the image, from 0 to 1")


def _size(height: Any, width: Any) -> tuple[int, int] | None:
    """A size in pixels; None if it is missing or 0, as some tools write it."""
    try:
        size = int(float(height)), int(float(width))
    except (TypeError, ValueError):
        return None
    return size if min(size) > 0 else None


def _entry(
    file: str, names: Sequence[str], rows: Iterable[tuple[Any, Any]], parse: Callable, *more: Any
) -> Entry:
    """The entry with the objects of rows (place, content); `more` are its size and split."""
    objects, problems, skipped = [], [], []
    for place, row in rows:
        try:
            each: Object = parse(row)
            if not all(map(math.isfinite, itertools.chain(each.box, *each.polygons))):
                raise ValueError("a coordinate is not a number")
            if any(len(polygon) < 6 for polygon in each.polygons):
                raise ValueError("a polygon of fewer than 3 points")
            objects.append(each._replace(label=each.label.strip()))
        except _NoBoxError as error:
            skipped.append(str(error))
        except Exception as error:  # globox asserts, and its parsers raise what odd rows lead to
            what = f"{row:.60}: " if isinstance(row, str) else ""
            what += "it has no " if isinstance(error, KeyError) else ""
            problems.append(f"{file}:{place}: {what}{one_line(error)}")
    return Entry(file, names, objects, problems, skipped, *more)


class Kind(NamedTuple):
    """How a form of labels is known and read."""

    title: str  # in messages
    ending: str  # of its label files
    read: Callable[[Reader, str], Iterator[Entry]]
    head: bytes  # the pattern of what a label file begins with
    shape: bytes = b"(?!)"  # of a box or a polygon; of a polygon it has a group


_NUMBERS = rb"(?:[ \t]+-?[\d.][\d.eE+-]*)"
_LINE = rb"^(?:\xef\xbb\xbf)?\s*\d+(?:\.0*)?" + _NUMBERS + rb"{4,}[ \t]*(?:[\r\n]|$)"
_LINES = rb"(?m)^\s*\d+(?:\.0*)?" + _NUMBERS + rb"{4,5}(" + _NUMBERS + rb"{5,})?[ \t]*\r?$"
_TABLE = rb"^(?:\xef\xbb\xbf)?ImageID,.*LabelName,.*XMin"
_SHAPES = rb'"shape_type"\s*:\s*"(?:rectangle|(polygon))"'
FORMS = {
    "yolo": Kind("YOLO's", ".txt", Reader.yolo, _LINE, _LINES),
    "voc": Kind("Pascal VOC's", ".xml", Reader.voc, rb"<annotation[\s>]"),
    "cvat": Kind("CVAT's", ".xml", Reader.cvat, rb"<annotations[\s>]", rb"<(?:box|(polygon))\s"),
    "labelme": Kind("LabelMe's", ".json", Reader.labelme, rb'"shapes"\s*:\s*\[', _SHAPES),
    "openimages": Kind("Open Images'", ".csv", Reader.openimages, _TABLE),
}
