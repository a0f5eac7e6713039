"""Which class each photo has: a table, such as Kaggle's train.csv, or a list of lines."""

import collections
import csv
import dataclasses
import io
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.resnet.preparation import several
from common import limits
from common.data import storage
from common.errors import some, visible
from common.images.photos import SUFFIXES
from common.preparation.folders import COLUMNS, split_of, whole_split
from common.preparation.sources import Source, SourceError, read_all
from common.tensorflow import tensorflow
from common.text import decoded, normal_name, text_lines

_LABELS = (  # names of columns, the likeliest first
    "label_name class_name category_name label labels class category breed species target "
    "diagnosis dx class_id label_id category_id y"
)
_SPLIT = rf"(data_?)?({'|'.join(COLUMNS)})s?"
_SPLITS = 20  # a column of splits or folds has at most so many values
_FOLD = r"(k_?)?folds?|cv(_?fold)?"  # the name of a column with numbers of folds
# Names of columns with boxes or outlines. Of the second kind, four are a box.
_BOX = (
    r"(^|_)([xy]_?(rel_)?(min|max|tl|br|[012])|(b|bounding_?)?box(es)?|rle|encoded_?pixels"
    r"|polygons?|segmentation|shape_attributes|[xy]_?cent(er|re)|cent(er|re)_?[xy]|c_?[xy])(_|$)"
)
_SIDE = r"(^|_)([xywh]|width|height|left|top|right|bottom)(_|$)"
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?", re.I).fullmatch


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
        for above in (self._folders[i] for i in rows):
            same = len(os.path.commonprefix([above, folders[::-1]]))
            scores.append((same, len(near & {*above})))
        best = max(scores)
        return [i for i, score in zip(rows, scores, strict=True) if score == best]


class Row(NamedTuple):
    """A row of a table."""

    place: str  # its table and line
    file: str
    photos: list[int]  # the photos that `file` may mean
    labels: tuple[str, ...] | None  # None if nothing is said about them
    split: str  # 'train', 'validation' or 'test'; '' in a table without splits


class Table(NamedTuple):
    """Photos and their classes."""

    rows: list[Row]
    file: str  # the names of the columns with files, labels and splits
    label: str  # '' with some problems
    split: str
    problem: str = ""  # why it may have no class for each photo, and the fix
    note: str = ""  # what tells the split, or why a column does not
    form: several.Form | None = None  # how several columns, cells or rows have the labels

    @property
    def has_several(self) -> bool:
        """Whether a photo may have several labels, or none."""
        return bool(self.form) and several.has_several([row.labels for row in self.rows], self.form)


def parse(
    path: str,
    text: str,
    photos: Photos,
    file: str = "",
    given: Sequence[str] = (),
    kind: str = "",
    guess: bool = True,
) -> Table:
    """Reads a table with commas, tabs or semicolons; titles above it do not matter.

    Without a header the columns are "1", "2" and so on. `file` is the name of a column, `given` has
    that of the labels, of a `kind` of several labels perhaps more; without them those are taken
    that look like it. With `guess`, the only other column with values that repeat may have the
    labels, whatever its name.
    A table of something else has a `problem`, unless the user chose the column of the labels.
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
    cells = itertools.zip_longest(*(row for _, row in lines), fillvalue="")
    columns = dict(zip(names, cells, strict=False))
    for name in filter(None, (file, *given)):
        if name not in columns:
            raise SourceError(f"{path} has no column {name!r}; give one of {', '.join(names)}")

    def hits(name: str) -> tuple[int, int]:  # a suffix counts: numbers of rows look like names
        found = {*itertools.chain(*map(photos.find, columns[name]))}
        return len(found), sum(cell.lower().endswith(SUFFIXES) for cell in columns[name])

    file = file or max((name for name in columns if hits(name)[0]), key=hits, default="")
    if not file:
        flags = f"give --file_column and --label_column, of {', '.join(names)}"
        raise SourceError(f"{path}: which columns have files and labels is not clear: {flags}")
    split, parts, note = _splits({k: cells for k, cells in columns.items() if k != file})
    others = {name: column for name, column in columns.items() if name not in (file, split)}
    boxes, sides = _boxes(others, has_header)
    can_be = {name: column for name, column in others.items() if name not in boxes + sides}
    label, form = given[0] if given else _label_column(can_be, guess), None
    if kind:
        form = several.given(kind, others, given)
    elif not (given or boxes):
        is_known = several.key(label) in _LABELS.split()
        form = several.find(can_be, label, is_known, columns[file])
    problem = "" if given or form else _problem(others, boxes or sides, label)
    if not (label or form or problem):
        words = (name for name in others if not all(map(_NUMBER, filter(None, others[name]))))
        label = next(words, "")  # numbers that are not known to be classes are often measures
        problem = f"names photos ({file}), but which of {some(others)} has the classes is not clear"
        problem += ": call it 'label'"
    blank = [""] * len(lines)
    names = [normal_name(cell) for cell in columns.get(label, blank)]
    labels = several.read(others, form) if form else [(name,) if name else None for name in names]
    values = zip(lines, columns[file], labels, parts or blank, strict=True)
    rows = [
        Row(f"{path}, line {number}", cell, photos.find(cell, path), named, part)
        for (number, _), cell, named, part in values
    ]
    return Table(rows, file, label, split, problem, note, form)


def parse_all(texts: Mapping[str, str], photos: Photos, **columns: Any) -> Table:
    """`parse` of tables with the same columns, by their paths; each is for the split in its path.

    What the first one has is taken for the others.
    """
    (path, text), *others = texts.items()
    first = parse(path, text, photos, **columns)
    if not others or first.problem or first.split:
        return first
    same = {"given": [first.label], "file": first.file}
    if first.form:
        same |= {"given": first.form.columns, "kind": first.form.kind}
    tables = {path: first} | {path: parse(path, text, photos, **same) for path, text in others}
    rows = [row._replace(split=split_of(p)) for p, table in tables.items() for row in table.rows]
    note = f"{' and '.join(tables)} say the splits"
    return first._replace(rows=rows, split="the path", note=note)


def _splits(columns: Mapping[str, Sequence[str]]) -> tuple[str, list[str], str]:
    """(the column that says splits or '', the split of each row, how or why not)."""
    keys = {name: several.key(name) for name in columns}
    flags = [name for name, key in keys.items() if key[:3] == "is_" and whole_split(key[3:])]
    fix = "write train and val into each row of one column, or add --validation_fraction=0.1"
    if len(flags) > 1:
        return "", [], f"the columns {some(flags)} say splits: {fix}"
    for name, cells in columns.items():
        key, values = keys[name], {cell.strip().lower() for cell in cells}
        parts, note = [*map(split_of, cells)], f"split by {name}"
        numbers = sorted(float(text) for text in values if re.fullmatch(r"\d+(\.0)?", text))
        are_numbers = len(numbers) == len(values)
        if not 1 < len(values) <= _SPLITS:
            continue
        if name in flags and values <= several.YES | several.NO:
            split = whole_split(key[3:])
            other = "validation" if split == "train" else "train"
            parts = [split if cell.strip().lower() in several.YES else other for cell in cells]
        elif are_numbers and re.fullmatch(_FOLD, key):
            parts = ["validation" if float(cell) == numbers[0] else "train" for cell in cells]
            note = f"{name} {numbers[0]:g} is for validation"
        elif re.fullmatch(_SPLIT, key) and (are_numbers or any(parts)) and not all(parts):
            odd = some(sorted({repr(cell.strip()) for cell in cells if not split_of(cell)}))
            return "", [], f"column {name} has {odd}: {fix}"
        if all(parts) and len({*parts}) > 1 and len(values) < len(cells):
            return name, parts, note
    return "", [], ""


def _boxes(columns: Mapping[str, Sequence[str]], has_header: bool) -> tuple[list[str], list[str]]:
    """The columns with boxes or outlines, by their names or several numbers in a cell.

    The second ones are four or more that may be sides of boxes, or of the photos.
    """

    def has_numbers(cell: str) -> bool:  # four for each word, such as "cat 0.9 5 5 20 20"
        parts = re.findall(r"[^\s,;|]+", cell[:200])
        numbers = sum(map(bool, map(_NUMBER, parts)))
        return numbers >= max(4, 4 * (len(parts) - numbers))

    values = {name: {*map(str.strip, cells)} - {""} for name, cells in columns.items()}
    boxes = [name for name in columns if re.search(_BOX, several.key(name))]
    boxes += [
        name
        for name, cells in values.items()
        if name not in boxes and 2 * sum(map(has_numbers, cells)) > len(cells)
        if not (several.is_plural(name) and several.separated(cells, True)[0])
    ]
    sides = [name for name in columns if re.search(_SIDE, several.key(name))]
    if not has_header:  # sides are columns of numbers
        sides = [name for name, cells in values.items() if cells and all(map(_NUMBER, cells))]
    return boxes, sides * (len(sides) > 3)


def _problem(columns: Mapping[str, Sequence[str]], boxes: Sequence[str], label: str) -> str:
    """Why a table gives no class for each photo, and the fix; '' if it gives one.

    `columns` are those without files and splits; `boxes` are those of them with boxes; `label` is
    the one that may have the classes.
    """
    values = {name: {*map(str.strip, cells)} - {""} for name, cells in columns.items()}
    is_known = several.key(label) in _LABELS.split()
    fix = "write the class of each photo into one column, or boxes in COCO's form"
    if not is_known and (doubt := several.doubtful(columns)):
        return doubt
    if boxes:
        return f"has boxes or outlines (columns {some(boxes)}): {fix}"
    cells = values.get(label, set())
    if 2 * sum(cell.startswith(("[", "{")) for cell in cells) > len(cells):
        return f"has lists or JSON in column {label}, such as {min(cells, key=len):.40}: {fix}"
    return ""


def _label_column(columns: Mapping[str, Sequence[str]], guess: bool) -> str:
    """The column with the labels; '' if it is not clear."""
    keys = {several.key(name): name for name in columns}
    for key in _LABELS.split():
        if key in keys:
            return keys[key]
    repeat = [name for name, cells in columns.items() if 1 < len({*cells}) <= len(cells) / 2]
    return repeat[0] if guess and len(repeat) == 1 else ""


def label(
    source: Source, paths: Sequence[str], file: str, label: str, kind: str, by_split: bool
) -> dict[str, Source]:
    """The photos in tables with their classes: for "train" and, if they have it, "validation".

    `file` and `label` are the names of columns, of several with commas between; `kind` says how a
    photo has several labels, `by_split` whether a column with the names of splits counts. Prints
    which photos have no label, and which files are missing. SourceError: there is no such column, a
    file has two labels, or several files fit a row.
    """
    texts = {p: decoded(read_all(p, limits.TEXT_BYTES), p, SourceError) for p in paths}
    path, photos = " and ".join(paths), Photos([photo.name for photo in source.files])
    labelled: dict[int, Row] = {}
    missing = []
    given = next(csv.reader([label]), []) if kind else [label] * bool(label)
    content = parse_all(texts, photos, file=file, given=given, kind=kind)
    if content.problem:
        raise SourceError(f"{path} {content.problem}; --label_column takes a column as it is")
    if content.note and by_split:
        if not content.split:
            raise SourceError(f"{path}: {content.note}")
        print(visible(f"{path}: {content.note}"))
    for row in content.rows:
        position = f"{row.place}: {row.file}"
        if len(row.photos) > 1:
            pair = " or ".join(source.files[i].name for i in row.photos[:2])
            raise SourceError(f"{position} is {pair}: write its folder")
        if not row.photos:
            missing.append(row.file)
        elif row.labels is not None:
            first = labelled.setdefault(row.photos[0], row)
            if content.form and content.form.kind == several.ROWS:
                union = tuple(dict.fromkeys((*(first.labels or ()), *row.labels)))
                labelled[row.photos[0]] = first._replace(labels=union)
            elif first.labels != row.labels:
                pair = f"is {_text(row)}, but in {first.place} {_text(first)}"
                fix = "remove one of the two rows, or, if both are right, give --several=rows"
                raise SourceError(f"{position} {pair}: {fix}")
    if content.form and labelled:
        way = "exactly one for each photo, so they are classes"
        if content.has_several:
            way = several.summary([row.labels or () for row in labelled.values()], content.form)
        print(visible(f"{path}: {content.form}: {way}"))
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
            classes=[labelled[i].labels or () for i in part],
            several=content.has_several,
            skipped=skipped if split == "train" else (),
        )
        for split, part in parts.items()
    }


def _text(row: Row) -> str:
    return " and ".join(map(repr, row.labels or ("without a label",)))


def _warn(text: str, names: Sequence[str]) -> None:
    if names:
        print(visible(f"warning: {text} ({len(names):,}): {some(names)}"), flush=True)


def read_lines(path: str) -> list[str]:
    """The class names in a file, one in a line, as of ImageNet's validation images."""
    if not tensorflow().io.gfile.exists(path) or storage.is_folder(path):
        raise SourceError(f"there is no file {path}")
    lines = text_lines(decoded(read_all(path, limits.TEXT_BYTES), path, SourceError))
    if not lines:
        raise SourceError(f"{path} is empty")
    return lines
