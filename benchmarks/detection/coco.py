"""COCO's annotations: images, categories and objects, the outline of each object, and odd labels.

An outline is the field `segmentation` of an object: polygons, or the run lengths of a mask. A file
that cannot be used is refused (DataError); `oddities` and `weaknesses` tell what spoils the score
or the training of one that can be read.
"""

import array
import collections
import dataclasses
import hashlib
import os
import posixpath
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from common.errors import DataError, count, one_line, parse_json, some
from common.text import decoded

# Where a folder of records may have the annotations of the evaluation; the second is Google's.
FILES = "instances_val*.json,raw-data/annotations/instances_val*.json"
_INT32 = 2**31
_LARGEST_COORDINATE = 1e9  # in pixels, either way
_TINY, _FEW_TINY = 8, 0.05  # pixels, and the share of the objects that may be smaller
_FEW = 20  # objects of a category
_SSD_SIDE, _MASK_SIDES = 300, np.array([800, 1333])  # sides of the recipes' images

Finding = tuple[str, str, str]  # status "warn", text and fix


@dataclasses.dataclass(frozen=True, eq=False)
class Annotations:
    """The n images, the categories and the m objects of an `instances_*.json`."""

    path: str  # the file, for messages
    digest: str  # SHA-256 of the file, in hexadecimal
    # (id, name), sorted by id; class c of the training, counted from 1, is `categories[c - 1]`
    categories: tuple[tuple[int, str], ...]
    image_ids: np.ndarray  # int64[n], in the order of the file; unique, and each fits int32
    sizes: np.ndarray  # int64[n, 2], height and width in pixels
    file_names: list[str]
    rows: np.ndarray  # int64[m], which image each object is in: an index into `image_ids`
    category_ids: np.ndarray  # int64[m]
    boxes: np.ndarray  # float64[m, 4]: x, y, width and height in pixels, as the file has them
    areas: np.ndarray  # float64[m], of the outlines in square pixels; without one, of the boxes
    crowd: np.ndarray  # bool[m]
    # For each object its polygons (a list of sequences x, y, x, y ...) or its run-length encoding
    # (a dict); [] unless they were asked for
    outlines: list[Any]

    @classmethod
    def load(cls, path: str, masks: bool = False) -> "Annotations":
        """Reads a file, local or gs://; `masks` keeps the outlines."""
        try:
            data = epath.Path(path).read_bytes()
        except Exception as error:  # gs:// raises TensorFlow's classes
            raise DataError(f"cannot read the annotations {path}: {one_line(error)}") from error
        return cls.parse(data, path, masks)

    @classmethod
    def parse(cls, data: bytes, path: str, masks: bool = False) -> "Annotations":
        """Reads the bytes of a file; `path` is its name in messages."""
        content = _decode(data, path, masks)
        file_names, image_ids, sizes = _images(content["images"], path)
        named = _listed(content["categories"], path, ("category", "categories"), "name")
        categories = tuple(sorted((number, name) for number, name, _ in named))
        row_of = {image_id: row for row, image_id in enumerate(image_ids)}
        objects = _objects(content["annotations"], path, row_of, dict(categories))
        columns = list(zip(*objects, strict=True)) or [()] * 6
        rows, labels, corners, areas, crowd, outlines = columns
        if masks:
            for i, (row, outline) in enumerate(zip(rows, outlines, strict=True)):
                if error := outline_error(outline, *sizes[row]):
                    name = _name(content["annotations"][i], i)
                    raise DataError(f"{path}: {name}, of image {image_ids[row]}, {error}")
        return cls(
            path=path,
            digest=hashlib.sha256(data).hexdigest(),
            categories=categories,
            image_ids=np.array(image_ids, np.int64),
            sizes=np.array(sizes, np.int64).reshape(-1, 2),
            file_names=file_names,
            rows=np.array(rows, np.int64),
            category_ids=np.array(labels, np.int64),
            boxes=np.array(corners, np.float64).reshape(-1, 4),
            areas=np.array(areas, np.float64),
            crowd=np.array(crowd, bool),
            outlines=list(outlines) if masks else [],
        )

    def listed(self, paths: Sequence[str]) -> list[int | None]:
        """The row of the image for each path of a picture; None unless exactly one image fits.

        A `file_name` may have more or fewer folders in front than the path.
        """
        by_base: dict[str, list[int]] = {}
        for row, name in enumerate(self.file_names):
            by_base.setdefault(os.path.basename(normal(name)), []).append(row)
        fitting = []
        for path in paths:
            same_base = by_base.get(os.path.basename(path), ())
            fitting.append([r for r in same_base if is_end(normal(self.file_names[r]), path)])
        times = collections.Counter(row for rows in fitting for row in rows)
        return [rows[0] if len(rows) == 1 and times[rows[0]] == 1 else None for rows in fitting]


def normal(name: str) -> str:
    """A `file_name` as a relative path; some tools write paths of Windows."""
    return posixpath.normpath(name.replace("\\", "/")).lstrip("/")


def is_end(path: str, name: str) -> bool:
    """Whether one path ends with the other one."""
    short, long = sorted((path, name), key=len)
    return f"/{long}".endswith(f"/{short}")


def _decode(data: bytes, path: str, masks: bool) -> dict[str, list]:
    """The three lists of a file.

    Objects become tuples of the needed values while the file is read: as dicts, the objects in
    COCO's training images take 2 GB.
    """

    def compact(fields: dict[str, Any]) -> Any:
        if "bbox" in fields and ("image_id" in fields or "file_name" not in fields):
            names = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
            outline = dense_outline(fields.get("segmentation")) if masks else None
            return (*map(fields.get, names), outline)
        if "file_name" in fields or "coco_url" in fields:
            names = ("id", "file_name", "height", "width")
            row = {"file_name": posixpath.basename(str(fields.get("coco_url") or ""))}  # LVIS
            return row | {name: fields[name] for name in names if name in fields}
        return fields

    try:
        content = parse_json(decoded(data, path), object_hook=compact)
    except ValueError as error:
        raise DataError(f"{path} is damaged or no JSON ({one_line(error)})") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(
                f"{path} has no list '{key}', so it does not describe objects in COCO's form: "
                "give an instances_*.json"
            )
    return content


def _images(rows: list[Any], path: str) -> tuple[list[str], list[int], list[tuple[int, int]]]:
    """(file names, ids, (height, width)) of the images; DataError names the first error."""
    names, ids, sizes = [], [], []
    for image_id, name, row in _listed(rows, path, ("image", "images"), "file_name"):
        size: Any = row.get("height"), row.get("width")
        if not all(type(number) is int and 0 < number < _INT32 for number in size):
            raise DataError(
                f"{path}: image {image_id} ({name}) needs a height and width that are "
                f"integers of 1 or more, but has {size[0]!r} and {size[1]!r}"
            )
        names.append(name)
        ids.append(image_id)
        sizes.append(size)
    return names, ids, sizes


def _listed(
    rows: list[Any], path: str, nouns: tuple[str, str], name_key: str
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(id, name, row) of each image or category; DataError names the first error.

    `nouns` are the word for one row and for several.
    """
    one, several = nouns
    seen = set()
    for i, row in enumerate(rows):
        row = row if isinstance(row, dict) else {}
        number: Any = row.get("id")
        name = row.get(name_key)
        if type(number) is not int or not -_INT32 <= number < _INT32:
            raise DataError(
                f"{path}: the id of {one} {i} (counted from 0) is {number!r}, not an integer "
                "of 32 bits: number them from 1"
            )
        if number in seen:
            raise DataError(f"{path}: {one} id {number} occurs more than once")
        if not isinstance(name, str) or not name:
            raise DataError(f"{path}: {one} {number} has no {name_key}")
        seen.add(number)
        yield number, name, row
    if not rows:
        raise DataError(f"{path} lists no {several}")


def _objects(
    rows: list[Any], path: str, row_of: dict[int, int], categories: dict[int, str]
) -> list[tuple[int, int, list[float], float, bool, Any]]:
    """(image row, category id, box, area, crowd, outline) of each object.

    Objects without an area get the area of their box. DataError names the first error.
    """
    objects = []
    for i, row in enumerate(rows):
        if type(row) is not tuple:
            raise DataError(f"{path}: {_name(row, i)} has no bbox")
        _, image_id, category, box, area, crowd, outline = row
        if type(image_id) is not int or image_id not in row_of:
            error = f"is of image {image_id!r}, which is not among the {len(row_of):,} images"
        elif type(category) is not int or category not in categories:
            error = f"is of category {category!r}, which is not among the {len(categories):,}"
        elif not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
            numbers = "four numbers of pixels, [x, y, width, height]"
            error = f"of image {image_id} has bbox {box!r:.200} instead of {numbers}"
        elif crowd not in (None, 0, 1):
            error = f"has iscrowd {crowd!r} instead of 0 or 1"
        else:
            area = float(area) if is_number(area) else float(box[2]) * float(box[3])
            objects.append((row_of[image_id], category, box, area, bool(crowd), outline))
            continue
        raise DataError(f"{path}: {_name(row, i)} {error}")
    return objects


def _name(row: Any, i: int) -> str:
    """The i-th object in words: by its id, else by its index."""
    number = row[0] if isinstance(row, tuple) else row.get("id") if isinstance(row, dict) else None
    return f"annotation {i} (counted from 0)" if number is None else f"annotation {number}"


def outline_error(outline: Any, height: int, width: int) -> str:
    """What is wrong with an object's polygons or run-length encoding; '' if nothing is.

    pycocotools allocates memory for these numbers without checking them.
    """
    pixels, side = f"{height}x{width} pixels", max(height, width)
    if isinstance(outline, dict):
        counts = outline.get("counts")
        if not isinstance(counts, (list, str, bytes)):
            return "has a segmentation without 'counts'"
        if outline.get("size") not in ([height, width], (height, width)):
            return f"has a segmentation of size {outline.get('size')} in {pixels}"
        if isinstance(counts, list):
            are_lengths = all(type(length) is int and length >= 0 for length in counts)
            if not are_lengths or sum(counts) != height * width:
                return f"has a segmentation whose runs do not add up to {pixels}"
        return ""
    if not isinstance(outline, list) or not outline:
        return "has no segmentation"
    for polygon in outline:
        if not isinstance(polygon, (list, array.array)) or len(polygon) < 6 or len(polygon) % 2:
            return "has a polygon that is not 3 or more points x, y"
        odd = [v for v in polygon if not (is_number(v) and -side <= v <= 2 * side)]
        if odd:
            return f"has a polygon with {odd[0]!r:.30}, no number in or near its {pixels}"
    return ""


def is_number(value: Any) -> bool:
    """Whether a value from a JSON file is a number that pixels can have."""
    return type(value) in (int, float) and -_LARGEST_COORDINATE < value < _LARGEST_COORDINATE


def dense_outline(outline: Any) -> Any:
    """Polygons as arrays, which take a quarter of the memory; anything else as it is."""
    try:
        return [array.array("d", polygon) for polygon in outline] if outline else outline
    except (TypeError, ValueError, OverflowError):
        return outline


def outline_mask(outline: Any, height: int, width: int) -> np.ndarray:
    """The pixels of an object, drawn by pycocotools: uint8[height, width], 1 inside its outline.

    The outline must have no `outline_error`. ValueError says that its compressed runs are damaged.
    """
    from pycocotools import mask as masks

    runs = outline
    if isinstance(outline, list):
        runs = masks.merge(masks.frPyObjects(outline_lists(outline), height, width))
    elif isinstance(outline["counts"], list):
        runs = masks.frPyObjects(outline, height, width)
    with warnings.catch_warnings():  # pycocotools warns with NumPy 2
        warnings.simplefilter("ignore", DeprecationWarning)
        inside = masks.decode(runs)
    if inside.sum() != masks.area(runs):  # too few runs, then pixels without a value
        raise ValueError(f"its compressed runs do not add up to {height}x{width} pixels")
    return inside


def outline_lists(outline: Any) -> Any:
    """An outline as pycocotools takes it."""
    return list(map(list, outline)) if isinstance(outline, list) else outline


def mask_outline(inside: np.ndarray) -> dict[str, Any]:
    """The run-length encoding of bool[height, width], column by column."""
    edges = np.flatnonzero(np.diff(inside.T.ravel(), prepend=False, append=not inside[-1, -1]))
    return {"counts": np.diff(edges, prepend=0).tolist(), "size": [*inside.shape]}


def oddities(annotations: Annotations) -> list[Finding]:
    """Labels that must be mistakes: categories whose objects are all crowds, and copied boxes."""
    findings: list[Finding] = []
    total, labels = len(annotations.rows), annotations.category_ids
    lost = np.setdiff1d(labels, labels[~annotations.crowd])
    if len(lost):
        number = int(np.isin(labels, lost).sum())
        categories = count(len(lost), "category", "categories")
        text = f"all {number:,} objects of {categories}, such as {lost[0]}, are crowds"
        text += " (iscrowd 1): no score counts them, and Mask R-CNN does not learn them"
        findings.append(("warn", text, "set iscrowd to 0 where an annotation is of one object"))
    single = np.flatnonzero(~annotations.crowd)
    columns = np.column_stack([annotations.rows, labels, annotations.boxes])[single]
    _, first, times = np.unique(columns, axis=0, return_index=True, return_counts=True)
    if copies := len(single) - len(first):
        image = annotations.file_names[annotations.rows[single[first[times > 1].min()]]]
        text = f"{copies:,} of {total:,} boxes are copies of others, with the same image, "
        text += f"category and bbox, first in {image}: even a perfect detector misses them"
        findings.append(("warn", text, "remove the copies from the annotations"))
    return findings


def weaknesses(annotations: Annotations, masks: bool) -> list[Finding]:
    """What makes the training data weak: tiny objects, and categories with few objects.

    `annotations` belong to the training images; with `masks` Mask R-CNN trains on them, else SSD.
    """
    findings: list[Finding] = []
    if masks:
        size = "Mask R-CNN's 800x1333"
        sides = np.sort(annotations.sizes, axis=1)
        factors = (_MASK_SIDES / sides).min(axis=1, keepdims=True)
    else:
        size, factors = f"SSD's {_SSD_SIDE}x{_SSD_SIDE}", _SSD_SIDE / annotations.sizes
    seen = annotations.boxes[:, 3:1:-1] * factors[annotations.rows]
    tiny = int((np.sqrt(seen.prod(axis=1).clip(0)) < _TINY).sum())
    if tiny > _FEW_TINY * len(seen):
        text = f"{tiny:,} of {len(seen):,} objects are smaller than {_TINY} pixels in {size}"
        fix = "train on larger images, or on parts of them and predict with --tiles"
        findings.append(("warn", text, fix))
    names, labels = dict(annotations.categories), annotations.category_ids[~annotations.crowd]
    numbers, counts = np.unique(labels, return_counts=True)
    if few := np.flatnonzero(counts < _FEW).tolist():
        listed = some(f"{names[numbers[i]]} ({counts[i]})" for i in few)
        categories = count(len(few), "category has", "categories have")
        text = f"{categories} fewer than {_FEW} objects: {listed}"
        findings.append(("warn", text, "label more of them"))
    return findings
