"""Prepares ratings, or events of any kind, of own users and items, to train NCF on.

    python -m scripts.prepare interactions events.csv --out=data/own
    python -m scripts.prepare interactions log.jsonl.gz --user=member --item=film --time=seen \\
        --out=data/own

A row says which user chose which item, and perhaps when; the value of a rating is ignored. FILE is
CSV or the like, JSON lines or Parquet, perhaps in gzip. --out gets ratings.csv in whole numbers,
users.csv and items.csv with the names of these numbers, and manifest.json. See docs/data.md.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.csv

from benchmarks.ncf.preparation.tables import (
    HEAD,
    MISSING,
    WHOLE,
    Table,
    as_bytes,
    open_table,
    pc,
)
from benchmarks.ncf.preparation.times import ORDERS, Times
from common import console
from common.data import caches, files
from common.data.shards import tensorflow
from common.errors import UserError, one_line, parse_json, some
from common.preparation import arguments, writing
from common.preparation.folders import Folder, Reading
from common.preparation.sources import File, SourceError

_COLUMNS = ("user", "item", "time")
_RATINGS, _USERS, _ITEMS = _FILES = ("ratings.csv", "users.csv", "items.csv")
_LEAST = (20, 10, 5, 3, 2)  # of min_ratings: the first that keeps 90% of those with 2 or more
_LARGE = 1_000_000  # rows from which on the recipe is that of ml-20m
_BATCH = 2048  # of configs/ncf.py; an eighth of fewer rows learns more in as many epochs
_FEW = 100  # with fewer users or items a score says little
_BATCHES = 32  # until their dictionaries become one
_PART = 1 << 20  # rows that are written at a time
_LISTS = ("movies.csv", "movies.dat", "u.item", _ITEMS)  # of titles, beside the table
_KNOWN = ("ratings.csv", "ratings.dat", "u.data")  # of MovieLens, which has other tables beside it
_SUFFIXES = (".csv", ".tsv", ".dat", ".data", ".inter", ".jsonl", ".json", ".parquet", ".txt")
_MOST = 20  # files that are looked at
_COUNTED = 64 << 20  # bytes of a file whose rows are counted to name them


def parse(parser: console.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments without reading files; exits with status 2 if one is invalid."""
    add = parser.add_argument
    add("files", nargs="+", type=console.path, metavar="FILE", help="tables, also of several forms")
    for what, more in (("user", ""), ("item", ""), ("time", ", or none: the order of the rows")):
        about = f"column of the {what}: its name, or its number from 1{more}"
        add(f"--{what}", default="", metavar="COLUMN", help=about)
    about = "table of items and titles (movies.csv, u.item or NAME.item beside the table)"
    add("--titles", type=console.path, default="", metavar="FILE", help=about)
    add("--dates", choices=ORDERS, default="", help="which comes first, the day or the month")
    arguments.add_out(parser)
    add("--overwrite", action="store_true", help="replace other ratings in --out")
    return parser.parse_args(argv)


class Log(NamedTuple):
    """The rows of all tables: who chose which item, and when.

    Attributes:
      users, items: int32[n], which index `user_names` and `item_names`.
      times: uint32[n], seconds since 1970, or the numbers of the rows.
      titles: by the names of items, as far as the tables have them.
      left_out: the number of rows by what they lack.
    """

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray
    user_names: pyarrow.Array
    item_names: pyarrow.Array
    titles: dict[str, str]
    left_out: dict[str, int]


def read(sources: Sequence[tuple[Table, dict[str, int]]], order: str) -> Log:
    """Reads tables, each with the columns of what it holds; `order` is one of `ORDERS` or "".

    Raises:
      SourceError: a table cannot be read.
    """
    parts: dict[str, list[pyarrow.Array]] = {"user": [], "item": [], "title": []}
    times: list[np.ndarray] = []
    for table, columns in sources:
        clock, first = Times(table.path, table.skip, order), sum(map(len, times))
        rows = 0
        for batch in table.batches([*columns.values()]):
            values, size = dict(zip(columns, batch, strict=True)), len(batch[0])
            try:
                for what, arrays in parts.items():
                    column = values.get(what, pyarrow.nulls(size, pyarrow.binary()))
                    arrays.append(as_bytes(column).dictionary_encode())
                    if len(arrays) == _BATCHES:
                        arrays[:] = [_joined(arrays)]
                if "time" in columns:
                    clock.add(values["time"])
            except pyarrow.ArrowException as error:  # lists, or times that are no text
                raise SourceError(f"cannot read {table.path}: {one_line(error)}") from error
            rows += size
        if not rows:
            raise SourceError(f"{table.path} has a header and no rows")
        seconds, form = np.arange(first, first + rows), "none, the order of the rows"
        if "time" in columns:
            seconds, form = clock.seconds()
        times.append(seconds)
        print(f"{table.path}: {rows:,} rows; times: {form}", flush=True)
    seconds = np.concatenate(times)
    users, user_names = _number(parts.pop("user"))
    items, item_names = _number(parts.pop("item"))
    codes, texts = _number(parts.pop("title"))
    titles = {}
    if 0 < len(texts) <= len(item_names):  # more are those of reviews
        known, firsts = np.unique(items, return_index=True)
        pairs = zip(known, codes[firsts], strict=True)
        titles = {item_names[i].as_py(): texts[t].as_py() for i, t in pairs if min(i, t) >= 0}
    lacks = {"user": users < 0, "item": items < 0, "time": np.isnan(seconds)}
    kept = ~np.logical_or.reduce([*lacks.values()])
    return Log(
        users[kept],
        items[kept],
        seconds[kept].astype(np.uint32),
        user_names,
        item_names,
        titles,
        {what: int(rows.sum()) for what, rows in lacks.items()},
    )


def _number(parts: list[pyarrow.Array]) -> tuple[np.ndarray, pyarrow.Array]:
    """int32[n] of a column, the numbers of its names by first appearance or -1; and the names."""
    column = _joined(parts)
    parts.clear()
    encoded = pc.utf8_trim_whitespace(_text(column.dictionary)).dictionary_encode()
    is_name = pc.invert(pc.is_in(encoded.dictionary, MISSING))
    present = is_name.to_numpy(zero_copy_only=False)
    numbers = np.where(present, np.cumsum(present) - 1, -1)[encoded.indices.to_numpy()]
    numbers = np.append(numbers, -1).astype(np.int32)  # the last one is that of null
    names = encoded.dictionary.filter(is_name)
    if _are_whole(names):
        names = pc.replace_substring_regex(names, r"\.0$", "")
    return numbers[column.indices.fill_null(len(numbers) - 1).to_numpy()], names


def _are_whole(names: pyarrow.Array) -> bool:
    return bool(pc.all(pc.match_substring_regex(names, f"^{WHOLE.pattern}$")).as_py())


def _text(values: pyarrow.Array) -> pyarrow.Array:
    """Bytes as text; what is not UTF-8, as in u.item, is taken for Latin-1."""
    try:
        return as_bytes(values).cast("string")
    except pyarrow.ArrowInvalid:
        return pyarrow.array([v and v.decode("latin-1") for v in values.to_pylist()], "string")


def _joined(parts: list[pyarrow.Array]) -> Any:
    """One dictionary array of several."""
    joined: Any = pyarrow.chunked_array(parts).unify_dictionaries().combine_chunks()
    return joined


def prepare(args: argparse.Namespace) -> str:
    """Writes the ratings and the names; returns the last line to print.

    Raises:
        UserError: a mistake of the user's.
        tf.errors.OpError: reading or writing failed.
    """
    begin, wanted = time.monotonic(), [getattr(args, what) for what in _COLUMNS]
    sources = [(t, _columns(t, args)) for t in (open_table(p, wanted) for p in args.files)]
    timeless = [table.path for table, columns in sources if "time" not in columns]
    if 0 < len(timeless) < len(sources):
        raise SourceError(
            f"{timeless[0]} has no times, and others have: give --time=none or drop it"
        )
    stamps = [[os.path.basename(path), *rest] for path, *rest in caches.file_stamps(args.files)]
    settings = {key: getattr(args, key) for key in (*_COLUMNS, "titles", "dates")}
    content = {"format": 1, "kind": "recommendation", "input": stamps, "settings": settings}
    _check_out(args, content)
    log = read(sources, args.dates)
    dropped, least = _weigh(log)
    kept = ~dropped[log.users]
    users, user_ids, names = _ids(log.user_names, log.users[kept])
    files.write(os.path.join(args.out, _USERS), _csv("user_id,name", user_ids, names))
    items, item_ids, names = _ids(log.item_names, log.items[kept])
    titles = log.titles | _listed_titles(args)
    if titles:
        names = [titles.get(name, name) for name in names.to_pylist()]
    files.write(os.path.join(args.out, _ITEMS), _csv("item_id,title", item_ids, names))
    columns = (users, items, log.times[kept])
    files.write(os.path.join(args.out, _RATINGS), _csv("user_id,item_id,timestamp", *columns))
    counts = {"ratings": len(users), "users": len(user_ids), "items": len(item_ids)}
    left_out = {**log.left_out, "users_with_all_items": int(dropped.sum())}
    writing.save_manifest(args.out, content | {"counts": counts, "left_out": left_out})
    recipe = "small.py:ncf" if len(users) < _LARGE else "ncf"
    keys: dict[str, Any] = {"min_ratings": least}
    batch = arguments.fitted(len(users), _BATCH, 1, 1)["train_batch_size"]
    keys |= {"train_batch_size": batch} if batch < _BATCH else {}
    command = arguments.train_command(recipe, args.out, *arguments.keys(**keys))
    text = ", ".join(f"{number:,} {name}" for name, number in counts.items())
    seconds = console.duration(time.monotonic() - begin)
    return f"{text} are in {args.out} ({seconds}); train on them: {command}"


def _columns(table: Table, args: argparse.Namespace) -> dict[str, int]:
    """The columns of a table by what they hold: a user, an item, perhaps a time and a title."""
    names, columns, guesses = some(table.names, 20), {}, table.guesses()
    for what in _COLUMNS:
        if named := getattr(args, what):
            guesses.pop(what, None)
            if (column := table.find(named)) is not None and column not in columns.values():
                columns[what] = column
            elif named != "none" or what != "time":
                raise SourceError(f"--{what}={named}: the columns of {table.path} are {names}")
    columns |= {what: i for what, i in guesses.items() if i not in columns.values()}
    for what in ("user", "item"):
        if what not in columns:
            kind = names if table.has_header else f"{names} without a header: {some(table.rows[0])}"
            raise SourceError(f"{table.path}: give --{what}=COLUMN, one of {kind}")
    if not table.has_header:
        order = ", ".join(f"{what} {column + 1}" for what, column in columns.items())
        print(f"{table.path} has no header; by their values, the columns are: {order}")
    return columns


def _check_out(args: argparse.Namespace, content: dict[str, Any]) -> None:
    """Refuses an output folder with other data; deletes the manifest of earlier ones."""
    out = {name: os.path.join(args.out, name) for name in (files.MANIFEST, *_FILES)}
    if inputs := {*args.files, args.titles}.intersection(out.values()):
        raise SourceError(f"{inputs.pop()} would be replaced: choose another --out")
    try:
        old = parse_json(files.read(out[files.MANIFEST]) or b"{}")
    except ValueError:
        old = {}
    is_same = isinstance(old, dict) and content.items() <= old.items()
    for name in (files.MANIFEST, _RATINGS):
        if tensorflow().io.gfile.exists(out[name]) and not is_same and not args.overwrite:
            fault = f"{args.out} already holds {name} of another input or other settings"
            raise SourceError(f"{fault}; choose another --out, or --overwrite")
    writing.State(args.out).remove_manifest()


def _weigh(log: Log) -> tuple[np.ndarray, int]:
    """Warns of weak data. Returns bool[users], who is left out, and the value of min_ratings.

    Who has chosen every item is left out, because training needs items that were not chosen.
    """
    width = max(len(log.item_names), 1)
    pairs = log.users * np.int64(width)
    pairs += log.items
    pairs.sort()  # np.unique needs twice the memory
    pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)]]
    users = (pairs // width).astype(np.int32)
    pairs %= width
    items = pairs.astype(np.int32)
    del pairs
    counts = np.bincount(users, minlength=len(log.user_names))
    choosers = np.bincount(items, minlength=1)
    total, things = np.count_nonzero(counts), np.count_nonzero(choosers)
    least = next(n for n in _LEAST if (counts >= n).sum() >= 0.9 * (counts >= 2).sum())
    dropped = np.zeros(len(counts), bool)
    while True:
        enough = (counts >= least) & ~dropped
        seen = np.zeros(width, bool)
        seen[items[enough[users]]] = True
        every = enough & (counts >= np.count_nonzero(seen))
        if not every.any():
            break
        dropped |= every
    one, few = int((counts == 1).sum()), int(((counts > 1) & (counts < least)).sum())
    numbers = {f"rows without {what}, left out": n for what, n in log.left_out.items()} | {
        "rows that repeat a user and an item, and count once": len(log.users) - len(users),
        "users with one item, left out": one,
        f"users with fewer than {least} items, left out by --config.min_ratings": few,
        "users with every item, left out because nothing else is there to rank": dropped.sum(),
        "items with one user, of which little can be learnt": (choosers == 1).sum(),
        "few users, whose scores say little": total if total < _FEW else 0,
        "few items, so that a hit among ten says little": things if things < _FEW else 0,
    }
    for text, number in numbers.items():
        if number:
            print(f"warning: {text}: {number:,}")
    if not enough.any():
        raise SourceError("no user has two items and leaves out a third: nothing can be learnt")
    return dropped, least


def _ids(names: pyarrow.Array, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, pyarrow.Array]:
    """The ids uint32[n] of rows, the rising ids uint32[k], and the name of each.

    If all names are whole numbers, they stay; others count from 1. `codes` int32[n] index `names`.
    """
    ids = np.arange(1, 1 + len(names), dtype=np.uint32)
    if _are_whole(names) and (numbers := names.cast("float64").to_numpy()).max() < 1 << 32:
        ids = numbers.astype(np.uint32)
    used = np.unique(codes)
    rising, first = np.unique(ids[used], return_index=True)
    return ids[codes], rising, names.take(pyarrow.array(used[first]))


def _listed_titles(args: argparse.Namespace) -> dict[str, str]:
    """Titles by the names of items, from --titles or from the lists beside the tables."""
    titles: dict[str, str] = {}
    folders = {os.path.dirname(path) for path in args.files}
    beside = [os.path.join(folder, name) for folder in folders for name in _LISTS]
    beside += [f"{os.path.splitext(path)[0]}.item" for path in args.files]
    for path in [args.titles] if args.titles else filter(tensorflow().io.gfile.exists, beside):
        table = open_table(path)
        columns = table.guesses() if table.has_header else {"item": 0, "title": 1}
        if {"item", "title"} <= columns.keys():
            print(f"titles: {path}")
            for batch in table.batches([columns["item"], columns["title"]]):
                names, values = (pc.utf8_trim_whitespace(_text(c)).to_pylist() for c in batch)
                titles |= {name: title for name, title in zip(names, values, strict=True) if title}
    return titles


def _csv(header: str, *columns: Any) -> Iterator[bytes]:
    """The parts of a CSV; text is in quotes."""
    yield f"{header}\n".encode()
    table = pyarrow.table(dict(zip(header.split(","), columns, strict=True)))
    for first in range(0, len(table), _PART):
        sink, options = pyarrow.BufferOutputStream(), pyarrow.csv.WriteOptions(include_header=False)
        pyarrow.csv.write_csv(table.slice(first, _PART), sink, options)
        yield sink.getvalue().to_pybytes()


def readings(folder: Folder) -> list[Reading]:
    """The table of users and items in a folder: the largest, and others with its columns."""
    logs: dict[tuple[str, ...], list[tuple[File, Table]]] = collections.defaultdict(list)
    candidates = [f for f in folder.files if f.name.lower().removesuffix(".gz").endswith(_SUFFIXES)]
    candidates.sort(key=lambda file: (os.path.basename(file.name) not in _KNOWN, -file.size))
    for file in candidates[:_MOST]:
        # The fault of a single file is what the user wants to know.
        faults = (OSError, tensorflow().errors.OpError, *[UserError] * (not folder.is_file))
        with contextlib.suppress(*faults):
            table = open_table(folder.full(file.name), (), folder.head(file.name, HEAD))
            if {"user", "item"} <= table.guesses().keys():
                logs[table.names].append((file, table))
                if os.path.basename(file.name) in _KNOWN:
                    break
    if not logs:
        return []
    log = max(logs.values(), key=lambda rows: sum(file.size for file, _ in rows))
    # Of files without times, the rows of the last one are the latest.
    log.sort(key=lambda row: ("test" in row[0].name, "val" in row[0].name, row[0].name))
    names, table, number = [file.name for file, _ in log], log[0][1], "rows"
    is_packed = table.kind == "parquet" or any(name.lower().endswith(".gz") for name in names)
    if not is_packed and max(file.size for file, _ in log) < _COUNTED:
        lines = sum(folder.head(name, _COUNTED).count(b"\n") for name in names)
        number = f"{lines - sum(table.skip for _, table in log):,} rows"
    columns = {what: table.names[column] for what, column in table.guesses().items()}
    how = f"by the header {', '.join(columns.values())}" if table.has_header else "without a header"
    return [
        Reading(
            name="interactions",
            form="interactions",
            found=f"{some(names)}: {number} of {', '.join(columns)}, {how}",
            makes="ratings, and lists of users and items, for NCF to recommend from",
            arguments=[folder.full(name) for name in names],
            files=len(names),
        )
    ]
