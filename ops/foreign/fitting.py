"""Checks that the arrays of a file are those of a model, before any of them is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from errors import DataError, some


def check(
    path: str, arrays: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses arrays that are not those of a model.

    Args:
      path: the file, for messages.
      arrays: what it holds, by name.
      wanted: the names and shapes of the model's arrays, as the file has them.

    Raises:
      DataError: an array is missing, is unknown, has another shape, or holds whole numbers.
    """
    common = {name: arrays[name] for name in wanted if name in arrays}
    faults: dict[str, Iterable[str]] = {
        "lacks": [name for name in wanted if name not in arrays],
        "has unknown arrays:": [name for name in arrays if name not in wanted],
        "has other shapes:": [
            f"{name} {list(array.shape)} instead of {list(wanted[name])}"
            for name, array in common.items()
            if array.shape != wanted[name]
        ],
        "has no weights, but whole numbers, in": [
            name for name, array in common.items() if array.dtype.kind in "iub"
        ],
    }
    if text := "; it ".join(f"{what} {some(names)}" for what, names in faults.items() if names):
        raise DataError(f"{path} is another model than its names say: it {text}")


def floats(path: str, name: str, array: np.ndarray) -> np.ndarray:
    """An array as float32.

    Raises:
      DataError: it has values that are not finite.
    """
    values = np.asarray(array, np.float32)
    if not np.isfinite(values).all():
        raise DataError(f"{path}: {name} has values that are not finite")
    return values
