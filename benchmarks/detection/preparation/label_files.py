"""What the label files of YOLO, Pascal VOC, CVAT, LabelMe and Open Images say about images.

globox parses the boxes. Polygons and files are read here: its readers of files drop polygons, take
local paths only, and end at the first odd value without naming it.
"""

from __future__ import annotations

import collections
import csv
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

import yaml

from benchmarks.detection.coco import normal
from common import console, limits, pools
from common.data.shards import tensorflow
from common.errors import one_line
from common.preparation.folders import Folder
from common.preparation.sources import SourceError

# The image of the likeliest of some names; `by_stem`, the default, wherever only one has that name.
Find = Callable[..., str | None]
_NO_LABELS = re.compile(r"(classes|labels|readme.*|train|val|valid|test|notes)\.txt", re.IGNORECASE)
_SPLIT = re.compile(r"(?<![a-z])(train|val|test)(?:ing|id|idation)?(?![a-z])")


class Object(NamedTuple):
    """An object; its unit is the pixel, in YOLO and Open Images the image's width and height."""

    label: str  # the name of its category
    box: Sequence[float]  # x, y, width, height
    polygons: list[list[float]]  # x, y, x, y ... of each
    crowd: bool = False  # whether it counts neither for nor against a model


class Entry(NamedTuple):
    """What a label file says about an image."""

    file: str  # that it is from
    names: tuple[str, ...]  # of the image, the likeliest first; with or without an ending
    objects: list[Object]
    faults: list[str]  # "FILE:PLACE: REASON" of each object that cannot be read
    size: tuple[int, int] | None = None  # height, width in pixels, if the file has it
    skipped: tuple[str, ...] = ()  # the kinds of shapes that are no upright boxes or polygons
    split: str = ""  # "train", "val" or "test", if the file says it


def split_of(path: str) -> str:
    """The last split that a path names, or ''."""
    return (_SPLIT.findall(path.lower()) or [""])[-1]


def in_threads(folder: Folder, work: Callable, names: list[str], unit: str) -> Iterator[Any]:
    """`map(work, names)` with the progress."""
    if not names:
        return
    workers = pools.threads(folder.path)
    progress = console.ProgressBar(f"reading {folder.path}", len(names), unit)
    with pools.Threads(workers) as pool:
        for value in pools.ordered(pool, work, names, 4 * workers):
            progress.add()
            yield value
    progress.close()


def text(folder: Folder, name: str) -> str:
    """A text file; what is no UTF-8 becomes signs that no parser takes."""
    return folder.head(name, limits.TEXT_BYTES).decode("utf-8-sig", "replace")


def yolo_settings(folder: Folder) -> tuple[str, dict[str, Any]]:
    """(file, its content) of data.yaml or obj.data; `names` is from class numbers to names.

    Raises:
        SourceError: a .yaml is no YAML.
    """

    def nearest(*endings: str) -> list[str]:
        usual = ("data.yaml", "obj.data", "obj.names", "classes.txt")
        names = folder.named(*endings)
        return sorted(names, key=lambda n: (os.path.basename(n) not in usual, n.count("/"), n))

    for file in nearest(".yaml", ".yml"):
        if "names" not in (lines := text(folder, file)):
            continue
        try:  # the loader that leaves all values text: `no` is a name
            content = yaml.load(lines, Loader=yaml.BaseLoader)
        except yaml.YAMLError as error:
            fault = " ".join(str(error).split())
            raise SourceError(f"{folder.full(file)} is no YAML: {fault}") from error
        names = content.get("names") if isinstance(content, dict) else None
        if isinstance(names, list):
            return file, content | {"names": dict(enumerate(names))}
        if isinstance(names, dict) and all(str(key).isdigit() for key in names):
            return file, content | {"names": {int(key): name for key, name in names.items()}}
    content = {}
    for file in nearest(".data")[:1]:
        rows = (line.partition("=") for line in text(folder, file).splitlines())
        content = {key.strip(): value.strip() for key, _, value in rows}
    for file in nearest(".names", ".labels", "classes.txt")[:1]:
        names = filter(None, map(str.strip, text(folder, file).splitlines()))
        return file, content | {"names": dict(enumerate(names))}
    return "", content | {"names": {}}


def yolo(folder: Folder, find: Find) -> Iterator[Entry]:
    """A line is a class number and x, y (of the middle), width, height, or a polygon's x, y ..."""
    boxes, (settings, content) = _boxes(), yolo_settings(folder)
    names: dict[int, Any] = content["names"]

    def parse(line: str) -> Object:
        number, *values = map(float, line.split())
        if names and number not in names:
            fault = f"class {number:.0f} is not among the {len(names)} of {settings}"
            raise ValueError(f"{fault}: complete the names there")
        if "kpt_shape" in content:  # key points follow the box
            values = values[:4]
        if not all(-0.01 <= value <= 1.01 for value in values):
            raise ValueError("the numbers are no shares of the image, from 0 to 1")
        is_box = len(values) < 6
        read = boxes.from_yolo_v5 if is_box else boxes.from_yolo_seg
        box = read(" ".join(map(str, (0, *values))), image_size=(1, 1))
        label = str(names[int(number)]) if names else f"{number:.0f}"
        return Object(label, box.ltwh, [] if is_box else [values])

    def entry(name: str) -> Entry:
        lines = enumerate(text(folder, name).splitlines(), 1)
        rows = ((i, line) for i, line in lines if line.strip())
        return Entry(name, (name,), *_objects(name, rows, parse))

    files = [n for n in folder.named(".txt") if not _NO_LABELS.fullmatch(os.path.basename(n))]
    folders = {os.path.dirname(name) for name in files if find((name,), by_stem=False)}
    folders |= {path for path in map(os.path.dirname, files) if "labels" in path.lower().split("/")}
    yield from in_threads(
        folder, entry, [name for name in files if os.path.dirname(name) in folders], "labels"
    )


def voc(folder: Folder, _: Find) -> Iterator[Entry]:
    """A difficult object counts neither for nor against a model, as a crowd in COCO's score."""
    boxes = _boxes()

    def parse(node: ElementTree.Element) -> Object:
        box, difficult = boxes.from_xml(node), node.findtext("difficult", "")
        return Object(box.label, box.ltwh, [], difficult.strip() == "1")

    def entry(name: str) -> Entry | None:
        try:
            root = ElementTree.fromstring(folder.head(name, limits.TEXT_BYTES))
        except ElementTree.ParseError as error:
            return Entry(name, (name,), [], [f"{name}: no XML: {error}"])
        near = os.path.join(os.path.dirname(name), normal(root.findtext("filename", "").strip()))
        size = _size(root.findtext("size/height"), root.findtext("size/width"))
        rows = ((f"object {i}", node) for i, node in enumerate(root.iter("object"), 1))
        objects = _objects(name, rows, parse)
        return Entry(name, (name, near), *objects, size) if root.tag == "annotation" else None

    yield from filter(None, in_threads(folder, entry, folder.named(".xml"), "labels"))


def cvat(folder: Folder, _: Find) -> Iterator[Entry]:
    """Of "CVAT for images 1.1"; a turned box has no place in COCO's form."""
    boxes = _boxes()

    def parse(node: ElementTree.Element) -> Object:
        if node.tag == "box":
            box = boxes.from_cvat(node)
            return Object(box.label, box.ltwh, [])
        points = [[*map(float, point.split(","))] for point in node.attrib["points"].split(";")]
        box = boxes.from_labelme({"label": node.attrib["label"], "points": points})
        return Object(box.label, box.ltwh, [[x for point in points for x in point]])

    def kind(node: ElementTree.Element) -> str:
        return "turned box" if node.tag == "box" and float(node.get("rotation", 0)) else node.tag

    def entry(file: str, node: ElementTree.Element) -> Entry:
        name, number = node.get("name", ""), node.get("id", "")
        shapes = [child for child in node if kind(child) in ("box", "polygon")]
        rows = ((f"image {number}, shape {i}", shape) for i, shape in enumerate(shapes, 1))
        skipped = tuple(kind(c) for c in node if c not in shapes and c.tag != "tag")
        names = (os.path.join(os.path.dirname(file), name), name)
        size = _size(node.get("height"), node.get("width"))
        split = split_of(node.get("subset", ""))
        return Entry(file, names, *_objects(file, rows, parse), size, skipped, split)

    for file in folder.named(".xml"):
        if not re.search(FORMS["cvat"].head, folder.head(file)):
            continue
        try:
            data = io.BytesIO(folder.head(file, limits.ANNOTATION_BYTES))
            for node in (node for _, node in ElementTree.iterparse(data)):
                if node.tag == "track":
                    fix = "export it again as 'CVAT for images 1.1'"
                    raise SourceError(f"{folder.full(file)} is 'CVAT for video': {fix}")
                if node.tag == "image":
                    yield entry(file, node)
                    node.clear()
        except ElementTree.ParseError as error:
            raise SourceError(f"{folder.full(file)} is damaged or cut short: {error}") from error


def labelme(folder: Folder, _: Find) -> Iterator[Entry]:
    """Shapes of one label and one group are an object, of several polygons."""
    boxes = _boxes()

    def parse(shapes: list[dict[str, Any]]) -> Object:
        points = [point for shape in shapes for point in shape["points"]]
        box = boxes.from_labelme({"label": shapes[0]["label"], "points": points})
        outlines = [shape["points"] for shape in shapes if kind(shape) == "polygon"]
        return Object(box.label, box.ltwh, [[float(x) for p in o for x in p] for o in outlines])

    def kind(shape: dict[str, Any]) -> str:
        if shape.get("label") == "__ignore__":  # LabelMe's label of what is no object
            return "__ignore__"
        return shape.get("shape_type") or "polygon"  # files of old versions do not say it

    def entry(name: str) -> Entry | None:
        try:
            content = json.loads(text(folder, name))
        except ValueError as error:
            return Entry(name, (name,), [], [f"{name}: no JSON: {error}"])
        shapes = content.get("shapes") if isinstance(content, dict) else None
        if not isinstance(shapes, list) or not all(isinstance(shape, dict) for shape in shapes):
            return None
        groups, skipped = collections.defaultdict(list), []
        for i, shape in enumerate(shapes, 1):
            if kind(shape) in ("polygon", "rectangle"):
                group = shape.get("group_id")
                groups[i if group is None else (shape.get("label"), group)].append((i, shape))
            else:
                skipped.append(kind(shape))
        rows = [(f"shape {g[0][0]}", [shape for _, shape in g]) for g in groups.values()]
        near = os.path.join(os.path.dirname(name), normal(str(content.get("imagePath"))))
        size = _size(content.get("imageHeight"), content.get("imageWidth"))
        return Entry(name, (name, near), *_objects(name, rows, parse), size, tuple(skipped))

    yield from filter(None, in_threads(folder, entry, folder.named(".json"), "labels"))


def open_images(folder: Folder, find: Find) -> Iterator[Entry]:
    """A row is an object; it is not kept if its image is not there, as most are not."""
    boxes, titles = _boxes(), {}
    for file in folder.named(".csv"):
        if "class" in os.path.basename(file).lower():
            rows = csv.reader(io.StringIO(text(folder, file)))
            titles |= {row[0]: row[1] for row in rows if len(row) == 2}

    def parse(row: dict[str, str]) -> Object:
        sides = tuple(float(row[side]) for side in ("XMin", "YMin", "XMax", "YMax"))
        if not all(-0.01 <= side <= 1.01 for side in sides):
            raise ValueError(f"{sides} are no shares of the image, from 0 to 1")
        label = titles.get(row["LabelName"], row["LabelName"])
        box = boxes.create(label=label, coords=sides)
        return Object(label, box.ltwh, [], row.get("IsGroupOf") == "1")

    for file in folder.named(".csv"):
        if not re.search(FORMS["openimages"].head, folder.head(file)):
            continue
        with tensorflow().io.gfile.GFile(folder.full(file), "rb") as lines:
            table = csv.reader(line.decode("utf-8-sig", "replace") for line in lines)
            head = next(table)
            column, objects = head.index("ImageID"), {}
            for line, row in enumerate(table, 2):
                image = row[column] if len(row) > column else ""
                if image not in objects:
                    objects[image] = [] if find((image,)) else None
                if objects[image] is not None:
                    objects[image].append((line, dict(zip(head, row, strict=False))))
        for image, rows in objects.items():
            each = _objects(file, rows or (), parse)
            yield Entry(file, (image,), *each, split=split_of(file))


def _boxes() -> Any:
    """globox's class of boxes."""
    try:
        from globox import BoundingBox
    except ImportError as error:
        raise SourceError("globox reads such labels and is missing: pip install globox") from error
    return BoundingBox


def _size(height: Any, width: Any) -> tuple[int, int] | None:
    """A size in pixels; None if it is missing or 0, as some tools write it."""
    try:
        size = int(float(height)), int(float(width))
    except (TypeError, ValueError):
        return None
    return size if min(size) > 0 else None


def _objects(
    file: str, rows: Iterable[tuple[Any, Any]], parse: Callable[[Any], Object]
) -> tuple[list[Object], list[str]]:
    """The objects of a file's rows, each with its place in words, and the faults of the others."""
    objects, faults = [], []
    for place, row in rows:
        try:
            each = parse(row)
            if not all(map(math.isfinite, itertools.chain(each.box, *each.polygons))):
                raise ValueError("a coordinate is no number")
            if any(len(polygon) < 6 for polygon in each.polygons):
                raise ValueError("a polygon of fewer than 3 points")
            objects.append(each._replace(label=each.label.strip()))
        except Exception as error:  # globox asserts, and its parsers raise what odd rows lead to
            what = f"{row.strip():.60}: " if isinstance(row, str) else ""
            what += "it has no " if isinstance(error, KeyError) else ""
            faults.append(f"{file}:{place}: {what}{one_line(error)}")
    return objects, faults


class Kind(NamedTuple):
    """How a form of labels is known and read."""

    title: str  # in messages
    ending: str  # of its label files
    each: bool  # whether an image has a label file of its own
    read: Callable[[Folder, Find], Iterator[Entry]]
    head: bytes  # the pattern of what a label file begins with
    polygon: bytes = b"$^"  # of what a file with polygons has, and `box` one with boxes
    box: bytes = b"$^"


_LINE = rb"^(?:\xef\xbb\xbf)?\s*\d+(?:\.0*)?(?:[ \t]+-?[\d.][\d.eE+-]*)"  # and more such numbers
_SHAPE = rb'"shape_type"\s*:\s*'
FORMS = {
    # A polygon has 5 points or more: 4 are an oriented box.
    "yolo": Kind(
        *("YOLO", ".txt", True, yolo, _LINE + rb"{4,}[ \t]*(?:[\r\n]|$)"),
        *(rb"(?m)" + _LINE + rb"{10,}", rb"(?m)" + _LINE + rb"{4,5}[ \t]*\r?$"),
    ),
    "voc": Kind("Pascal VOC", ".xml", True, voc, rb"<annotation[\s>]"),
    "cvat": Kind("CVAT", ".xml", False, cvat, rb"<annotations[\s>]", rb"<polygon\s", rb"<box\s"),
    "labelme": Kind(
        *("LabelMe", ".json", True, labelme, rb'"shapes"\s*:\s*\['),
        *(_SHAPE + rb'"polygon"', _SHAPE + rb'"rectangle"'),
    ),
    "openimages": Kind(
        *("Open Images", ".csv", False, open_images),
        rb"^(?:\xef\xbb\xbf)?ImageID,.*LabelName,.*XMin",
    ),
}
