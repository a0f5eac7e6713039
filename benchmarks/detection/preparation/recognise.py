"""Recognises images with boxes or masks: COCO's form, labels of other tools, TFRecords."""

import collections
import itertools
import os
from typing import NamedTuple

from benchmarks.detection.coco import normal
from benchmarks.detection.preparation import label_folders, tfrecords
from common import limits
from common.errors import count, one_line, parse_json, some, visible
from common.images import photos
from common.preparation.folders import DatasetFormat, Folder, split_of
from common.text import decoded

_COCO = {  # the archives of 2017
    "--train_images": "train2017.zip",
    "--val_images": "val2017.zip",
    "--annotations": "annotations_trainval2017.zip",
}
_KEYS = (b'"images"', b'"annotations"', b'"categories"', b'"bbox"')
_LARGEST = 8  # JSONs that are looked at, because COCO's are larger than other tools'
_NEARLY_ALL = 0.9
_LISTED = 100  # images of a JSON that are looked for


class _File(NamedTuple):
    """A JSON in COCO's form."""

    name: str
    masks: bool  # whether all objects have outlines
    text: str  # what it holds
    images: int
    listed: list[str]  # some file names
    folder: str | None = None  # of these images; None if there are none of them


def dataset_formats(folder: Folder) -> list[DatasetFormat]:
    """The formats of images with boxes or masks that a folder has."""
    zips = {os.path.basename(name): name for name in folder.named(".zip")}
    if zips.keys() >= {*_COCO.values()}:
        flags = [f"{flag}={folder.full(zips[name])}" for flag, name in _COCO.items()]
        evidence = f"COCO's {', '.join(_COCO.values())}"
        return [_format("coco", evidence, len(zips), True, flags, "COCO's images")]
    if folder.is_file and folder.named(".json"):  # its images lie beside it
        beside = Folder.open(folder.path)
        return _coco(beside, beside.named(*photos.SUFFIXES), [folder.files[0].name])
    images = folder.named(*photos.SUFFIXES)
    rows = _coco(folder, images, folder.named(".json"))
    detected = label_folders.detect(folder) if images or not rows else []
    most = max((each.num_files for each in detected), default=0)
    for name, evidence, files, masks in [*detected, *tfrecords.detect(folder)]:
        flags = [f"--labels={name}", f"--train_images={folder.given}"]
        split = "images; validation as folders or lists of splits say, else a tenth"
        # A table is worth little beside label files for nearly all images: it is often their copy.
        is_copy = files < _NEARLY_ALL * len(images) <= most
        files += 0 if name == "tfrecords" or is_copy else len(images)
        rows.append(_format(name, evidence, files, masks, flags, split))
    return rows if images or zips else rows[-1:]  # beside records a JSON is about their images


def _format(
    name: str, evidence: str, files: int, masks: bool, flags: list[str], images: str
) -> DatasetFormat:
    objects = "boxes and masks, for Mask R-CNN," if masks else "boxes, for SSD,"
    flags = [*flags, *["--masks"] * masks]
    output = f"records with {objects} of {images}"
    return DatasetFormat("coco", name, evidence, output, flags, files)


def _coco(folder: Folder, images: list[str], names: list[str]) -> list[DatasetFormat]:
    """Images and one JSON in COCO's form, or one for each split."""
    sizes = {file.name: file.size for file in folder.files}
    by_base = collections.defaultdict(list)
    for image in images:
        by_base[os.path.basename(image).lower()].append(image)
    # COCO's annotations have other files for the same images: key points and captions.
    names = [n for n in names if os.path.basename(n).startswith("instances")] or names
    names = sorted(names, key=lambda name: (-sizes[name], name))[:_LARGEST]
    files = [file for file in (_look(folder, name) for name in names) if file]
    files = [file._replace(folder=_folder(file, by_base)) for file in files]
    files = [file for file in files if file.folder is not None] or files
    if not files:
        return []
    parts = collections.defaultdict(list)
    for file in files:
        parts[split_of(file.name)].append(file)
    val = parts["validation"] or parts["test"]
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
    evidence = " and ".join(
        ["images" if has_images else "no images", *(file.name for file in used)]
    )
    shapes = ", polygons: boxes and masks" if masks else ": boxes"
    evidence += f" in COCO's form{used[0].text}{shapes}"
    if unused := [f"{file.name} (images: {file.images:,})" for file in files if file not in used]:
        evidence += f"; not used: {some(unused)}"
    split = f"{used[0].images:,} images, a tenth of them for validation"
    if len(used) > 1:
        split = f"{used[0].images:,} train and {used[1].images:,} val images"
    return [_format("coco", evidence, len(images) + len(used), masks, flags, split)]


def _look(folder: Folder, name: str) -> _File | None:
    """What a JSON in COCO's form says; None if it is none, or has captions or segments."""
    head = folder.head(name)
    if not any(key in head for key in _KEYS) or b"}\n{" in head:  # gigabytes of JSON Lines
        return None
    data, path = folder.head(name, limits.ANNOTATION_BYTES), folder.full(name)
    if not all(key in data for key in _KEYS) or b'"segments_info"' in data:
        return None
    try:
        content = parse_json(decoded(data, path))
        names = [str(row.get("file_name") or row.get("coco_url")) for row in content["images"]]
        outlines = [bool(row.get("segmentation")) for row in content["annotations"]]
        text = f", {count(len(content['categories']), 'category', 'categories')}"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        print(visible(f"not taken: {path} is damaged or not in COCO's form ({one_line(error)})"))
        return None
    plain = outlines.count(False)
    if 0 < plain < len(outlines):
        text += f", {plain:,} of {len(outlines):,} objects without an outline"
    return _File(name, not plain, text, len(names), names[:: max(1, len(names) // _LISTED)])


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
