"""What the label files of YOLO, Pascal VOC, CVAT, LabelMe and Open Images say about images.

globox parses the boxes. Its readers of folders drop polygons, take local paths only, and end at the
first mistake without naming its file.
"""

from __future__ import annotations

import collections
import csv
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from benchmarks.detection.coco import normal
from common import limits
from common.data.shards import tensorflow
from common.errors import one_line
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
    faults: Sequence[str] = ()  # "FILE:PLACE: REASON" of each object that cannot be read
    size: tuple[int, int] | None = None  # height, width in pixels, if the file has it
    skipped: Sequence[str] = ()  # the kinds of shapes that are neither upright boxes nor polygons
    split: str = ""  # "train", "val" or "test", if the file says it


def split_of(path: str) -> str:
    """The last split that a path names, or ''."""
    return (_SPLIT.findall(path.lower()) or [""])[-1]


def lines(folder: Folder, name: str) -> list[str]:
    """The lines of a text file without spaces around them."""
    return [line.strip() for line in _text(folder, name).splitlines()]


def yolo_settings(folder: Folder) -> tuple[str, dict[str, Any]]:
    """(file, its content) of data.yaml or a list of classes; `names` has the names by number.

    Raises:
        SourceError: a .yaml is no YAML.
    """
    import yaml

    lists = folder.named(".names", ".labels", "classes.txt")  # of darknet and LabelImg
    files = [*folder.named(".yaml", ".yml"), *lists]
    for file in sorted(files, key=lambda name: (name in lists, name.count("/"), name)):
        text = _text(folder, file)
        try:  # the loader that leaves all values text: `no` is a name
            content = {} if file in lists else yaml.load(text, Loader=yaml.BaseLoader)
        except yaml.YAMLError as error:
            if "names" not in text:
                continue
            fault = " ".join(str(error).split())
            raise SourceError(f"{folder.full(file)} is no YAML: {fault}") from error
        names = content.get("names") if isinstance(content, dict) else None
        names = text.split("\n") if file in lists else names
        names = dict(enumerate(filter(str.strip, names))) if isinstance(names, list) else names
        if isinstance(names, dict) and all(str(key).isdigit() for key in names):
            return file, content | {"names": {int(k): str(v).strip() for k, v in names.items()}}
    return "", {"names": {}}


class Reader:
    """Reads label files; each form has a method, which yields the entries of a file.

    `has_image` tells whether a name is that of an image, `yolo` is of `yolo_settings`.
    """

    def __init__(self, folder: Folder, has_image: Callable, yolo: tuple[str, dict[str, Any]]):
        try:
            from globox import BoundingBox
        except ImportError as error:
            fix = "pip install globox"
            raise SourceError(f"globox reads such labels and is missing: {fix}") from error
        self._boxes: Any = BoundingBox
        self._folder, self._has_image, self._settings = folder, has_image, yolo

    def yolo(self, file: str) -> Iterator[Entry]:
        """A line is a class number and x, y (of the middle), width, height, or a polygon."""
        rows = [(i, line) for i, line in enumerate(lines(self._folder, file), 1) if line]
        is_label = rows and re.match(FORMS["yolo"].head, rows[0][1].encode())
        if is_label or self._has_image(file):
            yield _entry(file, (file,), rows, self._yolo)

    def _yolo(self, line: str) -> Object:
        settings, content = self._settings
        names = content["names"]
        number, *values = map(float, line.split())
        if names and number not in names:
            fault = f"class {number:.0f} is not among the {len(names)} of {settings}"
            raise ValueError(f"{fault}: complete the names there")
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
            yield _entry(file, names, rows, self._voc, size=size)

    def _voc(self, node: ElementTree.Element) -> Object:
        """A difficult object counts neither for nor against a model, as a crowd in COCO's score."""
        box, difficult = self._boxes.from_xml(node), node.findtext("difficult", "")
        return Object(box.label, box.ltwh, crowd=difficult.strip() == "1")

    def cvat(self, file: str) -> Iterator[Entry]:
        """Of "CVAT for images 1.1"; a turned box has no place in COCO's form."""

        def kind(node: ElementTree.Element) -> str:
            is_turned = node.tag == "box" and float(node.get("rotation", 0))
            return "turned box" if is_turned else node.tag

        def parse(node: ElementTree.Element) -> Object:
            if node.tag == "box":
                box = self._boxes.from_cvat(node)
                return Object(box.label, box.ltwh)
            points = [[*map(float, point.split(","))] for point in node.attrib["points"].split(";")]
            return self._outlined(node.attrib["label"], points, [points])

        root = ElementTree.fromstring(self._folder.head(file, limits.ANNOTATION_BYTES))
        if root.tag != "annotations":
            return
        if root.find("track") is not None:
            fix = "export it again as 'CVAT for images 1.1'"
            raise SourceError(f"{self._folder.full(file)} is 'CVAT for video': {fix}")
        for image in root.iter("image"):
            name, subset = image.get("name", ""), image.get("subset", "")
            names = [_beside(file, f"{subset}/{name}"), _beside(file, name), name]
            shapes = [(kind(node), node) for node in image if node.tag != "tag"]
            used = [node for shape, node in shapes if shape in ("box", "polygon")]
            rows = ((f"image {name}, shape {i}", node) for i, node in enumerate(used, 1))
            skipped = [shape for shape, _ in shapes if shape not in ("box", "polygon")]
            size = _size(image.get("height"), image.get("width"))
            more = {"size": size, "skipped": skipped, "split": split_of(subset)}
            yield _entry(file, names, rows, parse, **more)

    def labelme(self, file: str) -> Iterator[Entry]:
        """Shapes of one label and one group are an object, of several polygons."""

        def kind(shape: dict[str, Any]) -> str:
            if shape.get("label") == "__ignore__":  # LabelMe's label of what is no object
                return "__ignore__"
            return shape.get("shape_type") or "polygon"  # files of old versions do not say it

        def parse(shapes: list[dict[str, Any]]) -> Object:
            points = [point for shape in shapes for point in shape["points"]]
            outlines = [shape["points"] for shape in shapes if kind(shape) == "polygon"]
            return self._outlined(shapes[0]["label"], points, outlines)

        content = json.loads(_text(self._folder, file))
        if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
            return
        groups, skipped = collections.defaultdict(list), []
        for i, shape in enumerate(content["shapes"], 1):
            if kind(shape) in ("polygon", "rectangle"):
                group = shape.get("group_id")
                place = f"shape {i}" if group is None else f"{shape.get('label')} {group}"
                groups[place].append(shape)
            else:
                skipped.append(kind(shape))
        names = file, _beside(file, content.get("imagePath") or "")
        size = _size(content.get("imageHeight"), content.get("imageWidth"))
        yield _entry(file, names, groups.items(), parse, size=size, skipped=skipped)

    def _outlined(self, label: str, points: list, outlines: list[list[list[float]]]) -> Object:
        box = self._boxes.from_labelme({"label": label, "points": points})
        return Object(box.label, box.ltwh, [sum(map(list, outline), []) for outline in outlines])

    def openimages(self, file: str) -> Iterator[Entry]:
        """A row is an object; only those of images that are there are kept, a few of millions."""
        rows: dict[str, list[tuple[int, dict[str, str]]] | None] = {}
        with tensorflow().io.gfile.GFile(self._folder.full(file), "rb") as data:
            table = csv.DictReader(line.decode("utf-8-sig", "replace") for line in data)
            if not {"ImageID", "LabelName", "XMin"} <= {*(table.fieldnames or ())}:
                return
            for i, row in enumerate(table, 2):
                if (image := row["ImageID"]) not in rows:
                    rows[image] = [] if self._has_image(image) else None
                if (kept := rows[image]) is not None:
                    kept.append((i, row))
        for image, kept in rows.items():
            yield _entry(file, (image,), kept or (), self._openimages, split=split_of(file))

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
    """A text file; what is no UTF-8 becomes signs that no parser takes."""
    return folder.head(name, limits.TEXT_BYTES).decode("utf-8-sig", "replace")


def _beside(file: str, name: str) -> str:
    """The path of a name that a file has for another one."""
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
    file: str, names: Sequence[str], rows: Iterable[tuple[Any, Any]], parse: Callable, **more: Any
) -> Entry:
    """The entry with the objects of rows, each with its place, and the faults of the others."""
    objects, faults = [], []
    for place, row in rows:
        try:
            each: Object = parse(row)
            if not all(map(math.isfinite, sum(each.polygons, [*each.box]))):
                raise ValueError("a coordinate is no number")
            if any(len(polygon) < 6 for polygon in each.polygons):
                raise ValueError("a polygon of fewer than 3 points")
            objects.append(each._replace(label=each.label.strip()))
        except Exception as error:  # globox asserts, and its parsers raise what odd rows lead to
            what = f"{row:.60}: " if isinstance(row, str) else ""
            what += "it has no " if isinstance(error, KeyError) else ""
            faults.append(f"{file}:{place}: {what}{one_line(error)}")
    return Entry(file, names, objects, faults, **more)


class Kind(NamedTuple):
    """How a form of labels is known and read."""

    title: str  # in messages
    ending: str  # of its label files
    read: Callable[[Reader, str], Iterator[Entry]]
    head: bytes  # the pattern of what a label file begins with
    shape: bytes = b"$^"  # of a box or a polygon; of a polygon it has a group


_NUMBERS = rb"(?:[ \t]+-?[\d.][\d.eE+-]*)"
_LINE = rb"^(?:\xef\xbb\xbf)?\s*\d+(?:\.0*)?" + _NUMBERS + rb"{4,}[ \t]*(?:[\r\n]|$)"
_LINES = rb"(?m)^\s*\d+(?:\.0*)?" + _NUMBERS + rb"{4,5}(" + _NUMBERS + rb"{5,})?[ \t]*\r?$"
_SHAPES = rb'"shape_type"\s*:\s*"(?:rectangle|(polygon))"'
_TABLE = rb"^(?:\xef\xbb\xbf)?ImageID,.*LabelName,.*XMin"
_VOC, _CVAT = rb"<annotation[\s>]", rb"<annotations[\s>]"
FORMS = {
    "yolo": Kind("YOLO's", ".txt", Reader.yolo, _LINE, _LINES),
    "voc": Kind("Pascal VOC's", ".xml", Reader.voc, _VOC),
    "cvat": Kind("CVAT's", ".xml", Reader.cvat, _CVAT, rb"<(?:box|(polygon))\s"),
    "labelme": Kind("LabelMe's", ".json", Reader.labelme, rb'"shapes"\s*:\s*\[', _SHAPES),
    "openimages": Kind("Open Images'", ".csv", Reader.openimages, _TABLE),
}
