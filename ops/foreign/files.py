"""Reads a file of weights: arrays by the names that they have in it, and the JSON beside it."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from errors import DataError, one_line, parse_json
from ops import limits
from ops.foreign import checkpoints, downloads, fitting

_MOST_BYTES = 8 << 30
_BESIDE = ("config.json", "preprocessor_config.json", "input_spec.json")


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
    """Reads a file of weights that `ops.foreign.find` returned.

    Raises:
      DataError: the file is damaged, is of a kind that is not supported, holds something that is
        no array, or values that are not finite.
    """
    if source := _peeked.pop(path, None):
        return source
    file = epath.Path(path)
    limits.check_file(path)
    try:
        if checkpoints.is_second(path) or checkpoints.is_first(path):
            arrays, digest, remark = checkpoints.read(path, _MOST_BYTES)
            _check_finite(path, arrays)
            return Foreign(path, "TensorFlow", digest, arrays, {}, (), remark)
        if (size := file.stat().length) > _MOST_BYTES:
            raise DataError(f"{path} has {size:,} bytes: more than {_MOST_BYTES:,} are not read")
        data = file.read_bytes()
        # Beside files of other names the descriptions may be another model's.
        beside, lines = _beside(file) if file.name in downloads.PUBLISHED else ({}, "")
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
        form, module = "PyTorch", "pickles"
    elif data[8:9] == b"{":
        form, module = "safetensors", "tensors"
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
    arrays, entry = importlib.import_module(f"ops.foreign.{module}").read(data, path)
    return f"{form}, entry {entry!r}" if entry else form, arrays


def _check_finite(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Refuses a file before anything is written; `fitting.floats` sees what float32 cannot hold."""
    for name, array in arrays.items():
        if array.dtype.kind not in "iub":
            fitting.floats(path, name, array)


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
    names: Any = limits.text_lines(lines) or config.get("label_names")
    numbered = config.get("id2label")
    if not names and isinstance(numbered, dict):
        names = [numbered.get(str(i)) for i in range(len(numbered))]
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or all(re.fullmatch(r"LABEL_\d+", name) for name in names):
        return ()  # Hugging Face's names for classes without names
    return tuple(" ".join(name.split()) for name in names)
