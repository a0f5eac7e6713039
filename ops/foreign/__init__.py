"""Reads the weights of other libraries: .safetensors, PyTorch's .pth, Keras's .h5; nothing runs.

`read` gives arrays by the names that they have in the file; the benchmarks know what these mean.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from errors import DataError, one_line
from ops.foreign import keras, pickles, tensors

_MOST_BYTES = 8 << 30
# The names of a model's files, where it is a folder. Only beside the first two do JSON files count.
_PUBLISHED = ("model.safetensors", "pytorch_model.bin")
_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".pth.tar", ".h5", ".keras")
_BESIDE = ("config.json", "preprocessor_config.json", "input_spec.json")


@dataclasses.dataclass(frozen=True)
class Foreign:
    """Weights of another library.

    Attributes:
      path: the file.
      format: "safetensors", "PyTorch" or "Keras"; with the entry of a training checkpoint.
      sha256: of the file, in hexadecimal digits.
      arrays: {name in the file: array}; they cannot be written to.
      beside: {name: content} of JSON files beside it: config.json, preprocessor_config.json and
        input_spec.json, where there are some.
      labels: the names of the classes in order; () if none are known.
    """

    path: str
    format: str
    sha256: str
    arrays: Mapping[str, np.ndarray]
    beside: Mapping[str, Any]
    labels: tuple[str, ...]


def find(path: str) -> str:
    """The file of weights that a path, local or gs://, means; "" if it is none.

    A file is one whatever its name. A folder is one if it has a file of weights and no folder
    `checkpoints`.

    Raises:
      DataError: a folder has several files of weights, or cannot be listed.
    """
    try:
        folder = epath.Path(path)
        if not folder.is_dir():
            return path if folder.exists() else ""
        if (folder / "checkpoints").exists():
            return ""
        files = sorted(p.name for p in folder.iterdir() if p.name.endswith(_SUFFIXES))
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    published = [name for name in _PUBLISHED if name in files]
    if len(files) > 1 and not published:
        raise DataError(f"{path} has the weights {', '.join(files[:4])}: name one of them")
    return str(folder / (published or files)[0]) if files else ""


def read(path: str) -> Foreign:
    """Reads a file of weights that `find` has found.

    Raises:
      DataError: the file is damaged, is of a kind that is not supported, or holds something that
        is no array.
    """
    file = epath.Path(path)
    try:
        if (size := file.stat().length) > _MOST_BYTES:
            raise DataError(f"{path} has {size:,} bytes: more than {_MOST_BYTES:,} are not read")
        data = file.read_bytes()
        beside, lines = _beside(file) if file.name in _PUBLISHED else ({}, "")
    except DataError:
        raise
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    form, arrays = _parse(data, path)
    if not arrays:
        raise DataError(f"{path} holds no arrays")
    labels = _labels(beside.get("config.json", {}), lines)
    return Foreign(path, form, hashlib.sha256(data).hexdigest(), arrays, beside, labels)


def _parse(data: bytes, path: str) -> tuple[str, Mapping[str, np.ndarray]]:
    """(format, arrays), by what the file begins with."""
    if data.startswith(b"\x89HDF"):
        return "Keras", keras.read(data, path)
    if data.startswith(b"PK") and path.endswith(".keras"):
        raise keras.nameless(path)
    if data.startswith(b"PK") or data.startswith(pickles.BEFORE_ZIP):
        arrays, place = pickles.read(data, path)
        return f"PyTorch, entry {place!r}" if place else "PyTorch", arrays
    if data[8:9] == b"{":
        return "safetensors", tensors.read(data, path)
    raise DataError(
        f"{path} is no file of weights that can be read: use .safetensors, PyTorch's .pth or .pt, "
        "or Keras's .h5"
    )


def _beside(file: epath.Path) -> tuple[dict[str, Any], str]:
    """The JSON files beside the weights, and the text of labels.txt."""
    found = {}
    for name in _BESIDE:
        other = file.parent / name
        if other.exists():
            try:
                content = json.loads(other.read_bytes())
                if not isinstance(content, dict):
                    raise ValueError("it is no object")
            except (ValueError, RecursionError) as error:
                raise DataError(f"{other} is no JSON object: {one_line(error)}") from error
            found[name] = content
    labels = file.parent / "labels.txt"
    try:
        return found, labels.read_bytes().decode() if labels.exists() else ""
    except UnicodeDecodeError as error:
        raise DataError(f"{labels} is not UTF-8") from error


def _labels(config: Mapping[str, Any], lines: str) -> tuple[str, ...]:
    """The names of classes: of labels.txt, else timm's, else Hugging Face's."""
    names: Any = lines.splitlines() or config.get("label_names")
    numbered = config.get("id2label")
    if not names and isinstance(numbered, dict):
        names = [numbered.get(str(i)) for i in range(len(numbered))]
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or all(re.fullmatch(r"LABEL_\d+", name) for name in names):
        return ()  # Hugging Face's names for classes without names
    return tuple(" ".join(name.split()) for name in names)
