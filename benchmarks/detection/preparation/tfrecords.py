"""TFRecords of TensorFlow's Object Detection API in COCO's form.

Areas, crowds and masks are taken where the records have them. Ids are made, because those of the
records are often file names.
"""

import collections
import io
import itertools
import re
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.detection import coco
from benchmarks.detection.preparation.label_folders import Detected, Labels
from benchmarks.detection.records import CROWD, LABEL, MASK, SIDES
from common import limits
from common.data import records
from common.errors import count, one_line
from common.images import photos
from common.preparation.folders import Folder, split_of
from common.preparation.sources import File, SourceError
from common.tensorflow import tensorflow

_XMIN, _TEXT = "image/object/bbox/xmin", "image/object/class/text"
_NAME = re.compile(r"\.(tf)?rec(ords?)?$|-\d{5,}-of-\d{5,}(\.\w+)?$", re.IGNORECASE)
_ITEM = re.compile(r"\bitem\s*\{(.*?)\}", re.DOTALL)
_LOOKS = 8  # files that are looked at
_MOST = 1.5  # a larger coordinate is no share of an image


def detect(folder: Folder) -> list[Detected]:
    """The format "tfrecords", if the first record of one of a few files has objects; else []."""
    names = [*itertools.chain(*_shards(folder).values())]
    for name in names[:: max(1, len(names) // _LOOKS)]:
        length = int.from_bytes(folder.head(name, 8), "little")
        data = folder.head(name, 12 + min(length, limits.IMAGE_BYTES))
        try:  # a checksum is between the length and the record
            row = _features(data[12:])
        except Exception:  # protobuf's classes, of files that hold no Examples
            continue
        if _XMIN in row and LABEL in row:
            evidence = "TFRecords of TensorFlow's Object Detection API"
            evidence += f" in {count(len(names), 'file')}, such as {name}"
            return [Detected("tfrecords", evidence, len(names), bool(row[MASK].bytes_list.value))]
    return []


def read(folder: Folder, masks: bool) -> tuple[Labels, list[File]]:
    """(labels, images that lie in the records); SourceError if a record cannot be understood."""
    if not detect(folder):
        raise SourceError(f"{folder.path} has no TFRecords with {_XMIN} and {LABEL}")
    parts, notes = _shards(folder), []
    used = {"train": parts["train"], "val": parts["validation"] or parts["test"]}
    names = [*itertools.chain(*parts.values())]
    if not all(used.values()):
        used = {"train": sorted(names)}
    elif aside := {*names} - {*used["train"], *used["val"]}:
        notes.append(f"{count(len(aside), 'file')} not of train or val: not used, as {min(aside)}")
    categories, files, contents = _label_map(folder), {}, {}
    for split, shards in used.items():
        content = contents[split] = {"images": [], "annotations": []}
        for shard in shards:
            path, offset = folder.full(shard), 12  # behind the length and its checksum
            for i, record in enumerate(records.read_shard(path)):
                try:
                    encoded, image, objects = _parse(_features(record), categories, masks)
                except ValueError as error:
                    problem = f"{path}, record {i} (counted from 0): {one_line(error)}"
                    raise SourceError(problem) from error
                name, number = image["file_name"], len(content["images"]) + 1
                name = f"{shard}/{i}" if name == "." or name in files else name
                files[name] = File(name, len(encoded), (path, offset + record.find(encoded)))
                content["images"].append({**image, "file_name": name, "id": number})
                for each in objects:
                    each |= {"id": len(content["annotations"]) + 1, "image_id": number}
                    content["annotations"].append(each)
                offset += len(record) + 16
    for content in contents.values():
        content["categories"] = [{"id": key, "name": categories[key]} for key in sorted(categories)]
    return Labels(contents, notes), [*files.values()]


def _shards(folder: Folder) -> dict[str, list[str]]:
    """The files that are named as records are, by the split in their name or ''."""
    parts = collections.defaultdict(list)
    for name in (file.name for file in folder.files if file.size):
        if _NAME.search(name):
            parts[split_of(name)].append(name)
    return parts


def _label_map(folder: Folder) -> dict[int, str]:
    """The names by number in the label maps (.pbtxt)."""
    result: dict[int, str] = {}
    for path in folder.named(".pbtxt"):
        for item in _ITEM.findall(folder.text(path)):
            values = dict(re.findall(r"(\w+)\s*:\s*[\"']?([^\"'\n,]+)", item))
            name = values.get("display_name") or values.get("name")
            if name and values.get("id", "").strip().isdigit():
                result.setdefault(int(values["id"]), name.strip())
    return result


def _features(record: bytes) -> Any:
    """The features of an Example by key; one that is missing has no values."""
    return tensorflow().train.Example.FromString(record).features.feature


def _parse(
    feature: Any, categories: dict[int, str], masks: bool
) -> tuple[bytes, dict[str, Any], list[dict[str, Any]]]:
    """(image file, image, objects) of a record, the latter as COCO has them.

    Adds to `categories`. ValueError if the record cannot be understood.
    """

    def ints(key: str) -> list[int]:
        return list(feature[key].int64_list.value)

    def texts(key: str) -> list[bytes]:
        return list(feature[key].bytes_list.value)

    encoded = b"".join(texts("image/encoded")[:1])
    size = ints("image/height") + ints("image/width")
    height, width = size if len(size) == 2 else photos.sizes(encoded)[0]
    name = coco.normal(b"".join(texts("image/filename")[:1]).decode(errors="backslashreplace"))
    image = {"file_name": name, "height": height, "width": width}
    labels, sides = ints(LABEL), [feature[f"image/object/bbox/{s}"].float_list.value for s in SIDES]
    if len({len(labels), *map(len, sides)}) > 1:
        raise ValueError(f"{len(labels)} labels for {[*map(len, sides)]} sides of boxes")
    for label, title in itertools.zip_longest(labels, texts(_TEXT)[: len(labels)]):
        if label not in categories:
            categories[label] = (title or b"").decode() or f"class {label}"
    boxes = np.array(sides, np.float64).reshape(4, -1).T
    if boxes.size and np.abs(boxes).max() > _MOST:
        raise ValueError(f"a side of a box is {np.abs(boxes).max():.0f}, no share of the image")
    boxes = (boxes * (height, width, height, width)).round(3)
    areas = feature["image/object/area"].float_list.value
    areas = areas or (boxes[:, 2:] - boxes[:, :2]).prod(1).tolist()
    crowds = ints(CROWD) or ints("image/object/group_of") or [0] * len(labels)
    rows: list[dict[str, Any]] = [
        {"category_id": label, "bbox": [x0, y0, x1 - x0, y1 - y0], "area": area, "iscrowd": crowd}
        for label, (y0, x0, y1, x1), area, crowd in zip(
            labels, boxes.tolist(), areas, crowds, strict=True
        )
    ]
    pngs = feature[MASK].bytes_list.value if masks else []
    for row, png in zip(rows, pngs, strict=bool(pngs)):
        row["segmentation"] = coco.mask_outline(np.asarray(Image.open(io.BytesIO(png))) > 0)
    return encoded, image, rows
