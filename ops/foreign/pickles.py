"""Reads the arrays of PyTorch's .pth and .pt files without PyTorch, and executes nothing.

Such a file is a zip archive: one pickle, and one record for each storage. A pickle names functions
that its reader is to call. This reader calls only its own: for a tensor, a parameter, an
`OrderedDict`, and stand-ins that do nothing for the settings of a training run. It refuses
everything else by name.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from errors import DataError, one_line

BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8"  # how files before PyTorch 1.6 begin
_RESAVE = "save only the weights there, with torch.save(model.state_dict(), FILE)"
_DTYPES = {
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    **{"HalfStorage": np.dtype("<f2"), "FloatStorage": np.dtype("<f4")},
    **{"DoubleStorage": np.dtype("<f8"), "LongStorage": np.dtype("<i8")},
    **{"IntStorage": np.dtype("<i4"), "ShortStorage": np.dtype("<i2")},
    **{"CharStorage": np.dtype("i1"), "ByteStorage": np.dtype("u1")},
    "BoolStorage": np.dtype("?"),
}
# Names in training checkpoints that become stand-ins
_HARMLESS = {"argparse.Namespace", "datetime.datetime", "_codecs.encode", "builtins.set"}
_HARMLESS |= {"__builtin__.set", "collections.defaultdict", "collections.Counter"}
for _module, _names in {
    "pathlib": "Path PosixPath WindowsPath",
    "pathlib._local": "Path PosixPath WindowsPath",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "scalar _reconstruct",
    "numpy._core.multiarray": "scalar _reconstruct",
    "torch": "Size device bfloat16 float16 float32 float64 int32 int64 bool uint8",
}.items():
    _HARMLESS |= {f"{_module}.{_name}" for _name in _names.split()}
# The others make objects past `find_class`, or take memory before they have the data for it.
_REFUSED = {"INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID"}
_REFUSED |= {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}
# Where training programs keep the weights; their running average comes first.
_PLACES = ("state_dict_ema", "model_ema", "state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")  # of wrappers for several devices and for compilation


def read(data: bytes, path: str) -> tuple[dict[str, np.ndarray], str]:
    """Reads {name: array} from the bytes of a file.

    Args:
      data: the file.
      path: its name, for messages.

    Returns:
      (arrays, the entry of a training checkpoint that they are from or ""). The arrays cannot be
      written to; their dtypes are the file's.

    Raises:
      DataError: the file is damaged, names something that must not run, or holds no arrays.
    """
    if data.startswith(BEFORE_ZIP):
        raise DataError(f"{path} was written by PyTorch before 1.6: load it there and {_RESAVE}")
    try:
        content = _load(data)
    except _Forbidden as error:
        raise DataError(f"{path} is refused: {error}; {_RESAVE}") from error
    except Exception as error:  # a damaged pickle may raise any type
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise DataError(f"{path} is damaged, or no file of PyTorch's ({reason})") from error
    place, arrays = "", _arrays(content)
    for key in _PLACES:
        if not arrays and isinstance(content, Mapping) and (arrays := _arrays(content.get(key))):
            place = key
    if not arrays:
        raise DataError(f"{path} holds no weights by name: {_RESAVE}")
    return arrays, place


class _Forbidden(Exception):
    """The pickle wants what this reader does not do."""


def _load(data: bytes) -> Any:
    """The object in a zip archive of PyTorch's."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("it has no data.pkl")
        folder, left = pickles[0].removesuffix("data.pkl"), len(data)

        def record(name: str) -> bytes:
            nonlocal left
            entry = archive.getinfo(folder + name)
            left -= entry.file_size  # a second time, or overlapping: a bomb
            if entry.compress_type != zipfile.ZIP_STORED or left < 0:
                raise _Forbidden(f"its record {name} is compressed or larger than the file")
            return archive.read(entry)

        if folder + "byteorder" in archive.namelist() and record("byteorder") != b"little":
            raise _Forbidden("its numbers are big-endian")
        content = record("data.pkl")
        _check_operations(content)
        return _Unpickler(content, record).load()


def _check_operations(content: bytes) -> None:
    """Reads through a pickle without executing it."""
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in _REFUSED:
            raise _Forbidden(f"its pickle has the operation {operation.name}")
        if operation.name.endswith("PUT") and int(argument or 0) > len(content):
            raise ValueError("its pickle's memo is larger than the pickle")


class _Unpickler(pickle.Unpickler):
    """Calls only functions of this file."""

    def __init__(self, content: bytes, record: Callable[[str], bytes]):
        super().__init__(io.BytesIO(content))
        self._record, self._storages = record, {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if name == "collections.OrderedDict":
            return collections.OrderedDict
        if module_name == "torch" and global_name in _DTYPES:
            return _Function(lambda: global_name)  # `persistent_load` calls it
        if name == "torch._utils._rebuild_tensor_v2":
            return _Function(_tensor)
        if name == "torch._utils._rebuild_parameter":
            return _Function(lambda data, *_: data)
        if name in _HARMLESS:
            return _StandIn
        raise _Forbidden(f"its pickle asks for {name[:200]!r}, which is no part of weights")

    def persistent_load(self, pid: Any, /) -> Any:
        _, storage_type, key, _, count = pid
        if key not in self._storages:
            dtype = _DTYPES[storage_type()]
            values = np.frombuffer(self._record(f"data/{key}"), np.uint8)
            self._storages[key] = _Held(values[: count * dtype.itemsize].view(dtype))
        return self._storages[key]


class _Held:
    """An array that a pickle can hand on, and not change."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray):
        self.array = array

    def __setstate__(self, state: Any) -> None:
        raise _Forbidden("its pickle changes an array")


class _Function:
    """A function that a pickle can call, and not change."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise _Forbidden("its pickle changes a function")


class _StandIn:
    """Takes the place of an object that is no array, and forgets what it gets."""

    def __init__(self, *arguments: Any, **named: Any):
        del arguments, named

    def __setstate__(self, state: Any) -> None:
        del state

    def __setitem__(self, key: Any, value: Any) -> None:
        del key, value

    def append(self, value: Any) -> None:
        """Of lists and, named `add`, of sets."""
        del value

    add = append


def _tensor(held: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _Held:
    """A view of a storage; ValueError if it would reach beyond, or repeat elements."""
    count = math.prod(size)
    if not isinstance(held, _Held) or len(size) != len(stride):
        raise ValueError("a tensor has no storage, or its stride has another length than its size")
    storage = held.array
    if min((offset, *size, *stride)) < 0 or count > storage.size:
        raise ValueError("a tensor is larger than its storage")
    if count == 0:
        return _Held(np.zeros(size, storage.dtype))
    if offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= storage.size:
        raise ValueError("a tensor reaches beyond its storage")
    steps = [step * storage.itemsize for step in stride]
    view = np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)
    return _Held(view)


def _arrays(content: Any) -> dict[str, np.ndarray]:
    """The arrays of a dictionary by name, without the prefixes of wrappers."""
    if not isinstance(content, Mapping):
        return {}
    arrays = {}
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, _Held) and name != "n_averaged":
            while prefix := next((p for p in _PREFIXES if name.startswith(p)), ""):
                name = name.removeprefix(prefix)
            arrays[name] = value.array
    return arrays
