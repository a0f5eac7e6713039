"""Reads the arrays of Keras's legacy .h5 files, in which every layer has its name."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np

from errors import DataError, one_line

_REMEDY = "load the model in Keras and write model.save('MODEL.h5'), which keeps the names"


def read(data: bytes, path: str) -> tuple[dict[str, np.ndarray], str]:
    """Reads ({"LAYER/kernel": array}, "") from the bytes of a file; `path` is for messages.

    Raises:
      DataError: the file is damaged, refers to other files, or has no names of layers.
    """
    nameless = DataError(f"{path} has no names of layers: {_REMEDY}")
    if data.startswith(b"PK"):  # Keras 3 numbers its layers
        raise nameless
    import h5py

    arrays: dict[str, np.ndarray] = {}
    left = len(data)

    def take(name: str, item: Any) -> None:  # links are not followed
        nonlocal left
        if not isinstance(item, h5py.Dataset) or name.startswith("optimizer_weights/"):
            return
        if re.fullmatch(r"(.*/)?vars/\d+", name):
            raise nameless
        left -= item.nbytes
        is_plain = item.chunks is None and not item.external and not item.is_virtual
        if left < 0 or not is_plain or item.dtype.kind != "f":
            raise DataError(
                f"{path}: {name} is compressed, lies in another file or is no array of numbers: "
                f"{_REMEDY}"
            )
        layer, *_, leaf = name.removeprefix("model_weights/").split("/")
        arrays[f"{layer}/{leaf.partition(':')[0]}"] = item[()]

    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            file.visititems(take)
    except DataError:
        raise
    except Exception as error:  # h5py raises many types on damage
        raise DataError(f"{path} is damaged: {one_line(error)}") from error
    return arrays, ""
