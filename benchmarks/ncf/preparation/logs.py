"""The rows of logs: who chose what and when, as numbers; and what is doubtful about them."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow

from benchmarks.ncf.preparation import times
from benchmarks.ncf.preparation.tables import Table, are_lists, known
from benchmarks.ncf.preparation.times import pc
from common.data.order import hash64
from common.errors import some
from common.preparation.sources import SourceError
from common.text import alike, normal_name

KINDS = ("user", "item", "time")  # of columns
_SHOWN = 10  # files with a line each


class Log(NamedTuple):
    """The rows of all tables: who chose which item, and when."""

    users: np.ndarray  # int32[n], indices into `user_names`
    items: np.ndarray  # int32[n], indices into `item_names`
    times: np.ndarray  # uint32[n], seconds since 1970, or the numbers of the rows
    user_names: pyarrow.Array
    item_names: pyarrow.Array
    left_out: dict[str, int]  # the number of rows by the value that they lack


def read(sources: Sequence[tuple[Table, dict[str, int]]]) -> Log:
    """Reads tables; each comes with its columns by their content."""
    columns: dict[str, list[pyarrow.Array]] = {"user": [], "item": []}
    parts: list[np.ndarray] = []
    taken, count = "", 0
    for table, numbers in sources:
        if taken != (taken := _taken(table, numbers)):
            print(f"reading {table.path}: {taken}", flush=True)
        for what, arrays in columns.items():  # one after the other, which needs less memory
            column: Any = table.read({what: numbers[what]})[what].dictionary_encode()
            arrays.append(column.combine_chunks())
        first, count = count, sum(map(len, columns["user"]))
        seconds, form = np.arange(first, count), "none; the order of the rows counts"
        if "time" in numbers:
            rows = table.read({what: c for what, c in numbers.items() if what in ("time", "clock")})
            seconds, form = times.seconds(times.joined(*rows.columns), table.path, table.skip)
        parts.append(seconds)
        if len(parts) <= _SHOWN:
            print(f"{table.path}: {count - first:,} rows; times: {form}", flush=True)
    if (more := len(parts) - _SHOWN) > 0:
        print(f"... and {more:,} more files: {count:,} rows in all")
    users, user_names = _encode("user", columns.pop("user"))
    items, item_names = _encode("item", columns.pop("item"))
    seconds = np.concatenate(parts)
    lacks = {"user": users < 0, "item": items < 0, "time": np.isnan(seconds)}
    kept = ~np.logical_or.reduce([*lacks.values()])
    if not kept.any():
        number = ", ".join(f"without {what} {rows.sum():,}" for what, rows in lacks.items())
        raise SourceError(f"no row has a user, an item and a time ({number}): name other columns")
    if len(sources) > 1:
        sizes, is_timed = np.array([*map(len, parts)]), "time" in sources[0][1]
        kept &= ~_repeated(sizes, users, items, seconds if is_timed else None)
    return Log(
        users[kept],
        items[kept],
        seconds[kept].astype(np.uint32),
        user_names,
        item_names,
        {what: int(rows.sum()) for what, rows in lacks.items()},
    )


def _taken(table: Table, columns: dict[str, int]) -> str:
    """Which columns are taken of a table, and which others may be meant."""
    names, several = table.names, [known(table.names).get(what, []) for what in KINDS]
    lists = [column for column in range(len(names)) if are_lists(table.cells(column))]
    others = {*itertools.chain(*several, lists)} - {*columns.values()} if table.has_header else {}
    taken = ", ".join(f"{what} {names[column]}" for what, column in columns.items())
    aside = some([names[column] for column in sorted(others)])
    text = taken if table.has_header else f"no header; the columns are {taken}"
    return f"{text}; not taken: {aside}" if aside else text


def _repeated(
    sizes: np.ndarray, users: np.ndarray, items: np.ndarray, times: np.ndarray | None
) -> np.ndarray:
    """bool[n], the rows that an earlier file has, too, as folds do; says how many.

    `sizes` has the rows of each file. Without times only files count of which most rows are
    repeated: others tell what their users chose again.
    """
    file = np.repeat(np.arange(len(sizes)), sizes)
    keys = hash64(users, items, 0 if times is None else times)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    repeated = file[first[inverse]] < file
    if times is None:
        repeated &= (2 * np.bincount(file, repeated) > sizes)[file]
    if number := int(repeated.sum()):
        print(f"warning: rows that an earlier file has, too, as folds do, left out: {number:,}")
    return repeated


def _encode(kind: str, arrays: list[pyarrow.Array]) -> tuple[np.ndarray, pyarrow.Array]:
    """int32[n] of an encoded column: the numbers of its names or -1; and the names.

    The numbers are by first appearance. Names that look the same are one: says how many.
    """
    column: Any = pyarrow.chunked_array(arrays).unify_dictionaries().combine_chunks()
    arrays.clear()
    texts = normal(column.dictionary)
    if joined := len(texts) - len(texts.unique()):
        print(
            f"warning: {kind}s whose names look like another's, joined with it: {joined:,} (blanks "
            "or Unicode's forms, NFC and NFD, are different)"
        )
    # pandas writes 7.0 where a column has empty cells.
    texts = pc.replace_substring_regex(texts, r"^(0|[1-9]\d*)\.0$", r"\1")
    names = texts.unique()
    names = names.filter(pc.not_equal(names, ""))
    _warn_of_names(kind, names)
    codes = pc.index_in(texts, value_set=names).take(column.indices)
    return codes.fill_null(-1).to_numpy(), names


def normal(texts: Any) -> Any:
    """Names in `normal_name`'s form, which most have already."""
    texts = texts.combine_chunks() if isinstance(texts, pyarrow.ChunkedArray) else texts
    is_odd = pc.fill_null(pc.match_substring_regex(texts, r"[^\x21-\x7e]"), False)
    return pc.replace_with_mask(
        texts, is_odd, pyarrow.array(map(normal_name, texts.filter(is_odd).to_pylist()), "string")
    )


def _warn_of_names(kind: str, names: pyarrow.Array) -> None:
    """Warns about names that differ in case, and about numbers that have lost their digits."""
    if len(pc.utf8_lower(pc.utf8_normalize(names, form="NFKC")).unique()) < len(names):
        groups = alike(names.to_pylist())
        print(
            f"warning: {kind}s whose names differ in case only, such as {groups[0][0]} and "
            f"{groups[0][1]}, stay apart: {sum(map(len, groups)):,}; write those alike that are one"
        )
    is_cut = pc.match_substring_regex(names, times.CUT)
    is_long, is_round = (pc.match_substring_regex(names, rf"^\d{{15}}{x}+$") for x in (r"\d", "0"))
    if 2 < (pc.sum(is_long).as_py() or 0) == pc.sum(is_round).as_py():  # of 15 digits at most
        is_cut = pc.or_(is_cut, is_round)
    if number := pc.sum(is_cut).as_py():
        print(
            f"warning: {kind}s that are numbers without their last digits, such as "
            f"{names.filter(is_cut)[0]}, by a spreadsheet: {number:,}. Several may have become "
            "one: export the table again, with this column as text"
        )


def warn_of_ties(log: Log) -> None:
    """Warns about users whose latest item is not known, as several have the same time."""
    keys = np.sort(log.users.astype(np.uint64) << np.uint64(32) | log.times)
    same = np.append(keys[1:] == keys[:-1], False)
    shared = int((same | np.append(False, same[:-1])).sum())
    latest = np.zeros(len(log.user_names), np.uint32)
    np.maximum.at(latest, log.users, log.times)
    last = np.flatnonzero(log.times == latest[log.users])
    _, first = np.unique(hash64(log.users[last], log.items[last]), return_index=True)
    counts = np.bincount(log.users[last][first])
    if tied := int((counts > 1).sum()):
        print(
            f"warning: users with several items at their latest time: {tied:,} of "
            f"{(counts > 0).sum():,}; the one with the largest id is held out ({shared:,} rows "
            "share a time with another of their user). Take a column of finer times, if there is "
            "one (--time), or train with --config.eval_holdout=random"
        )
