"""Labels of YOLO, Pascal VOC, CVAT, LabelMe and Open Images in COCO's form: images and splits.

A label file belongs to the image of its name, beside it or in the folder that stands for its own:
labels/train/a.txt and images/train/a.jpg. `label_files` has what the files say.
"""

from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from PIL import Image

from benchmarks.detection.coco import is_end, normal
from benchmarks.detection.preparation import label_files
from benchmarks.detection.preparation.label_files import FORMS, Entry, split_of
from common import limits
from common.images import photos
from common.preparation.folders import Folder
from common.preparation.sources import SourceError

# Folders of images and of their labels, by which the paths of the two differ.
_KINDS = {"images", "image", "jpegimages", "labels", "annotations", "xmls"}
_LISTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_MANY = 0.1  # of the objects; so many faults are no accident

_Listed = dict[str, list[tuple[str, str | None]]]  # of each split names and their images


class Form(NamedTuple):
    """A form of labels that a folder has."""

    form: str  # a key of FORMS
    found: str  # which files say so
    files: int  # the number of label files
    masks: bool  # whether all objects in the files that were looked at have polygons


class Labels(NamedTuple):
    """The labels of a folder in COCO's form."""

    # By "train" and "val", or "train" alone where the data have no split, a dict with the lists
    # "images", "annotations" and "categories"; `file_name` is relative to the folder.
    splits: dict[str, dict[str, Any]]
    notes: list[str]  # what is odd about the labels, each a line for the user


class _Pictures:
    """The images of a folder, by the names that labels have for them."""

    def __init__(self, folder: Folder):
        known = Image.registered_extensions().items()
        self._endings = {ending for ending, kind in known if kind in photos.FORMATS}
        self.names = folder.named(*self._endings)
        self._by_key, self._by_stem = collections.defaultdict(list), collections.defaultdict(list)
        for name in self.names:
            key = self.key(name)
            self._by_key[key].append(name)
            self._by_stem[os.path.basename(key)].append(name)

    def key(self, name: str) -> str:
        """A path in lower case, without its endings and the folders that tell kinds apart."""
        *folders, base = normal(name).lower().split("/")
        stem, ending = os.path.splitext(base)
        while ending in self._endings or ending in (".txt", ".xml", ".json"):
            base = stem
            stem, ending = os.path.splitext(base)
        return "/".join([*(f for f in folders if f not in _KINDS and f != ".."), base])

    def find(self, names: Iterable[str], by_stem: bool = True) -> str | None:
        """The image of one of the names; `by_stem` in another folder, too, if only one fits."""
        keys = {name: self.key(name) for name in names}
        for name, key in keys.items():
            if rows := self._by_key.get(key):
                base = os.path.basename(normal(name))
                stem = os.path.splitext(base)[0]  # a.jpg and A.jpg may be two images
                bases = {row: os.path.basename(row) for row in rows}
                return max(rows, key=lambda r: (bases[r] == base, bases[r].startswith(stem)))
        for key in keys.values() if by_stem else ():
            rows = [
                row
                for row in self._by_stem.get(os.path.basename(key), [])
                if len({*map(split_of, map(os.path.dirname, (row, key)))} - {""}) < 2
            ]
            fits = [row for row in rows if is_end(self.key(row), key)] or rows
            if len(fits) == 1:
                return fits[0]
        return None


def forms(folder: Folder) -> list[Form]:
    """The forms of labels in a folder, from names and the heads of a few files."""
    pictures = _Pictures(folder)
    if folder.is_file:
        return []
    result, filled = [], {file.name for file in folder.files if file.size}
    for form, kind in FORMS.items():
        names = [name for name in folder.named(kind.ending) if name in filled]
        beside = [name for name in names if pictures.find((name,), by_stem=False)]
        others = sorted({*names} - {*beside}, key=lambda name: (name.count("/"), name))
        sample = beside[:: max(1, len(beside) // 16)][:16] + others[:16]
        heads = {name: folder.head(name) for name in sample}
        heads = {name: head for name, head in heads.items() if re.search(kind.head, head)}
        if not heads or (form == "yolo" and not pictures.names):  # numbers may be anything
            continue
        number = len(beside) if kind.each and heads.keys() & {*beside} else len(heads)
        polygons, boxes = (
            any(re.search(pattern, head) for head in heads.values())
            for pattern in (kind.polygon, kind.box)
        )
        form_of = f"{kind.title}'s form{' with polygons' * polygons}"
        found = f"{number:,} {kind.ending} files in {form_of}, such as {min(heads, key=len)}"
        result.append(Form(form, found, number, polygons and not boxes))
    return result


def read(folder: Folder, form: str) -> Labels:
    """Reads all labels of a form.

    An image without labels in a folder with labelled ones has no objects. Of the splits, test
    counts as val where there is no val.

    Raises:
        SourceError: globox is missing; no label has an image or an object; a tenth of the objects
            cannot be read; an image has labels twice.
        tf.errors.OpError: a file cannot be read.
    """
    pictures, notes = _Pictures(folder), []
    entries = [*FORMS[form].read(folder, pictures.find)]
    _check(folder, entries, notes)
    labelled = _matched(folder, pictures, entries, notes)
    keys, folders = {*map(pictures.key, labelled)}, {*map(os.path.dirname, labelled)}
    rest = {
        name
        for name in pictures.names
        if os.path.dirname(name) in folders and pictures.key(name) not in keys
    }
    images = sorted({*labelled} | rest)
    sizes = {name: entry.size for name, entry in labelled.items() if entry.size}
    sizes |= _sizes(folder, [name for name in images if name not in sizes], notes)
    used = {o.label for entry in labelled.values() for o in entry.objects}
    names = sorted(used, key=lambda label: (len(label) * label.isdigit(), label))
    if form == "yolo":
        known = label_files.yolo_settings(folder)[1]["names"]
        names = [*dict.fromkeys(str(name).strip() for name in known.values())] or names
        if not known:
            notes.append("no data.yaml, obj.names or classes.txt has names: categories are numbers")
    contents = {}
    listed = {"voc": _voc_lists, "yolo": _yolo_lists}.get(form)
    lists = _lists(listed(folder, pictures), notes) if listed else {}
    for split, members in _splits(images, labelled, lists, notes).items():
        members = [name for name in members if name in sizes]
        if empty := sum(name in rest for name in members):
            notes.append(
                f"{split}: {empty:,} of {len(members):,} images have no labels: they count as "
                "images without objects; take those out that nobody has labelled"
            )
        relative = form in ("yolo", "openimages")
        contents[split] = _content(members, labelled, sizes, names, relative)
    rows = [row for content in contents.values() for row in content["annotations"]]
    if 0 < (plain := sum("segmentation" not in row for row in rows)) < len(rows):
        notes.append(f"{plain:,} of {len(rows):,} objects have a box and no polygon: no masks")
    return Labels(contents, notes)


def _check(folder: Folder, entries: list[Entry], notes: list[str]) -> None:
    """Notes what cannot be read; SourceError if that is much, or all."""
    objects = sum(len(entry.objects) for entry in entries)
    faults = [fault for entry in entries for fault in entry.faults]
    total = objects + len(faults)
    if len(faults) > _MANY * total:
        raise SourceError(f"{len(faults):,} of {total:,} labels cannot be read: {faults[0]}")
    if not objects:
        raise SourceError(f"{folder.path}: none of its {len(entries):,} labels has an object")
    if faults:
        notes.append(f"{len(faults):,} of {total:,} labels are left out, for one {faults[0]}")
    for kind, number in collections.Counter(k for e in entries for k in e.skipped).items():
        notes.append(f"{number:,} shapes '{kind}' are left out: boxes and polygons are read")


def _matched(
    folder: Folder, pictures: _Pictures, entries: list[Entry], notes: list[str]
) -> dict[str, Entry]:
    """The entry of each labelled image; first where both have one name, then where a name fits."""
    labelled: dict[str, Entry] = {}
    missing = entries
    for by_stem in (False, True):
        entries, missing = missing, []
        for entry in entries:
            image = pictures.find(entry.names if by_stem else entry.names[:1], by_stem)
            if image is None or (by_stem and image in labelled):
                missing.append(entry)
            elif image in labelled:
                both = f"{labelled[image].file} and {entry.file}"
                raise SourceError(f"{folder.path}: {both} both label {image}: remove one of them")
            else:
                labelled[image] = entry
    if missing:
        number = f"{len(missing):,} of {len(missing) + len(labelled):,}"
        fault = f"{number} labels have no image, for one {missing[0].file}: {missing[0].names[-1]}"
        if not labelled:
            fix = "put the images beside them, or into the folder images beside labels"
            raise SourceError(f"{folder.path}: {fault}: {fix}")
        notes.append(fault)
    return labelled


def _splits(
    images: list[str], labelled: dict[str, Entry], lists: dict[str, set[str]], notes: list[str]
) -> dict[str, list[str]]:
    """The images of each split: from lists, labels or folders, in this order."""

    def split(name: str) -> str:
        if lists:
            return next((key for key, members in lists.items() if name in members), "")
        said = labelled[name].split if name in labelled else ""
        return said or split_of(os.path.dirname(name))

    rows = {name: split(name) for name in images}
    train, *others = ([n for n, s in rows.items() if s == key] for key in _LISTS)
    val = next(filter(None, others), [])
    if not train or not val:
        return {"train": train if lists and train else images}
    if rest := sum(not s for s in rows.values()):
        notes.append(f"{rest:,} images are neither of train nor of val: they are left out")
    return {"train": train, "val": val}


def _lists(rows: _Listed, notes: list[str]) -> dict[str, set[str]]:
    """The images of each split where files list them; {} where none does."""
    lists = {split: {image for _, image in row if image} for split, row in rows.items()}
    missing = [name for key in ("train", "val") for name, image in rows.get(key, ()) if not image]
    if missing:
        end = "" if lists["train"] else ", and folders' names decide which image is of which split"
        number = f"{len(missing):,} images or folders"
        notes.append(f"{number} of the lists of splits are not there, for one {missing[0]}{end}")
    if lists.get("train", set()) & lists.get("val", set()):
        notes.append("the lists of train and val have images in common: they are not used")
        return {"train": lists["train"] | lists["val"]}
    return lists if lists.get("train") else {}


def _voc_lists(folder: Folder, pictures: _Pictures) -> _Listed:
    """ImageSets/Main/SPLIT.txt has the names of images without endings."""
    rows: _Listed = collections.defaultdict(list)
    pattern = re.compile(r"(?i)(.*?)/?ImageSets/Main/(train|val|trainval|test)\.txt")
    for file in folder.named(".txt"):
        if match := pattern.fullmatch(file):
            for name in filter(None, map(str.strip, label_files.text(folder, file).splitlines())):
                image = pictures.find((os.path.join(match[1], name),), by_stem=False)
                rows[match[2].lower()].append((name, image))
    known = {*rows["train"], *rows["val"]}
    both = [row for row in rows.pop("trainval", []) if row not in known]
    if not rows["train"] or not rows["val"]:
        rows["val" if rows["train"] else "train"] += both
    return rows


def _yolo_lists(folder: Folder, pictures: _Pictures) -> _Listed:
    """The values train, val and test are folders, files with lists of images, or lists of both.

    The paths are often those of another machine: the longest end that is here counts.
    """
    file, content = label_files.yolo_settings(folder)
    above, texts = os.path.dirname(file), {*folder.named(".txt")}
    folders = collections.defaultdict(list, {"": pictures.names})
    for name in pictures.names:
        path = name
        while path := os.path.dirname(path):
            folders[path].append(name)

    def images(value: str) -> list[tuple[str, str | None]]:
        parts = [part for part in normal(value).split("/") if part not in ("..", ".", "")]
        ends = ["/".join(parts[i:]) for i in range(len(parts))] or [""]
        for path in (os.path.join(base, end) for end in ends for base in (above, "")):
            if path.rstrip("/") in folders:
                return [(name, name) for name in folders[path.rstrip("/")]]
            if path in texts:
                lines = filter(None, map(str.strip, label_files.text(folder, path).splitlines()))
                return [(name, pictures.find((os.path.join(above, name), name))) for name in lines]
        return [(f"{value} of {file}", None)]

    rows: _Listed = {}
    for split, keys in _LISTS.items():
        usual = [f"{key}.txt" for key in keys if f"{key}.txt" in texts]
        value = next((content[key] for key in keys if content.get(key)), usual)
        values = value if isinstance(value, list) else [value]
        path = str(content.get("path") or "")
        rows[split] = [row for v in values for row in images(os.path.join(path, str(v)))]
    return rows


def _sizes(folder: Folder, images: list[str], notes: list[str]) -> dict[str, tuple[int, int]]:
    """(height, width) of images as EXIF turns them; those that cannot be read are missing."""

    def size(name: str, most: int = 1 << 16) -> tuple[int, int] | str:
        try:
            return photos.sizes(folder.head(name, most))[-1]
        except photos.BadImage as error:  # or its sizes are further behind
            everything = most == limits.TEXT_BYTES
            return f"{name}: {error}" if everything else size(name, limits.TEXT_BYTES)

    rows = dict(zip(images, label_files.in_threads(folder, size, images, "images"), strict=True))
    if bad := [row for row in rows.values() if isinstance(row, str)]:
        notes.append(f"{len(bad):,} images are left out, for one {bad[0]}")
    return {name: row for name, row in rows.items() if not isinstance(row, str)}


def _content(
    images: list[str],
    labelled: dict[str, Entry],
    sizes: dict[str, tuple[int, int]],
    names: Sequence[str],
    relative: bool,
) -> dict[str, Any]:
    """The images, annotations and categories of a split; ids count from 1."""
    ids = {name: i for i, name in enumerate(names, 1)}
    rows, annotations = [], []
    for image_id, name in enumerate(images, 1):
        height, width = sizes[name]
        rows.append({"id": image_id, "file_name": name, "height": height, "width": width})
        factors = (width, height) if relative else (1, 1)
        for label, box, polygons, crowd in labelled[name].objects if name in labelled else ():
            x, y, w, h = _scaled(box, factors)
            row: dict[str, Any] = {"id": len(annotations) + 1, "image_id": image_id}
            row |= {"category_id": ids[label], "bbox": [x, y, w, h], "area": w * h}
            row["iscrowd"] = int(crowd)
            if polygons:
                row["segmentation"] = [_scaled(polygon, factors) for polygon in polygons]
                row["area"] = sum(map(_area, row["segmentation"]))
            annotations.append(row)
    categories = [{"id": i, "name": name} for name, i in ids.items()]
    return {"images": rows, "annotations": annotations, "categories": categories}


def _scaled(values: Sequence[float], factors: tuple[int, int]) -> list[float]:
    return [value * factor for value, factor in zip(values, itertools.cycle(factors), strict=False)]


def _area(polygon: list[float]) -> float:
    """The area of a polygon x, y, x, y ..."""
    points = list(zip(polygon[::2], polygon[1::2], strict=True))
    pairs = zip(points, points[1:] + points[:1], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs)) / 2
