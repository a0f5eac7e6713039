"""Reads a folder of images and label files into COCO's form: images, splits and categories.

A label file belongs to the image of its name, beside it or in the folder that stands for its own:
labels/train/a.txt and images/train/a.jpg. `label_formats` reads the files.
"""

import collections
import contextlib
import csv
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from benchmarks.detection.coco import is_end, normal
from benchmarks.detection.preparation import examples, yolo
from benchmarks.detection.preparation.label_formats import FORMATS, Entry, Reader
from common import limits, pools
from common.errors import count, one_line
from common.images import photos
from common.preparation.folders import Folder, split_of, whole_split
from common.preparation.sources import SourceError
from common.progress import ProgressBar
from common.text import text_lines

# Folders of images and of their labels, by which the paths of the two differ.
_COUNTERPARTS = {"images", "image", "jpegimages", "labels", "annotations", "xmls", ".."}
# What readers raise of a file of another format, or damaged.
_DAMAGE = (ElementTree.ParseError, csv.Error, ValueError, LookupError, TypeError, AttributeError)
_MANY = 0.1  # of the objects: so many that cannot be read are no accident
_SHAPES = {  # notes
    "key points": "the labels are boxes with key points, and the boxes are read; if the numbers "
    "are outlines, repeat each one's first point at its end",
    "corners": "labels of 8 numbers have four corners: the box is the upright one around them, "
    "and with --masks they are the outline",
}


class Images:
    """The images of a folder, by the names that labels have for them."""

    def __init__(self, folder: Folder):
        extensions = Image.registered_extensions().items()
        endings = [ending for ending, name in extensions if name in photos.FORMATS]
        self.names = folder.named(*endings)
        every = "|".join(ending[1:] for ending in [*endings, ".txt", ".xml", ".json"])
        self._endings = re.compile(rf"(\.({every}))+$")
        self._by_key, self._by_stem = collections.defaultdict(list), collections.defaultdict(list)
        for name in self.names:
            key = self.key(name)
            self._by_key[key].append(name)
            self._by_stem[os.path.basename(key)].append(name)

    def key(self, name: str) -> str:
        """A path in lower case, without its endings and the folders of images and labels."""
        parts = self._endings.sub("", normal(name).lower()).split("/")
        return "/".join([*(part for part in parts[:-1] if part not in _COUNTERPARTS), parts[-1]])

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
            parts = {"", split_of(os.path.dirname(key))}
            rows = self._by_stem.get(os.path.basename(key), [])
            rows = [r for r in rows if len(parts | {split_of(os.path.dirname(r))}) < 3]
            rows = [row for row in rows if is_end(self.key(row), key)] or rows
            if len(rows) == 1:
                return i, rows[0]
        return None


class Detected(NamedTuple):
    """A label format that a folder has."""

    format: str  # a key of FORMATS
    evidence: str  # which files say so
    num_files: int  # of labels
    masks: bool  # whether all objects in the files that were looked at have polygons


class Labels(NamedTuple):
    """The labels of a folder in COCO's form."""

    # By "train" and "val", or "train" alone where the data have no split, a dict with the lists
    # "images", "annotations" and "categories"; `file_name` is relative to the folder.
    splits: dict[str, dict[str, Any]]
    notes: list[str]  # what is odd about the labels, each a line for the user
    turns: bool | None = None  # whether the boxes are on photos as EXIF turns them, if it is known


def detect(folder: Folder) -> list[Detected]:
    """The label formats in a folder, from names and the heads of a few files."""
    images, result = Images(folder), []
    for name, label_format in FORMATS.items():
        files, heads = _heads(folder, name)
        if not heads:
            continue
        settings = yolo.Settings()
        if name == "yolo":
            with contextlib.suppress(SourceError):  # which `read` raises
                settings = yolo.read_settings(folder, heads.values())
            if not (images.names or settings.names):  # numbers may be anything
                continue
        if not any(map(images.find, heads)):  # one file for many images
            files = [*heads]
        number = max(len(heads), sum(images.find(file) is not None for file in files))
        shapes = {
            bool(m[1]) for head in heads.values() for m in re.finditer(label_format.shape, head)
        }
        polygons = True in shapes and not settings.shapes
        evidence = f"{count(number, 'label file')} in {label_format.title} form"
        evidence += f"{' with polygons' * polygons}, such as {min(heads, key=len)}"
        if settings.names:
            evidence += f", {count(len(settings.names), 'class', 'classes')} by {settings.file}"
        result.append(Detected(name, evidence, number, polygons and False not in shapes))
    return result


def _heads(folder: Folder, label_format: str) -> tuple[list[str], dict[str, bytes]]:
    """(files that may be of a format, what some of those that are begin with)."""
    filled = {file.name for file in folder.files if file.size and not folder.is_file}
    names = filled & {*folder.named(FORMATS[label_format].ending)}
    names = sorted(names, key=lambda name: (name.count("/"), name))
    sample = dict.fromkeys([*names[:16], *names[:: max(1, len(names) // 16)]])
    heads = {name: folder.head(name) for name in sample}
    pattern = FORMATS[label_format].head
    return names, {name: head for name, head in heads.items() if re.search(pattern, head)}


def read(folder: Folder, label_format: str, exif: str | None = None) -> Labels:
    """Reads all labels of a format.

    An image without labels in a folder with labelled ones has no objects; but training takes such
    ones of YOLO's alone, whose tools write no file for them: those of other forms, and those with
    labels of which none can be read, have "labelled": false. Of the splits, test counts as val
    where there is no val. Where labels have no size, `exif` says whether the boxes
    are on photos as EXIF turns them ("turn") or not ("ignore"); None does as labels with a size, or
    turns them. SourceError if globox is missing, a file's encoding is not known, no label has an
    image or an object, or a tenth of the objects cannot be read.
    """
    images, notes = Images(folder), []
    settings = yolo.Settings()
    if label_format == "yolo":
        settings = yolo.read_settings(folder, _heads(folder, label_format)[-1].values())
    if settings.shapes:
        notes.append(_SHAPES[settings.shapes])
    reader = Reader(folder, images.find, settings)
    labelled = _matched(folder, images, _entries(folder, label_format, reader, notes), notes)
    notes += reader.notes
    keys, folders = {*map(images.key, labelled)}, {*map(os.path.dirname, labelled)}
    bare = [name for name in images.names if images.key(name) not in keys]
    unlabelled = [name for name in bare if os.path.dirname(name) in folders]
    if others := [name for name in bare if os.path.dirname(name) not in folders]:
        number = count(len(others), "image")
        notes.append(f"left out: {number} in folders without labels, for one {others[0]}")
    photo_sizes = _sizes(folder, sorted({*labelled, *unlabelled}), notes)
    stated = {name: entry.size for name, entry in labelled.items() if entry.size}
    differing = {name: row for name, row in photo_sizes.items() if row[0] != row[-1]}
    # Whether labels have the sizes of such photos as EXIF turns them.
    said = {stated[name] == row[1] for name, row in differing.items() if stated.get(name) in row}
    turns = exif == "turn" if exif else False not in said
    doubtful = 0 if said else sum(len(row) == 2 for row in photo_sizes.values())
    if note := not exif and examples.exif_note(turns, doubtful):
        notes.append(note)
    sizes = {name: stated.get(name, row[-turns]) for name, row in photo_sizes.items()}
    used = {o.label.strip() for entry in labelled.values() for o in entry.objects}
    names = [*dict.fromkeys(map(str.strip, settings.names.values()))]
    names = names or sorted(used, key=lambda label: (len(label) * label.isdigit(), label))
    if not settings.names and label_format == "yolo":
        notes.append("no data.yaml, obj.names or classes.txt has names: categories are numbers")
    lists = _lists(folder, label_format, settings, images, notes)
    unread = {name for name, e in labelled.items() if not e.objects and (e.problems or e.skipped)}
    unread |= set() if label_format == "yolo" else {*sizes} - {*labelled}
    if unread:
        problem = f"{count(len(unread), 'image')} without labels that can be read"
        fix = "only validation takes them; label them as empty if they have no objects"
        notes.append(f"{problem}, for one {min(unread)}: {fix}")
    contents = {}
    for split, members in _splits(sorted(sizes), labelled, lists, notes).items():
        empty = sum(name not in labelled for name in members)
        if empty and (label_format == "yolo" or split == "val"):
            problem = f"{split}: {empty:,} of {count(len(members), 'image')} without labels"
            fix = "they count as images without objects; take those out that nobody has labelled"
            notes.append(f"{problem}: {fix}")
        contents[split] = _content(members, labelled, sizes, names)
        for row in contents[split]["images"]:
            row |= {"labelled": False} if row["file_name"] in unread else {}
    rows = [row for content in contents.values() for row in content["annotations"]]
    if 0 < (plain := sum("segmentation" not in row for row in rows)) < len(rows):
        notes.append(f"{plain:,} of {len(rows):,} objects have a box and no polygon: no masks")
    return Labels(contents, notes, turns)


def _in_threads(folder: Folder, work: Callable, names: list[str], unit: str) -> Iterator[Any]:
    """`map(work, names)` with a progress bar."""
    if not names:
        return
    workers = pools.threads(folder.path)
    progress = ProgressBar(f"reading {folder.path}", len(names), unit)
    with pools.Threads(workers) as pool:
        for value in pools.ordered(pool, work, names, 4 * workers):
            progress.add()
            yield value
    progress.close()


def _entries(folder: Folder, label_format: str, reader: Reader, notes: list[str]) -> list[Entry]:
    """All labels. Objects that cannot be read are a note, or a SourceError if they are many."""

    def entries(name: str) -> list[Entry]:
        try:
            return [*FORMATS[label_format].read(reader, name)]
        except _DAMAGE as error:
            problem = f"{name} is damaged or cut short: {one_line(error)}"
            return [Entry(name, (name,), problems=[problem])]

    rows = _in_threads(folder, entries, folder.named(FORMATS[label_format].ending), "label files")
    result = [entry for row in rows for entry in row]
    problems = [problem for entry in result for problem in entry.problems]
    total = sum(len(entry.objects) for entry in result) + len(problems)
    if len(problems) > _MANY * total:
        raise SourceError(f"{len(problems):,} of {total:,} objects cannot be read: {problems[0]}")
    if not total:
        problem = "no image has a label: give the folder that holds both, images and labels"
        problem = f"none of its {len(result):,} labels has an object" if result else problem
        raise SourceError(f"{folder.path}: {problem}")
    if problems:
        notes.append(f"left out: {len(problems):,} of {total:,} objects, for one {problems[0]}")
    skipped = collections.Counter(shape for entry in result for shape in entry.skipped)
    for shape, number in skipped.items():
        notes.append(f"left out: {count(number, 'shape')} '{shape}'; boxes and polygons are read")
    return result


def _matched(
    folder: Folder, images: Images, entries: list[Entry], notes: list[str]
) -> dict[str, Entry]:
    """The entry of each labelled image; an image goes to the entry whose name fits best."""
    labelled: dict[str, Entry] = {}
    rows = [(images.find(*entry.names) or (math.inf, ""), entry) for entry in entries]
    missing = []
    for (_, image), entry in sorted(rows, key=lambda row: (row[0][0], not row[1].split)):
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
    val = "validation" if parts["validation"] else "test"
    used = {"train": parts["train"], "val": parts[val]}
    if not all(used.values()):
        used = {"train": parts["train"] if "train" in lists else images}
    if left_out := len(images) - sum(map(len, used.values())):
        of_test = len(parts["test"]) if val == "validation" else 0
        notes.append(f"left out: {count(left_out, 'image')} ({of_test:,} of test)")
    return used


def _lists(
    folder: Folder, label_format: str, settings: yolo.Settings, images: Images, notes: list[str]
) -> dict[str, set[str]]:
    """The images of each split that data.yaml or a list names: train.txt, or VOC's ImageSets."""
    where = {"yolo": "", "voc": "ImageSets/Main/"}
    pattern = rf"(?i)(?:.*/)?{where.get(label_format)}([^/]+)\.txt"
    texts = ((re.fullmatch(pattern, name), name) for name in folder.named(".txt"))
    found = {name: match[1].lower() for match, name in texts if match and not images.find(name)}
    lists, missing = {}, []
    for split in ("train", "validation", "test") if label_format in where else ():
        values = [v for key, v in settings.content.items() if v and whole_split(key) == split]
        values = [value for v in values for value in (v if isinstance(v, list) else [v])]
        rows = [row for value in values for row in _members(folder, settings, images, str(value))]
        files = [] if rows else [name for name, stem in found.items() if whole_split(stem) == split]
        files = [name for name in files if found[name] != "trainval"] or files
        rows += [row for file in files for row in _listed(folder, images, file)]
        missing += [name for name, image in rows if not image and split != "test"]
        lists[split] = {image for _, image in rows if image}
    if missing:
        number = count(len(missing), "image or folder", "images or folders")
        notes.append(f"{number} in the lists of splits and not here, for one {missing[0]}")
    if lists and (both := lists["train"] & lists["validation"]):
        rest = "train goes without them" if lists["train"] - both else "a new split is made"
        notes.append(f"{count(len(both), 'image')} of both train and val: {rest}")
        lists["train"] -= both
    return {split: members for split, members in lists.items() if members}


def _members(
    folder: Folder, settings: yolo.Settings, images: Images, value: str
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


def _listed(folder: Folder, images: Images, file: str) -> list[tuple[str, str]]:
    """(name, image or '') of each line of a list of images."""
    above = re.sub(r"(ImageSets/Main/)?[^/]*$", "", file)
    names = filter(None, text_lines(folder.text(file)))
    return [(name, (images.find(above + name, name) or (0, ""))[1]) for name in names]


def _sizes(folder: Folder, images: list[str], notes: list[str]) -> dict[str, list[tuple[int, int]]]:
    """`photos.sizes` of images; those that cannot be read are missing."""

    def size(name: str) -> list[tuple[int, int]] | str:
        problem = ""
        for most in (1 << 16, limits.TEXT_BYTES):  # a TIFF may have its size behind the pixels
            try:
                return photos.sizes(folder.head(name, most))
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
) -> dict[str, Any]:
    """The images, annotations and categories of a split; ids count from 1."""
    ids = {name: i for i, name in enumerate(names, 1)}
    rows, annotations = [], []
    for image_id, name in enumerate(images, 1):
        height, width = sizes[name]
        rows.append({"id": image_id, "file_name": name, "height": height, "width": width})
        entry = labelled.get(name, Entry("", ()))
        unit = (width, height) if entry.relative else (1, 1)
        for label, box, polygons, crowd in entry.objects:
            x, y, w, h = (np.reshape(box, (2, 2)) * unit).ravel().tolist()
            row: dict[str, Any] = {
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": ids[label.strip()],
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
