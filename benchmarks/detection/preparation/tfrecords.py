"""Reads TFRecords of TensorFlow's Object Detection API into COCO's form.

Areas, crowds and masks are taken where the records have them. Ids are made, because those of the
records are often file names.
"""

from __future__ import annotations

import collections
import io
import itertools
import re
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.detection import coco
from benchmarks.detection.preparation.label_files import split_of
from benchmarks.detection.preparation.labels import Form
from benchmarks.detection.records import CROWD, LABEL, MASK, SIDES
from common import limits
from common.data import records
from common.data.shards import tensorflow
from common.errors import count, one_line
from common.images import photos
from common.preparation.folders import Folder
from common.preparation.sources import File, Source, SourceError, read_at

AREA, TEXT, _XMIN = "image/object/area", "image/object/class/text", "image/object/bbox/xmin"
_NAME = re.compile(r"\.(tf)?rec(ords?)?$|-\d{5,}-of-\d{5,}(\.\w+)?$", re.IGNORECASE)
_ITEM = re.compile(r"\bitem\s*\{(.*?)\}", re.DOTALL)
_LOOKS = 8  # files
_MOST = 1.5  # a larger share of an image is none


class Images(Source):
    """The images inside of records; the `place` of a file is the path of its records and offset."""

    def read(self, i: int, most: int = limits.IMAGE_BYTES) -> bytes:
        """The i-th image; any thread may call it."""
        _, size, (path, offset) = self.files[i]
        return read_at(path, offset, size)


def names(folder: Folder) -> list[str]:
    """The names of the files that are named as records are."""
    return [file.name for file in folder.files if _NAME.search(file.name) and file.size]


def forms(folder: Folder) -> list[Form]:
    """The form "tfrecords", if the first records of a few files are of this form; else []."""
    files = names(folder)
    for name in files[:: max(1, len(files) // _LOOKS)]:
        try:
            row = _features(next(records.read_shard(folder.full(name)), b""))
        except Exception:  # TensorFlow's and protobuf's classes, of files that hold no Examples
            continue
        if _XMIN in row and (LABEL in row or TEXT in row):
            found = "TFRecords of TensorFlow's Object Detection API"
            found += f" in {count(len(files), 'file')}, such as {name}"
            return [Form("tfrecords", found, len(files), bool(row[MASK].bytes_list.value))]
    return []


def read(folder: Folder, masks: bool) -> tuple[dict[str, Any], list[str], list[File]]:
    """(content in COCO's form by split, notes for the user, the files of `Images`).

    Raises:
        SourceError: there are no such records, or one cannot be understood.
        tf.errors.OpError: a file is damaged or cannot be read.
    """
    if not forms(folder):
        raise SourceError(f"{folder.path} has no TFRecords with {_XMIN}")
    parts = collections.defaultdict(list)
    for name in names(folder):
        parts[split_of(name.replace("eval", "val"))].append(name)
    splits, notes = {"train": parts["train"], "val": parts["val"] or parts["test"]}, []
    if not all(splits.values()):
        splits = {"train": names(folder)}
    elif rest := {*names(folder)} - {*splits["train"], *splits["val"]}:
        notes.append(f"{count(len(rest), 'file')} not of train or val: not used, as {min(rest)}")
    categories = _label_map(folder)
    images: dict[str, File] = {}
    content = {split: _read(folder, splits[split], categories, masks, images) for split in splits}
    rows = [{"id": number, "name": categories[number]} for number in sorted(categories)]
    content = {split: {**lists, "categories": rows} for split, lists in content.items()}
    return content, notes, [*images.values()]


def _features(record: bytes) -> Any:
    """The features of an Example by key; one that is missing has no values."""
    return tensorflow().train.Example.FromString(record).features.feature


def _label_map(folder: Folder) -> dict[int, str]:
    """The names by number in the first .pbtxt with items; {} without one."""
    result: dict[int, str] = {}
    for path in folder.named(".pbtxt"):
        for item in _ITEM.findall(folder.head(path, limits.TEXT_BYTES).decode(errors="replace")):
            values = dict(re.findall(r"(\w+)\s*:\s*[\"']?([^\"'\n,]+)", item))
            name = values.get("display_name") or values.get("name")
            if name and values.get("id", "").strip().isdigit():
                result[int(values["id"])] = name.strip()
        if result:
            break
    return result


def _read(
    folder: Folder, names: list[str], categories: dict[int, str], masks: bool, files: dict
) -> dict[str, list[Any]]:
    """The images and annotations of a split; adds to `categories`, and the images to `files`."""
    images, annotations = [], []
    for name in names:
        offset = 12  # behind the length and its checksum
        for i, record in enumerate(records.read_shard(folder.full(name))):
            try:
                feature = _features(record)
                encoded = b"".join(feature["image/encoded"].bytes_list.value[:1])
                size = _ints(feature, "image/height") + _ints(feature, "image/width")
                height, width = size if len(size) == 2 else photos.sizes(encoded)[0]
                objects = _objects(feature, (height, width), categories, masks)
            except ValueError as error:  # or no image
                where = f"{folder.full(name)}, record {i} (counted from 0)"
                raise SourceError(f"{where}: {one_line(error)}") from error
            file = coco.normal(b"".join(feature["image/filename"].bytes_list.value[:1]).decode())
            file = f"{name}/{i}" if file == "." or file in files else file
            place = folder.full(name), offset + record.find(encoded)
            files[file] = File(file, len(encoded), place)
            row = {"id": len(images) + 1, "file_name": file, "height": height, "width": width}
            images.append(row)
            for each in objects:
                annotations.append({"id": len(annotations) + 1, "image_id": row["id"], **each})
            offset += len(record) + 16
    return {"images": images, "annotations": annotations}


def _ints(feature: Any, key: str) -> list[int]:
    return list(feature[key].int64_list.value)


def _objects(
    feature: Any, size: tuple[int, int], categories: dict[int, str], masks: bool
) -> list[dict[str, Any]]:
    """The objects of a record as COCO has them; ValueError if they cannot be understood."""
    sides = [feature[f"image/object/bbox/{side}"].float_list.value for side in SIDES]
    texts = [text.decode(errors="replace") for text in feature[TEXT].bytes_list.value]
    labels = _ints(feature, LABEL)
    if not labels:
        ids = {name: number for number, name in categories.items()}
        labels = [ids.setdefault(text, max([0, *ids.values()]) + 1) for text in texts]
    if len({len(labels), *map(len, sides)}) > 1:
        raise ValueError(f"{len(labels)} labels for {[*map(len, sides)]} sides of boxes")
    for label, text in itertools.zip_longest(labels, texts[: len(labels)]):
        categories.setdefault(label, text or f"class {label}")
    boxes = np.array(sides, np.float64).reshape(4, -1).T
    if boxes.size and np.abs(boxes).max() > _MOST:
        raise ValueError(f"a side of a box is {np.abs(boxes).max():.0f}, no share of the image")
    boxes = (boxes * np.tile(size, 2)).round(3)
    crowds = _ints(feature, CROWD) or _ints(feature, "image/object/group_of") or [0] * len(labels)
    areas = feature[AREA].float_list.value or (boxes[:, 2:] - boxes[:, :2]).prod(1).tolist()
    rows: list[dict[str, Any]] = [
        {"category_id": label, "bbox": [x0, y0, x1 - x0, y1 - y0], "area": area, "iscrowd": crowd}
        for label, (y0, x0, y1, x1), area, crowd in zip(
            labels, boxes.tolist(), areas, crowds, strict=True
        )
    ]
    pngs = feature[MASK].bytes_list.value if masks else []
    for row, png in zip(rows, pngs, strict=bool(pngs)):
        row["segmentation"] = coco.mask_outline(np.asarray(Image.open(io.BytesIO(png))) > 0)
    return rows
