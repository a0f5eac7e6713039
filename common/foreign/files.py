"""Reads a file of weights: arrays by the names that they have in it, and the JSON beside it.

`adapt` makes a model's arrays of them.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from common.errors import DataError, one_line, parse_json, some
from common.foreign import BESIDE, PUBLISHED, pickles, tf_checkpoints
from common.text import decoded, text_lines

_SAFETENSORS_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}


@dataclasses.dataclass(frozen=True)
class Foreign:
    """Weights of another library.

    `arrays` have their names in the file; all are finite in float32. PyTorch's counters of batches
    are left out.
    """

    path: str  # the file, or the prefix of TensorFlow's checkpoint
    format: str  # "safetensors", "PyTorch" or "TensorFlow"; with the entry of a training checkpoint
    sha256: str  # of the file, or of the arrays that were read from a checkpoint of TensorFlow
    arrays: Mapping[str, np.ndarray]
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON files, by name
    labels: tuple[str, ...] = ()  # the names of the classes in order, if they are known
    note: str = ""  # what was left out, in one line


_peeked: dict[str, Foreign] = {}  # the last file of `peek`, by its path


def peek(path: str) -> Foreign:
    """Reads a file and keeps it in memory for the next `read` of this path.

    A start needs a file twice: for the keys of the config, and for the arrays.
    """
    if path not in _peeked:
        source = read(path)
        _peeked.clear()
        _peeked[path] = source
    return _peeked[path]


def read(path: str) -> Foreign:
    """Reads a file of weights that `common.foreign.find` returned; DataError if it is damaged."""
    if source := _peeked.pop(path, None):
        return source
    try:
        if tf_checkpoints.is_one(path):
            arrays, digest, note = tf_checkpoints.read(path)
            source = Foreign(path, "TensorFlow", digest, arrays, note=note)
        else:
            source = _read_file(epath.Path(path))
    except DataError:
        raise
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    arrays = {k: v for k, v in source.arrays.items() if not k.endswith("num_batches_tracked")}
    if not arrays:
        raise DataError(f"{path} holds no arrays")
    for name, array in arrays.items():
        if array.dtype.kind not in "iub" and not np.isfinite(np.asarray(array, np.float32)).all():
            raise DataError(f"{path}: {name} has values that are not finite")
    return dataclasses.replace(source, arrays=arrays)


def _read_file(file: epath.Path) -> Foreign:
    path, data = str(file), file.read_bytes()
    # The JSON files beside weights of other names may describe another model.
    beside, lines = _beside(file) if file.name in PUBLISHED else ({}, "")
    if data.startswith((b"PK", b"\x80\x02")):  # a zip archive; before PyTorch 1.6 a pickle
        arrays, entry = pickles.read(data, path)
        form = f"PyTorch, entry {entry!r}" if entry else "PyTorch"
    elif data[8:9] == b"{":
        form, arrays = "safetensors", _read_safetensors(data, path)
    else:
        if data.startswith(b"version https://git-lfs"):
            raise DataError(f"{path} is a pointer of Git LFS, not the weights: type git lfs pull")
        if path.endswith(".safetensors"):
            raise DataError(f"{path} is damaged or empty: get it again")
        raise DataError(
            f"{path} is not a file of weights that can be read: use .safetensors, PyTorch's .pth "
            "or .pt, or a checkpoint of TensorFlow"
        )
    labels = _labels(beside.get("config.json", {}), lines)
    return Foreign(path, form, hashlib.sha256(data).hexdigest(), arrays, beside, labels)


def _beside(file: epath.Path) -> tuple[dict[str, Any], str]:
    """The JSON files beside the weights, and the text of labels.txt."""
    contents = {}
    for other in (file.parent / name for name in BESIDE):
        if other.exists():
            try:
                contents[other.name] = parse_json(other.read_bytes())
                if not isinstance(contents[other.name], dict):
                    raise ValueError("it is a list or a value")
            except ValueError as error:
                raise DataError(f"{other} is not a JSON object: {one_line(error)}") from error
    labels = file.parent / "labels.txt"
    return contents, decoded(labels.read_bytes(), str(labels)) if labels.exists() else ""


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


def _read_safetensors(data: bytes, path: str) -> dict[str, np.ndarray]:
    import safetensors

    try:
        rows = dict(safetensors.deserialize(data))
    except Exception as error:  # the library's own class
        raise DataError(f"{path} is damaged: {one_line(error)}") from error
    arrays = {}
    for name, row in rows.items():
        if (dtype := _SAFETENSORS_DTYPES.get(row["dtype"])) is None:
            raise DataError(f"{path}: {name} has the dtype {row['dtype']}; save it as F32")
        arrays[name] = np.frombuffer(row["data"], dtype).reshape(row["shape"])
    return arrays


def adapt(
    path: str,
    arrays: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    theirs: Callable[[str, np.ndarray], Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """A model's arrays, float32 by path, with the values of the `arrays` in the file `path`.

    `shapes` are the shapes of the model's arrays, by path such as "params/head/kernel".
    `theirs(path, array)` is an array of the model as the file has it: {name: array} in the
    library's layout, with several names where the library splits it. Here it gets arrays that
    number their own elements, so that its result says where each element is in the file. DataError
    if an array is missing, is unknown, has another shape, or holds integers.
    """
    wanted: dict[str, tuple[str, np.ndarray]] = {}
    for ours, shape in shapes.items():
        numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
        wanted |= {name: (ours, array) for name, array in theirs(ours, numbers).items()}
    common = {name: arrays[name] for name in wanted if name in arrays}
    errors = {
        "lacks": [name for name in wanted if name not in arrays],
        "has unknown arrays:": [name for name in arrays if name not in wanted],
        "has other shapes:": [
            f"{name} {list(array.shape)} instead of {list(wanted[name][1].shape)}"
            for name, array in common.items()
            if array.shape != wanted[name][1].shape
        ],
        "has no weights, but whole numbers, in": [
            name for name, array in common.items() if array.dtype.kind in "iub"
        ],
    }
    if text := "; it ".join(f"{what} {some(names)}" for what, names in errors.items() if names):
        raise DataError(f"{path} is not the model that its names describe: it {text}")
    values = {ours: np.empty(shape, np.float32) for ours, shape in shapes.items()}
    for name, (ours, numbers) in wanted.items():
        values[ours].reshape(-1)[numbers] = arrays[name]
    return values
