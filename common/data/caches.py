"""Results about the data that take long to compute, kept in files for the next start.

`scan_files` keeps what a scan of each file found, as JSON: counts of records that no data manifest
has. `cached_arrays` keeps a dataclass of arrays, with a key that says what they depend on.
"""

import concurrent.futures
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from etils import epath

from common.data import storage
from common.data.shards import READ_BUFFER, read_problem, record_name
from common.errors import DataError, one_line, parse_json
from common.progress import Progress, report_progress
from common.tensorflow import read_errors, tensorflow

T = TypeVar("T")

_log = logging.getLogger("tpu_suite")

_PART = 64 << 20  # bytes that are written at a time


def scan_files(
    paths: Sequence[str], scan: Callable[[str], dict[str, Any]], cache: str, settings: Any
) -> list[Any]:
    """The results of `scan(path)`, as JSON values, for all files.

    The file `cache`, local or gs://, keeps them for the next start, as long as paths, sizes and
    `settings` (JSON) are the same. A damaged one is made again. DataError if a file is missing.
    """
    report_progress(f"looking up the sizes of {len(paths)} files, {paths[0]} first")
    lengths = storage.sizes(paths)
    key = {"settings": settings, "files": [list(row) for row in zip(paths, lengths, strict=True)]}
    path = epath.Path(cache)
    report_progress(f"reading {cache}")
    if path.exists():
        try:
            content = parse_json(path.read_bytes())
            if content["sha256"] != _digest(content["key"], content["results"]):
                raise ValueError("its SHA-256 is another")
            if content["key"] == key:
                return content["results"]
        except (ValueError, TypeError, KeyError) as error:
            _note_damage(cache, error)
    progress, results = Progress(sum(lengths)), []
    progress.at(0, f"counting records, once per workdir: 0 of {len(paths)} files")
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        # The first file alone: TensorFlow may crash if an operation is first used by two threads.
        for result in itertools.chain([scan(paths[0])], pool.map(scan, paths[1:])):
            results.append(result)
            text = f"counting records, once per workdir: {len(results)} of {len(paths)} files"
            progress.at(sum(lengths[: len(results)]), text)
    report_progress(f"writing {cache}")
    content = {"key": key, "results": results, "sha256": _digest(key, results)}
    storage.write(cache, [json.dumps(content).encode()])
    return results


def _digest(key: Any, results: Any) -> str:
    """The SHA-256 of an index: one changed digit of a count would hide examples."""
    return hashlib.sha256(json.dumps([key, results]).encode()).hexdigest()


def _note_damage(path: str, error: Exception) -> None:
    text = "NOTE %s is damaged, or another version wrote it (%s): it is made again"
    _log.info(text, path, one_line(error))


def count_records(path: str, check: Callable[[Any, int], None], schema: str) -> int:
    """The number of records in a file, all of which `check` has seen.

    `check` takes a string tensor [n] of serialized records, and the position of the first. It
    raises DataError for a record that cannot be used, and TensorFlow's errors for a record that it
    cannot parse, which it then gets once more. `schema`, for messages, says what records should be.
    """
    tf = tensorflow()
    dataset, problem = tf.data.TFRecordDataset(path, buffer_size=READ_BUFFER), ""
    count = size = 0
    for rows in (256, 1):  # after an error again one by one, to name the record
        try:
            for chunk in dataset.skip(count).batch(rows):
                check(chunk, count)
                count += len(chunk)
                size += sum(16 + len(record) for record in chunk.numpy())
            if size != tf.io.gfile.stat(path).length:  # TensorFlow takes a torn length for the end
                raise DataError(f"{record_name(path, count)} is cut short")
            return count
        except read_errors() as error:
            damage = tf.errors.DataLossError, tf.errors.InvalidArgumentError, UnicodeDecodeError
            if not isinstance(error, damage):
                raise DataError(f"cannot read {path}: {one_line(error)}") from error
            problem = read_problem(error)
    raise DataError(f"{record_name(path, count)} is damaged or not in {schema}: {problem}")


def file_stamps(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """Path, bytes and time of modification (ns, but whole seconds) of files, for keys."""
    sizes, gfile = storage.sizes(paths), tensorflow().io.gfile
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        times = pool.map(lambda path: int(gfile.stat(path).mtime_nsec), paths)
        return list(zip(paths, sizes, times, strict=True))


def cached_arrays(cls: type[T], path: str, key: str, compute: Callable[[], T]) -> T:
    """The result of `compute`, or what an earlier call with the same key has written to `path`.

    The result is a `cls`, a dataclass of arrays. `path` is local or gs://; "" keeps nothing. `key`
    says what the arrays depend on: if it differs, or the file is damaged, they are computed again.
    """
    if not path:
        return compute()
    if (result := read_arrays(cls, path, key)) is not None:
        return result
    result = compute()
    content = io.BytesIO()
    np.savez(content, key=np.array(key), **vars(result))
    report_progress(f"writing {path}")
    view = content.getbuffer()
    storage.write(path, (bytes(view[i : i + _PART]) for i in range(0, len(view), _PART)))
    return result


def read_arrays(cls: type[T], path: str, key: str = "") -> T | None:
    """What `cached_arrays` has written, with any key if none is given.

    None if there is no file, its key is another, or it is damaged.
    """
    if not epath.Path(path).exists():
        return None
    report_progress(f"reading {path}")
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    try:
        with np.load(io.BytesIO(epath.Path(path).read_bytes())) as arrays:
            if key and arrays["key"].item() != key:
                return None
            return cls(**{name: arrays[name] for name in names})
    except (ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        _note_damage(path, error)
        return None
