"""Reads .safetensors files: a JSON header, which the library checks against the file, and data."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from errors import DataError, one_line

_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")},
    **{"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")},
}


def read(data: bytes, path: str) -> tuple[dict[str, np.ndarray], str]:
    """Reads ({name: array}, "") from the bytes of a file; `path` is its name, for messages.

    Raises:
      DataError: the header is damaged or does not match the data, or a dtype is not supported.
    """
    import safetensors

    try:
        rows = dict(safetensors.deserialize(data))
    except Exception as error:  # the library's own class
        raise DataError(f"{path} is damaged: {one_line(error)}") from error
    arrays = {}
    for name, row in rows.items():
        if row["dtype"] not in _DTYPES:
            raise DataError(f"{path}: {name} has the dtype {row['dtype']}; save it as F32")
        arrays[name] = np.frombuffer(row["data"], _DTYPES[row["dtype"]]).reshape(row["shape"])
    return arrays, ""
