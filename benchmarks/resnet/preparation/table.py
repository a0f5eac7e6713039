"""A table of photos and their classes, such as Kaggle's train.csv."""

from __future__ import annotations

import collections
import csv
import dataclasses
import io
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from common import limits
from common.errors import some, visible
from common.preparation.sources import Source, SourceError, read_all
from common.text import normal_name

_LABELS = (  # names of columns, the likeliest first
    *("label_name", "class_name", "classname", "category_name", "label", "labels", "class"),
    *("category", "breed", "species", "target", "diagnosis", "dx", "class_id", "classid"),
    *("label_id", "category_id", "tag", "y"),
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
    """Finds photos by what a table calls them: any end of the path, also without its ending."""

    def __init__(self, names: Sequence[str]):
        self._folders = [name.lower().split("/")[-2::-1] for name in names]  # the inner ones first
        self._rows = collections.defaultdict(list)
        for i, name in enumerate(names):
            base = os.path.basename(name.lower())
            for key in {base, os.path.splitext(base)[0]}:
                self._rows[key].append(i)

    def find(self, text: str, table: str = "") -> list[int]:
        """The photos that a cell may mean: none, one, or several that fit equally well.

        Those in a folder that is named as the table or as its folder fit better: train.csv means
        train/1.jpg, not test/1.jpg.
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


class Table(NamedTuple):
    """A table as it is written.

    Attributes:
        path: of the file.
        names: of the columns; "1", "2" and so on where the first row names a photo.
        rows: (line of the file, cells); each row has as many cells as there are columns.
    """

    path: str
    names: list[str]
    rows: list[tuple[int, list[str]]]

    @classmethod
    def parse(cls, path: str, text: str, photos: Photos) -> Table:
        """Reads a text with commas, tabs or semicolons; titles above the table do not matter.

        Raises:
            SourceError: it is no table.
        """
        reader = csv.reader(io.StringIO(text, ""), delimiter=max(",\t;", key=text[:4096].count))
        try:
            rows = [(reader.line_num, cells) for cells in reader if len(cells) > 1]
        except csv.Error as error:
            raise SourceError(f"{path}, line {reader.line_num} is no row: {error}") from error
        if not rows:
            raise SourceError(f"{path} is no table with columns of files and labels")
        names = [cell.strip() for cell in rows[0][1]]
        if any(map(photos.find, names)):
            names = [str(i) for i in range(1, len(names) + 1)]
        else:
            rows = rows[1:]
        width = len(names)
        return cls(path, names, [(line, [*row, *[""] * width][:width]) for line, row in rows])

    def number(self, name: str) -> int:
        """The number of a column from 0; SourceError if there is none of this name."""
        if name not in self.names:
            raise SourceError(f"{self.path} has no column {name!r}, but {', '.join(self.names)}")
        return self.names.index(name)

    def columns(self, photos: Photos, guess: bool = True) -> tuple[int, int, int]:
        """The numbers of the columns with files, labels and splits; -1 for what is not clear.

        `guess`: the only other column with values that repeat may have labels, whatever its name.
        """
        cells = [*zip(*(row for _, row in self.rows), strict=True)] or [()]
        hits = [len({i for cell in column for i in photos.find(cell)}) for column in cells]
        file = hits.index(max(hits)) if any(hits) else -1
        keys = [re.sub(r"\W+", "_", name.lower()) for name in self.names]
        kinds = [{_SPLITS.get(cell.strip().lower(), "") for cell in column} for column in cells]
        split = next((i for i, k in enumerate(kinds) if "" not in k and len(k) > 1), -1)
        named = [keys.index(key) for key in _LABELS if key in keys and keys.index(key) != file]
        others = [
            i
            for i, column in enumerate(cells)
            if i not in (file, split) and 1 < len({*column}) <= len(column) / 2
        ]
        label = named[0] if named else others[0] if guess and len(others) == 1 else -1
        return file, label, split


def label(
    source: Source, path: str, file_column: str, label_column: str, by_split: bool
) -> dict[str, Source]:
    """The photos of a table with its classes, by split: "train" and, if it has them, "validation".

    Prints which photos have no label, and which files are missing.

    Args:
        source: all photos.
        path: of the table.
        file_column, label_column: their names; '' for those that `Table.columns` finds.
        by_split: whether a column with the names of splits counts.

    Raises:
        SourceError: there is no such column, a file has two labels, or several files fit a row.
    """
    try:
        text = read_all(path, limits.TEXT_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is no text in UTF-8: save it as CSV (UTF-8)") from error
    photos = Photos([file.name for file in source.files])
    table = Table.parse(path, text, photos)
    file, kind, split = table.columns(photos)
    file = table.number(file_column) if file_column else file
    kind = table.number(label_column) if label_column else kind
    if min(file, kind) < 0:
        flags = f"give --file_column and --label_column, of {', '.join(table.names)}"
        raise SourceError(f"{path}: which columns have files and labels is not clear: {flags}")
    rows: dict[int, tuple[int, str, str]] = {}
    missing = []
    for line, cells in table.rows:
        fits, name = photos.find(cells[file], path), normal_name(cells[kind])
        if len(fits) > 1:
            pair = " or ".join(source.files[i].name for i in fits[:2])
            raise SourceError(f"{path}, line {line}: {cells[file]} is {pair}: write its folder")
        if not fits:
            missing.append(cells[file])
        elif name:
            part = split_of(cells[split]) if by_split and split >= 0 else "train"
            first = rows.setdefault(fits[0], (line, name, part))
            if first[1] != name:
                fault = f"{cells[file]} is {name!r}, but in line {first[0]} {first[1]!r}"
                raise SourceError(f"{path}, line {line}: {fault}: leave one of the two rows")
    _warn(f"files of {path} that are not photos in {source.path}", missing)
    bare = [photo.name for i, photo in enumerate(source.files) if i not in rows]
    _warn(f"photos without a label in {path} are left out", bare)
    return _by_split(source, path, rows)


def _by_split(source: Source, path: str, rows: dict[int, tuple[int, str, str]]):
    """The photos by their split, of `rows` by photo: (line, class, split)."""
    parts = collections.defaultdict(list)
    for i, (_, name, split) in sorted(rows.items()):
        parts[split].append((source.files[i], name))
    if "validation" not in parts and "test" in parts:
        parts["validation"] = parts.pop("test")
    left = [file.name for file, _ in parts.pop("test", [])]
    _warn(f"photos of the split 'test' in {path} are left out", left)
    if "train" not in parts:
        raise SourceError(f"{path} has no label of a training photo in {source.path}")
    skipped = tuple(row for row in source.skipped if not row[0].endswith((".csv", ".tsv")))
    result = {}
    for split, pairs in parts.items():
        files, classes = map(list, zip(*pairs, strict=True))
        reasons = skipped if split == "train" else ()
        result[split] = dataclasses.replace(source, files=files, classes=classes, skipped=reasons)
    return result


def _warn(text: str, names: Sequence[str]) -> None:
    if names:
        print(visible(f"warning: {text} ({len(names):,}): {some(names)}"), flush=True)
