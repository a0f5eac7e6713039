"""Reads TFRecords of TensorFlow's Object Detection API into COCO's form.

Areas, crowds and masks are taken where the records have them. Ids are made, because those of the
records are often file names.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.detection import coco
from benchmarks.detection.records import CROWD, LABEL, MASK, SIDES
from common import limits
from common.data import records
from common.data.shards import tensorflow
from common.errors import one_line
from common.images import photos
from common.preparation.folders import Folder
from common.preparation.sources import File, Source, SourceError, read_at

AREA, TEXT, _XMIN = "image/object/area", "image/object/class/text", "image/object/bbox/xmin"
_SCORES = re.compile(r"(raw-data/annotations/)?instances_val[^/]*\.json")
_NAME = re.compile(r"\.(tf)?rec(ords?)?$|-\d{5,}-of-\d{5,}(\.\w+)?$", re.IGNORECASE)
_SPLIT = re.compile(r"(?<![a-z])(train|val|eval|test)(ing|id|idation)?(?![a-z])", re.IGNORECASE)
_ITEM = re.compile(r"\bitem\s*\{(.*?)\}", re.DOTALL)
_LOOKS = 8  # files
_MOST = 1.5  # a larger share of an image is none


class Images(Source):
    """The images inside of records; `place` of a file is the name of its records and its offset."""

    def read(self, i: int, most: int = limits.IMAGE_BYTES) -> bytes:
        """The i-th image; any thread may call it."""
        _, size, (shard, offset) = self.files[i]
        return read_at(os.path.join(self.path, shard), offset, size)


def files(folder: Folder) -> dict[str, list[str]]:
    """The files of each split, "train" and "val", or "train" alone; {} if there are none.

    The first records of a few files decide whether they are of this form.
    """
    names = [file.name for file in folder.files if _NAME.search(file.name) and file.size]
    rows = [first(folder, name) for name in names[:: max(1, len(names) // _LOOKS)]]
    if not any(_XMIN in row and (LABEL in row or TEXT in row) for row in rows):
        return {}
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault((_SPLIT.findall(name) or [("", "")])[-1][0].lower(), []).append(name)
    val = parts.get("val") or parts.get("eval") or parts.get("test")
    if val and "train" in parts:
        return {"train": parts["train"], "val": val}
    return {"train": names}


def first(folder: Folder, name: str) -> Any:
    """The features of the first record of a file, by key; {} if it is none."""
    size = int.from_bytes(folder.head(name, 8), "little")
    try:
        data = read_at(folder.full(name), 12, size) if size < limits.IMAGE_BYTES else b""
        return tensorflow().train.Example.FromString(data).features.feature
    except Exception:  # protobuf's own class, of bytes that are no Example
        return {}


def has_masks(folder: Folder, name: str) -> bool:
    """Whether the first record of a file has masks."""
    row = first(folder, name)
    return MASK in row and bool(row[MASK].bytes_list.value)


def are_complete(folder: Folder) -> bool:
    """Whether training reads the records as they are: those of this program or of Google's."""
    names = files(folder)
    named = [names.get(key, [""])[0].startswith(f"{key}-") for key in records.DETECTION_SPLITS]
    if not all(named) or not any(_SCORES.fullmatch(file.name) for file in folder.files):
        return False
    row = first(folder, names["val"][0])
    return "image/source_id" in row and _text(row, "image/source_id").isdigit()


def read(folder: Folder, masks: bool) -> tuple[dict[str, Any], list[str], Images]:
    """(content in COCO's form by split, notes for the user, the images).

    Raises:
        SourceError: there are no such records, or one cannot be understood.
        tf.errors.OpError: a file is damaged or cannot be read.
    """
    splits = files(folder)
    if not splits:
        raise SourceError(f"{folder.path} has no TFRecords with {_XMIN}")
    categories = _label_map(folder)
    notes = [] if categories else ["no label map (.pbtxt): categories are named as in the records"]
    content: dict[str, Any] = {}
    places: dict[str, File] = {}
    for key, names in splits.items():
        content[key] = _read(folder, names, categories, masks, places)
    rows = [{"id": number, "name": categories[number]} for number in sorted(categories)]
    content = {key: {**lists, "categories": rows} for key, lists in content.items()}
    return content, notes, Images(folder.path, [places[name] for name in sorted(places)])


def _label_map(folder: Folder) -> dict[int, str]:
    """The names by number in the first .pbtxt with items; {} without one."""
    for path in folder.named(".pbtxt"):
        result = {}
        for item in _ITEM.findall(folder.head(path, limits.TEXT_BYTES).decode(errors="replace")):
            values = dict(re.findall(r"(\w+)\s*:\s*[\"']?([^\"'\n,]+)", item))
            if values.get("id", "").strip().isdigit():
                name = values.get("display_name") or values.get("name") or f"class {values['id']}"
                result[int(values["id"])] = name.strip()
        if result:
            return result
    return {}


def _read(
    folder: Folder,
    names: list[str],
    categories: dict[int, str],
    masks: bool,
    places: dict[str, File],
) -> dict[str, list[Any]]:
    """The images and annotations of a split; adds to the categories and to the images' places."""
    images, annotations = [], []
    for name in names:
        offset = 12  # behind the length and its checksum
        for i, record in enumerate(records.read_shard(folder.full(name))):
            where = f"{folder.full(name)}, record {i} (counted from 0)"
            feature = tensorflow().train.Example.FromString(record).features.feature
            encoded = b"".join(feature["image/encoded"].bytes_list.value[:1])
            try:
                size = _ints(feature, "image/height") + _ints(feature, "image/width")
                height, width = size if len(size) == 2 else photos.sizes(encoded)[0]
                objects = _objects(feature, (height, width), categories, masks)
            except ValueError as error:  # or no image
                raise SourceError(f"{where}: {one_line(error)}") from error
            file = coco.normal(_text(feature, "image/filename"))
            file = f"{name}/{i}" if file == "." or file in places else file
            places[file] = File(file, len(encoded), (name, offset + record.find(encoded)))
            row = {"id": len(images) + 1, "file_name": file, "height": height, "width": width}
            images.append(row)
            for each in objects:
                annotations.append({"id": len(annotations) + 1, "image_id": row["id"], **each})
            offset += len(record) + 16
    return {"images": images, "annotations": annotations}


def _text(feature: Any, key: str) -> str:
    return b"".join(feature[key].bytes_list.value[:1]).decode(errors="replace")


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
    areas = list(feature[AREA].float_list.value)
    areas = areas if len(areas) == len(boxes) else (boxes[:, 2:] - boxes[:, :2]).prod(1).tolist()
    rows = [
        {"category_id": label, "bbox": [x0, y0, x1 - x0, y1 - y0], "area": area, "iscrowd": crowd}
        for label, (y0, x0, y1, x1), area, crowd in zip(
            labels, boxes.tolist(), areas, crowds, strict=True
        )
    ]
    pngs = feature[MASK].bytes_list.value if masks else []
    for row, png in zip(rows, pngs, strict=bool(pngs)):
        row["segmentation"] = coco.mask_outline(np.asarray(Image.open(io.BytesIO(png))) > 0)
    return rows
