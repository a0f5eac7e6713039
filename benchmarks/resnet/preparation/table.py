"""A table of photos and their classes, such as Kaggle's train.csv."""

import collections
import csv
import dataclasses
import io
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from common import limits
from common.errors import some, visible
from common.images.photos import SUFFIXES
from common.preparation.sources import Source, SourceError, read_all
from common.text import normal_name

_LABELS = (  # names of columns, the likeliest first
    "label_name class_name category_name label labels class category breed species target "
    "diagnosis dx class_id label_id category_id y"
)
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "pred", "prediction"), "test"),
}


def split_of(name: str) -> str:
    """'train', 'validation' or 'test' if a word of a name, such as "seg_train", says so, or ''."""
    splits = (_SPLITS.get(word, "") for word in re.findall("[a-z]+", name.lower()))
    return next(filter(None, splits), "")


class Photos:
    """Finds photos by their names in a table: any end of the path, with or without its suffix."""

    def __init__(self, names: Sequence[str]):
        self._folders = [name.lower().split("/")[-2::-1] for name in names]  # the inner ones first
        self._rows = collections.defaultdict(list)
        for i, name in enumerate(names):
            base = os.path.basename(name.lower())
            for key in {base, os.path.splitext(base)[0]}:
                self._rows[key].append(i)

    def find(self, text: str, table: str = "") -> list[int]:
        """The photos that a cell may mean: none, one, or several that fit equally well.

        Photos in a folder with the name of the table, or of the table's folder, fit better: in
        train.csv, 1.jpg means train/1.jpg, not test/1.jpg.
        """
        *folders, base = text.strip().lower().replace("\\", "/").split("/")
        rows = self._rows.get(base, [])
        if len(rows) < 2:
            return rows
        near = {os.path.splitext(part)[0] for part in table.lower().split("/")[-2:]}
        scores = []
        for mine in (self._folders[i] for i in rows):
            same = len(os.path.commonprefix([mine, folders[::-1]]))
            scores.append((same, len(near & {*mine})))
        best = max(scores)
        return [i for i, score in zip(rows, scores, strict=True) if score == best]


class Row(NamedTuple):
    """A row of a table."""

    line: int
    file: str
    photos: list[int]  # the photos that `file` may mean
    label: str  # '' if there is none
    split: str  # 'train', 'validation' or 'test'; '' in a table without splits


class Table(NamedTuple):
    """Photos and their classes."""

    rows: list[Row]
    names: list[str]  # the names of all columns
    file: str  # the names of the columns with files, labels and splits
    label: str
    split: str


def parse(
    path: str, text: str, photos: Photos, file: str = "", label: str = "", guess: bool = True
) -> Table:
    """Reads a table with commas, tabs or semicolons; titles above it do not matter.

    Without a header the columns are "1", "2" and so on. `file` and `label` are the names of
    columns; '' takes those that look like it. With `guess`, the only other column with values that
    repeat may have the labels, whatever its name.
    """
    reader = csv.reader(io.StringIO(text, ""), delimiter=max(",\t;", key=text[:4096].count))
    try:
        lines = [(reader.line_num, cells) for cells in reader if len(cells) > 1]
    except csv.Error as error:
        raise SourceError(f"{path}, line {reader.line_num} is not a row: {error}") from error
    if not lines:
        raise SourceError(f"{path} is not a table with columns of files and labels")
    header = [cell.strip() for cell in lines[0][1]]
    has_header = not any(map(photos.find, header))
    names = [has_header and cell or str(i) for i, cell in enumerate(header, 1)]
    lines = lines[has_header:]
    rest = itertools.zip_longest(*(row for _, row in lines), fillvalue="")
    columns = dict(zip(names, rest, strict=False))
    for name in filter(None, (file, label)):
        if name not in columns:
            raise SourceError(f"{path} has no column {name!r}; give one of {', '.join(names)}")

    def hits(name: str) -> tuple[int, int]:  # a suffix counts: numbers of rows look like names
        found = {*itertools.chain(*map(photos.find, columns[name]))}
        return len(found), sum(cell.lower().endswith(SUFFIXES) for cell in columns[name])

    file = file or max((name for name in columns if hits(name)[0]), key=hits, default="")
    splits = {name: [_SPLITS.get(x.strip().lower(), "") for x in columns[name]] for name in columns}
    split = next((name for name, each in splits.items() if all(each) and len({*each}) > 1), "")
    label = label or _label_column(columns, (file, split), guess)
    if not (file and label):
        flags = f"give --file_column and --label_column, of {', '.join(names)}"
        raise SourceError(f"{path}: which columns have files and labels is not clear: {flags}")
    parts = splits.get(split, [""] * len(lines))
    values = zip(lines, columns[file], columns[label], parts, strict=True)
    rows = [Row(k, x, photos.find(x, path), normal_name(y), z) for (k, _), x, y, z in values]
    return Table(rows, names, file, label, split)


def _label_column(columns: Mapping[str, Sequence[str]], known: Sequence[str], guess: bool) -> str:
    """The column with the labels, apart from the `known` columns; '' if it is not clear."""
    others = {name: column for name, column in columns.items() if name not in known}
    keys = {re.sub(r"\W+", "_", name.lower()): name for name in others}
    for key in _LABELS.split():
        if key in keys:
            return keys[key]
    repeat = [name for name, cells in others.items() if 1 < len({*cells}) <= len(cells) / 2]
    return repeat[0] if guess and len(repeat) == 1 else ""


def label(
    source: Source, path: str, file_column: str, label_column: str, by_split: bool
) -> dict[str, Source]:
    """The photos in a table with its classes, by split: "train" and, if it has them, "validation".

    Prints which photos have no label, and which files are missing. `by_split` is whether a column
    with the names of splits counts. SourceError: there is no such column, a file has two labels, or
    several files fit a row.
    """
    try:
        text = read_all(path, limits.TEXT_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not text in UTF-8: save it as CSV (UTF-8)") from error
    photos = Photos([file.name for file in source.files])
    labelled: dict[int, Row] = {}
    missing = []
    for row in parse(path, text, photos, file_column, label_column).rows:
        place = f"{path}, line {row.line}: {row.file}"
        if len(row.photos) > 1:
            pair = " or ".join(source.files[i].name for i in row.photos[:2])
            raise SourceError(f"{place} is {pair}: write its folder")
        if not row.photos:
            missing.append(row.file)
        elif row.label and (first := labelled.setdefault(row.photos[0], row)).label != row.label:
            other = f"is {row.label!r}, but in line {first.line} {first.label!r}"
            raise SourceError(f"{place} {other}: remove one of the two rows")
    _warn(f"files of {path} that are not photos in {source.path}", missing)
    bare = [photo.name for i, photo in enumerate(source.files) if i not in labelled]
    _warn(f"photos without a label in {path} are left out", bare)
    parts = collections.defaultdict(list)
    for i, row in sorted(labelled.items()):
        parts[row.split if by_split and row.split else "train"].append(i)
    if "validation" not in parts and "test" in parts:
        parts["validation"] = parts.pop("test")
    left = [source.files[i].name for i in parts.pop("test", ())]
    _warn(f"photos of the split 'test' in {path} are left out", left)
    if "train" not in parts:
        raise SourceError(f"{path} has no label of a training photo in {source.path}")
    skipped = tuple(row for row in source.skipped if not row[0].endswith((".csv", ".tsv")))
    return {
        split: dataclasses.replace(
            source,
            files=[source.files[i] for i in part],
            classes=[labelled[i].label for i in part],
            skipped=skipped if split == "train" else (),
        )
        for split, part in parts.items()
    }


def _warn(text: str, names: Sequence[str]) -> None:
    if names:
        print(visible(f"warning: {text} ({len(names):,}): {some(names)}"), flush=True)
