"""The files of a split: found by the config's patterns, complete sets of shards, their identity."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence

from common.data import data_manifest, storage
from common.errors import DataError, one_line
from common.progress import report_progress
from common.tensorflow import tensorflow

_NUMBERED = r"-(\d+)-of-(\d+)(?:\.tfrecord)?$"  # how the names of shards end


def find(data_dir: str, patterns: str, what: str) -> tuple[str, ...]:
    """Sorted files that match comma-separated `patterns`, relative to `data_dir` or absolute.

    DataError if no file matches, or the folder cannot be listed; it calls the files `what`.
    """
    tf, paths, problem = tensorflow(), set(), ""
    folder = data_dir.rstrip("/") or "/"
    report_progress(f"listing {folder} for {what}")
    data_manifest.check_finished(folder)
    try:
        for pattern in filter(None, (p.strip() for p in patterns.split(","))):
            is_absolute = "://" in pattern or pattern.startswith("/")
            place = (pattern,) if is_absolute else (f"{folder}/{pattern}", folder)
            paths.update(storage.matching_paths(*place))
        if not paths and not tf.io.gfile.exists(folder):
            problem = "there is no such folder"
        elif not paths and not tf.io.gfile.stat(folder).is_directory:
            problem = "it is a file, not a folder"
        elif all(map(tf.io.gfile.isdir, paths)):  # "train-images" is a folder that matches
            problem, paths = _without_records(folder, patterns), set()
    except (tf.errors.OpError, UnicodeDecodeError) as error:  # a name may not be UTF-8
        raise DataError(f"cannot list {folder} for {what}: {one_line(error)}") from error
    if not paths:
        raise DataError(f"no {what} in {data_dir!r}: {problem}")
    numbered = {path for path in paths if re.search(_NUMBERED, path)}
    matches = tuple(sorted(numbered or paths))  # unfinished copies have other names
    for path in matches:
        if "://" not in path and not os.path.isfile(path):  # reading a pipe might never end
            raise DataError(f"{path} is a folder, a pipe or a device, not a file: remove it")
    return matches


def _without_records(folder: str, patterns: str) -> str:
    """What is wrong with a folder in which no file matches."""
    names = [name for name in tensorflow().io.gfile.listdir(folder) if not name.startswith(".")]
    problem = f"no file there matches {patterns!r}"
    if not names or any(re.search(r"-\d{5}-of-\d{5}", name) for name in names):
        return problem
    command = f"python -m scripts.prepare {shlex.quote(folder)}"
    return f"{problem}; if photos, text or ratings are there, {command} makes records of them"


def find_one(data_dir: str, patterns: str, what: str, key: str) -> str:
    """The one file that matches; DataError if there are several, with the config's `key`."""
    path, *others = find(data_dir, patterns, what)
    if others:
        raise DataError(
            f"config.{key}={patterns!r} matches {1 + len(others)} files, such as {path} and "
            f"{others[0]}: name one"
        )
    return path


def check_complete(paths: Sequence[str]) -> None:
    """Raises DataError unless sets of shards, STEM-00000-of-00008[.tfrecord], are complete.

    Numbers count from 0, or from 1 as in the files of MLPerf's reference for translation.
    """
    matches = _matches(paths)
    for stem in stems(paths):
        numbers = {int(match[2]) for match in matches if match[1] == stem}
        total, *others = sorted({int(match[3]) for match in matches if match[1] == stem})
        if others:
            totals = " and ".join(f"of {n}" for n in (total, *others))
            raise DataError(f"{stem}-*: two sets of shards lie together, {totals}; keep one")
        first = int(total in numbers and 0 not in numbers)
        if missing := sorted({*range(first, first + total)} - numbers):
            raise DataError(
                f"{stem}-*: {len(missing)} of {total} files are missing, number {missing[0]} first"
            )


def find_shards(data_dir: str, patterns: str, split: str, marker: str = "-*") -> tuple[str, ...]:
    """The files of a split; patterns that have `marker` must match complete sets of shards."""
    try:
        paths = find(data_dir, patterns, f"{split} records")
        if marker in patterns:
            check_complete(paths)
    except DataError as error:
        fix = f"set --config.data_dir (or --config.{split}_files) to where the TFRecords are"
        folder = data_dir.rstrip("/")
        if "no file there" in str(error) and (
            others := stems(storage.matching_paths(f"{folder}/*-of-*", folder))
        ):
            names = " and ".join(f"{os.path.basename(stem)}-*" for stem in others)
            fix = f"there is {names}: name the files with --config.{split}_files"
        raise DataError(f"{error}; {fix}") from error
    data_manifest.check_sizes(data_dir.rstrip("/"), paths)
    return paths


def check_not_empty(paths: Sequence[str], counts: Sequence[int], split: str) -> None:
    """Raises DataError if the files of a split hold no record at all."""
    if not sum(counts):
        raise DataError(f"no {split} records: the {len(paths)} files {paths[0]} ... are empty")


def stems(paths: Iterable[str]) -> list[str]:
    """STEM of each set of shards, STEM-00000-of-00008[.tfrecord], among the files."""
    return sorted({match[1] for match in _matches(paths)})


def _matches(paths: Iterable[str]) -> list[re.Match[str]]:
    return [m for path in paths if (m := re.fullmatch(f"(.*){_NUMBERED}", path))]


def identity(
    what: str, data_dir: str, paths: Sequence[str], counts: Sequence[int]
) -> dict[str, str]:
    """{`what`: a line about the files, "manifest.json": a line about their data manifest}.

    The lines are the same for files of the same names, sizes and numbers of records. Folders do not
    matter, so that data may move. A path may come several times, each time with other records.
    """
    totals: dict[str, int] = {}
    for path, count in zip(paths, counts, strict=True):
        totals[path] = totals.get(path, 0) + count
    names = map(os.path.basename, totals)
    rows = sorted(zip(names, storage.sizes([*totals]), totals.values(), strict=True))
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    line = f"{len(rows):,} files with {sum(counts):,} examples, SHA-256 {digest[:16]}"
    content = data_manifest.read_bytes(data_dir)
    known = "missing" if content is None else f"SHA-256 {hashlib.sha256(content).hexdigest()[:16]}"
    return {what: line, data_manifest.FILE_NAME: known}


def bytes_of(records: int, paths: Sequence[str], counts: Sequence[int]) -> int:
    """The bytes of so many records, estimated from the sizes of at most 64 of the files."""
    step = -(-len(paths) // 64)  # a thousand requests to gs:// would take seconds
    return records * sum(storage.sizes(paths[::step])) // max(sum(counts[::step]), 1)
