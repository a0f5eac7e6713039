"""Reads labels of YOLO, Pascal VOC, CVAT, LabelMe and Open Images into COCO's form.

A label file belongs to the image of its name, beside it or in the folder that stands for its own:
labels/train/a.txt and images/train/a.jpg. globox parses the boxes; it knows neither polygons nor
images, and its readers of files take local paths only.
"""

from __future__ import annotations

import cmath
import collections
import csv
import dataclasses
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
from PIL import Image

from benchmarks.detection.coco import is_end, normal
from common import console, limits, pools
from common.data.shards import tensorflow
from common.errors import one_line
from common.images import photos
from common.preparation.folders import Folder
from common.preparation.sources import SourceError

# Folders of images and of their labels, by which the paths of the two differ.
_KINDS = {"images", "image", "jpegimages", "labels", "annotations", "xmls"}
_SPLIT = re.compile(r"(?<![a-z])(train|val|test)(?:ing|id|idation)?(?![a-z])")
_LISTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_NO_LABELS = re.compile(r"(classes|labels|readme.*|train|val|valid|test|notes)\.txt", re.IGNORECASE)
_MANY = 0.1  # of the objects; so many faults are no accident
# A class and one number; more numbers follow.
_LINE = rb"[ \t]*\d+(?:\.0*)?(?:[ \t]+-?[\d.][\d.eE+-]*)"


class Form(NamedTuple):
    """A form of labels that a folder has.

    Attributes:
        form: "yolo", "voc", "cvat", "labelme" or "openimages".
        found: which files say so.
        files: the number of label files.
        masks: whether all objects in the files that were looked at have polygons.
    """

    form: str
    found: str
    files: int
    masks: bool


class Labels(NamedTuple):
    """The labels of a folder in COCO's form.

    Attributes:
        splits: by "train" and "val", or "train" alone where the data have no split, a dict with the
            lists "images", "annotations" and "categories"; `file_name` is relative to the folder.
        notes: what is odd about the labels, each a line for the user.
    """

    splits: dict[str, dict[str, Any]]
    notes: list[str]


class _Object(NamedTuple):
    """Its box is x, y, width, height, as its polygons in pixels or as shares of the image."""

    label: str
    box: Sequence[float]
    polygons: list[list[float]]
    crowd: bool = False


@dataclasses.dataclass(frozen=True)
class _Entry:
    """What a label file says about an image.

    Attributes:
        file: the label file.
        names: where the image may be, the likeliest first; with or without an ending.
        objects: of the image.
        faults: "FILE:PLACE: REASON" of each object that cannot be read.
        size: (height, width) in pixels; None if the file does not have it.
        skipped: the kinds of the shapes that are neither boxes nor polygons.
        split: as in _LISTS, if the file says it.
    """

    file: str
    names: tuple[str, ...]
    objects: list[_Object]
    faults: list[str]
    size: tuple[int, int] | None = None
    skipped: tuple[str, ...] = ()
    split: str = ""


class _Pictures:
    """The images of a folder, by the names that labels have for them."""

    def __init__(self, folder: Folder):
        known = Image.registered_extensions().items()
        self.endings = {ending for ending, kind in known if kind in photos.FORMATS}
        self.names = folder.named(*self.endings)
        self.by_key, self.by_stem = collections.defaultdict(list), collections.defaultdict(list)
        for name in self.names:
            key = self.key(name)
            self.by_key[key].append(name)
            self.by_stem[key.rpartition("/")[2]].append(name)

    def key(self, name: str) -> str:
        """A path in lower case, without its endings and the folders that tell kinds apart."""
        *folders, base = normal(name).lower().split("/")
        stem, ending = os.path.splitext(base)
        while ending in self.endings or ending in (".txt", ".xml", ".json"):
            base = stem
            stem, ending = os.path.splitext(base)
        return "/".join([*(f for f in folders if f not in _KINDS and f != ".."), base])

    def find(self, names: Iterable[str], by_stem: bool = True) -> str | None:
        """The image of one of the names; `by_stem` in another folder, too, if only one fits."""
        for name in names:
            if rows := self.by_key.get(self.key(name)):
                base = os.path.basename(normal(name))
                return min(rows, key=lambda row: os.path.basename(row) != base)
        for name in names if by_stem else ():
            key = self.key(name)
            rows = self.by_stem.get(key.rpartition("/")[2], [])
            fits = [row for row in rows if is_end(self.key(row), key)] or rows
            if len(fits) == 1:
                return fits[0]
        return None


def forms(folder: Folder) -> list[Form]:
    """The forms of labels in a folder, from names and the heads of a few files."""
    pictures = _Pictures(folder)
    if folder.is_file or not pictures.names:
        return []
    result = []
    filled = {file.name for file in folder.files if file.size}
    for form, row in _FORMS.items():
        names = [name for name in folder.named(row.ending) if name in filled]
        beside = [name for name in names if pictures.key(name) in pictures.by_key]
        others = sorted({*names} - {*beside}, key=lambda name: (name.count("/"), name))
        heads = {name: folder.head(name) for name in (*_spread(beside), *others[:16])}
        heads = {name: head for name, head in heads.items() if row.head.search(head)}
        if not heads:
            continue
        every = heads.keys() & {*beside} and row.each
        masks = bool(row.polygon) and not any(row.box.search(head) for head in heads.values())
        masks = masks and any(row.polygon.search(head) for head in heads.values())
        number = len(beside) if every else len(heads)
        found = f"{number:,} {row.ending} files in {row.title}'s form, for one {min(heads)}"
        result.append(Form(form, found + ", with polygons" * masks, number, masks))
    return result


def _spread(names: list[str], most: int = 16) -> list[str]:
    return names[:: max(1, len(names) // most)][:most]


def read(folder: Folder, form: str) -> Labels:
    """Reads all labels of a form.

    An image without labels in a folder with labelled ones has no objects. Of the splits, test
    counts as val where there is no val.

    Raises:
        SourceError: globox is missing; no label has an image; a tenth of the objects cannot be
            read; an image has labels twice.
        tf.errors.OpError: a file cannot be read.
    """
    pictures = _Pictures(folder)
    categories, entries = _FORMS[form].read(folder, pictures)
    entries, notes = list(entries), []
    total = sum(len(entry.objects) + len(entry.faults) for entry in entries)
    faults = [fault for entry in entries for fault in entry.faults]
    if len(faults) > _MANY * total:
        raise SourceError(f"{len(faults):,} of {total:,} labels cannot be read: {faults[0]}")
    if faults:
        notes.append(f"{len(faults):,} of {total:,} labels are left out, for one {faults[0]}")
    for kind, number in collections.Counter(k for e in entries for k in e.skipped).items():
        notes.append(f"{number:,} shapes '{kind}' are left out: boxes and polygons are read")
    labelled = _matched(folder, pictures, entries, notes)
    lists = _lists(folder, form, pictures, notes)
    keys, folders = {*map(pictures.key, labelled)}, {*map(os.path.dirname, labelled)}
    rest = {
        name
        for name in pictures.names
        if os.path.dirname(name) in folders and pictures.key(name) not in keys
    }
    images = sorted({*labelled} | rest)
    sizes = _sizes(folder, [i for i in images if not (i in labelled and labelled[i].size)], notes)
    sizes |= {name: entry.size for name, entry in labelled.items() if entry.size}
    used = {o.label for entry in labelled.values() for o in entry.objects}
    names = categories or sorted(used, key=lambda label: (len(label) * label.isdigit(), label))
    if not any(entry.objects for entry in labelled.values()):
        raise SourceError(f"{folder.path}: none of the {len(entries):,} labels has an object")
    contents = {}
    for split, members in _splits(images, labelled, lists, notes).items():
        members = [name for name in members if name in sizes]
        if empty := sum(name in rest for name in members):
            notes.append(
                f"{split}: {empty:,} of {len(members):,} images have no labels: they count as "
                "images without objects; take those out that nobody has labelled"
            )
        relative = _FORMS[form].relative
        contents[split] = _content(members, labelled, sizes, names, relative)
    rows = [row for content in contents.values() for row in content["annotations"]]
    plain = sum("segmentation" not in row for row in rows)
    if 0 < plain < len(rows):
        notes.append(f"{plain:,} of {len(rows):,} objects have a box and no polygon: no masks")
    return Labels(contents, notes)


def _matched(
    folder: Folder, pictures: _Pictures, entries: list[_Entry], notes: list[str]
) -> dict[str, _Entry]:
    """The entry of each labelled image."""
    labelled: dict[str, _Entry] = {}
    missing = entries
    for by_stem in (False, True):
        entries, missing = missing, []
        for entry in entries:
            image = pictures.find(entry.names if by_stem else entry.names[:1], by_stem)
            if image is None or (by_stem and image in labelled):
                missing.append(entry)
            elif image in labelled:
                both = f"{labelled[image].file} and {entry.file}"
                raise SourceError(f"{folder.path}: {both} both label {image}: remove one of them")
            else:
                labelled[image] = entry
    if not labelled:
        first = f", for one {missing[0].file}: {missing[0].names[-1]}" if missing else ""
        raise SourceError(
            f"{folder.path} has no image for any of its {len(missing):,} labels{first}: images "
            "belong beside their labels, or in the folder images beside labels"
        )
    if missing:
        name = f"{missing[0].names[-1]} of {missing[0].file}"
        number = f"{len(missing):,} of {len(missing) + len(labelled):,}"
        notes.append(f"the images of {number} labels are not there, for one {name}")
    return labelled


def _splits(
    images: list[str],
    labelled: dict[str, _Entry],
    lists: dict[str, set[str]],
    notes: list[str],
) -> dict[str, list[str]]:
    """The images of each split: from lists, labels or folders, in this order."""

    def split(name: str) -> str:
        if lists:
            return next((key for key, members in lists.items() if name in members), "")
        entry = labelled.get(name)
        return (entry.split if entry else "") or _split_of(os.path.dirname(name))

    rows = {name: split(name) for name in images}
    train, *others = ([n for n, s in rows.items() if s == key] for key in _LISTS)
    val = next(filter(None, others), [])
    if not train or not val:
        return {"train": train if lists and train else images}
    if rest := sum(not s for s in rows.values()):
        notes.append(f"{rest:,} images are neither of train nor of val: they are left out")
    return {"train": train, "val": val}


def _split_of(path: str) -> str:
    """The last split that a path names, or ''."""
    return (_SPLIT.findall(path.lower()) or [""])[-1]


def _sizes(folder: Folder, images: list[str], notes: list[str]) -> dict[str, tuple[int, int]]:
    """(height, width) of images as EXIF turns them; those that cannot be read are missing."""

    def size(name: str) -> tuple[int, int] | str:
        try:
            return photos.sizes(folder.head(name))[-1]
        except photos.BadImage:  # or its sizes are further behind
            try:
                return photos.sizes(folder.head(name, limits.TEXT_BYTES))[-1]
            except photos.BadImage as error:
                return f"{name}: {error}"

    rows = dict(zip(images, _in_threads(folder, size, images, "images"), strict=True))
    if bad := [row for row in rows.values() if isinstance(row, str)]:
        notes.append(f"{len(bad):,} images are left out, for one {bad[0]}")
    return {name: row for name, row in rows.items() if not isinstance(row, str)}


def _content(
    images: list[str],
    labelled: dict[str, _Entry],
    sizes: dict[str, tuple[int, int]],
    names: Sequence[str],
    relative: bool,
) -> dict[str, Any]:
    """The images, annotations and categories of a split; ids count from 1."""
    ids = {name: i for i, name in enumerate(names, 1)}
    rows, annotations = [], []
    for image_id, name in enumerate(images, 1):
        height, width = sizes[name]
        rows.append({"id": image_id, "file_name": name, "height": height, "width": width})
        factors = (width, height) if relative else (1, 1)
        for label, box, polygons, crowd in labelled[name].objects if name in labelled else ():
            x, y, w, h = _scaled(box, factors)
            row = {"id": len(annotations) + 1, "image_id": image_id, "category_id": ids[label]}
            row |= {"bbox": [x, y, w, h], "area": w * h, "iscrowd": int(crowd)}
            if polygons:
                row["segmentation"] = [_scaled(polygon, factors) for polygon in polygons]
                row["area"] = sum(map(_area, row["segmentation"]))
            annotations.append(row)
    categories = [{"id": i, "name": name} for name, i in ids.items()]
    return {"images": rows, "annotations": annotations, "categories": categories}


def _scaled(values: Sequence[float], factors: tuple[int, int]) -> list[float]:
    return [value * factor for value, factor in zip(values, itertools.cycle(factors))]


def _area(polygon: list[float]) -> float:
    """The area of a polygon x, y, x, y ..."""
    points = list(zip(polygon[::2], polygon[1::2], strict=True))
    pairs = zip(points, points[1:] + points[:1], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs)) / 2


def _boxes() -> Any:
    """globox's class of boxes."""
    try:
        from globox import BoundingBox
    except ImportError as error:
        raise SourceError("globox reads such labels and is missing: pip install globox") from error
    return BoundingBox


def _in_threads(folder: Folder, work: Callable, inputs: list[str], unit: str) -> Iterator[Any]:
    """`map(work, inputs)` with the progress."""
    workers = pools.threads(folder.path)
    progress = console.ProgressBar(f"reading {folder.path}", len(inputs), unit)
    with pools.Threads(workers) as pool:
        for value in pools.ordered(pool, work, inputs, 4 * workers):
            progress.add()
            yield value


def _text(folder: Folder, name: str) -> str:
    """A text file; what is no UTF-8 becomes signs that no parser takes."""
    return folder.head(name, limits.TEXT_BYTES).decode("utf-8-sig", "replace")


def _objects(
    file: str, rows: Iterable[tuple[Any, Any]], parse: Callable[[Any], _Object]
) -> tuple[list[_Object], list[str]]:
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
            row = f"{row.strip():.60}: " if isinstance(row, str) else ""
            faults.append(f"{file}:{place}: {row}{type(error).__name__}: {one_line(error)}")
    return objects, faults


def _yolo(folder: Folder, pictures: _Pictures) -> tuple[list[str], Iterator[_Entry]]:
    """A line is a class number and x, y (of the middle), width, height, or a polygon's x, y ..."""
    boxes, (file, content) = _boxes(), _yolo_settings(folder)
    names = content.get("names", {})
    numbered = {int(number): str(name) for number, name in names.items()}

    def parse(line: str) -> _Object:
        number, *rest = line.split()
        values = [float(value) for value in rest]
        if numbered and int(float(number)) not in numbered:
            raise ValueError(f"class {number} is not among the {len(numbered)} names of {file}")
        if "kpt_shape" in content:  # key points follow the box
            values = values[:4]
        if not all(-0.01 <= value <= 1.01 for value in values):
            raise ValueError("the numbers are no shares of the image, from 0 to 1")
        label = numbered.get(int(float(number)), str(int(float(number))))
        is_box = len(values) < 6
        read_line = boxes.from_yolo_v5 if is_box else boxes.from_yolo_seg
        box = read_line(" ".join(["0", *map(str, values)]), image_size=(1, 1))
        return _Object(label, box.ltwh, [] if is_box else [values])

    def entry(name: str) -> _Entry:
        lines = enumerate(_text(folder, name).splitlines(), 1)
        rows = [(i, line) for i, line in lines if line.strip()]
        return _Entry(name, (name,), *_objects(name, rows, parse))

    texts = [n for n in folder.named(".txt") if not _NO_LABELS.fullmatch(os.path.basename(n))]
    folders = {os.path.dirname(name) for name in texts if pictures.key(name) in pictures.by_key}
    texts = [
        name
        for name in texts
        if (path := os.path.dirname(name)) in folders or "labels" in path.lower().split("/")
    ]
    return [*dict.fromkeys(numbered.values())], _in_threads(folder, entry, texts, "labels")


def _yolo_settings(folder: Folder) -> tuple[str, dict[str, Any]]:
    """(file, its content) of data.yaml or obj.data; `names` is from class numbers to names.

    Raises:
        SourceError: a data.yaml is no YAML.
    """

    def nearest(*endings: str) -> list[str]:
        usual = ("data.yaml", "obj.data", "obj.names", "classes.txt")
        names = folder.named(*endings)
        return sorted(names, key=lambda n: (os.path.basename(n) not in usual, n.count("/"), n))

    for file in nearest(".yaml", ".yml"):
        try:  # the loader that leaves all values text: `no` is a name
            content = yaml.load(_text(folder, file), Loader=yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise SourceError(
                f"{folder.full(file)} is no YAML: {' '.join(str(error).split())}"
            ) from error
        names = content.get("names") if isinstance(content, dict) else None
        if isinstance(names, list):
            return file, content | {"names": dict(enumerate(names))}
        if isinstance(names, dict) and all(str(key).isdigit() for key in names):
            return file, content
    content = {}
    for file in nearest(".data")[:1]:
        lines = (line.partition("=") for line in _text(folder, file).splitlines())
        content = {key.strip(): value.strip() for key, _, value in lines}
    for file in nearest(".names", "classes.txt")[:1]:
        names = [line.strip() for line in _text(folder, file).splitlines() if line.strip()]
        return file, content | {"names": dict(enumerate(names))}
    return "", {key: value for key, value in content.items() if key != "names"}


def _voc(folder: Folder, pictures: _Pictures) -> tuple[list[str], Iterable[_Entry]]:
    """A difficult object counts neither for nor against a model, as a crowd in COCO's score."""
    boxes = _boxes()

    def parse(node: ElementTree.Element) -> _Object:
        box, difficult = boxes.from_xml(node), node.findtext("difficult", "0")
        return _Object(box.label, box.ltwh, [], difficult.strip() == "1")

    def entry(name: str) -> _Entry | None:
        try:
            root = ElementTree.fromstring(folder.head(name, limits.TEXT_BYTES))
        except ElementTree.ParseError as error:
            return _Entry(name, (name,), [], [f"{name}: no XML: {error}"])
        if root.tag != "annotation":
            return None
        near = os.path.join(os.path.dirname(name), root.findtext("filename", "").strip())
        size = _size(root.findtext("size/height"), root.findtext("size/width"))
        rows = ((f"object {i}", node) for i, node in enumerate(root.iter("object"), 1))
        return _Entry(name, (name, near), *_objects(name, rows, parse), size)

    return [], filter(None, _in_threads(folder, entry, folder.named(".xml"), "labels"))


def _size(height: Any, width: Any) -> tuple[int, int] | None:
    """A size in pixels; None if it is missing or 0, as some tools write it."""
    try:
        size = int(float(height)), int(float(width))
    except (TypeError, ValueError):
        return None
    return size if min(size) > 0 else None


def _outlined(label: Any, points: list[Any]) -> _Object:
    """An object of a polygon's points."""
    box = _boxes().from_labelme({"label": label, "points": points})
    return _Object(box.label, box.ltwh, [[float(value) for point in points for value in point]])


def _cvat(folder: Folder, pictures: _Pictures) -> tuple[list[str], Iterator[_Entry]]:
    boxes = _boxes()

    def parse(node: ElementTree.Element) -> _Object:
        if node.tag == "polygon":
            points = [point.split(",") for point in node.attrib["points"].split(";")]
            return _outlined(node.attrib["label"], [[float(x), float(y)] for x, y in points])
        box = boxes.from_cvat(node)
        turn = cmath.exp(1j * math.radians(float(node.get("rotation", 0))))
        if turn == 1:
            return _Object(box.label, box.ltwh, [])
        corners = [complex(x, y) for x in (box.xmin, box.xmax) for y in (box.ymin, box.ymax)]
        middle = complex(box.xmid, box.ymid)
        corners = [middle + (corner - middle) * turn for corner in corners]
        upright = boxes.from_labelme(
            {"label": box.label, "points": [[c.real, c.imag] for c in corners]}
        )
        return _Object(box.label, upright.ltwh, [])

    def entries() -> Iterator[_Entry]:
        for file in folder.named(".xml"):
            if not _FORMS["cvat"].head.search(folder.head(file)):
                continue
            data = io.BytesIO(folder.head(file, limits.ANNOTATION_BYTES))
            try:
                for _, node in ElementTree.iterparse(data):
                    if node.tag == "track":
                        fix = "export it again as 'CVAT for images 1.1'"
                        raise SourceError(f"{folder.full(file)} is 'CVAT for video': {fix}")
                    if node.tag == "image":
                        yield entry(file, node)
                        node.clear()
            except ElementTree.ParseError as error:
                raise SourceError(f"{folder.full(file)} is damaged: {error}") from error

    def entry(file: str, node: ElementTree.Element) -> _Entry:
        name, number = node.get("name", ""), node.get("id", "")
        shapes = [child for child in node if child.tag in ("box", "polygon")]
        rows = ((f"image {number}, shape {i}", shape) for i, shape in enumerate(shapes, 1))
        skipped = tuple(c.tag for c in node if c not in shapes and c.tag != "tag")
        names = (os.path.join(os.path.dirname(file), name), name)
        size = _size(node.get("height"), node.get("width"))
        split = _split_of(node.get("subset", ""))
        return _Entry(file, names, *_objects(file, rows, parse), size, skipped, split)

    return [], entries()


def _labelme(folder: Folder, pictures: _Pictures) -> tuple[list[str], Iterable[_Entry]]:
    """Shapes of one label and one group are an object of several polygons."""
    boxes = _boxes()

    def parse(shapes: list[dict[str, Any]]) -> _Object:
        points = [point for shape in shapes for point in shape["points"]]
        box = boxes.from_labelme({"label": shapes[0]["label"], "points": points})
        parts = [_outlined("", s["points"]).polygons[0] for s in shapes if kind(s) == "polygon"]
        return _Object(box.label, box.ltwh, parts)

    def kind(shape: dict[str, Any]) -> str:
        return shape.get("shape_type") or "polygon"  # files of old versions do not say it

    def entry(name: str) -> _Entry | None:
        try:
            content = json.loads(_text(folder, name))
        except ValueError as error:
            return _Entry(name, (name,), [], [f"{name}: no JSON: {error}"])
        if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
            return None
        groups, skipped = collections.defaultdict(list), []
        for i, shape in enumerate(content["shapes"], 1):
            if kind(shape) not in ("polygon", "rectangle"):
                skipped.append(kind(shape))
                continue
            group = shape.get("group_id")
            groups[i if group is None else (shape.get("label"), group)].append((i, shape))
        rows = [(f"shape {g[0][0]}", [shape for _, shape in g]) for g in groups.values()]
        near = os.path.join(os.path.dirname(name), normal(str(content.get("imagePath"))))
        size = _size(content.get("imageHeight"), content.get("imageWidth"))
        return _Entry(name, (name, near), *_objects(name, rows, parse), size, tuple(skipped))

    return [], filter(None, _in_threads(folder, entry, folder.named(".json"), "labels"))


def _open_images(folder: Folder, pictures: _Pictures) -> tuple[list[str], Iterator[_Entry]]:
    """A row is an object; those of images that are not there are not kept."""
    boxes = _boxes()
    files = folder.named(".csv")
    tables = [file for file in files if _FORMS["openimages"].head.search(folder.head(file))]
    titles = {}
    for file in files:
        if "class" in os.path.basename(file).lower():
            rows = csv.reader(io.StringIO(_text(folder, file)))
            titles |= {row[0]: row[1] for row in rows if len(row) == 2}

    def parse(row: dict[str, str]) -> _Object:
        sides = tuple(float(row[side]) for side in ("XMin", "YMin", "XMax", "YMax"))
        if not all(-0.01 <= side <= 1.01 for side in sides):
            raise ValueError(f"{sides} are no shares of the image, from 0 to 1")
        label = titles.get(row["LabelName"], row["LabelName"])
        box = boxes.create(label=label, coords=sides, relative=True, image_size=(1, 1))
        return _Object(label, box.ltwh, [], row.get("IsGroupOf") == "1")

    def entries() -> Iterator[_Entry]:
        for file in tables:
            rows: dict[str, list | None] = {}
            with tensorflow().io.gfile.GFile(folder.full(file)) as lines:
                table = csv.reader(lines)
                head = [title.strip("\ufeff ") for title in next(table)]
                column = head.index("ImageID")
                for line, row in enumerate(table, 2):
                    image = row[column] if len(row) > column else ""
                    if image not in rows:
                        rows[image] = [] if pictures.find((image,)) else None
                    if (known := rows[image]) is not None:
                        known.append((line, dict(zip(head, row, strict=False))))
            split = _split_of(file)
            for image, known in rows.items():
                yield _Entry(file, (image,), *_objects(file, known or (), parse), split=split)

    return [], entries()


def _lists(folder: Folder, form: str, pictures: _Pictures, notes: list[str]) -> dict[str, set[str]]:
    """The images of each split where a file lists them; {} where none does."""
    read_lists = {"voc": _voc_lists, "yolo": _yolo_lists}.get(form)
    rows = read_lists(folder, pictures) if read_lists else {}
    lists = {split: {image for _, image in row if image} for split, row in rows.items()}
    missing = [name for key in ("train", "val") for name, image in rows.get(key, ()) if not image]
    if missing:
        end = "" if lists["train"] else ", and folders' names decide which image is of which split"
        number = f"{len(missing):,} images or folders"
        notes.append(f"{number} of the lists of splits are not there, for one {missing[0]}{end}")
    if lists.get("train", set()) & lists.get("val", set()):
        notes.append("the lists of train and val have images in common: they are not used")
        return {"train": lists["train"] | lists["val"]}
    return lists if lists.get("train") else {}


_Listed = dict[str, list[tuple[str, str | None]]]  # of each split names and their images


def _voc_lists(folder: Folder, pictures: _Pictures) -> _Listed:
    """ImageSets/Main/SPLIT.txt has the names of images without endings."""
    rows: _Listed = collections.defaultdict(list)
    for file in folder.named(".txt"):
        if match := re.fullmatch(r"(?i)(.*?)/?ImageSets/Main/(train|val|trainval|test)\.txt", file):
            for name in filter(None, map(str.strip, _text(folder, file).splitlines())):
                image = pictures.find((os.path.join(match[1], name),), by_stem=False)
                rows[match[2].lower()].append((name, image))
    known = {*rows["train"], *rows["val"]}
    both = [row for row in rows.pop("trainval", []) if row not in known]
    if not rows["train"] or not rows["val"]:
        rows["val" if rows["train"] else "train"] += both
    return rows


def _yolo_lists(folder: Folder, pictures: _Pictures) -> _Listed:
    """The values train, val and test are folders, files with lists of images, or lists of both.

    The paths are often those of another machine: the longest end that is here counts.
    """
    file, content = _yolo_settings(folder)
    above, texts = os.path.dirname(file), {*folder.named(".txt")}
    folders = collections.defaultdict(list, {"": pictures.names})
    for name in pictures.names:
        path = name
        while path := os.path.dirname(path):
            folders[path].append(name)

    def images(value: str) -> list[tuple[str, str | None]]:
        parts = [part for part in normal(value).split("/") if part not in ("..", ".", "")]
        ends = ["/".join(parts[i:]) for i in range(len(parts))] or [""]
        for path in (os.path.join(base, end) for end in ends for base in (above, "")):
            if path.rstrip("/") in folders:
                return [(name, name) for name in folders[path.rstrip("/")]]
            if path in texts:
                lines = filter(None, map(str.strip, _text(folder, path).splitlines()))
                return [(name, pictures.find((os.path.join(above, name), name))) for name in lines]
        return [(f"{value} of {file}", None)]

    rows: _Listed = {}
    for split, keys in _LISTS.items():
        usual = [f"{key}.txt" for key in keys if f"{key}.txt" in texts]
        value = next((content[key] for key in keys if content.get(key)), usual)
        values = value if isinstance(value, list) else [value]
        path = str(content.get("path") or "")
        rows[split] = [row for v in values for row in images(os.path.join(path, str(v)))]
    return rows


class _Row(NamedTuple):
    """How a form is known and read.

    Attributes:
        title: its name in messages.
        ending: of its label files.
        head: what the beginning of a label file has.
        read: (names of the categories in their order, or [] for those of the objects; entries).
        each: whether an image has a label file of its own.
        relative: whether boxes are shares of the image.
        polygon: what a file with polygons has, and `box` one with boxes.
    """

    title: str
    ending: str
    head: re.Pattern[bytes]
    read: Callable[[Folder, _Pictures], tuple[list[str], Iterable[_Entry]]]
    each: bool = True
    relative: bool = False
    polygon: re.Pattern[bytes] | None = None
    box: re.Pattern[bytes] | None = None


_FORMS = {
    "yolo": _Row(
        "YOLO",
        ".txt",
        re.compile(rb"\A(?:\xef\xbb\xbf)?\s*" + _LINE + rb"{4,}[ \t]*(?:[\r\n]|\Z)"),
        _yolo,
        relative=True,
        polygon=re.compile(
            rb"(?m)^" + _LINE + rb"{10,}"
        ),  # those of four points are oriented boxes
        box=re.compile(rb"(?m)^" + _LINE + rb"{4,5}[ \t]*\r?$"),
    ),
    "voc": _Row("Pascal VOC", ".xml", re.compile(rb"<annotation[\s>]"), _voc),
    "cvat": _Row(
        "CVAT",
        ".xml",
        re.compile(rb"<annotations[\s>]"),
        _cvat,
        each=False,
        polygon=re.compile(rb"<polygon\s"),
        box=re.compile(rb"<box\s"),
    ),
    "labelme": _Row(
        "LabelMe",
        ".json",
        re.compile(rb'"shapes"\s*:\s*\['),
        _labelme,
        polygon=re.compile(rb'"shape_type"\s*:\s*"polygon"'),
        box=re.compile(rb'"shape_type"\s*:\s*"rectangle"'),
    ),
    "openimages": _Row(
        "Open Images",
        ".csv",
        re.compile(rb'ImageID"?,.*LabelName"?,.*XMin'),
        _open_images,
        each=False,
        relative=True,
    ),
}
