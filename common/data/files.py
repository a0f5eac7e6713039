"""The files of a split: found by the config's patterns, complete sets of shards, their identity."""

import concurrent.futures
import contextlib
import glob
import hashlib
import json
import os
import re
import shlex
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from etils import epath

from common.console import report_progress
from common.errors import DataError, one_line, parse_json
from common.tensorflow import tensorflow

Row = TypeVar("Row")

MANIFEST = "manifest.json"  # of a folder of records: their files, counts and names
# What a preparation keeps in the folder: what for, and the command that was typed.
STATE, PLAN, COMMAND = "prepare_state", "plan.json", "command.json"
DIGEST = "splits_sha256"  # the key of a manifest that has the `splits_digest` of its "splits"
_NUMBERED = r"-(\d+)-of-(\d+)(?:\.tfrecord)?$"  # how the names of shards end


def find(data_dir: str, patterns: str, what: str) -> tuple[str, ...]:
    """Sorted files that match comma-separated `patterns`, relative to `data_dir` or absolute.

    DataError if no file matches, or the folder cannot be listed; it calls the files `what`.
    """
    tf, paths, problem = tensorflow(), set(), ""
    folder = data_dir.rstrip("/") or "/"
    report_progress(f"listing {folder} for {what}")
    check_finished(folder)
    try:
        for pattern in filter(None, (p.strip() for p in patterns.split(","))):
            absolute = "://" in pattern or pattern.startswith("/")
            paths.update(
                matching_paths(pattern)
                if absolute
                else matching_paths(f"{folder}/{pattern}", folder)
            )
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


def matching_paths(pattern: str, folder: str = "") -> list[str]:
    """The paths that match a pattern; its `existing_prefix` is taken literally."""
    known = known_part(pattern, folder)
    escaped = re.sub(r"[\\*?\[]", r"\\\g<0>", known)
    return tensorflow().io.gfile.glob(escaped + pattern[len(known) :])


def known_part(pattern: str, folder: str = "") -> str:
    """The longest part from a pattern's start that exists as a path; at least `folder`."""
    exists = tensorflow().io.gfile.exists if "://" in pattern else os.path.lexists
    known = pattern
    while glob.has_magic(known[len(folder) :]) and not exists(known):
        known = known.rpartition("/")[0]
    return known


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
            others := stems(matching_paths(f"{folder}/*-of-*", folder))
        ):
            names = " and ".join(f"{os.path.basename(stem)}-*" for stem in others)
            fix = f"there is {names}: name the files with --config.{split}_files"
        raise DataError(f"{error}; {fix}") from error
    check_sizes(data_dir.rstrip("/"), paths)
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


def sizes(paths: Sequence[str]) -> list[int]:
    """The bytes in each file; DataError if a file is missing or may not be read."""
    tf = tensorflow()

    def size(path: str) -> int:
        try:
            return int(tf.io.gfile.stat(path).length)
        except tf.errors.OpError as error:
            raise DataError(f"cannot read {path}: {one_line(error)}") from error

    with concurrent.futures.ThreadPoolExecutor(16) as pool:  # a stat on gs:// takes 20 to 100 ms
        return list(pool.map(size, paths))


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
    rows = sorted(zip(names, sizes([*totals]), totals.values(), strict=True))
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    line = f"{len(rows):,} files with {sum(counts):,} examples, SHA-256 {digest[:16]}"
    content = read_manifest(data_dir)
    known = "missing" if content is None else f"SHA-256 {hashlib.sha256(content).hexdigest()[:16]}"
    return {what: line, MANIFEST: known}


def bytes_of(records: int, paths: Sequence[str], counts: Sequence[int]) -> int:
    """The bytes of so many records, estimated from the sizes of at most 64 of the files."""
    step = -(-len(paths) // 64)  # a thousand requests to gs:// would take seconds
    return records * sum(sizes(paths[::step])) // max(sum(counts[::step]), 1)


def write(path: str, parts: Iterable[bytes]) -> None:
    """Writes or replaces a local or gs:// file, completely or not at all; makes its folder."""
    gfile = tensorflow().io.gfile
    folder, name = os.path.split(path)
    if "://" not in path:  # object stores have no folders, and a missing bucket would hang makedirs
        gfile.makedirs(folder or ".")
    # A name for each writer, which the readers' patterns train-* and validation-* do not match.
    temporary = os.path.join(folder, f"tmp.{name}.{uuid.uuid4().hex[:8]}")
    try:
        with gfile.GFile(temporary, "wb") as file:
            file.write(b"")  # makes the file, even without parts
            for part in parts:
                file.write(part)
        gfile.rename(temporary, path, overwrite=True)
    except BaseException:
        with contextlib.suppress(tensorflow().errors.OpError):  # the first error is raised
            if gfile.exists(temporary):
                gfile.remove(temporary)
        raise


def read(path: str) -> bytes | None:
    """The content of a local or gs:// file; None if it does not exist."""
    tf = tensorflow()
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            return file.read()
    except tf.errors.NotFoundError:
        return None


def read_manifest(data_dir: str) -> bytes | None:
    """The manifest of a folder, local or gs://; None if it has none.

    DataError if it is unreadable, if its counts are others than those that were written, or if a
    preparation has begun the folder and not ended.
    """
    path, data = epath.Path(data_dir) / MANIFEST, None
    try:
        # epath takes a pipe for a file, too.
        if path.exists() if "://" in data_dir else os.path.isfile(path):
            data = path.read_bytes()
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    if data is None:
        check_finished(data_dir)
    elif problem := _miscounted(data):
        raise foreign_manifest(str(path), problem)
    return data


def splits_digest(splits: Any) -> str:
    """The SHA-256 of a manifest's "splits", in hexadecimal, for any form of the text."""
    return hashlib.sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest()


def _miscounted(manifest: bytes) -> Exception | None:
    """What is wrong with the counts of a manifest; other forms of manifests are not looked at."""
    try:
        content = parse_json(manifest)
        if content.get(DIGEST, digest := splits_digest(content["splits"])) != digest:
            return ValueError(f'"splits" was changed, its SHA-256 is not "{DIGEST}"')
        for name, split in content["splits"].items():
            for key in ("examples", "bytes"):  # ratings have no examples
                counts = [int(row[key]) for row in split["shards"] if key in row]
                if counts and (stated := split.get(key, sum(counts))) != sum(counts):
                    return ValueError(f"{name} has {stated} {key}, its files {sum(counts)}")
    except OverflowError as error:  # 1e999
        return error
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    return None


def check_finished(data_dir: str) -> None:
    """Raises DataError if a folder has a preparation's plan and no manifest."""
    tf, folder = tensorflow(), epath.Path(data_dir)
    plan, manifest = str(folder / STATE / PLAN), str(folder / MANIFEST)
    try:
        is_unfinished = tf.io.gfile.exists(plan) and not tf.io.gfile.exists(manifest)
    except tf.errors.OpError as error:
        raise DataError(f"cannot read {plan}: {one_line(error)}") from error
    if is_unfinished:
        raise DataError(f"{data_dir} holds unfinished records: {_again(data_dir)} finishes them")


def _again(data_dir: str) -> str:
    """The command that began the records of a folder, which also repairs them."""
    with contextlib.suppress(ValueError, tensorflow().errors.OpError):  # damaged, or a folder
        command = parse_json(read(os.path.join(data_dir, STATE, COMMAND)) or b"")
        if isinstance(command, str) and command.splitlines() == [command]:
            return f"`{command}`"
    return "the command that began them"


def check_sizes(data_dir: str, paths: Sequence[str]) -> None:
    """Raises DataError if a file has another size than the manifest of its folder lists."""
    try:
        content = parse_json(read_manifest(data_dir) or b"{}")
        rows = [row for split in content["splits"].values() for row in split["shards"]]
        listed = {os.path.join(data_dir, row["name"]): int(row["bytes"]) for row in rows}
    except (AttributeError, KeyError, TypeError, ValueError):  # another form, or none
        return
    paths = [path for path in paths if path in listed]
    for path, size in zip(paths, sizes(paths), strict=True):
        if size != listed[path]:
            raise DataError(
                f"{path} has {size:,} bytes, {MANIFEST} lists {listed[path]:,}: it is damaged or "
                f"another file; copy it again, or {_again(data_dir)} writes it again"
            )


def foreign_manifest(path: str, error: Exception) -> DataError:
    """The error for a manifest of another form; `error` says what is wrong with it."""
    folder, fix = os.path.dirname(path), "move it away, and the run counts the records itself"
    if tensorflow().io.gfile.exists(os.path.join(folder, STATE, PLAN)):
        fix = f"{_again(folder)} writes it again"
    return DataError(
        f"{path} was not written by this repository's scripts as it is now ({error!r}): {fix}"
    )


def listed_rows(shards: Mapping[str, Row], data_dir: str, paths: Sequence[str]) -> list[Row] | None:
    """The row of each file in `shards`; None if a file is not listed. See `check_sizes`."""
    folder = data_dir.rstrip("/") + "/"
    rows = [shards[name] for p in paths if (name := p.removeprefix(folder)) in shards]
    return rows if len(rows) == len(paths) else None
