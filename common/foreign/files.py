"""Reads a file of weights: arrays by the names that they have in it, and the JSON beside it.

`check_arrays` and `finite_floats` check that the arrays are those of a model, before any is used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from common import limits
from common.errors import DataError, one_line, parse_json, some
from common.foreign import PUBLISHED, pickles, tf_checkpoints
from common.text import text_lines

_MOST_BYTES = 8 << 30
_BESIDE = ("config.json", "preprocessor_config.json", "input_spec.json")
_SAFETENSORS_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")},
    **{"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")},
}


@dataclasses.dataclass(frozen=True)
class Foreign:
    """Weights of another library.

    Attributes:
      path: the file, or the prefix of TensorFlow's checkpoint.
      format: "safetensors", "PyTorch" or "TensorFlow"; with the entry of a training checkpoint.
      sha256: of the file, in hexadecimal digits; of the arrays that were read from a checkpoint of
        TensorFlow.
      arrays: {name in the file: array}; they cannot be written to.
      beside: {name: content} of JSON files beside it: config.json, preprocessor_config.json and
        input_spec.json, where there are some.
      labels: the names of the classes in order; () if none are known.
      remark: what was left out, in one line; "" for nothing.
    """

    path: str
    format: str
    sha256: str
    arrays: Mapping[str, np.ndarray]
    beside: Mapping[str, Any]
    labels: tuple[str, ...]
    remark: str = ""


_peeked: dict[str, Foreign] = {}  # the last file of `peek`, by its path


def peek(path: str) -> Foreign:
    """Reads a file as `read` does, and stores it in memory for the next `read` of this path.

    A start needs a file twice: for the keys of the config, and for the arrays.
    """
    if path not in _peeked:
        source = read(path)
        _peeked.clear()
        _peeked[path] = source
    return _peeked[path]


def read(path: str) -> Foreign:
    """Reads a file of weights that `common.foreign.find` returned.

    Raises:
      DataError: the file is damaged, is of a kind that is not supported, holds something that is
        no array, or values that are not finite.
    """
    if source := _peeked.pop(path, None):
        return source
    file = epath.Path(path)
    limits.check_file(path)
    try:
        if tf_checkpoints.is_v2(path) or tf_checkpoints.is_v1(path):
            arrays, digest, remark = tf_checkpoints.read(path, _MOST_BYTES)
            _check_finite(path, arrays)
            return Foreign(path, "TensorFlow", digest, arrays, {}, (), remark)
        if (size := file.stat().length) > _MOST_BYTES:
            raise DataError(f"{path} has {size:,} bytes: more than {_MOST_BYTES:,} are not read")
        data = file.read_bytes()
        # Beside files of other names the descriptions may be another model's.
        beside, lines = _beside(file) if file.name in PUBLISHED else ({}, "")
    except DataError:
        raise
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    form, arrays = _parse(data, path)
    if not arrays:
        raise DataError(f"{path} holds no arrays")
    _check_finite(path, arrays)
    labels = _labels(beside.get("config.json", {}), lines)
    return Foreign(path, form, hashlib.sha256(data).hexdigest(), arrays, beside, labels)


def _parse(data: bytes, path: str) -> tuple[str, Mapping[str, np.ndarray]]:
    """(format, arrays), by what the file begins with."""
    if data.startswith((b"PK", b"\x80\x02")) and not path.endswith(".keras"):
        # A zip archive; before PyTorch 1.6 a pickle. Keras's archives have no pickle.
        form, (arrays, entry) = "PyTorch", pickles.read(data, path)
    elif data[8:9] == b"{":
        form, (arrays, entry) = "safetensors", _read_safetensors(data, path)
    elif epath.Path(f"{path}.meta").exists():
        raise DataError(
            f"{path} is damaged or cut short: {path}.meta says that it is a checkpoint of "
            "TensorFlow, format V1; copy it again"
        )
    else:
        raise DataError(
            f"{path} is no file of weights that can be read: use .safetensors, PyTorch's .pth or "
            ".pt, or a checkpoint of TensorFlow"
        )
    return f"{form}, entry {entry!r}" if entry else form, arrays


def _check_finite(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Refuses a file before anything is written; `finite_floats` sees what float32 cannot hold."""
    for name, array in arrays.items():
        if array.dtype.kind not in "iub":
            finite_floats(path, name, array)


def _beside(file: epath.Path) -> tuple[dict[str, Any], str]:
    """The JSON files beside the weights, and the text of labels.txt."""
    contents = {}
    for other in (file.parent / name for name in _BESIDE):
        if other.exists():
            try:
                contents[other.name] = parse_json(other.read_bytes())
                if not isinstance(contents[other.name], dict):
                    raise ValueError("it is no object")
            except ValueError as error:
                raise DataError(f"{other} is no JSON object: {one_line(error)}") from error
    labels = file.parent / "labels.txt"
    try:
        return contents, labels.read_bytes().decode() if labels.exists() else ""
    except UnicodeDecodeError as error:
        raise DataError(f"{labels} is not UTF-8") from error


def _labels(config: Mapping[str, Any], lines: str) -> tuple[str, ...]:
    """The names of classes: of labels.txt, else timm's, else Hugging Face's."""
    names: Any = text_lines(lines) or config.get("label_names")
    numbered = config.get("id2label")
    if not names and isinstance(numbered, dict):
        names = [numbered.get(str(i)) for i in range(len(numbered))]
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or all(re.fullmatch(r"LABEL_\d+", name) for name in names):
        return ()  # Hugging Face's names for classes without names
    return tuple(" ".join(name.split()) for name in names)


def _read_safetensors(data: bytes, path: str) -> tuple[dict[str, np.ndarray], str]:
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
        if row["dtype"] not in _SAFETENSORS_DTYPES:
            raise DataError(f"{path}: {name} has the dtype {row['dtype']}; save it as F32")
        arrays[name] = np.frombuffer(row["data"], _SAFETENSORS_DTYPES[row["dtype"]]).reshape(
            row["shape"]
        )
    return arrays, ""


def check_arrays(
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


def finite_floats(path: str, name: str, array: np.ndarray) -> np.ndarray:
    """An array as float32.

    Raises:
      DataError: it has values that are not finite.
    """
    values = np.asarray(array, np.float32)
    if not np.isfinite(values).all():
        raise DataError(f"{path}: {name} has values that are not finite")
    return values
