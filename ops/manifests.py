"""What the data manifests of all kinds of records share: the file, its listing, its faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from etils import epath

from errors import DataError, one_line
from ops import files

NAME = "manifest.json"
Row = TypeVar("Row")


def read(data_dir: str) -> bytes | None:
    """The manifest of a folder, local or gs://; None if it has none. DataError if unreadable."""
    path = epath.Path(data_dir) / NAME
    try:
        return path.read_bytes() if path.exists() else None
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read {path}: {one_line(error)}") from error


def foreign(path: str, error: Exception) -> DataError:
    """The error for a manifest of another form; `error` says what is wrong with it."""
    return DataError(
        f"{path} is not one that this repository's scripts wrote ({error!r}): move it away, "
        "and the run counts the records itself"
    )


def listed(
    shards: Mapping[str, Row], data_dir: str, paths: Sequence[str], bytes_of: Callable[[Row], int]
) -> list[Row] | None:
    """The row of each file in `shards`; None if a file is not listed or has another size."""
    folder = data_dir.rstrip("/") + "/"
    rows = [row for path in paths if (row := shards.get(path.removeprefix(folder)))]
    if len(rows) < len(paths) or list(map(bytes_of, rows)) != files.sizes(paths):
        return None
    return rows
