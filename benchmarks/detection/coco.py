"""Reads COCO's annotations of objects."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import os
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from benchmarks.detection import segmentation
from errors import DataError, one_line, parse_json
from ops import limits

# Where a folder of records may have the annotations of the evaluation; the second is Google's.
FILES = "instances_val*.json,raw-data/annotations/instances_val*.json"
_INT32 = 2**31


@dataclasses.dataclass(frozen=True, eq=False)
class Annotations:
    """The images, categories and objects of an `instances_*.json`.

    Attributes:
      path: of the file, for messages.
      digest: SHA-256 of the file, in hexadecimal.
      categories: (id, name) of each category, sorted by id. Class c of the training, counted from
        1, is `categories[c - 1]`.
      image_ids: int64[n], in the order of the file; unique, and each fits int32.
      sizes: int64[n, 2], height and width in pixels.
      file_names: of the images.
      rows: int64[m], which image each object is in: an index into `image_ids`.
      category_ids: int64[m].
      boxes: float64[m, 4]: x, y, width and height in pixels, as the file has them.
      areas: float64[m], of the objects' outlines in square pixels; without one, of their boxes.
      crowd: bool[m].
      outlines: of each object its polygons (a list of sequences x, y, x, y ...) or its run-length
        encoding (a dict); [] unless they were asked for.
    """

    path: str
    digest: str
    categories: tuple[tuple[int, str], ...]
    image_ids: np.ndarray
    sizes: np.ndarray
    file_names: list[str]
    rows: np.ndarray
    category_ids: np.ndarray
    boxes: np.ndarray
    areas: np.ndarray
    crowd: np.ndarray
    outlines: list[Any]

    @classmethod
    def load(cls, path: str, masks: bool = False) -> Annotations:
        """Reads a file, local or gs://; `masks` keeps the outlines.

        Raises:
          DataError: the file cannot be read, or as `parse`.
        """
        return cls.parse(_read(path), path, masks)

    @classmethod
    def parse(cls, data: bytes, path: str, masks: bool = False) -> Annotations:
        """Reads the bytes of a file; `path` is its name in messages.

        Raises:
          DataError: it is no JSON, or has no objects; an id is repeated, missing or beyond int32;
            an object names an image or a category that the file does not list.
        """
        text, digest = _text(data, path), hashlib.sha256(data).hexdigest()
        del data  # COCO's training annotations are 450 MB
        content = _decode(text, path, masks)
        del text
        file_names, image_ids, sizes = _images(content["images"], path)
        named = _listed(content["categories"], path, ("category", "categories"), "name")
        categories = tuple(sorted((number, name) for number, name, _ in named))
        row_of = {image_id: row for row, image_id in enumerate(image_ids)}
        objects = _objects(content["annotations"], path, row_of, dict(categories))
        boxes = np.array([box for _, _, box, *_ in objects], np.float64).reshape(-1, 4)
        areas = [area for *_, area, _, _ in objects]
        own = boxes[:, 2] * boxes[:, 3]
        if masks:
            for i, (row, _, _, _, _, outline) in enumerate(objects):
                if fault := segmentation.fault(outline, *sizes[row]):
                    name = _name(content["annotations"][i], i)
                    raise DataError(f"{path}: {name}, of image {image_ids[row]}, {fault}")
        return cls(
            path=path,
            digest=digest,
            categories=categories,
            image_ids=np.array(image_ids, np.int64),
            sizes=np.array(sizes, np.int64).reshape(-1, 2),
            file_names=file_names,
            rows=np.array([row for row, *_ in objects], np.int64),
            category_ids=np.array([category for _, category, *_ in objects], np.int64),
            boxes=boxes,
            areas=np.array([own[i] if a is None else a for i, a in enumerate(areas)], np.float64),
            crowd=np.array([crowd for *_, crowd, _ in objects], bool),
            outlines=[outline for *_, outline in objects] if masks else [],
        )

    def listed(self, paths: Sequence[str]) -> list[int | None]:
        """For each path of a picture the row of its image; None without one, or with several.

        A `file_name` may have more or fewer folders in front than the path.
        """
        by_base: dict[str, list[int]] = {}
        for row, name in enumerate(self.file_names):
            by_base.setdefault(os.path.basename(normal(name)), []).append(row)
        fits = [
            [
                r
                for r in by_base.get(os.path.basename(p), ())
                if is_end(normal(self.file_names[r]), p)
            ]
            for p in paths
        ]
        times = collections.Counter(row for rows in fits for row in rows)
        return [rows[0] if len(rows) == 1 and times[rows[0]] == 1 else None for rows in fits]


def normal(name: str) -> str:
    """A `file_name` as a relative path; some tools write those of Windows."""
    return posixpath.normpath(name.replace("\\", "/")).lstrip("/")


def is_end(path: str, name: str) -> bool:
    """Whether one of two paths is the end of the other."""
    short, long = sorted((path, name), key=len)
    return f"/{long}".endswith(f"/{short}")


def _read(path: str) -> bytes:
    try:
        return epath.Path(path).read_bytes()
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read the annotations {path}: {one_line(error)}") from error


def _text(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is damaged or no JSON: it is not UTF-8; convert it") from error


def _decode(text: str, path: str, masks: bool) -> dict[str, list]:
    """The three lists of a file.

    Objects become tuples of what is needed while the file is read, because as dicts those of COCO's
    training images take 2 GB.
    """

    def compact(fields: dict[str, Any]) -> Any:
        if "bbox" in fields and ("image_id" in fields or "file_name" not in fields):
            names = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
            outline = segmentation.dense(fields.get("segmentation")) if masks else None
            return (*map(fields.get, names), outline)
        if "file_name" in fields:
            names = ("id", "file_name", "height", "width")
            return {name: fields[name] for name in names if name in fields}
        return fields

    try:
        content = parse_json(text, object_hook=compact)
    except ValueError as error:
        raise DataError(
            f"{path} is damaged or no JSON ({one_line(error)}): mend or replace it"
        ) from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(
                f"{path} has no list '{key}', so it does not describe objects in COCO's form: "
                "give an instances_*.json"
            )
    return content


def _images(rows: list[Any], path: str) -> tuple[list[str], list[int], list[tuple[int, int]]]:
    """(file names, ids, (height, width)) of the images; DataError names the first fault."""
    names, ids, sizes = [], [], []
    for image_id, name, row in _listed(rows, path, ("image", "images"), "file_name"):
        size: Any = row.get("height"), row.get("width")
        if not all(type(number) is int and 0 < number < _INT32 for number in size):
            raise DataError(
                f"{path}: image {image_id} ({name}) needs a height and width that are whole "
                f"numbers of 1 or more, but has {size[0]!r} and {size[1]!r}"
            )
        if math.prod(size) > limits.PIXELS:
            raise DataError(
                f"{path}: image {image_id} ({name}) has height {size[0]} and width {size[1]}, more "
                f"than the {limits.PIXELS:,} pixels that are decoded: mend the numbers"
            )
        names.append(name)
        ids.append(image_id)
        sizes.append(size)
    return names, ids, sizes


def _listed(
    rows: list[Any], path: str, kind: tuple[str, str], name_key: str
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(id, name, row) of each image or category; DataError names the first fault.

    `kind` is the word for one row and for several.
    """
    one, several = kind
    seen = set()
    for i, row in enumerate(rows):
        row = row if isinstance(row, dict) else {}
        number: Any = row.get("id")
        name = row.get(name_key)
        if fault := _id_fault(number):
            raise DataError(f"{path}: the id of {one} {i} (counted from 0) {fault}")
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
) -> list[tuple[int, int, list[float], float | None, bool, Any]]:
    """(image row, category id, box, area, crowd, outline) of each object; DataError as above."""
    objects = []
    for i, row in enumerate(rows):
        if type(row) is not tuple:
            raise DataError(f"{path}: {_name(row, i)} has no bbox")
        _, image_id, category, box, area, crowd, outline = row
        if type(image_id) is not int or image_id not in row_of:
            fault = f"is of image {image_id!r}, which is not among the {len(row_of):,} images"
            raise DataError(f"{path}: {_name(row, i)} {fault} of the file")
        if type(category) is not int or category not in categories:
            fault = f"is of category {category!r}, which is not among the {len(categories):,}"
            raise DataError(f"{path}: {_name(row, i)} {fault} categories of the file")
        if not isinstance(box, list) or len(box) != 4 or not all(map(segmentation.is_number, box)):
            fault = (
                f"has bbox {box!r:.200} instead of four numbers of pixels, [x, y, width, height]"
            )
            raise DataError(f"{path}: {_name(row, i)}, of image {image_id}, {fault}")
        if crowd not in (None, 0, 1):
            raise DataError(f"{path}: {_name(row, i)} has iscrowd {crowd!r} instead of 0 or 1")
        area = float(area) if segmentation.is_number(area) else None
        objects.append((row_of[image_id], category, box, area, bool(crowd), outline))
    return objects


def _name(row: Any, i: int) -> str:
    """The i-th object in words: by its id, else by its place."""
    number = row[0] if isinstance(row, tuple) else row.get("id") if isinstance(row, dict) else None
    return f"annotation {i} (counted from 0)" if number is None else f"annotation {number}"


def _id_fault(value: Any) -> str:
    if type(value) is not int:
        return f"is {value!r}, not a whole number"
    if not -_INT32 <= value < _INT32:
        return f"is {value}, which does not fit 32 bits: number them from 1"
    return ""
