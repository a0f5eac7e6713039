"""Checks records of images with objects, and compares them with the annotations in their folder."""

import argparse
import dataclasses
import functools
import hashlib
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.detection.coco import FILES, Annotations
from benchmarks.detection.scanning import parse_id
from errors import DataError
from ops import files, records
from ops.preparation import checks
from ops.preparation.checks import Findings, Row, Shard

ANNOTATIONS = "instances_val2017.json"
_SIDES = ("ymin", "xmin", "ymax", "xmax")
_ONE = {
    "image/encoded": "bytes_list",
    "image/source_id": "bytes_list",
    "image/height": "int64_list",
    "image/width": "int64_list",
}
_ONE_USUAL = {
    "image/filename": "bytes_list",
    "image/key/sha256": "bytes_list",
    "image/format": "bytes_list",
}
_BOX = [f"image/object/bbox/{side}" for side in _SIDES]
_EACH = {  # a value for each object
    **dict.fromkeys(_BOX, "float_list"),
    "image/object/class/label": "int64_list",
}
_EACH_USUAL = {
    "image/object/class/text": "bytes_list",
    "image/object/is_crowd": "int64_list",
    "image/object/area": "float_list",
}
_MASK = "image/object/mask"
_ROUNDING = 1e-6  # of float32
_TOUCH = 1e-3  # pixels


@dataclasses.dataclass(frozen=True)
class Known:
    """What records should hold.

    Attributes:
        categories: {id: name}; {} if neither the annotations nor the manifest are there.
        image_ids: of the validation images; None without annotations.
    """

    categories: dict[int, str]
    image_ids: set[int] | None


def is_detection(shards: list[Shard]) -> bool:
    """Whether files have the names of detection."""
    return any(shard.name.endswith(records.DETECTION_SUFFIX) for shard in shards)


def scan(
    args: argparse.Namespace,
    shards: list[Shard],
    manifest: dict[str, Any] | None,
    findings: Findings,
) -> tuple[list[dict[str, Any]], int]:
    """Checks all records; returns a row for each category, and their number."""
    if args.num_label_classes:
        text = f"--num_label_classes is not for the records of detection in {args.folder}"
        findings.add("errors", "arguments", f"{text}; the annotations list the categories")
    for shard in shards:
        if not shard.name.endswith(records.DETECTION_SUFFIX):
            text = f"{shard.name} lies beside files that end in {records.DETECTION_SUFFIX}"
            findings.add("errors", "mixed sets", text)
    expected = known(args.folder, manifest, findings)

    def check(shard: Shard) -> Callable[[bytes, str], Row]:
        is_train = shard.split == "train"
        return functools.partial(check_record, is_train=is_train, categories=expected.categories)

    checks.scan_all(shards, check, args.workers, findings)
    rows = counts(shards, expected, findings)
    return rows, len(rows)


def known(folder: str, manifest: dict[str, Any] | None, findings: Findings) -> Known:
    """Reads the annotations of a folder, else the categories of its manifest; adds their faults.

    They may lie wherever training finds them.
    """
    try:
        files.find(folder, FILES, "annotations")
    except DataError:
        findings.add("warnings", "annotations", f"no {ANNOTATIONS}: the score needs it")
    else:
        try:
            path = files.find_one(folder, FILES, "annotations", "eval_annotations")
            content = Annotations.load(path)
            return Known(dict(content.categories), set(content.image_ids.tolist()))
        except DataError as error:
            findings.add("errors", "annotations", str(error))
    rows = manifest["classes"] if manifest else []
    return Known({row["id"]: row["name"] for row in rows if "id" in row}, None)


def check_record(record: bytes, fault: str, is_train: bool, categories: dict[int, str]) -> Row:
    """Checks the keys, boxes, categories, masks and image of a record.

    Args:
        record: a serialized example.
        fault: of its frame, or ''.
        is_train: whether training reads it.
        categories: {id: name} of those that are known; {} accepts any.
    """
    feature, broken = checks.features(record, fault)
    if broken:
        return broken
    values, faults = _values(feature)
    image_id, id_faults = _image_id(values.get("image/source_id"))
    faults += id_faults
    labels, is_complete = (
        values.get("image/object/class/label") or [],
        _EACH.keys() <= values.keys(),
    )
    if is_complete:
        faults += _object_faults([values[key] for key in _EACH], categories)
        if is_train and not labels:
            faults.append(("warnings", "no boxes", "has no boxes; training leaves it out"))
    digest, encoded = b"", values.get("image/encoded")
    if encoded is not None:
        digest = hashlib.sha256(encoded).digest()[:16]
        for level, kind, text in checks.image_faults(encoded, values):
            # The score multiplies boxes by this size.
            faults.append(("errors" if kind == "image size" else level, kind, text))
    size = values.get("image/width"), values.get("image/height")
    boxes = list(zip(*(values[key] for key in _BOX), strict=True)) if is_complete else []
    faults += _mask_faults(values.get(_MASK) or [], size, boxes)
    texts = values.get("image/object/class/text") or []
    names = [text.decode(errors="replace") for text in texts]
    names = names if len(names) == len(labels) else [""] * len(labels)
    is_usable = is_complete and image_id is not None and bool(digest)
    return Row(labels, names, digest, faults, is_usable, image_id)


def counts(shards: list[Shard], known: Known, findings: Findings) -> list[dict[str, Any]]:
    """Rows of {"label", "id", "name", split: objects} by category; adds faults of ids and names."""
    numbers, names = checks.tally(shards)
    labels = sorted(set().union(*numbers.values()))
    expected = known.categories or {label: min(names.get(label, {""})) for label in labels}
    for label, name in expected.items():
        for other in sorted(names.get(label, set()) - {name}):
            fault = f"category {label} is called {other}, not {name}"
            findings.add("warnings", "category names", fault)
    _check_ids(shards, known, findings)
    for label, name in sorted(expected.items()):
        for split, number in numbers.items():
            if not number[label]:
                findings.add("warnings", "no objects", f"category {label} ({name}) in {split}")
    return [
        {"label": i, "id": label, "name": name}
        | {split: number[label] for split, number in numbers.items()}
        for i, (label, name) in enumerate(sorted(expected.items()), 1)
    ]


def _values(feature: Any) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """The values of a record by their keys, without those that cannot be used, and the faults."""

    def read(key: str, kind: str) -> list[Any]:
        return list(getattr(feature[key], kind).value) if key in feature else []

    values: dict[str, Any] = {}
    faults = []
    for key, kind in {**_ONE, **_ONE_USUAL}.items():
        faults += checks.take(feature, key, kind, "errors" if key in _ONE else "warnings", values)
    lists = {key: read(key, kind) for key, kind in {**_EACH, **_EACH_USUAL}.items()}
    number = max(len(lists[key]) for key in _EACH)
    if _MASK in feature:
        lists[_MASK] = read(_MASK, "bytes_list")
    for key, value in lists.items():
        level = "errors" if key in _EACH else "warnings"
        if len(value) == number:
            values[key] = value
        elif value:
            faults.append(("errors", "objects", f"has {len(value)} {key} of {number} objects"))
        else:
            faults.append((level, "keys", f"has no {key}"))
    return values, faults


def _image_id(source_id: bytes | None) -> tuple[int | None, list[tuple[str, str, str]]]:
    """The number in image/source_id, None if it is none, and its fault."""
    if source_id is None:
        return None, []  # a fault of the keys
    if (image_id := parse_id(source_id)) is not None:
        return image_id, []
    text = source_id[:40].decode(errors="replace")
    is_number = text.removeprefix("-").isdecimal() and text.isascii()
    fault = "does not fit 32 bits" if is_number else "is no number"
    return None, [("errors", "image ids", f"has image/source_id {text!r}, which {fault}")]


def _object_faults(
    columns: list[list[Any]], categories: dict[int, str]
) -> list[tuple[str, str, str]]:
    """The faults of boxes and labels; `columns` are the values of _EACH."""
    faults = []
    for i, (*box, label) in enumerate(zip(*columns, strict=True)):
        y0, x0, y1, x1 = box
        corners = f"y {y0:.6g} to {y1:.6g}, x {x0:.6g} to {x1:.6g}"
        name = f"object {i} (category {label}) has a box"
        if not all(map(math.isfinite, box)) or min(box) < -_ROUNDING or max(box) > 1 + _ROUNDING:
            faults.append(("errors", "boxes outside the image", f"{name} outside: {corners}"))
        elif y1 <= y0 or x1 <= x0:
            faults.append(("errors", "boxes without area", f"{name} without area: {corners}"))
        if categories and label not in categories:
            text = f"object {i} has category {label}, which is none of the {len(categories)}"
            faults.append(("errors", "unknown category", text))
    return faults


def _mask_faults(
    masks: list[bytes],
    size: tuple[int | None, int | None],
    boxes: list[tuple[float, ...]],
) -> list[tuple[str, str, str]]:
    """The faults of masks, which should be PNGs of `size`: the image's (width, height).

    `boxes` (y0, x0, y1, x1) are shares of the image.
    """
    faults = []
    for i, data in enumerate(masks):
        level, box = "errors", boxes[i] if i < len(boxes) else ()
        try:
            with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
                fault = "" if image.size == size else f"of {image.size[1]}x{image.size[0]} pixels"
                inside = np.asarray(image.convert("L")) > 0 if not fault else np.zeros((1, 1), bool)
        except Exception:  # Pillow raises anything on damaged files
            inside, fault = np.zeros((1, 1), bool), "that is no PNG"
        if not fault and not inside.any():  # a polygon may be smaller than a pixel
            level, fault = "warnings", "without a pixel; training takes it for background"
        elif not fault and box and all(map(math.isfinite, box)):
            share, chance = _shares(inside, box)
            if share < 1 and share <= chance:
                fault = f"with {share:.0%} of its pixels in the box, which covers {chance:.0%}"
        if fault:
            faults.append((level, "masks", f"object {i} has a mask {fault}"))
    return faults


def _shares(inside: np.ndarray, box: tuple[float, ...]) -> tuple[float, float]:
    """The share of a mask's pixels in a box, and that of all pixels: a chance mask would have it.

    Pixels that the box only touches are in it.
    """
    height, width = inside.shape
    low, high = np.array(box[:2]) * inside.shape, np.array(box[2:]) * inside.shape
    y0, x0 = np.floor(low + _TOUCH).astype(int).clip(0)
    y1, x1 = np.ceil(high - _TOUCH).astype(int).clip(0)
    part = inside[y0:y1, x0:x1]
    return float(part.sum() / inside.sum()), part.size / (height * width)


def _check_ids(shards: list[Shard], known: Known, findings: Findings) -> None:
    """Adds faults of image ids that occur twice, or only in records or only in annotations.

    The splits number their images independently.
    """
    first: dict[tuple[str, int], str] = {}
    for shard in shards:
        for row, image_id in zip(shard.rows, shard.ids, strict=True):
            record, key = f"{shard.name} record {row}", (shard.split, image_id)
            if key in first:
                text = f"{first[key]} and {record} have image id {image_id}"
                findings.add("errors", "image ids", text)
            first.setdefault(key, record)
            if shard.split == "val" and known.image_ids and image_id not in known.image_ids:
                text = f"{record} has image id {image_id}, which is not in {ANNOTATIONS}"
                findings.add("errors", "image ids", text)
    for image_id in sorted(known.image_ids or ()):
        if ("val", image_id) not in first:
            findings.add(
                "errors", "missing ids", f"image {image_id} of {ANNOTATIONS} has no record"
            )
