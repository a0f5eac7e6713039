"""Recognises images with boxes by the names and the heads of files, for `folders.Reading`."""

from __future__ import annotations

import collections
import itertools
import os
import re
from typing import Any, NamedTuple

from benchmarks.detection.coco import normal
from benchmarks.detection.preparation import label_files, labels, tfrecords
from benchmarks.detection.preparation.label_files import split_of
from common.errors import count, parse_json, some
from common.images import photos
from common.preparation.folders import Folder, Reading
from common.preparation.sources import read_at

_COCO = {  # the archives of 2017
    "--train_images": "train2017.zip",
    "--val_images": "val2017.zip",
    "--annotations": "annotations_trainval2017.zip",
}
_LIST = re.compile(rb'"(images|annotations|categories)"\s*:\s*\[')
_FILE_NAME = re.compile(rb'"file_name"\s*:\s*"([^"\\]+)"')
_EMPTY = re.compile(rb'"segmentation"\s*:\s*(\[\s*\]|null)')
_PARSED, _END = 16 << 20, 1 << 20  # bytes: of a larger JSON the first ones and the end are searched
_LARGEST = 8  # JSONs that are looked at, because COCO's are larger than other tools'
_LISTED = 100  # images of a JSON that are looked for


class _File(NamedTuple):
    """A JSON in COCO's form."""

    name: str
    masks: bool
    text: str  # what it holds
    images: str  # their number
    listed: list[str]  # some file names
    folder: str | None = None  # of these images; None if there are none of them


def readings(folder: Folder) -> list[Reading]:
    """The ways to read a folder as images with boxes or masks."""
    zips = {os.path.basename(name): name for name in folder.named(".zip")}
    if zips.keys() >= {*_COCO.values()}:
        flags = [f"{flag}={folder.full(zips[name])}" for flag, name in _COCO.items()]
        found = f"COCO's {', '.join(_COCO.values())}"
        return [_reading("coco", found, len(zips), True, flags, "COCO's images")]
    if folder.is_file and folder.named(".json"):  # its images lie beside it
        beside = Folder.open(folder.path)
        return _coco(beside, beside.named(*photos.SUFFIXES), [folder.files[0].name])
    images = folder.named(*photos.SUFFIXES)
    rows = _coco(folder, images, folder.named(".json"))
    path = folder.full(folder.files[0].name if folder.is_file else "")
    forms = labels.forms(folder) if images or not rows else []
    for form, found, files, masks in [*forms, *tfrecords.forms(folder)]:
        if form == "tfrecords":
            parts = tfrecords.names(folder)
        else:
            names = folder.named(label_files.FORMS[form].ending)
            parts, files = [os.path.dirname(name) for name in names], files + len(images)
        flags = [f"--labels={form}", f"--train_images={path}"]
        rows.append(_reading(form, found, files, masks, flags, _split(parts)))
    return rows if images or zips else rows[-1:]  # beside records a JSON is about their images


def _reading(
    form: str, found: str, files: int, masks: bool, flags: list[str], images: str
) -> Reading:
    kinds = "boxes and masks, for Mask R-CNN," if masks else "boxes, for SSD,"
    flags = [*flags, *["--masks"] * masks]
    return Reading("coco", form, found, f"records with {kinds} of {images}", flags, files)


def _split(paths: list[str]) -> str:
    """How many files are of each split, as their paths say."""
    sizes = collections.Counter(map(split_of, paths))
    val = "val" if sizes["val"] else "test"
    if not sizes["train"] or not sizes[val]:
        return "images; validation as lists of splits say, else a tenth"
    text = f"images: {count(sizes['train'], 'file')} of train, {sizes[val]:,} of {val}"
    unused = f", {sizes['test']:,} of test (not used)" if sizes["test"] and val == "val" else ""
    return text + unused


def _coco(folder: Folder, images: list[str], names: list[str]) -> list[Reading]:
    """Images and one JSON in COCO's form, or one for each split."""
    sizes = {file.name: file.size for file in folder.files}
    by_base = collections.defaultdict(list)
    for image in images:
        by_base[os.path.basename(image).lower()].append(image)
    names = sorted(names, key=lambda name: (-sizes[name], name))[:_LARGEST]
    looked = (_look(folder, name, sizes[name]) for name in names)
    files = [file._replace(folder=_folder(file, by_base)) for file in looked if file]
    files = [file for file in files if file.folder is not None] or files
    # COCO's annotations have other files for the same images: key points and captions.
    files = [f for f in files if os.path.basename(f.name).startswith("instances")] or files
    if not files:
        return []
    parts = collections.defaultdict(list)
    for file in files:
        parts[split_of(file.name)].append(file)
    val = parts["val"] or parts["test"]
    used = [parts["train"][0], val[0]] if parts["train"] and val else files[:1]
    masks = all(file.masks for file in used)
    zips = folder.named(".zip") if not images else []  # not opened here
    flags = []
    for split, file in zip(("train", "val"), used, strict=False):
        archive = [n for n in zips if split_of(n) == split_of(file.name)] or zips
        path = file.folder or (archive[0] if archive else "")
        flags.append(f"--{split}_images={folder.full(path)}")
        flags.append(f"--{split}_annotations={folder.full(file.name)}")
    has_images = zips or used[0].folder is not None
    found = " and ".join(["images" if has_images else "no images", *(file.name for file in used)])
    kinds = ", polygons: boxes and masks" if masks else ": boxes"
    found += f" in COCO's form{used[0].text}{kinds}"
    if rest := [f"{f.name} (images: {f.images})" for f in files if f not in used]:
        found += f"; not used: {some(rest)}"
    split = f"{used[0].images} images, a tenth of them for validation"
    if len(used) > 1:
        split = f"{used[0].images} train and {used[1].images} val images"
    return [_reading("coco", found, len(images) + len(used), masks, flags, split)]


def _look(folder: Folder, name: str, size: int) -> _File | None:
    """What a JSON in COCO's form says; None if it is none."""
    if not _LIST.search(folder.head(name)):
        return None
    data = folder.head(name, _PARSED)
    if size > len(data):
        data += read_at(folder.full(name), max(0, size - _END), _END)  # often the objects
        matches = itertools.islice(_FILE_NAME.finditer(data), _LISTED)
        listed = [match[1].decode(errors="replace") for match in matches]
        masks = b'"segmentation"' in data and not _EMPTY.search(data)
        return _File(name, masks, "", "many", listed) if b'"bbox"' in data else None
    try:
        content: Any = parse_json(data.decode("utf-8-sig"))
        images, objects, categories = (
            [row for row in content[key] if row.keys()]
            for key in ("images", "annotations", "categories")
        )
        listed = [normal(row["file_name"]) for row in images]
        plain = sum(not _has_outline(row.get("segmentation")) for row in objects)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if not categories or not any("bbox" in row for row in objects):  # captions, panoptic
        return None
    text = f", {count(len(categories), 'category', 'categories')}"
    if 0 < plain < len(objects):
        text += f", {plain:,} of {len(objects):,} objects without an outline"
    return _File(
        name, not plain, text, f"{len(images):,}", listed[:: max(1, len(listed) // _LISTED)]
    )


def _has_outline(value: Any) -> bool:
    return bool(value) and (isinstance(value, dict) or all(len(polygon) > 5 for polygon in value))


def _folder(file: _File, by_base: dict[str, list[str]]) -> str | None:
    """The folder below which all listed images lie that are there; '' if they lie in several."""
    votes: collections.Counter[str] = collections.Counter()
    there = 0
    for name in file.listed:
        ends = normal(name).lower().split("/")[::-1]
        rows = by_base.get(ends[0], [])
        there += bool(rows)
        for row in rows:
            equal = len(os.path.commonprefix([ends, row.lower().split("/")[::-1]]))
            votes["/".join(row.split("/")[:-equal])] += 1
    split, above = split_of(file.name), os.path.dirname(file.name)
    paths = sorted(path for path, number in votes.items() if number >= there)
    if not there:
        return None
    return max(paths, key=lambda path: (split_of(path) == split, path == above), default="")
