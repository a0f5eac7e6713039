"""What the label files of YOLO, Pascal VOC, CVAT and LabelMe say about images.

globox parses the boxes. Its readers of folders drop polygons, take local paths only, and end at the
first mistake without naming its file.
"""

import collections
import contextlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from benchmarks.detection.coco import is_end, normal
from common import limits
from common.errors import one_line, parse_json
from common.images import photos
from common.preparation import splits
from common.preparation.folders import Folder
from common.preparation.sources import SourceError
from common.text import decoded, text_lines

# Folders of images and of their labels, by which the paths of the two differ.
_KINDS = {"images", "image", "jpegimages", "labels", "annotations", "xmls", ".."}
_NUMBERS = rb"(?:[ \t]+-?[\d.][\d.eE+-]*)"
_YOLO = rb"^(?:\xef\xbb\xbf)?\s*\d+(?:\.0*)?" + _NUMBERS + rb"{4,}[ \t]*(?:[\r\n]|$)"
_LINES = rb"(?m)^\s*\d+(?:\.0*)?" + _NUMBERS + rb"{4,5}(" + _NUMBERS + rb"{5,})?[ \t]*\r?$"
_VOC, _CVAT, _LABELME = rb"<annotation[\s>]", rb"<annotations[\s>]", rb'"shapes"\s*:\s*\['
_MOST = 0.95  # of the rows: so many say what all are


class Images:
    """The images of a folder, by the names that labels have for them."""

    def __init__(self, folder: Folder):
        known = Image.registered_extensions().items()
        endings = [ending for ending, kind in known if kind in photos.FORMATS]
        self.names = folder.named(*endings)
        every = "|".join(ending[1:] for ending in [*endings, ".txt", ".xml", ".json"])
        self._endings = re.compile(rf"(\.({every}))+$")
        self._by_key, self._by_stem = collections.defaultdict(list), collections.defaultdict(list)
        for name in self.names:
            key = self.key(name)
            self._by_key[key].append(name)
            self._by_stem[os.path.basename(key)].append(name)

    def key(self, name: str) -> str:
        """A path in lower case, without its endings and the folders that tell kinds apart."""
        parts = self._endings.sub("", normal(name).lower()).split("/")
        return "/".join([*(part for part in parts[:-1] if part not in _KINDS), parts[-1]])

    def find(self, *names: str) -> tuple[int, str] | None:
        """The image of the first name that fits, with 0 for the first one, else a larger number.

        If none fits, an image in another folder is taken if it is the only one of its name.
        """
        keys = [self.key(name) for name in names]
        for i, (name, key) in enumerate(zip(names, keys, strict=True)):
            if rows := self._by_key.get(key):  # a.jpg and a.png
                base = os.path.basename(normal(name)).lower()
                return i, max(rows, key=lambda row: os.path.basename(row).lower() == base)
        for i, key in enumerate(keys, len(keys)):
            parts = {"", split_of(os.path.dirname(key))}
            rows = self._by_stem.get(os.path.basename(key), [])
            rows = [r for r in rows if len(parts | {split_of(os.path.dirname(r))}) < 3]
            rows = [row for row in rows if is_end(self.key(row), key)] or rows
            if len(rows) == 1:
                return i, rows[0]
        return None


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


class Settings(NamedTuple):
    """YOLO's data.yaml, or a list of classes without one."""

    file: str = ""
    names: Mapping[int, str] = {}  # of the classes
    content: Mapping[str, Any] = {}  # of data.yaml
    shapes: str = ""  # what `yolo_shapes` says


def split_of(path: str) -> str:
    """The split that the innermost such part of a path names, as `splits.split_of`."""
    return next(filter(None, map(splits.split_of, path.split("/")[::-1])), "")


def text(folder: Folder, name: str) -> str:
    """A text file; SourceError if its encoding is not known."""
    return decoded(folder.head(name, limits.TEXT_BYTES), folder.full(name), SourceError)


def yolo_settings(folder: Folder, heads: Iterable[bytes]) -> Settings:
    """The settings of the uppermost data.yaml with names, else of a list of classes.

    `heads` are the first bytes of label files. SourceError if a .yaml with names is no YAML, or the
    file's encoding is not known.
    """
    import yaml

    lists = folder.named(".names", ".labels", "classes.txt")  # of darknet and LabelImg
    files = [*folder.named(".yaml", ".yml"), *lists]
    shapes = yolo_shapes(heads)
    for file in sorted(files, key=lambda name: (name in lists, name.count("/"), name)):
        if file in lists:
            return Settings(file, dict(enumerate(text_lines(text(folder, file)))), {}, shapes)
        if not re.search(rb"n\0?a\0?m\0?e\0?s", folder.head(file, limits.TEXT_BYTES)):  # or UTF-16
            continue
        try:  # the loader that leaves all values text: `no` is a name
            content = yaml.load(text(folder, file), Loader=yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise SourceError(f"{folder.full(file)} is not YAML: {one_line(error)}") from error
        names = content.get("names") if isinstance(content, dict) else None
        names = dict(enumerate(names)) if isinstance(names, list) else names
        if isinstance(names, dict) and all(str(key).isdigit() for key in names):
            shapes = "key points" if "kpt_shape" in content else shapes
            return Settings(file, {int(k): str(name) for k, name in names.items()}, content, shapes)
    return Settings(shapes=shapes)


def yolo_shapes(heads: Iterable[bytes]) -> str:
    """What numbers behind the class mean in YOLO's label files, from what these begin with.

    "key points" follow a box, "corners" are of boxes in any direction, which people also draw as
    outlines; "" are outlines or boxes alone.
    """
    rows = []
    for line in itertools.chain(*(re.split(rb"[\r\n]+", head) for head in heads)):
        with contextlib.suppress(ValueError):
            if re.match(_YOLO, line) and len(values := [*map(float, line.split()[1:])]) > 5:
                rows.append(values)
    length, number = collections.Counter(map(len, rows)).most_common(1)[0] if rows else (0, 0)
    if number <= _MOST * len(rows):  # outlines have as many points as they need
        return ""
    table = np.array([row for row in rows if len(row) == length])
    if (table[:, :2] == table[:, -2:]).all(1).mean() > 0.5:  # closed outlines
        return ""
    if length == 8:
        return "corners"
    middle, half = table[:, None, :2], table[:, None, 2:4] / 2
    fits = (middle - half >= -0.01) & (middle + half <= 1.01)
    for size in (2, 3):  # of a key point, without or with a number that says whether it is seen
        if (length - 4) % size == 0:
            points = table[:, 4:].reshape(number, -1, size)
            xy, seen = points[..., :2], points[..., 2:]
            is_inside = fits & ((abs(xy - middle) <= half + 0.01) | (xy == 0))
            is_seen = size == 3 and np.isin(seen, (0, 1, 2)).all()
            if is_seen or is_inside.all((1, 2)).mean() >= _MOST:
                return "key points"
    return ""


class NoBoxError(Exception):
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
        self.notes: dict[str, None] = {}  # what is odd about the files, each a line, in order

    def _parsed(self, file: str, pattern: bytes, parse: Callable[[str], Any]) -> Any:
        """The content of a file with the pattern, else None; SourceError if it is not decoded."""
        data = self._folder.head(file, limits.ANNOTATION_BYTES)
        if not re.search(pattern, data):
            return None
        return parse(decoded(data, self._folder.full(file), SourceError))

    def yolo(self, file: str) -> Iterator[Entry]:
        """A line is a class number and x, y (of the middle), width, height, or a polygon."""
        if re.match(_YOLO, self._folder.head(file)) or self._has_image(file):
            lines = text_lines(text(self._folder, file))
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
            yield entry(file, names, rows, self._cvat, size=size, split=split_of(subset))

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
        label, kind = shapes[0]["label"], shapes[0].get("shape_type") or "polygon"
        if kind not in ("polygon", "rectangle") or label == "__ignore__":  # which is no object
            raise NoBoxError("__ignore__" if label == "__ignore__" else kind)
        outlines = [shape["points"] for shape in shapes]
        points = [point for outline in outlines for point in outline]
        return self._outlined(label, points, outlines if kind == "polygon" else [])

    def _outlined(self, label: str, points: list, outlines: list[list]) -> Object:
        box = self._boxes.from_labelme({"label": label, "points": points})
        polygons = [[float(x) for point in outline for x in point] for outline in outlines]
        return Object(box.label, box.ltwh, polygons)


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
    """The entry with the objects of rows (place, content); `more` are its last fields."""
    objects, problems, skipped = [], [], []
    for place, row in rows:
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
            problems.append(f"{file}:{place}: {what}{one_line(error)}")
    return Entry(file, names, objects, problems, skipped, **more)


class Kind(NamedTuple):
    """How a form of labels is known and read."""

    title: str  # in messages
    ending: str  # of its label files
    read: Callable[[Any, str], Iterator[Entry]]  # a method of a reader
    head: bytes  # the pattern of what a label file begins with
    shape: bytes = b"(?!)"  # of a box or a polygon; of a polygon it has a group


_SHAPES = rb'"shape_type"\s*:\s*"(?:rectangle|(polygon))"'
FORMS = {
    "yolo": Kind("YOLO's", ".txt", Reader.yolo, _YOLO, _LINES),
    "voc": Kind("Pascal VOC's", ".xml", Reader.voc, _VOC),
    "cvat": Kind("CVAT's", ".xml", Reader.cvat, _CVAT, rb"<(?:box|(polygon))\s"),
    "labelme": Kind("LabelMe's", ".json", Reader.labelme, _LABELME, _SHAPES),
}
