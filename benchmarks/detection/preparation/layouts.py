"""Recognises images with boxes by the names and the heads of files, for `folders.Reading`."""

from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.detection.coco import normal
from benchmarks.detection.preparation import labels, tfrecords
from common.errors import parse_json
from common.preparation.folders import Folder, Reading
from common.preparation.sources import read_at

_PHOTOS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
_OFFICIAL = re.compile(
    r"(?P<path>(.*/)?(?P<part>train2017|val2017|annotations)(_trainval2017)?)"
    r"((?P<zip>\.zip)|/([^/]+\.jpg|instances_(train|val)2017\.json))"
)
_BYTES = {"train2017": 15e9, "val2017": 0.7e9}  # of COCO, which a part of it has not
_LIST = re.compile(rb'"(images|annotations|categories)"\s*:\s*\[')
_EMPTY = re.compile(rb'"segmentation"\s*:\s*(\[\s*\]|null)')
_END = 1 << 20  # bytes
_PARSED = 16 << 20  # bytes of a JSON; of a larger one only the first are looked at
_LARGEST = 8  # JSONs that are looked at, because COCO's are larger than other tools'
_SPLITS = {
    "train": re.compile(r"(?<![a-z])train(ing)?(?![a-z])"),
    "val": re.compile(r"(?<![a-z])(val|valid|validation|eval|dev)(?![a-z])"),
    "test": re.compile(r"(?<![a-z])test(ing)?(?![a-z])"),
}


class _File(NamedTuple):
    """A JSON in COCO's form, and the folder of its images."""

    name: str
    masks: bool
    text: str  # what it holds
    photos: list[str]  # some file names
    folder: str = ""
    matches: bool = False


def readings(folder: Folder) -> list[Reading]:
    """The ways to read a folder as images with boxes or masks."""
    only = folder.files[0].name if folder.is_file and folder.named(".json") else ""
    folder = Folder.open(folder.path) if only else folder
    if official := _official(folder):
        return [official]
    photos = folder.named(*_PHOTOS)
    rows = _coco(folder, photos, [only] if only else folder.named(".json"))
    if only:
        return rows
    others = labels.forms(folder) if photos or not rows else []
    forms = [(f.form, f.found, f.files + len(photos), f.masks) for f in others]
    if parts := tfrecords.files(folder):
        names = [name for part in parts.values() for name in part]
        masks = tfrecords.has_masks(folder, parts["train"][0])
        found = f"TFRecords of TensorFlow's Object Detection API in {len(names):,} files"
        forms.append(("tfrecords", found, len(names), masks))
    for form, found, files, masks in forms:
        path = folder.full(folder.files[0].name if folder.is_file else "")
        flags = [f"--labels={form}", f"--train_images={path}"]
        rows.append(_reading(form, found, files, masks, flags, "as its folders or lists say"))
    if parts and tfrecords.are_complete(folder):
        return [rows[-1]._replace(makes="nothing, because training reads them as they are")]
    return rows


def _reading(
    form: str, found: str, files: int, masks: bool, flags: Sequence[str], split: str
) -> Reading:
    kinds = "boxes and masks, for Mask R-CNN" if masks else "boxes, for SSD"
    makes = f"records of images with {kinds}; validation {split}"
    return Reading("coco", form, found, makes, [*flags, *["--masks"] * masks], files)


def _official(folder: Folder) -> Reading | None:
    """COCO's own archives, or what is in them."""
    paths: dict[str, str] = {}
    sizes: collections.Counter[str] = collections.Counter()
    for file in folder.files:
        if match := _OFFICIAL.fullmatch(file.name):
            paths[match["part"]] = match["path"] + (match["zip"] or "")
            sizes[match["part"]] += file.size
    bases = {os.path.basename(name) for name in folder.named(".json", ".zip")}
    lists = {"instances_train2017.json", "instances_val2017.json"}
    if len(paths) < 3 or not (lists <= bases or "annotations_trainval2017.zip" in bases):
        return None
    flags = [f"--{part[:-4]}_images={folder.full(paths[part])}" for part in _BYTES]
    flags.append(f"--annotations={folder.full(paths['annotations'])}")
    if any(sizes[part] < size for part, size in _BYTES.items()):
        flags.append("--subset")
    found = "COCO's " + ", ".join(sorted(paths.values()))
    return _reading("coco", found, len(folder.files), True, flags, "as COCO's")


def _coco(folder: Folder, photos: list[str], names: list[str]) -> list[Reading]:
    """Images and one JSON in COCO's form, or one for each split."""
    sizes = {file.name: file.size for file in folder.files}
    by_base = collections.defaultdict(list)
    for photo in photos:
        by_base[os.path.basename(photo).lower()].append(photo)
    names = sorted(names, key=lambda name: (-sizes[name], name))[:_LARGEST]
    files = [file for name in names if (file := _look(folder, name, sizes[name]))]
    files = [_with_folder(file, by_base) for file in files]
    files = [file for file in files if file.matches] or files
    # COCO's annotations have other files for the same images: key points and captions.
    instances = [f for f in files if os.path.basename(f.name).startswith("instances")]
    files = instances or files
    if not files:
        return []
    parts: dict[str, list[_File]] = collections.defaultdict(list)
    for file in files:
        parts[_split_of(file.name)].append(file)
    val = (parts["val"] or parts["test"])[:1]
    used = [parts["train"][0], *val] if parts["train"] and val else files[:1]
    masks = all(file.masks for file in used)
    taken = [file.name for file in used]
    zips = folder.named(".zip")
    if not photos and len(zips) == 1:  # not opened here
        used = [file._replace(folder=zips[0], matches=True) for file in used]
    found = " and ".join(["images" if used[0].matches else "no images", *taken])
    kinds = ", polygons: boxes and masks" if masks else ": boxes"
    found += f" in COCO's form{used[0].text}{kinds}"
    if rest := [file.name for file in files if file.name not in taken]:
        found += f"; {len(rest)} more such files are not used, for one {rest[0]}"
    flags = []
    for split, file in zip(_SPLITS, used, strict=False):
        flags.append(f"--{split}_images={folder.full(file.folder)}")
        flags.append(f"--{split}_annotations={folder.full(file.name)}")
    split = f"from {used[1].name}" if val and len(used) > 1 else "a tenth of the images"
    return [_reading("coco", found, len(photos) + len(used), masks, flags, split)]


def _look(folder: Folder, name: str, size: int) -> _File | None:
    """What a JSON in COCO's form says; None if it is none."""
    if not _LIST.search(folder.head(name)):
        return None
    data = folder.head(name, _PARSED)
    if size > len(data):
        data += read_at(folder.full(name), max(0, size - _END), _END)  # often the objects
        listed = re.findall(rb'"file_name"\s*:\s*"([^"\\]+)"', data[:_END])[:_LARGEST]
        masks = b'"segmentation"' in data and not _EMPTY.search(data)
        names = [text.decode(errors="replace") for text in listed]
        return _File(name, masks, "", names) if b'"bbox"' in data else None
    try:
        content: Any = parse_json(data.decode("utf-8-sig"))
        lists = [content[key] for key in ("images", "annotations", "categories")]
        images, objects, categories = ([row for row in rows if row.keys()] for rows in lists)
        listed = [normal(row["file_name"]) for row in images]
        plain = sum(not _has_outline(row.get("segmentation")) for row in objects)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not categories or not any("bbox" in row for row in objects):  # captions, panoptic
        return None
    outlines = ""
    if 0 < plain < len(objects):
        outlines = f", {plain:,} of {len(objects):,} objects without an outline"
    number = f", {len(categories):,} {'category' if len(categories) == 1 else 'categories'}"
    spread = listed[:: max(1, len(listed) // 100)]
    return _File(name, not plain, number + outlines, spread)


def _has_outline(value: Any) -> bool:
    return bool(value) and (isinstance(value, dict) or all(len(polygon) > 5 for polygon in value))


def _with_folder(file: _File, by_base: dict[str, list[str]]) -> _File:
    """The file with the folder below which its file names lie, and whether there are any."""
    votes: collections.Counter[str] = collections.Counter()
    for name in file.photos:
        ends = normal(name).lower().split("/")
        for photo in by_base.get(ends[-1], ()):
            shared = itertools.zip_longest(ends[::-1], photo.lower().split("/")[::-1])
            equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], shared))
            votes["/".join(photo.split("/")[:-equal])] += 1
    if not votes:
        return file
    most, split, above = max(votes.values()), _split_of(file.name), os.path.dirname(file.name)
    best = max(
        sorted(votes), key=lambda path: (votes[path], _split_of(path) == split, path == above)
    )
    return file._replace(folder=best if most == len(file.photos) else "", matches=True)


def _split_of(path: str) -> str:
    """The split that a path names, the last one first; '' if it names none."""
    for part in reversed(path.lower().split("/")):
        for split, pattern in _SPLITS.items():
            if pattern.search(part):
                return split
    return ""
