"""Recognises logs of users and items in a folder: tables with columns for both."""

import collections
import re
import shlex

from benchmarks.ncf.preparation.table_formats import Table, are_lists, named_columns, open_table
from common.errors import UserError, some
from common.preparation.folders import DatasetFormat, Folder, have_splits, split_of
from common.preparation.sources import SourceError
from common.tensorflow import tensorflow

_SUFFIXES = (".csv", ".tsv", ".dat", ".data", ".inter", ".jsonl", ".json", ".parquet", ".txt")
_TABLES = tuple(suffix for suffix in _SUFFIXES if suffix not in (".json", ".txt"))
_TABLE_START = re.compile(rb"[^\n]*\t|(\d+ )+\d+\s*\n")  # of a .txt that is no other text
_PHOTO = re.compile(rb"\.(jpe?g|png)\b", re.IGNORECASE)
_FOLDS = (".base", ".test", ".train", ".rating")  # of ml-100k and the authors of NCF
_MOST = 20  # files that are looked at, if none is a log


def dataset_formats(folder: Folder) -> list[DatasetFormat]:
    """The table of users and items in a folder: the largest file, and others with its columns.

    Raises SourceError if the user gave a single file that is no such table, or a folder in which
    most files are tables, but none such.
    """
    found: dict[tuple[str, ...], list[tuple[str, Table]]] = collections.defaultdict(list)
    sizes = {file.name: file.size for file in folder.files}
    unread: list[UserError] = []
    damaged: list[str] = []
    for suffixes in (_SUFFIXES, () if folder.is_file else _FOLDS):
        candidates = [n for n in sizes if n.lower().removesuffix(".gz").endswith(suffixes)]
        for number, name in enumerate(sorted(candidates, key=lambda name: -sizes[name])):
            if found or number < _MOST:
                try:
                    table = open_table(folder.full(name))
                    columns = table.guesses()
                    if {"user", "item"} <= columns.keys():
                        found[table.names].append((name, table))
                    elif len(table.names) > 1 and ("user" in columns or _is_table(folder, name)):
                        unread.append(SourceError(advice(table)))
                except UserError as error:
                    if folder.is_file or _is_table(folder, name):
                        unread.append(error)
                        damaged.append(str(error))
        if found:
            break
    if not found:
        if unread and 2 * len(unread) >= min(len(sizes), _MOST):
            raise unread[0]
        return []
    log, *others = sorted(found.values(), key=lambda log: -sum(sizes[name] for name, _ in log))
    # Of files without times, the rows of the last one are the latest.
    parts, have_parts = ["", "train", "validation", "test"], have_splits(name for name, _ in log)
    log.sort(key=lambda row: (have_parts and parts.index(split_of(row[0])), row[0]))
    names, table = [name for name, _ in log], log[0][1]
    aside = [f"{name}, which has users and items, too" for other in others for name, _ in other]
    more = f"; not taken: {some([*aside, *damaged])}" if aside or damaged else ""
    evidence = f"{some(names)}: rows of {taken(table, table.guesses())}{more}"
    output = "ratings, and lists of users and items, for NCF to recommend from"
    row = "interactions", "interactions", evidence, output, [*map(folder.full, names)], len(names)
    return [DatasetFormat(*row)]


def _is_table(folder: Folder, name: str) -> bool:
    """Whether a file is a table, not of photos: by its ending, or a .txt by its first line."""
    if not tensorflow().io.gfile.exists(folder.full(name)):  # it is in an archive
        return False
    has_ending, head = name.lower().removesuffix(".gz").endswith(_TABLES), folder.head(name)
    return (has_ending or bool(_TABLE_START.match(head))) and not _PHOTO.search(head)


def taken(table: Table, columns: dict[str, int]) -> str:
    """Which columns are taken of a table, and which others may be meant."""
    names, meant = table.names, named_columns(table.names)
    others = {*meant["user"], *meant["item"], *meant["time"]} - {*columns.values()}
    taken = ", ".join(f"{what} {names[column]}" for what, column in columns.items())
    aside = some([names[column] for column in sorted(others)])
    if not table.has_header and columns == table.guesses():
        user, item = columns["user"] + 1, columns["item"] + 1
        taken += f"; no header says so: --user={item} --item={user} turns them"
    return f"{taken}; not taken: {aside}" if aside else taken


def advice(table: Table) -> str:
    """What to do about a table whose users or items are not known, or lists."""
    for column, name in enumerate(table.names):
        if are_lists(cells := table.cells(column)):
            return (
                f"{table.path}: a cell of column {name} holds several items, such as "
                f"{max(cells, key=len)[:40]!r}: write a row for each item, as DataFrame.explode of "
                "pandas does, or name another column with --item"
            )
    columns, path = some(table.names, 20), shlex.quote(table.path)
    columns += "" if table.has_header else f" without a header: {some(table.rows[0], 20)}"
    command = "python -m scripts.prepare"
    letters = [sum(map(str.isalpha, "".join(cells))) for cells in zip(*table.rows, strict=True)]
    two = sorted(sorted(range(len(letters)), key=lambda column: -letters[column])[:2])
    sides = ",".join(str(column + 1) for column in two)
    text = f"; if sentences, {command} text --train={path} --columns={sides} --out=DIR"
    return (
        f"{table.path} has no columns whose names are known: if users and items are in it, type "
        f"{command} interactions {path} --user=COLUMN --item=COLUMN --out=DIR"
        f"{text if table.path.endswith(('.csv', '.tsv')) else ''}; the columns are {columns}"
    )
