"""Ratings: reads them, and indexes who rated what.

The files are MovieLens' CSV, DAT and zip files, u.data, and what MLPerf's convert.py makes. The
index has each user's items to train on, and those held out for evaluation.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import logging
import os
import re
import shlex
import zipfile
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal, Self

import numpy as np
import pyarrow
from pyarrow import csv

from common import limits
from common.data import caches, data_manifest
from common.data.order import hash64
from common.errors import ConfigError, DataError, one_line
from common.progress import report_progress
from common.tensorflow import tensorflow
from common.text import decoded


@dataclasses.dataclass(frozen=True)
class Holdout:
    """The rule by which rows are held out."""

    rule: Literal["latest", "random", "date", "none"] = "latest"
    seed: int = 0  # of "random"
    share: float = 0.0  # of "date": this share of the newest rows; 0: those since `since`
    since: int = 0  # seconds since 1970

    @classmethod
    def parse(cls, text: str, seed: int) -> Self:
        """Reads the value of `config.eval_holdout`; ConfigError if it is none."""
        if text == "latest" or text == "none":
            return cls(text)
        if text == "random":
            return cls("random", seed)
        if text == "date":
            return cls("date", share=0.1)
        try:
            if text.endswith("%") and 0 < (share := float(text[:-1]) / 100) < 1:
                return cls("date", share=share)
            if re.match(r"\d{4}-", text):
                date = datetime.datetime.fromisoformat(text)
                date = date if date.tzinfo else date.replace(tzinfo=datetime.UTC)
                return cls("date", since=int(date.timestamp()))
        except ValueError:
            pass
        raise ConfigError(
            f"config.eval_holdout={text!r}: must be latest, random, none, date (the newest 10 % of "
            "the rows), another share such as 20%, or a date such as 2018-05-31"
        )

    def first(self, times: np.ndarray, path: str) -> int:
        """The time of the first row that is held out by date, of rows with `times` uint32[n].

        DataError if all rows are held out, or none is.
        """
        first = self.since
        if self.share:
            place = len(times) - max(1, round(self.share * len(times)))
            first = int(np.partition(times, place)[place])
        oldest, newest = int(times.min()), int(times.max())
        if not oldest < first <= newest:
            raise DataError(
                f"config.eval_holdout: the rows of {path} are from {day(oldest)} to {day(newest)}, "
                f"so {'all' if first <= oldest else 'none'} of them would be held out from "
                f"{day(first)} on: give a day between them, or another share"
            )
        return first


def day(seconds: int) -> str:
    """A time since 1970 in UTC, such as 2018-05-31."""
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d}"


LATEST = Holdout()


_log = logging.getLogger("tpu_suite")

# The sizes of ml-20m, under the config's keys.
ML_20M = {"num_users": 138_493, "num_items": 26_744, "num_ratings": 20_000_263}
TARGET = 0.635  # HR@10 that MLPerf asks for on ml-20m
# The files that a data folder may have, in the order of preference.
FILES = (
    "ratings.csv",
    "ml-20m/ratings.csv",
    "ratings.dat",
    "ml-1m/ratings.dat",
    "ml-20m.zip",
    "ml-1m.zip",
    "train-ratings.csv",
    "u.data",
    "ml-100k/u.data",
)
# MLPerf's convert.py writes each user's latest rating there, the others into train-ratings.csv:
# user, item and a 1 in a row, without a header or a time.
_CONVERTED = ("train-ratings.csv", "test-ratings.csv")
_VERSION = 2  # raise it when `index_ratings` makes other arrays from the same file
_HOLD_OUT = 14  # hashed with the seed; see input_pipeline.py for the other draws
_BLOCK = 4 << 20  # bytes that are parsed at a time
_DAT = "UserID::MovieID::Rating::Timestamp"  # the columns of ml-1m, whose file has no header
# The columns that are read, as MovieLens or MLPerf's load.py calls them.
_COLUMNS = (("userid", "user_id"), ("movieid", "item_id"), ("timestamp",))
_NAMES = ["userid", "movieid", "rating", "timestamp"]  # columns of a table with tabs and no header


@dataclasses.dataclass(frozen=True, eq=False)
class Ratings:
    """Who rated which item when, uint32[n] each, in the order of the file; without the values."""

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray


def locate(data_dir: str) -> str:
    """The path of the ratings in a folder; `data_dir` may also be the file itself."""
    tf, folder = tensorflow(), data_dir.rstrip("/")
    is_file = folder.endswith((".csv", ".dat", ".data", ".zip"))
    paths = [folder] if is_file else [f"{folder}/{name}" for name in FILES]
    try:
        data_manifest.check_finished(folder)
        for path in paths:
            if tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path):
                limits.check_file(path)
                place = os.path.dirname(path)
                beside = (os.path.join(place, name) for name in ("users.csv", "items.csv"))
                data_manifest.check_sizes(place, [path, *beside])
                return path
    except tf.errors.OpError as error:
        raise DataError(f"cannot look for ratings in {data_dir}: {one_line(error)}") from error
    reason = "no such file" if is_file else f"there is none of {', '.join(FILES)}"
    raise DataError(
        f"no ratings in {data_dir!r}: {reason}. python -m scripts.prepare FILE makes them of any "
        "table of users and items; ml-20m.zip is at grouplens.org"
    )


def parts(path: str) -> list[str]:
    """The files that belong to `path`: itself, and test-ratings.csv beside train-ratings.csv."""
    folder, name = os.path.split(path)
    return [os.path.join(folder, n) for n in (_CONVERTED if name == _CONVERTED[0] else [name])]


def read(path: str) -> Ratings:
    """Reads all ratings of a file, which is local or in a bucket. Blank lines are skipped.

    Files of MLPerf's converter have no times: 1 is the time of test-ratings.csv, 0 of the others.
    A row that is not a rating is a DataError that names the row.
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
        with _open(path) as (name, file):
            for batch in _parse(path, name, file, width):
                # Copied, so that pyarrow reuses its memory.
                batches.append([np.array(column) for column in batch.columns])
                count += len(batch)
                report_progress(f"reading ratings, {count:,} so far")
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
        with zipfile.ZipFile(file) as archive:
            names = [n for n in archive.namelist() if n.endswith(("ratings.csv", "ratings.dat"))]
            if not names:
                raise DataError(f"{path} contains no ratings.csv or ratings.dat")
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
        header = decoded(start.split(b"\n", 1)[0], path).strip()
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
                f"{path}, line 1: no column {' or '.join(known)} in {header[:80]!r}: "
                f"python -m scripts.prepare {shlex.quote(path)} reads other columns"
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
            f"{path} has a row that is not {header[:80]}; fix the row, or have "
            f"python -m scripts.prepare {shlex.quote(path)} read text and dates: {one_line(error)}"
        ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class Interactions:
    """The items of each user; both are numbered from 0, in the order of their ids in the file."""

    starts: np.ndarray  # int64[users + 1]; user u trains on items[starts[u]:starts[u + 1]]
    items: np.ndarray  # int32[positives], rising within each user
    held_starts: np.ndarray  # int64[users + 1], the same for the held-out items:
    held_out: np.ndarray  # int32[held], rising within each user, whose `items` have none of them
    held_from: np.ndarray  # int64[], the time of the first row that is held out by date, or 0
    user_ids: np.ndarray  # uint32[users], as in the file
    item_ids: np.ndarray  # uint32[items], as in the file

    @property
    def num_users(self) -> int:
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    @property
    def num_positives(self) -> int:
        """Pairs of a user and an item to train on."""
        return len(self.items)

    @property
    def num_ratings(self) -> int:
        """Pairs of a user and an item."""
        return len(self.items) + len(self.held_out)

    @property
    def evaluated(self) -> np.ndarray:
        """int32[e], rising: the users who are ranked, who have held-out items and others."""
        has_both = (np.diff(self.held_starts) > 0) & (np.diff(self.starts) > 0)
        return np.flatnonzero(has_both).astype(np.int32)

    def only(self, kept: np.ndarray) -> "Interactions":
        """The same users and items with only the positives of `kept`, bool[positives]."""
        starts = np.append(0, np.cumsum(kept))[self.starts]
        return dataclasses.replace(self, starts=starts, items=self.items[kept])

    @property
    def users(self) -> np.ndarray:
        """int32[positives], the user of each positive."""
        return np.repeat(np.arange(self.num_users, dtype=np.int32), np.diff(self.starts))

    @property
    def held_users(self) -> np.ndarray:
        """int32[held], the user of each held-out item."""
        return np.repeat(np.arange(self.num_users, dtype=np.int32), np.diff(self.held_starts))

    @property
    def rows_digest(self) -> str:
        """A digest of the ids of users and items, which number the rows of the model's tables."""
        ids = self.user_ids.tobytes() + self.item_ids.tobytes()
        return hashlib.sha256(ids).hexdigest()[:16]

    @property
    def checksum(self) -> int:
        """CRC-32 of who rated what, and what is held out."""
        crc = 0
        for array in (self.starts, self.items, self.held_out):
            crc = zlib.crc32(array.data, crc)
        is_one_each = np.array_equal(self.held_starts, np.arange(self.num_users + 1))
        return crc if is_one_each else zlib.crc32(self.held_starts.data, crc)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in vars(self).values())


def load_interactions(
    data_dir: str, min_ratings: int, cache: str, holdout: Holdout = LATEST
) -> Interactions:
    """Indexes the ratings in a folder, or takes the index from `cache` if nothing has changed.

    The name of the file, its size, its time of modification (in seconds), `min_ratings` and
    `holdout` decide whether the cache, a file that is local or gs://, is used; "" keeps nothing.
    `data_dir` may also be one of `FILES`. Users with fewer than `min_ratings` are left out.
    """
    path = locate(data_dir)
    (_, size, modified), *others = caches.file_stamps(parts(path))
    facts = {"file": path, "bytes": size, "modified": modified, **vars(holdout)}
    facts |= {"others": others} if others else {}
    key = json.dumps(facts | {"min_ratings": min_ratings, "version": _VERSION})
    return caches.cached_arrays(
        Interactions, cache, key, lambda: index_ratings(read(path), min_ratings, path, holdout)
    )


def index_ratings(
    raw: Ratings, min_ratings: int, path: str, holdout: Holdout = LATEST
) -> Interactions:
    """Indexes ratings, whose order does not matter; `path` is the file, for messages.

    A user's repeated rating of an item counts once: with its latest time, or with the earliest if
    items are held out by date, as the user knew the item since then. If a user's last ratings have
    the same time, the one of the item with the largest id is the latest. Of random ones, each of a
    user's items is equally likely to be held out.
    """
    user_ids, users = np.unique(raw.users, return_inverse=True)
    item_ids, items = np.unique(raw.items, return_inverse=True)
    pairs = users * np.int64(len(item_ids)) + items
    pairs, times = _sort_pairs(pairs, raw.times, path, earliest=holdout.rule == "date")
    users, items = np.divmod(pairs, len(item_ids))
    del pairs
    counts = np.bincount(users, minlength=len(user_ids))
    enough = counts >= min_ratings
    if not enough.all():
        few = len(enough) - int(enough.sum())
        fact = f"{few:,} of {len(enough):,} users in {path} have fewer than {min_ratings} ratings"
        if not enough.any():
            raise DataError(f"{fact}, so no user is left: set a smaller --config.min_ratings")
        _log.info("%s and are left out", fact)
        items, times = items[enough[users]], times[enough[users]]
        user_ids, counts = user_ids[enough], counts[enough]
        used, items = np.unique(items, return_inverse=True)
        item_ids = item_ids[used]
    if counts.max() >= len(item_ids):
        raise DataError(
            f"user {user_ids[np.argmax(counts)]} in {path} has rated all {len(item_ids):,} items, "
            "so no item is left as a negative example: use a larger data set"
        )
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    is_held, first = np.zeros(len(items), np.bool_), 0
    if holdout.rule == "date":
        first = holdout.first(times, path)
        is_held = times >= first
    elif holdout.rule != "none":
        if holdout.rule == "random":  # by ids, so that ratings of other users change no draw
            times = hash64(holdout.seed, _HOLD_OUT, np.repeat(user_ids, counts), item_ids[items])
        is_latest = np.repeat(np.maximum.reduceat(times, starts[:-1]), counts) == times
        rows = np.where(is_latest, np.arange(len(times)), -1)
        is_held[np.maximum.reduceat(rows, starts[:-1])] = True
    held_starts = np.append(0, np.cumsum(is_held))[starts]
    positives, held_out = items[~is_held].astype(np.int32), items[is_held].astype(np.int32)
    starts = starts - held_starts
    since = np.array(first, np.int64)
    data = Interactions(starts, positives, held_starts, held_out, since, user_ids, item_ids)
    if first and not len(data.evaluated):
        raise DataError(
            f"config.eval_holdout: no user in {path} has ratings before {day(first)} and since, so "
            "nothing can be ranked (rows without times count in their order): give another day or "
            "share, or latest"
        )
    return data


def _sort_pairs(
    pairs: np.ndarray, times: np.ndarray, path: str, earliest: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Sorts pairs int64[n] with their times, and keeps each once, with its latest time.

    Or with the `earliest`.
    """
    if (pairs[1:] > pairs[:-1]).all():
        return pairs, times
    order = np.lexsort((times, pairs))
    pairs, times = pairs[order], times[order]
    differs = pairs[1:] != pairs[:-1]
    is_kept = np.append(True, differs) if earliest else np.append(differs, True)
    _log.info(
        "%s was not in the order of users and items: sorted; %d ratings repeat an item and only "
        "the %s counts",
        path,
        len(is_kept) - int(is_kept.sum()),
        "earliest" if earliest else "latest",
    )
    return pairs[is_kept], times[is_kept]
