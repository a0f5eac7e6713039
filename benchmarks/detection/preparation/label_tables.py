"""What tables of boxes and VIA's files say about images; all forms of labels.

Tables of boxes are Open Images', TensorFlow's (Roboflow names them _annotations.csv) and VoTT's.
"""

import collections
import csv
import functools
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from benchmarks.detection.preparation import label_files
from benchmarks.detection.preparation.label_files import Entry, Kind, Object
from common.data.shards import tensorflow
from common.errors import parse_json, some
from common.preparation.sources import SourceError
from common.preparation.splits import whole_split
from common.text import decoded

_COLUMNS = {  # their names, the likeliest first
    "file": "filename fname file_name image_name image_path filepath file image path img frame "
    "image_id imageid",
    "label": "class label class_name label_name category name class_id classid labelname type "
    "species breed target object",
    "x0": "xmin x_min x1 left",
    "y0": "ymin y_min y1 top",
    "x1": "xmax x_max x2 right",
    "y1": "ymax y_max y2 bottom",
    "width": "width image_width",
    "height": "height image_height",
    "split": "split set subset",
    "crowd": "isgroupof",
}
_SIDES = ("x0", "y0", "x1", "y1")
# Of VIA's regions, the likeliest to be the category first.
_ATTRIBUTES = ("label", "class", "class_name", "name", "type", "category", "object")
_UNSAID = ("", None, {}, "not_defined", "unknown")  # the last ones are VIA's own


class Reader(label_files.Reader):
    """Reads all forms of labels."""

    def openimages(self, file: str) -> Iterator[Entry]:
        """Only rows of images that are there are kept, a few of millions."""
        has_image, titles = functools.cache(self._has_image), self._titles
        rows = (row for row in self._rows(file, _OPEN) if has_image(row[1]["file"]))
        rows = ((i, {**row, "label": titles.get(row["label"], row["label"])}) for i, row in rows)
        yield from self._table(file, rows, True)

    @functools.cached_property
    def _titles(self) -> dict[str, str]:
        """The names of Open Images' classes."""
        files = (n for n in self._folder.named(".csv") if "class" in os.path.basename(n).lower())
        rows = (row for name in files for _, row in self._cells(name))
        return {row[0]: row[1] for row in rows if len(row) == 2}

    def table(self, file: str) -> Iterator[Entry]:
        """A row is a box in pixels, or an image without one."""
        yield from self._table(file, self._rows(file, _TABLE), False)

    def _cells(self, file: str) -> Iterator[tuple[int, list[str]]]:
        """(number of its line, cells) of each row of a table with commas, tabs or semicolons."""
        path = self._folder.full(file)
        with tensorflow().io.gfile.GFile(path, "rb") as data:
            lines = (decoded(line, path, SourceError, i) for i, line in enumerate(data, 1))
            first = next(lines, "")
            delimiter = max(",\t;", key=first.count)
            reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter)
            for cells in reader:
                if any(cells := [cell.strip() for cell in cells]):
                    yield reader.line_num, cells

    def _rows(self, file: str, pattern: bytes) -> Iterator[tuple[int, dict[str, str]]]:
        """(number of its line, cells by the keys of _COLUMNS) of each row."""
        if not re.match(pattern, self._folder.head(file)):
            return
        rows = self._cells(file)
        header = [re.sub(r"\W+", "_", cell.lower()).strip("_") for cell in next(rows)[1]]
        ends = {name.rpartition("_")[2]: name for name in header}  # of bbox_x1 and Roi.X1
        ends |= {name: name for name in header}
        keys = {k: next((ends[n] for n in v.split() if n in ends), "") for k, v in _COLUMNS.items()}
        rest = [name for name in header if name not in keys.values()]
        label = {} if keys["label"] else {"label": self._nameless(file, rest)}
        for i, row in rows:
            named = dict(zip(header, row, strict=False)) | {"": ""}
            yield i, {key: named.get(name, "") for key, name in keys.items()} | label

    def _table(
        self, file: str, rows: Iterable[tuple[int, dict[str, str]]], relative: bool
    ) -> Iterator[Entry]:
        images = collections.defaultdict(list)
        for line, row in rows:
            images[row["file"]].append((line, row))
        for image, rows in images.items():
            first, names = rows[0][1], (label_files.beside(file, image), image)
            boxes = [(line, row) for line, row in rows if any(row[side] for side in _SIDES)]
            split = whole_split(first["split"]) or label_files.split_of(file)
            size = label_files.size_of(first["height"], first["width"])
            more = {"size": size, "split": split, "relative": relative}
            yield label_files.entry(file, names, boxes, self._row, **more)

    def _row(self, row: dict[str, str]) -> Object:
        sides = tuple(float(row[side]) for side in _SIDES)
        box = self._boxes.create(label=row["label"], coords=sides)
        return Object(row["label"], box.ltwh, crowd=row["crowd"] == "1")

    def via(self, file: str) -> Iterator[Entry]:
        """Of VIA 1 and 2: an export, or a project; one attribute of the regions is the category."""
        content = self._parsed(file, _VIA, parse_json)
        images = content.get("_via_img_metadata", content) if isinstance(content, dict) else {}
        images = [x for x in images.values() if isinstance(x, dict) and "regions" in x]
        regions = [image["regions"] for image in images]  # a list, or a dict by numbers
        regions = [[*each.values()] if isinstance(each, dict) else each for each in regions]
        attributes = [each.get("region_attributes") or {} for each in itertools.chain(*regions)]
        pairs = ((key, value) for each in attributes for key, value in each.items())
        keys = dict.fromkeys(key for key, value in pairs if value not in _UNSAID)
        known = [key for word in _ATTRIBUTES for key in keys if key.lower() == word]
        if len(keys) > 1 and not known:
            problem = f"has regions with the attributes {some(keys)}"
            fix = "call the one with the category 'label'"
            raise SourceError(f"{self._folder.full(file)} {problem}: {fix}")
        key = [*known, *keys, ""][0]
        if rest := [name for name in keys if name != key]:
            self.notes[f"{file}: the attribute '{key}' is the category, not {some(rest)}"] = None
        nameless = self._nameless(file) if attributes and not key else ""
        read, split = functools.partial(self._region, key, nameless), label_files.split_of(file)
        for name, rows in zip((image["filename"] for image in images), regions, strict=True):
            rows = [(f"{name}, region {i}", region) for i, region in enumerate(rows, 1)]
            names = (label_files.beside(file, name), name)
            yield label_files.entry(file, names, rows, read, split=split)

    def _region(self, key: str, nameless: str, region: dict[str, Any]) -> Object:
        shape = region["shape_attributes"]
        if shape["name"] not in ("rect", "polygon"):
            raise label_files.NoBoxError(shape["name"])
        label = nameless or region["region_attributes"][key]
        if isinstance(label, dict):  # of boxes to tick
            (label,) = (name for name, is_ticked in label.items() if is_ticked)
        label = "" if label is None else str(label)
        if shape["name"] == "polygon":
            points = [*zip(shape["all_points_x"], shape["all_points_y"], strict=True)]
            return self._outlined(label, points, [points])
        region = {"region_attributes": {key: label}, "shape_attributes": shape}
        return Object(label, self._boxes.from_via_json(region, label_key=key).ltwh)

    def _nameless(self, file: str, rest: Collection[str] = ()) -> str:
        aside = f" (not taken: {some(rest)})" if rest else ""
        self.notes[f"{file} names no categories{aside}: all objects are 'object'"] = None
        return "object"


_OPEN = rb"^(?:\xef\xbb\xbf)?ImageID,.*LabelName,.*XMin"
_VIA = rb'"(?:_via_img_metadata|file_attributes|shape_attributes)"'
_VIA_SHAPES = rb'"name"\s*:\s*"(?:rect|(polygon))"'
_TABLE = (  # a header that names an image and two sides
    rb"(?i)^(?:\xef\xbb\xbf)?(?![^\r\n]*LabelName)(?=[^\r\n]*(?:file|fname|image|img|path|frame))"
    rb"(?=[^\r\n]*(?:\b|_)(?:x_?min|x1|left)\b)[^\r\n]*(?:\b|_)(?:y_?max|y2|bottom)\b"
)
FORMS = label_files.FORMS | {
    "via": Kind("VIA's", ".json", Reader.via, _VIA, _VIA_SHAPES),
    "openimages": Kind("Open Images'", ".csv", Reader.openimages, _OPEN),
    "csv": Kind("a box table's", ".csv", Reader.table, _TABLE),
}
