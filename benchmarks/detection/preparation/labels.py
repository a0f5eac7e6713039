"""Labels of YOLO, Pascal VOC, CVAT, LabelMe and Open Images in COCO's form: images and splits.

A label file belongs to the image of its name, beside it or in the folder that stands for its own:
labels/train/a.txt and images/train/a.jpg. `label_files` reads the files.
"""

import collections
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from benchmarks.detection.coco import is_end, normal
from benchmarks.detection.preparation.label_files import (
    FORMS,
    Entry,
    Reader,
    Settings,
    lines,
    split_of,
    yolo_settings,
)
from common import console, limits, pools
from common.errors import count
from common.images import photos
from common.preparation.folders import Folder
from common.preparation.sources import SourceError

# Folders of images and of their labels, by which the paths of the two differ.
_KINDS = {"images", "image", "jpegimages", "labels", "annotations", "xmls", ".."}
# Of each split the keys in data.yaml, and the names of the lists of its images.
_LISTS = {"train": ("train", "trainval"), "val": ("val", "valid", "validation"), "test": ("test",)}
_MANY = 0.1  # of the objects: so many that cannot be read are no accident


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


class _Images:
    """The images of a folder, by the names that labels have for them."""

    def __init__(self, folder: Folder):
        known = Image.registered_extensions().items()
        endings = [ending for ending, kind in known if kind in photos.FORMATS]
        self.names = folder.named(*endings)
        every = "|".join(ending[1:] for ending in [*endings, ".txt", ".xml", ".json"])
        self._endings = re.compile(rf"(\.({every}))+$")
        self._by_key, self._by_stem = collections.defaultdict(list), collections.defaultdict(list)
        for name in self.names:
            key = self.key(name)
            self._by_key[key].append(name)
            self._by_stem[os.path.basename(key)].append(name)

    def key(self, name: str) -> str:
        """A path in lower case, without its endings and the folders that tell kinds apart."""
        parts = self._endings.sub("", normal(name).lower()).split("/")
        return "/".join([*(part for part in parts[:-1] if part not in _KINDS), parts[-1]])

    def find(self, *names: str) -> tuple[int, str] | None:
        """The image of the first name that fits, with 0 for the first one, else a larger number.

        If none fits, an image in another folder is taken if it is the only one of its name.
        """
        keys = [self.key(name) for name in names]
        for i, (name, key) in enumerate(zip(names, keys, strict=True)):
            if rows := self._by_key.get(key):  # a.jpg and a.png
                base = os.path.basename(normal(name)).lower()
                return i, max(rows, key=lambda row: os.path.basename(row).lower() == base)
        for i, key in enumerate(keys, len(keys)):
            splits = {"", split_of(os.path.dirname(key))}
            rows = self._by_stem.get(os.path.basename(key), [])
            rows = [r for r in rows if len(splits | {split_of(os.path.dirname(r))}) < 3]
            rows = [row for row in rows if is_end(self.key(row), key)] or rows
            if len(rows) == 1:
                return i, rows[0]
        return None


def forms(folder: Folder) -> list[Form]:
    """The forms of labels in a folder, from names and the heads of a few files."""
    images, result = _Images(folder), []
    filled = {file.name for file in folder.files if file.size and not folder.is_file}
    for form, kind in FORMS.items():
        names = sorted(filled & {*folder.named(kind.ending)}, key=lambda n: (n.count("/"), n))
        sample = dict.fromkeys([*names[:16], *names[:: max(1, len(names) // 16)]])
        heads = {name: folder.head(name) for name in sample}
        heads = {name: head for name, head in heads.items() if re.search(kind.head, head)}
        if not heads:
            continue
        try:
            settings = yolo_settings(folder) if form == "yolo" else Settings()
        except SourceError:  # which `read` raises
            settings = Settings()
        if form == "yolo" and not (images.names or settings.names):  # numbers may be anything
            continue
        number = max(len(heads), sum(images.find(name) is not None for name in names))
        shapes = {bool(m[1]) for head in heads.values() for m in re.finditer(kind.shape, head)}
        polygons = True in shapes and "kpt_shape" not in settings.content
        found = f"{count(number, 'label file')} in {kind.title} form"
        found += f"{' with polygons' * polygons}, such as {min(heads, key=len)}"
        if settings.names:
            found += f", {count(len(settings.names), 'class', 'classes')} by {settings.file}"
        result.append(Form(form, found, number, polygons and False not in shapes))
    return result


def read(folder: Folder, form: str) -> Labels:
    """Reads all labels of a form.

    An image without labels in a folder with labelled ones has no objects. Of the splits, test
    counts as val where there is no val. SourceError if globox is missing, no label has an image or
    an object, or a tenth of the objects cannot be read.
    """
    images, notes = _Images(folder), []
    settings = yolo_settings(folder) if form == "yolo" else Settings()
    reader = Reader(folder, images.find, settings)
    labelled = _matched(folder, images, _entries(folder, form, reader, notes), notes)
    keys, folders = {*map(images.key, labelled)}, {*map(os.path.dirname, labelled)}
    rest = (n for n in images.names if os.path.dirname(n) in folders and images.key(n) not in keys)
    sizes = {name: entry.size for name, entry in labelled.items() if entry.size}
    sizes |= _sizes(folder, sorted({*labelled, *rest} - {*sizes}), notes)
    used = {o.label for entry in labelled.values() for o in entry.objects}
    names = [*dict.fromkeys(settings.names.values())]
    names = names or sorted(used, key=lambda label: (len(label) * label.isdigit(), label))
    if not settings.names and form == "yolo":
        notes.append("no data.yaml, obj.names or classes.txt has names: categories are numbers")
    lists = _lists(folder, form, settings, images, notes)
    contents = {}
    for split, members in _splits(sorted(sizes), labelled, lists, notes).items():
        if empty := sum(name not in labelled for name in members):
            notes.append(
                f"{split}: {empty:,} of {count(len(members), 'image')} without labels: they count "
                "as images without objects; take those out that nobody has labelled"
            )
        relative = form in ("yolo", "openimages")
        contents[split] = _content(members, labelled, sizes, names, relative)
    rows = [row for content in contents.values() for row in content["annotations"]]
    if 0 < (plain := sum("segmentation" not in row for row in rows)) < len(rows):
        notes.append(f"{plain:,} of {len(rows):,} objects have a box and no polygon: no masks")
    return Labels(contents, notes)


def _in_threads(folder: Folder, work: Callable, names: list[str], unit: str) -> Iterator[Any]:
    """`map(work, names)` with a progress bar."""
    if not names:
        return
    workers = pools.threads(folder.path)
    progress = console.ProgressBar(f"reading {folder.path}", len(names), unit)
    with pools.Threads(workers) as pool:
        for value in pools.ordered(pool, work, names, 4 * workers):
            progress.add()
            yield value
    progress.close()


def _entries(folder: Folder, form: str, reader: Reader, notes: list[str]) -> list[Entry]:
    """All labels. Objects that cannot be read are a note, or a SourceError if they are many."""

    def entries(name: str) -> list[Entry]:
        try:
            return [*FORMS[form].read(reader, name)]
        except (ElementTree.ParseError, ValueError) as error:
            problem = f"{name} is damaged or cut short: {error}"
            return [Entry(name, (name,), problems=[problem])]

    rows = _in_threads(folder, entries, folder.named(FORMS[form].ending), "label files")
    result = [entry for row in rows for entry in row]
    problems = [problem for entry in result for problem in entry.problems]
    total = sum(len(entry.objects) for entry in result) + len(problems)
    if len(problems) > _MANY * total:
        raise SourceError(f"{len(problems):,} of {total:,} objects cannot be read: {problems[0]}")
    if not total:
        problem = f"none of its {len(result):,} labels has an object"
        raise SourceError(f"{folder.path}: {problem if result else 'no image has a label'}")
    if problems:
        notes.append(f"left out: {len(problems):,} of {total:,} objects, for one {problems[0]}")
    skipped = collections.Counter(shape for entry in result for shape in entry.skipped)
    for shape, number in skipped.items():
        notes.append(f"left out: {count(number, 'shape')} '{shape}'; boxes and polygons are read")
    return result


def _matched(
    folder: Folder, images: _Images, entries: list[Entry], notes: list[str]
) -> dict[str, Entry]:
    """The entry of each labelled image; an image goes to the entry whose name fits best."""
    labelled: dict[str, Entry] = {}
    rows = [(images.find(*entry.names) or (math.inf, ""), entry) for entry in entries]
    missing = []
    for (_, image), entry in sorted(rows, key=lambda row: row[0][0]):
        if not image or labelled.setdefault(image, entry) is not entry:
            missing.append(entry)
    if missing:
        number = f"{len(missing):,} of {count(len(entries), 'label')}"
        names = dict.fromkeys((missing[0].file, missing[0].names[-1]))
        problem = f"{number} without an image of their own, for one {': '.join(names)}"
        if not labelled:
            fix = "put the images beside them, or into the folder images beside labels"
            raise SourceError(f"{folder.path}: {problem}: {fix}")
        notes.append(f"left out: {problem}")
    return labelled


def _splits(
    images: list[str], labelled: dict[str, Entry], lists: dict[str, set[str]], notes: list[str]
) -> dict[str, list[str]]:
    """The images of each split, from lists, and where a split has none from labels or folders."""
    parts = collections.defaultdict(list)
    for name in images:
        split = next((key for key, members in lists.items() if name in members), "")
        if not split:
            in_label = labelled[name].split if name in labelled else ""
            split = in_label or split_of(os.path.dirname(name))
            split = "" if split in lists else split
        parts[split].append(name)
    val = "val" if parts["val"] else "test"
    used = {"train": parts["train"], "val": parts[val]}
    if not all(used.values()):
        used = {"train": parts["train"] if "train" in lists else images}
    if rest := len(images) - sum(map(len, used.values())):
        of_test = len(parts["test"]) if val == "val" else 0
        notes.append(f"left out: {count(rest, 'image')} ({of_test:,} of test)")
    return used


def _lists(
    folder: Folder, form: str, settings: Settings, images: _Images, notes: list[str]
) -> dict[str, set[str]]:
    """The images of each split that data.yaml or a list names: train.txt, or VOC's ImageSets."""
    where, texts = {"yolo": "", "voc": "ImageSets/Main/"}, folder.named(".txt")
    lists, missing = {}, []
    for split, keys in _LISTS.items() if form in where else ():
        values = next(filter(None, map(settings.content.get, keys)), [])
        values = values if isinstance(values, list) else [values]
        rows = [row for value in values for row in _members(folder, settings, images, str(value))]
        for key in () if values else keys:  # the second one where there is no first one
            pattern = rf"(?i)(.*/)?{where[form]}{key}\.txt"
            files = [] if rows else [text for text in texts if re.fullmatch(pattern, text)]
            rows += [row for file in files for row in _listed(folder, images, file)]
        missing += [name for name, image in rows if not image and split != "test"]
        lists[split] = {image for _, image in rows if image}
    if missing:
        number = count(len(missing), "image or folder", "images or folders")
        notes.append(f"{number} in the lists of splits and not here, for one {missing[0]}")
    if lists and (both := lists["train"] & lists["val"]):
        rest = "train goes without them" if lists["train"] - both else "a new split is made"
        notes.append(f"{count(len(both), 'image')} of both train and val: {rest}")
        lists["train"] -= both
    return {split: members for split, members in lists.items() if members}


def _members(
    folder: Folder, settings: Settings, images: _Images, value: str
) -> list[tuple[str, str]]:
    """(name, image or '') of the images in a folder, or in a list, that data.yaml names.

    The path is often one of another machine: the longest end that is here, with its split, counts.
    """
    path = normal(os.path.join(str(settings.content.get("path") or ""), value))
    parts = [part for part in path.split("/") if part not in ("..", ".")]
    ends = [os.path.join(*parts[i:]) for i in range(len(parts))]
    above, texts = os.path.dirname(settings.file), folder.named(".txt")
    splits = {split_of(value), split_of(path)}
    for end in (end for end in ends if split_of(end) in splits):
        for name in (os.path.join(above, end), end):
            if name in texts:
                return _listed(folder, images, name)
            if rows := [(image, image) for image in images.names if image.startswith(f"{name}/")]:
                return rows
    return [(f"{value} of {settings.file}", "")]


def _listed(folder: Folder, images: _Images, file: str) -> list[tuple[str, str]]:
    """(name, image or '') of each line of a list of images."""
    above = re.sub(r"(ImageSets/Main/)?[^/]*$", "", file)
    names = filter(None, lines(folder, file))
    return [(name, (images.find(above + name, name) or (0, ""))[1]) for name in names]


def _sizes(folder: Folder, images: list[str], notes: list[str]) -> dict[str, tuple[int, int]]:
    """(height, width) of images as EXIF turns them; those that cannot be read are missing."""

    def size(name: str) -> tuple[int, int] | str:
        problem = ""
        for most in (1 << 16, limits.TEXT_BYTES):  # a TIFF may have its size behind the pixels
            try:
                return photos.sizes(folder.head(name, most))[-1]
            except photos.BadImage as error:
                problem = f"{name}: {error}"
        return problem

    rows = dict(zip(images, _in_threads(folder, size, images, "images"), strict=True))
    if bad := [row for row in rows.values() if isinstance(row, str)]:
        notes.append(f"left out: {count(len(bad), 'image')}, for one {bad[0]}")
    return {name: row for name, row in rows.items() if not isinstance(row, str)}


def _content(
    images: list[str],
    labelled: dict[str, Entry],
    sizes: dict[str, tuple[int, int]],
    names: list[str],
    relative: bool,
) -> dict[str, Any]:
    """The images, annotations and categories of a split; ids count from 1."""
    ids = {name: i for i, name in enumerate(names, 1)}
    rows, annotations = [], []
    for image_id, name in enumerate(images, 1):
        height, width = sizes[name]
        rows.append({"id": image_id, "file_name": name, "height": height, "width": width})
        unit = (width, height) if relative else (1, 1)
        for label, box, polygons, crowd in labelled[name].objects if name in labelled else ():
            x, y, w, h = (np.reshape(box, (2, 2)) * unit).ravel().tolist()
            row: dict[str, Any] = {
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": ids[label],
                "bbox": [x, y, w, h],
                "area": w * h,
                "iscrowd": int(crowd),
            }
            if polygons:
                row["segmentation"], row["area"] = [], 0.0
                for polygon in polygons:
                    points = np.reshape(polygon, (-1, 2)) * unit
                    row["segmentation"].append(points.ravel().tolist())
                    (x0, y0), (x1, y1) = points.T, np.roll(points, -1, axis=0).T
                    row["area"] += float(abs(x0 @ y1 - x1 @ y0) / 2)  # the shoelace formula
            annotations.append(row)
    categories = [{"id": i, "name": name} for name, i in ids.items()]
    return {"images": rows, "annotations": annotations, "categories": categories}
