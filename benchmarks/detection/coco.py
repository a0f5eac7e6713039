"""COCO's annotations: images, categories and objects, and the outline of each object.

An outline is the field `segmentation` of an object: polygons, or the run lengths of a mask.
"""

from __future__ import annotations

import array
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

from common import limits
from common.errors import DataError, one_line, parse_json

# Where a folder of records may have the annotations of the evaluation; the second is Google's.
FILES = "instances_val*.json,raw-data/annotations/instances_val*.json"
_INT32 = 2**31
_LARGEST_COORDINATE = 1e9  # of a coordinate in pixels, either way
_LONGEST_EDGE = 1 << 23  # pixels of a polygon's edge, for which pycocotools takes about a gigabyte


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
                if fault := outline_fault(outline, *sizes[row]):
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
            outline = dense_outline(fields.get("segmentation")) if masks else None
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
        if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
            fault = (
                f"has bbox {box!r:.200} instead of four numbers of pixels, [x, y, width, height]"
            )
            raise DataError(f"{path}: {_name(row, i)}, of image {image_id}, {fault}")
        if crowd not in (None, 0, 1):
            raise DataError(f"{path}: {_name(row, i)} has iscrowd {crowd!r} instead of 0 or 1")
        area = float(area) if is_number(area) else None
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


def outline_fault(outline: Any, height: int, width: int) -> str:
    """What is wrong with an object's polygons or run-length encoding; '' if nothing is.

    pycocotools takes memory as these numbers say, and its loops end where they say.
    """
    pixels, side = f"{height}x{width} pixels", max(height, width)
    if isinstance(outline, dict):
        if not isinstance(outline.get("counts"), (list, str, bytes)):
            return "has a segmentation without 'counts'"
        if outline.get("size") not in ([height, width], (height, width)):
            return f"has a segmentation of size {outline.get('size')} in {pixels}"
        try:
            _run_lengths(outline["counts"], height * width)
        except ValueError as error:
            return f"has a segmentation whose runs are damaged ({error})"
        return ""
    if not isinstance(outline, list) or not outline:
        return "has no segmentation"
    for polygon in outline:
        if not isinstance(polygon, (list, array.array)) or len(polygon) < 6 or len(polygon) % 2:
            return "has a polygon that is not 3 or more points x, y"
        odd = [v for v in polygon if not (is_number(v) and -side <= v <= 2 * side)]
        if odd:
            return f"has a polygon with {odd[0]!r:.30}, no number in or near its {pixels}"
        if len(polygon) * 2 * side > _LONGEST_EDGE:  # no edge is longer than 3 sides
            points = np.reshape(polygon, (-1, 2))
            length = np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum()
            if length > _LONGEST_EDGE:
                return f"has a polygon with an edge of {length:,.0f} pixels in {pixels}"
    return ""


def _run_lengths(counts: Any, total: int) -> list[int]:
    """The lengths of runs outside and inside in turn, from a list or from COCO's compressed text.

    Raises:
      ValueError: they are not whole numbers of 0 or more whose sum is `total`.
    """
    lengths = counts if isinstance(counts, list) else _decoded_lengths(counts)
    for length in lengths:
        if type(length) is not int or length < 0:
            raise ValueError(f"{length!r} is no length")
    if sum(lengths) != total:
        raise ValueError(f"{sum(lengths)} of {total} pixels")
    return lengths


def _decoded_lengths(counts: str | bytes) -> list[int]:
    """The numbers in COCO's compressed text.

    A number has 5 bits per character, the lowest first; the 6th bit says that more follow. From the
    fourth number on, it is the difference to the run before the last.
    """
    lengths: list[int] = []
    value = shift = 0
    for character in counts.encode() if isinstance(counts, str) else counts:
        bits = character - 48
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            if shift > 64:
                raise ValueError("a number has no end")
            continue
        if bits & 16:  # the sign
            value -= 1 << shift
        lengths.append(value + lengths[-2] if len(lengths) > 2 else value)
        value = shift = 0
    return lengths


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
    """The pixels of an object: uint8[height, width], 1 inside its outline.

    The outline must have no `outline_fault`. pycocotools draws the polygons. Its own decoder
    is left out, because it warns with NumPy 2, and because damaged runs can lead it beyond its
    memory.

    Raises:
      ValueError: the runs are damaged.
    """
    from pycocotools import mask as masks

    try:
        counts = outline["counts"] if isinstance(outline, dict) else None
        if counts is None:
            counts = masks.merge(masks.frPyObjects(outline_lists(outline), height, width))["counts"]
        runs = _run_lengths(counts, height * width)
        inside = np.repeat((np.arange(len(runs)) % 2).astype(np.uint8), runs)
        return inside.reshape(width, height).T  # column by column
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"its segmentation is damaged ({one_line(error)})") from error


def outline_lists(outline: Any) -> Any:
    """An outline as pycocotools takes it."""
    return list(map(list, outline)) if isinstance(outline, list) else outline


def mask_outline(inside: np.ndarray) -> dict[str, Any]:
    """The run-length encoding of bool[height, width]: see `outline_mask`."""
    edges = np.flatnonzero(np.diff(inside.T.ravel(), prepend=False, append=not inside[-1, -1]))
    return {"counts": np.diff(edges, prepend=0).tolist(), "size": [*inside.shape]}
