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
    """An object of an image.

    Attributes:
        label: the name of its category.
        box: x, y, width, height in pixels, of YOLO and Open Images as shares of the image.
        polygons: x, y, x, y ... of each, in the same unit.
        crowd: whether it counts neither for nor against a model.
    """

    label: str
    box: Sequence[float]
    polygons: list[list[float]]
    crowd: bool = False


class Entry(NamedTuple):
    """What a label file says about an image.

    Attributes:
        file: the label file.
        names: where the image may be, the likeliest first; with or without an ending.
        objects: of the image.
        faults: "FILE:PLACE: REASON" of each object that cannot be read.
        size: (height, width) in pixels; None if the file does not have it.
        skipped: the kinds of the shapes that are neither upright boxes nor polygons.
        split: "train", "val" or "test", if the file says it.
    """

    file: str
    names: tuple[str, ...]
    objects: list[Object]
    faults: list[str]
    size: tuple[int, int] | None = None
    skipped: tuple[str, ...] = ()
    split: str = ""


def split_of(path: str) -> str:
    """The last split that a path names, or ''."""
    return (_SPLIT.findall(path.lower()) or [""])[-1]


def in_threads(folder: Folder, work: Callable, names: list[str], unit: str) -> Iterator[Any]:
    """`map(work, names)` with the progress."""
    workers = pools.threads(folder.path)
    progress = console.ProgressBar(f"reading {folder.path}", len(names), unit)
    with pools.Threads(workers) as pool:
        for value in pools.ordered(pool, work, names, 4 * workers):
            progress.add()
            yield value


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
        try:  # the loader that leaves all values text: `no` is a name
            content = yaml.load(text(folder, file), Loader=yaml.BaseLoader)
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
    for file in nearest(".names", "classes.txt")[:1]:
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
            raise ValueError(f"class {number:.0f} is not among the {len(names)} of {settings}")
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


def voc(folder: Folder, find: Find) -> Iterator[Entry]:
    """A difficult object counts neither for nor against a model, as a crowd in COCO's score."""
    del find
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


def cvat(folder: Folder, find: Find) -> Iterator[Entry]:
    """Of "CVAT for images 1.1"; a turned box has no place in COCO's form."""
    del find
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
        if not FORMS["cvat"].head.search(folder.head(file)):
            continue
        try:
            data = io.BytesIO(folder.head(file, limits.ANNOTATION_BYTES))
            for _, node in ElementTree.iterparse(data):
                if node.tag == "track":
                    fix = "export it again as 'CVAT for images 1.1'"
                    raise SourceError(f"{folder.full(file)} is 'CVAT for video': {fix}")
                if node.tag == "image":
                    yield entry(file, node)
                    node.clear()
        except ElementTree.ParseError as error:
            raise SourceError(f"{folder.full(file)} is damaged or cut short: {error}") from error


def labelme(folder: Folder, find: Find) -> Iterator[Entry]:
    """Shapes of one label and one group are an object, of several polygons."""
    del find
    boxes = _boxes()

    def parse(shapes: list[dict[str, Any]]) -> Object:
        points = [point for shape in shapes for point in shape["points"]]
        box = boxes.from_labelme({"label": shapes[0]["label"], "points": points})
        outlines = [shape["points"] for shape in shapes if kind(shape) == "polygon"]
        return Object(box.label, box.ltwh, [[float(x) for p in o for x in p] for o in outlines])

    def kind(shape: dict[str, Any]) -> str:
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
        if not FORMS["openimages"].head.search(folder.head(file)):
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
    """How a form of labels is known and read.

    Attributes:
        title: its name in messages.
        ending: of its label files.
        each: whether an image has a label file of its own.
        read: its reader.
        head: what a label file begins with.
        polygon: what a file with polygons has, and `box` one with boxes, where a form has both.
    """

    title: str
    ending: str
    each: bool
    read: Callable[[Folder, Find], Iterator[Entry]]
    head: re.Pattern[bytes]
    polygon: re.Pattern[bytes] | None = None
    box: re.Pattern[bytes] | None = None


_LINE = rb"(?:\A\xef\xbb\xbf)?[ \t]*\d+(?:\.0*)?(?:[ \t]+-?[\d.][\d.eE+-]*)"  # and one number
FORMS = {
    "yolo": Kind(
        *("YOLO", ".txt", True, yolo),
        re.compile(rb"\A\s*" + _LINE + rb"{4,}[ \t]*(?:[\r\n]|\Z)"),
        re.compile(rb"(?m)^" + _LINE + rb"{10,}"),  # four points are an oriented box
        re.compile(rb"(?m)^" + _LINE + rb"{4,5}[ \t]*\r?$"),
    ),
    "voc": Kind("Pascal VOC", ".xml", True, voc, re.compile(rb"<annotation[\s>]")),
    "cvat": Kind(
        *("CVAT", ".xml", False, cvat),
        re.compile(rb"<annotations[\s>]"),
        re.compile(rb"<polygon\s"),
        re.compile(rb"<box\s"),
    ),
    "labelme": Kind(
        *("LabelMe", ".json", True, labelme),
        re.compile(rb'"shapes"\s*:\s*\['),
        re.compile(rb'"shape_type"\s*:\s*"polygon"'),
        re.compile(rb'"shape_type"\s*:\s*"rectangle"'),
    ),
    "openimages": Kind(
        *("Open Images", ".csv", False, open_images),
        re.compile(rb"\A(?:\xef\xbb\xbf)?ImageID,.*LabelName,.*XMin"),
    ),
}
