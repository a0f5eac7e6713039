"""Reads a file of records through once, to count and check its records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from errors import DataError, one_line
from ops import files
from ops.shards import READ_BUFFER, read_errors, read_fault, record_name, tensorflow


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
            if size != files.sizes([path])[0]:  # TensorFlow takes a torn length for the end
                raise DataError(f"{record_name(path, count)} is cut short")
            return count
        except read_errors() as error:
            damage = tf.errors.DataLossError, tf.errors.InvalidArgumentError, UnicodeDecodeError
            if not isinstance(error, damage):
                raise DataError(f"cannot read {path}: {one_line(error)}") from error
            fault = read_fault(error)
    raise DataError(f"{record_name(path, count)} is damaged or not in {schema}: {fault}")
