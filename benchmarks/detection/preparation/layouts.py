"""Recognises images with boxes by the names and the heads of files, for `folders.Reading`."""

from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

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
_FILE_NAME = re.compile(
    rb'"file_name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")'
)
_CATEGORIES = re.compile(rb'"categories"\s*:\s*\[.*?(\}\s*\]|$)', re.DOTALL)
_NAME = re.compile(rb'"name"\s*:')
# Run lengths, or polygons of at least six numbers.
_OUTLINE = re.compile(rb'"segmentation"\s*:\s*(?:\{|\[\s*\[(?:[^][,]+,){5})')
_LOOKED, _END = 16 << 20, 1 << 20  # bytes: of a larger JSON the first and the last ones
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
            sizes = {split: len(names) for split, names in tfrecords.splits(folder).items()}
        else:
            names = map(os.path.dirname, folder.named(label_files.FORMS[form].ending))
            sizes, files = collections.Counter(map(split_of, names)), files + len(images)
        flags = [f"--labels={form}", f"--train_images={path}"]
        rows.append(_reading(form, found, files, masks, flags, _sized(sizes)))
    return rows if images or zips else rows[-1:]  # beside records a JSON is about their images


def _reading(
    form: str, found: str, files: int, masks: bool, flags: list[str], images: str
) -> Reading:
    kinds = "boxes and masks, for Mask R-CNN," if masks else "boxes, for SSD,"
    flags = [*flags, *["--masks"] * masks]
    return Reading("coco", form, found, f"records with {kinds} of {images}", flags, files)


def _sized(sizes: Mapping[str, int]) -> str:
    """How many files are of each split, as their names say."""
    train, val, test = (sizes.get(split, 0) for split in ("train", "val", "test"))
    if not train or not (val or test):
        return "images; validation as lists of splits say, else a tenth"
    text = f"images: {count(train, 'file')} of train, {val or test:,} of {'val' if val else 'test'}"
    return text + (f", {test:,} of test (not used)" if val and test else "")


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
    """What a JSON in COCO's form says; None if it is none, or has captions or segments."""
    data = folder.head(name, _LOOKED)
    if is_part := size > len(data):
        data += read_at(folder.full(name), max(0, size - _END), _END)  # often the objects
    lists = {match[1] for match in _LIST.finditer(data)}
    if len(lists) < 3 - is_part or b'"bbox"' not in data or b'"segments_info"' in data:
        return None
    listed = _FILE_NAME.findall(data)
    number, objects = f"{len(listed):,}", data.count(b'"bbox"')
    plain = objects - len(_OUTLINE.findall(data))
    text = f", {plain:,} of {objects:,} objects without an outline" if 0 < plain < objects else ""
    if is_part:
        number, text = "many", ""
    elif match := _CATEGORIES.search(data):
        names = len(_NAME.findall(match[0]))
        text = f", {count(names, 'category', 'categories')}{text}"
    some_names = listed[:: max(1, len(listed) // _LISTED)]
    names = [parse_json(each.decode(errors="replace")) for each in some_names]
    return _File(name, plain <= 2 * is_part, text, number, names)  # a part cuts two objects


def _folder(file: _File, by_base: dict[str, list[str]]) -> str | None:
    """The folder below which all listed images lie that are there; '' if they lie in several."""
    votes: collections.Counter[str] = collections.Counter()
    there = 0
    for name in file.listed:
        ends = normal(name).lower().split("/")[::-1]
        rows = by_base.get(ends[0], [])
        there += bool(rows)
        for row in rows:
            pairs = zip(ends, row.lower().split("/")[::-1], strict=False)
            equal = [*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
            votes["/".join(row.split("/")[: -len(equal)])] += 1
    split, above = split_of(file.name), os.path.dirname(file.name)
    paths = sorted(path for path, number in votes.items() if number >= there)
    if not there:
        return None
    return max(paths, key=lambda path: (split_of(path) == split, path == above), default="")
