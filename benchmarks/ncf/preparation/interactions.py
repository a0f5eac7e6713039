"""Prepares ratings, or events of any kind, of your users and items, to train NCF on.

    python -m scripts.prepare interactions events.csv --out=data/own
    python -m scripts.prepare interactions log.jsonl.gz --user=member --item=film --time=seen \\
        --out=data/own

A row says which user chose which item, and perhaps when; the value of a rating is ignored. FILE is
CSV or the like, JSON lines or Parquet, perhaps in gzip. The program writes to --out ratings.csv
with integer ids, users.csv and items.csv with the names of these ids, and manifest.json.
docs/data.md describes the formats.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.csv

from benchmarks.ncf.preparation import values
from benchmarks.ncf.preparation.recognise import advice, taken
from benchmarks.ncf.preparation.table_formats import Table, are_lists, open_table
from benchmarks.ncf.preparation.values import pc
from common import cli
from common.data import caches, data_manifest, storage
from common.errors import some
from common.preparation import arguments, writing
from common.preparation.sources import SourceError
from common.progress import duration
from common.tensorflow import tensorflow

_COLUMNS = ("user", "item", "time")  # what they hold, and the flags that name them
_SHOWN = 10  # files with a line each
_RATINGS, _USERS, _ITEMS = "ratings.csv", "users.csv", "items.csv"
_LEAST = (20, 10, 5, 3, 2)  # min_ratings: the first that keeps 90% of users with 2 ratings
_LARGE = 1_000_000  # rows from which on the recipe is that of ml-20m
_BATCH = 2048  # of configs/ncf.py; small tables take an eighth, which learns more per epoch
_RANKED = 10**8  # users by items whose full ranking takes seconds; of more, some items are drawn
_PART = 1 << 20  # rows that are written at a time
_TITLES = ("movies.csv", "movies.dat", "u.item", "books.csv", _ITEMS)  # lists beside the table


def parse(parser: cli.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments without reading files; exits with status 2 if one is invalid."""
    add, about = parser.add_argument, "tables, also in different formats"
    add("files", nargs="+", type=cli.path, metavar="FILE", help=about)
    for what, more in (("user", ""), ("item", ""), ("time", "; none takes the rows' order")):
        about = f"column of the {what}: its name, or its number from 1{more}"
        add(f"--{what}", default="", metavar="COLUMN", help=about)
    about = "table of items and titles (movies.csv, u.item or NAME.item beside the table)"
    add("--titles", type=cli.path, default="", metavar="FILE", help=about)
    arguments.add_out(parser)
    add("--overwrite", action="store_true", help="replace other ratings in --out")
    args = parser.parse_args(argv)
    for path in filter(None, [*args.files, args.titles]):
        if (os.path.dirname(path) or ".") == (args.out.rstrip("/") or "/"):
            parser.error(f"--out={args.out} is the folder of {path}: choose another")
    return args


class Log(NamedTuple):
    """The rows of all tables: who chose which item, and when."""

    users: np.ndarray  # int32[n], indices into `user_names`
    items: np.ndarray  # int32[n], indices into `item_names`
    times: np.ndarray  # uint32[n], seconds since 1970, or the numbers of the rows
    user_names: pyarrow.Array
    item_names: pyarrow.Array
    left_out: dict[str, int]  # the number of rows by the value that they lack


def _read(sources: Sequence[tuple[Table, dict[str, int]]]) -> Log:
    """Reads tables; each comes with its columns by their content."""
    columns: dict[str, list[pyarrow.Array]] = {"user": [], "item": []}
    times: list[np.ndarray] = []
    count = 0
    for table, numbers in sources:
        for what, arrays in columns.items():  # one after the other, which needs less memory
            column: Any = table.read({what: numbers[what]})[what].dictionary_encode()
            arrays.append(column.combine_chunks())
        first, count = count, count + len(columns["user"][-1])
        seconds, form = np.arange(first, count), "none; the order of the rows counts"
        if "time" in numbers:
            column = table.read({"time": numbers["time"]})["time"]
            seconds, form = values.seconds(column, table.path, table.skip)
        times.append(seconds)
        if len(times) <= _SHOWN:
            text = f"{count - first:,} rows; times: {form}; columns: {taken(table, numbers)}"
            print(f"{table.path}: {text}", flush=True)
    if (more := len(times) - _SHOWN) > 0:
        print(f"... and {more:,} more files: {count:,} rows in all")
    users, user_names = values.encode("user", columns.pop("user"))
    items, item_names = values.encode("item", columns.pop("item"))
    seconds = np.concatenate(times)
    lacks = {"user": users < 0, "item": items < 0, "time": np.isnan(seconds)}
    kept = ~np.logical_or.reduce([*lacks.values()])
    if not kept.any():
        number = ", ".join(f"without {what} {rows.sum():,}" for what, rows in lacks.items())
        raise SourceError(f"no row has a user, an item and a time ({number}): name other columns")
    if len(sources) > 1:
        is_timed = "time" in sources[0][1]
        kept &= ~values.are_repeated(users, items, *([seconds] if is_timed else []))
    return Log(
        users[kept],
        items[kept],
        seconds[kept].astype(np.uint32),
        user_names,
        item_names,
        {what: int(rows.sum()) for what, rows in lacks.items()},
    )


def prepare(args: argparse.Namespace) -> str:
    """Writes the ratings and the names; returns the last line to print."""
    begin, wanted = time.monotonic(), [getattr(args, what) for what in _COLUMNS]
    sources = [(t, _columns(t, args)) for t in (open_table(p, wanted) for p in args.files)]
    timeless = [table.path for table, columns in sources if "time" not in columns]
    if 0 < len(timeless) < len(sources):
        raise SourceError(
            f"{timeless[0]} has no times, and others have: give --time=none or drop it"
        )
    stamps = [[os.path.basename(path), *rest] for path, *rest in caches.file_stamps(args.files)]
    settings = {what: getattr(args, what) for what in (*_COLUMNS, "titles")}
    state, plan = writing.State(args.out), {"settings": settings, "input": {"files": stamps}}
    is_ours = state.read(data_manifest.PLAN) or args.overwrite
    if not is_ours and storage.read(f"{args.out}/{_RATINGS}"):
        raise SourceError(f"{args.out} already holds {_RATINGS}: choose another --out")
    log = _read(sources)
    dropped, least = _weigh(log)
    titles = _listed_titles(args)
    state.claim(plan, args.overwrite)
    kept = ~dropped[log.users]
    users, user_ids, names = _ids(log.user_names, log.users[kept])
    storage.write(os.path.join(args.out, _USERS), _csv("user_id,name", user_ids, names))
    items, item_ids, names = _ids(log.item_names, log.items[kept])
    # The names stay beside the titles: they tell the same item in a later table.
    shown = [titles.get(name, name) for name in names.to_pylist()]
    lines = _csv("item_id,title,name", item_ids, shown, names)
    storage.write(os.path.join(args.out, _ITEMS), lines)
    columns = (users, items, log.times[kept])
    storage.write(os.path.join(args.out, _RATINGS), _csv("user_id,item_id,timestamp", *columns))
    names = (_RATINGS, _USERS, _ITEMS)
    sizes = storage.sizes([os.path.join(args.out, name) for name in names])
    shards = [{"name": n, "bytes": size} for n, size in zip(names, sizes, strict=True)]
    counts = {"ratings": len(users), "users": len(user_ids), "items": len(item_ids)}
    left_out = {**log.left_out, "users_with_all_items": int(dropped.sum())}
    content = {"format": 1, "kind": "recommendation", **plan, "counts": counts}
    content |= {"left_out": left_out, "splits": {"train": {"shards": shards}}}
    writing.save_data_manifest(args.out, content)
    recipe = "small.py:ncf" if len(users) < _LARGE else "ncf"
    keys: dict[str, Any] = {"min_ratings": least}
    batch = arguments.fitted(len(users), _BATCH, 1, 1)["train_batch_size"]
    keys |= {"train_batch_size": batch} if batch < _BATCH else {}
    keys |= {"eval_negatives": "all"} if len(user_ids) * len(item_ids) <= _RANKED else {}
    command = arguments.train_command(recipe, args.out, *arguments.keys(**keys))
    text = ", ".join(f"{number:,} {name}" for name, number in counts.items())
    seconds = duration(time.monotonic() - begin)
    return f"{text} are in {args.out} ({seconds}); train on them: {command}"


def _columns(table: Table, args: argparse.Namespace) -> dict[str, int]:
    """The columns of a table by what they hold: a user, an item, perhaps a time."""
    names, columns, guesses = some(table.names, 20), {}, table.guesses()
    for what in _COLUMNS:
        named = getattr(args, what)
        column = table.find(named) if named else guesses.get(what)
        if named and column is None and (what, named) != ("time", "none"):
            raise SourceError(f"--{what}={named}: the columns of {table.path} are {names}")
        if column is not None and column not in columns.values():
            columns[what] = column
    if not {"user", "item"} <= columns.keys() or are_lists(table.cells(columns["item"])):
        raise SourceError(advice(table))
    return columns


def _weigh(log: Log) -> tuple[np.ndarray, int]:
    """Warns about users and rows that are left out; returns who stays and the min_ratings to use.

    Users who have chosen every item are left out: training needs items that were not chosen. It
    also warns about users whose latest item is not known, as several have the same time.
    """
    width = np.int64(len(log.item_names))
    pairs = log.users * width + log.items
    latest = np.zeros(len(log.user_names), np.uint32)
    np.maximum.at(latest, log.users, log.times)
    last = values.unique(pairs[log.times == latest[log.users]]) // width
    users, items = np.divmod(values.unique(pairs), width)
    counts = np.bincount(users, minlength=len(latest))
    least = next(n for n in _LEAST if (counts >= n).sum() >= 0.9 * (counts >= 2).sum())
    enough, few = counts >= least, (counts > 1) & (counts < least)
    ranked = np.count_nonzero(np.bincount(items[enough[users]]))
    dropped = enough & (counts >= ranked)
    numbers = {f"rows without {what}, left out": n for what, n in log.left_out.items()} | {
        "rows that repeat a user and an item; each pair counts once": len(log.users) - len(users),
        "users with one item, left out": (counts == 1).sum(),
        f"users with fewer than {least} items, left out by --config.min_ratings": few.sum(),
        "users with every item, left out because no items remain to rank": dropped.sum(),
        "users with several items at their latest time, of which the one with the largest id is "
        "held out unless you name a column of finer times (--time) or train with "
        "--config.eval_holdout=random": (np.bincount(last) > 1).sum(),
    }
    for text, number in numbers.items():
        if number:
            print(f"warning: {text}: {number:,}")
    if not (enough & ~dropped).any():
        raise SourceError("every user has one item or all items: nothing can be learnt")
    return dropped, least


def _ids(names: pyarrow.Array, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, pyarrow.Array]:
    """The ids uint32[n] of rows, the rising ids uint32[k], and the name of each.

    If all names are integers, they are the ids; otherwise ids count from 1. `codes` int32[n] index
    `names`.
    """
    ids = np.arange(1, 1 + len(names), dtype=np.uint32)
    if pc.all(pc.match_substring_regex(names, r"^(0|[1-9]\d{0,9})$")).as_py():
        numbers = names.cast("int64").to_numpy()
        ids = numbers.astype(np.uint32) if numbers.max() < 1 << 32 else ids
    used = np.unique(codes)
    rising, first = np.unique(ids[used], return_index=True)
    return ids[codes], rising, names.take(pyarrow.array(used[first]))


def _listed_titles(args: argparse.Namespace) -> dict[str, str]:
    """Titles by the names of items, from --titles or from the lists beside the first table."""
    folder, name = os.path.split(args.files[0])
    beside = [os.path.join(folder, each) for each in (*_TITLES, f"{name.partition('.')[0]}.item")]
    titles: dict[str, str] = {}
    found = filter(tensorflow().io.gfile.exists, dict.fromkeys(beside))
    for path in [args.titles] if args.titles else found:
        table = open_table(path)
        columns = table.guesses() if table.has_header else {"item": 0, "title": 1}
        if {"item", "title"} <= columns.keys():
            print(f"titles: {path}")
            rows = table.read({what: columns[what] for what in ("item", "title")})
            pairs = zip(
                *(values.normal(column.combine_chunks()).to_pylist() for column in rows.columns),
                strict=True,
            )
            titles |= {name: title for name, title in pairs if title}
    return titles


def _csv(header: str, *columns: Any) -> Iterator[bytes]:
    """The parts of a CSV; text is in quotes."""
    yield f"{header}\n".encode()
    table = pyarrow.table(dict(zip(header.split(","), columns, strict=True)))
    for first in range(0, len(table), _PART):
        sink, options = pyarrow.BufferOutputStream(), pyarrow.csv.WriteOptions(include_header=False)
        pyarrow.csv.write_csv(table.slice(first, _PART), sink, options)
        yield sink.getvalue().to_pybytes()
