"""Files of records: finding them, counting what they hold, and which are being read."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epath

from errors import one_line
from ops.shards import DataError, tensorflow

_log = logging.getLogger("tpu_suite")
on_progress: Callable[[str], None] | None = None  # told what long work is at
# What is being read, for those who wait for it: called, it gives the files.
_reading: dict[str, Callable[[], list[str]]] = {}


@contextlib.contextmanager
def reading(files: Callable[[], list[str]]) -> Iterator[None]:
    """Says inside which files are waited for."""
    thread = threading.current_thread().name
    _reading[thread] = files
    try:
        yield
    finally:
        del _reading[thread]


def unanswered(seconds: float) -> list[str]:
    """What is being read, in words; files that do not answer within `seconds` are named."""
    paths = sorted({path for files in list(_reading.values()) for path in files()})
    if not paths:
        return []
    answered = set()

    def probe(path: str) -> None:
        with tensorflow().io.gfile.GFile(path, "rb") as file:
            file.read(1)
        answered.add(path)

    threads = [threading.Thread(target=probe, args=(path,), daemon=True) for path in paths[:64]]
    until = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0))
    silent = [path for path in paths[:64] if path not in answered]
    if silent:
        return [f"{', '.join(silent[:4])} did not answer within {seconds:.0f} s"]
    return [f"reading {paths[0]} and {len(paths) - 1} more files, which all answer"]


def find(data_dir: str, patterns: str, what: str) -> tuple[str, ...]:
    """Sorted files that match comma-separated `patterns`, relative to `data_dir` or absolute.

    Raises:
      DataError: no file matches, or the folder cannot be listed; `what` is looked for.
    """
    tf, found = tensorflow(), set()
    folder = data_dir.rstrip("/") or "/"
    try:
        for pattern in filter(None, (p.strip() for p in patterns.split(","))):
            absolute = "://" in pattern or pattern.startswith("/")
            found.update(tf.io.gfile.glob(pattern if absolute else f"{folder}/{pattern}"))
        there = bool(found) or tf.io.gfile.exists(folder)
    except tf.errors.OpError as error:
        raise DataError(f"cannot list {folder} for {what}: {one_line(error)}") from error
    if whole := {p for p in found if re.search(r"-\d+-of-\d+$", p)}:
        found = whole  # leaves out what an unfinished copy is called
    if not found:
        fault = f"no file there matches {patterns!r}" if there else "there is no such folder"
        raise DataError(f"no {what} in {data_dir!r}: {fault}")
    return tuple(sorted(found))


def check_complete(paths: Sequence[str]) -> None:
    """Refuses a set of shards, named STEM-00000-of-00008, that is not whole.

    Raises:
      DataError: a file is missing, or files of two sets lie together.
    """
    sets: dict[str, dict[int, set[int]]] = {}
    for path in paths:
        if match := re.fullmatch(r"(.*)-(\d+)-of-(\d+)", path):
            sets.setdefault(match[1], {}).setdefault(int(match[3]), set()).add(int(match[2]))
    for stem, by_total in sets.items():
        if len(by_total) > 1:
            totals = " and ".join(f"of {total}" for total in sorted(by_total))
            raise DataError(f"{stem}-*: two sets of shards lie together, {totals}; keep one")
        ((total, have),) = by_total.items()
        if missing := sorted(set(range(total)) - have):
            raise DataError(
                f"{stem}-*: {len(missing)} of {total} files are missing, number {missing[0]} first"
            )


def sizes(paths: Sequence[str]) -> list[int]:
    """Bytes in each file.

    Raises:
      DataError: a file is not there, or may not be read.
    """
    tf = tensorflow()

    def size(path: str) -> int:
        try:
            return int(tf.io.gfile.stat(path).length)
        except tf.errors.OpError as error:
            raise DataError(f"cannot read {path}: {one_line(error)}") from error

    with concurrent.futures.ThreadPoolExecutor(16) as pool:  # a stat on gs:// takes 20 to 100 ms
        return list(pool.map(size, paths))


def index(
    paths: Sequence[str], scan: Callable[[str], dict[str, Any]], cache: str, settings: Any
) -> list[Any]:
    """What `scan(path)` says of every file, from `cache` if files, sizes and settings are the same.

    Args:
      paths: TFRecord files, local or gs://.
      scan: reads one whole file; its result, with the number of records as "count", must be JSON.
      cache: JSON file, local or gs://, to keep the results in.
      settings: JSON of what else the results depend on.

    Raises:
      DataError: a file is not there; or from `scan`, for the first file that has a fault.
    """

    def scanned(pool: concurrent.futures.Executor) -> Iterator[dict[str, Any]]:
        # Not all at once: TensorFlow may crash if the first to use an operation are two threads.
        yield scan(paths[0])
        yield from pool.map(scan, paths[1:])

    lengths = sizes(paths)
    key = {"settings": settings, "files": [list(row) for row in zip(paths, lengths, strict=True)]}
    kept = epath.Path(cache)
    known = _cached(kept)
    if known.get("key") == key:
        return known["results"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        begun = told = time.monotonic()
        results, done = [], 0
        for result, length in zip(scanned(pool), lengths, strict=True):
            results.append(result)
            done += length
            if on_progress:
                on_progress(f"counting records, {len(results)} of {len(paths)} files")
            now = time.monotonic()
            if now - told > 10 and done:
                left = (now - begun) * (sum(lengths) - done) / done
                _log.info(
                    "counting and checking records, once per workdir: %d of %d files, %.0f s left",
                    *(len(results), len(paths), left),
                )
                told = now
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.parent / (kept.name + ".part")
    part.write_text(json.dumps({"key": key, "results": results}))
    part.replace(kept)
    return results


def _cached(path: epath.Path) -> dict[str, Any]:
    """What a cache holds; {} if it is absent or, after a crash, damaged."""
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}
