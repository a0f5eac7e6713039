"""Reads ratings: MovieLens' CSV, DAT and zip files, u.data, and what MLPerf's convert.py makes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zipfile
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
from pyarrow import csv

from errors import one_line
from ops import files, limits, progress
from ops.shards import DataError, tensorflow

# The sizes of ml-20m, under the config's keys.
ML_20M = {"num_users": 138_493, "num_items": 26_744, "num_ratings": 20_000_263}
TARGET = 0.635  # HR@10 that MLPerf asks for on ml-20m
# The files that a data folder may have, in the order of preference.
FILES = (
    *("ratings.csv", "ml-20m/ratings.csv", "ratings.dat", "ml-1m/ratings.dat"),
    *("ml-20m.zip", "ml-1m.zip", "train-ratings.csv", "u.data", "ml-100k/u.data"),
)
# MLPerf's convert.py writes each user's latest rating there, the others into train-ratings.csv:
# user, item and a 1 in a row, without a header or a time.
_CONVERTED = ("train-ratings.csv", "test-ratings.csv")
_BLOCK = 4 << 20  # bytes that are parsed at a time
_DAT = "UserID::MovieID::Rating::Timestamp"  # the columns of ml-1m, whose file has no header
# The columns that are read, as MovieLens or MLPerf's load.py calls them.
_COLUMNS = (("userid", "user_id"), ("movieid", "item_id"), ("timestamp",))
_NAMES = ["userid", "movieid", "rating", "timestamp"]  # of a table with tabs and no header


@dataclasses.dataclass(frozen=True, eq=False)
class Ratings:
    """Who rated which item when, uint32[n] each, in the order of the file; not the stars."""

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray


def locate(data_dir: str) -> str:
    """The path of the ratings in a folder; `data_dir` may also be the file itself.

    Raises:
      DataError: there is no such file, or the folder cannot be read.
    """
    tf, folder = tensorflow(), data_dir.rstrip("/")
    is_file = folder.endswith((".csv", ".dat", ".data", ".zip"))
    paths = [folder] if is_file else [f"{folder}/{name}" for name in FILES]
    try:
        for path in paths:
            if tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path):
                if "://" not in path and not os.path.isfile(path):  # reading might never end
                    raise DataError(f"{path} is a pipe or a device: save its content as a file")
                return path
        is_other_file = not is_file and tf.io.gfile.exists(folder) and not tf.io.gfile.isdir(folder)
    except tf.errors.OpError as error:
        raise DataError(f"cannot look for ratings in {data_dir}: {one_line(error)}") from error
    reason = "no such file" if is_file else f"it has none of {', '.join(FILES)}"
    if is_other_file:
        reason = "it is a file, but its name does not end with .csv, .dat, .data or .zip"
    raise DataError(
        f"no ratings in {data_dir!r}: {reason}. ml-20m.zip is at grouplens.org; "
        "python -m scripts.prepare ratings writes made-up ratings"
    )


def parts(path: str) -> list[str]:
    """The files that belong to `path`: itself, and test-ratings.csv beside train-ratings.csv."""
    folder, name = os.path.split(path)
    return [os.path.join(folder, n) for n in (_CONVERTED if name == _CONVERTED[0] else [name])]


def read(path: str) -> Ratings:
    """Reads all ratings of a file, which is local or in a bucket. Blank lines are skipped.

    Files of MLPerf's converter have no times: 1 is the time of test-ratings.csv, 0 of the others.

    Raises:
      DataError: the file cannot be read, or a row is not a rating; the message names the row.
    """
    if len(paths := parts(path)) > 1:
        train, test = (_read(part, 2) for part in paths)
        times = np.repeat(np.array([0, 1], np.uint32), [len(train[0]), len(test[0])])
        users, items = map(np.concatenate, zip(train, test, strict=True))
        return Ratings(users, items, times)
    return Ratings(*_read(path, 3))


def _read(path: str, width: int) -> list[np.ndarray]:
    """The first `width` columns of a file of users, items and times."""
    tf, batches, count = tensorflow(), [], 0
    try:
        with files.reading(lambda: [path]), _open(path) as (name, file):
            for batch in _parse(
                path, name, file, width
            ):  # copied, so that pyarrow reuses its memory
                batches.append([np.array(column) for column in batch.columns])
                count += len(batch)
                progress.report(f"reading ratings, {count:,} so far")
    except tf.errors.OpError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}): pack or copy it again") from error
    if not count:
        raise DataError(f"{path} holds no ratings, only a header")
    return [np.concatenate(columns) for columns in zip(*batches, strict=True)]


@contextlib.contextmanager
def _open(path: str) -> Iterator[tuple[str, Any]]:
    """Opens the text of a file, which may be in a zip: (its name, the open file)."""
    with tensorflow().io.gfile.GFile(path, "rb") as file:
        if not path.endswith(".zip"):
            yield path, file
            return
        if file.read(4) != b"PK\3\4":
            raise DataError(f"{path} is not a zip file: pack or copy it again")
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            names = [n for n in archive.namelist() if n.endswith(("ratings.csv", "ratings.dat"))]
            if not names:
                raise DataError(f"{path} contains no ratings.csv or ratings.dat")
            info = archive.getinfo(names[0])
            if fault := limits.expansion(info.compress_size, info.file_size):
                raise DataError(f"{path}: {names[0]} {fault}")
            with archive.open(names[0]) as text:
                yield names[0], text


def _parse(path: str, name: str, file: Any, width: int) -> Iterator[pyarrow.RecordBatch]:
    """Yields batches of rows as columns uint32[...]: users, items and, if there are any, times."""
    start = file.read(1 << 16)
    if not start.strip():
        raise DataError(f"{path} is empty: write or copy it again")
    file.seek(0)
    if name.endswith(".dat"):  # ":", as a delimiter has one character: columns between are empty
        header, delimiter, skip = _DAT, ":", 0
    else:
        header = start.split(b"\n", 1)[0].decode("utf-8-sig", "replace").strip()
        delimiter, skip = "\t" if "\t" in header else ",", 1
    names = [n.strip().strip('"').lower() for n in header.split(delimiter)]
    if delimiter == "\t" and not any(map(str.isalpha, header)):
        names, skip = _NAMES[: len(names)], 0
        header = delimiter.join(names)
    columns = []
    for known in _COLUMNS[:width]:
        present = [n for n in known if n in names]
        if not present:
            raise DataError(
                f"{path}, line 1: no column {' or '.join(known)} in {header[:80]!r}; MovieLens has "
                "userId,movieId,rating,timestamp"
            )
        columns.append(present[0])
    source: Any = SimpleNamespace(read=file.read, closed=False, close=lambda: None)
    try:
        yield from csv.open_csv(
            pyarrow.PythonFile(source, "r"),
            csv.ReadOptions(
                use_threads=False,  # with threads, messages would not have the number of the row
                block_size=_BLOCK,
                column_names=names,
                skip_rows=skip,
            ),
            csv.ParseOptions(delimiter=delimiter),
            csv.ConvertOptions(
                column_types=dict.fromkeys(columns, pyarrow.uint32()),
                include_columns=columns,
                null_values=[],  # an empty value is a mistake, too
            ),
        )
    except pyarrow.ArrowInvalid as error:
        raise DataError(
            f"{path} has a row that is not {header[:80]}; mend the row: {one_line(error)}"
        ) from error
