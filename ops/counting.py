"""Counts and checks the records of files that no data manifest describes, once per workdir."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from etils import epath

from errors import DataError, one_line, parse_json
from ops import files
from ops.progress import Progress, report
from ops.shards import READ_BUFFER, read_errors, read_fault, record_name, tensorflow


def index(
    paths: Sequence[str], scan: Callable[[str], dict[str, Any]], cache: str, settings: Any
) -> list[Any]:
    """The results of `scan(path)` for all files.

    The results are JSON. The file `cache`, local or gs://, keeps them for the next start, as long
    as paths, sizes and `settings` (JSON) are the same.

    Raises:
      DataError: a file is missing; or from `scan`, for the first file that has a fault.
    """
    report(f"looking up the sizes of {len(paths)} files, {paths[0]} first")
    lengths = files.sizes(paths)
    key = {"settings": settings, "files": [list(row) for row in zip(paths, lengths, strict=True)]}
    path = epath.Path(cache)
    report(f"reading {cache}")
    with contextlib.suppress(ValueError, TypeError, KeyError):  # a crash may have damaged the file
        if path.exists() and (content := parse_json(path.read_bytes()))["key"] == key:
            return content["results"]
    progress, results = Progress(sum(lengths)), []
    progress.at(0, f"counting records, once per workdir: 0 of {len(paths)} files")
    waiting = files.reading(lambda: list(paths[len(results) :]))
    with waiting, concurrent.futures.ThreadPoolExecutor(16) as pool:
        # The first file alone: TensorFlow may crash if an operation is first used by two threads.
        for result in itertools.chain([scan(paths[0])], pool.map(scan, paths[1:])):
            results.append(result)
            text = f"counting records, once per workdir: {len(results)} of {len(paths)} files"
            progress.at(sum(lengths[: len(results)]), text)
    report(f"writing {cache}")
    files.write(cache, [json.dumps({"key": key, "results": results}).encode()])
    return results


def scan(path: str, check: Callable[[Any, int], None], schema: str) -> int:
    """The number of records in a file, all of which `check` has seen.

    Args:
      check: takes a string tensor [n] of serialized records, and the position of the first. It
        raises DataError for a record that cannot be used, and TensorFlow's errors for one that it
        cannot parse. It sees records again that it could not parse.
      schema: what the records should be, for the message about one that cannot be parsed.

    Raises:
      DataError: the file cannot be read, a record is damaged or cannot be parsed; or from `check`.
    """
    tf = tensorflow()
    dataset, fault = tf.data.TFRecordDataset(path, buffer_size=READ_BUFFER), ""
    count = size = 0
    for rows in (256, 1):  # after a fault again one by one, to name the record
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
            fault = read_fault(error)
    raise DataError(f"{record_name(path, count)} is damaged or not in {schema}: {fault}")
