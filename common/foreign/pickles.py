"""Reads the arrays of PyTorch's .pth and .pt files without PyTorch, and executes nothing.

Such a file is a zip archive: one pickle, and one record for each storage. Before PyTorch 1.6 it is
five pickles, and then the storages: each int64 count and its elements. A pickle names functions
that its reader is to call. This reader calls only its own: for a tensor, a parameter, an
`OrderedDict`, and stand-ins that do nothing for the settings of a training run. It refuses
everything else by name.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from common.errors import DataError, one_line

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # the first two pickles before PyTorch 1.6
_RESAVE = "save only the weights there, with torch.save(model.state_dict(), FILE)"
_RESAVE_FLOATS = "save it as float32 there, with torch.save(model.float().state_dict(), FILE)"
_ODD_DTYPES = "torch._utils._rebuild_tensor_v3"  # the function for float8 and the like
_DTYPES = {
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    **{"HalfStorage": np.dtype("<f2"), "FloatStorage": np.dtype("<f4")},
    **{"DoubleStorage": np.dtype("<f8"), "LongStorage": np.dtype("<i8")},
    **{"IntStorage": np.dtype("<i4"), "ShortStorage": np.dtype("<i2")},
    **{"CharStorage": np.dtype("i1"), "ByteStorage": np.dtype("u1")},
    "BoolStorage": np.dtype("?"),
}
# Names in training checkpoints that become stand-ins.
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
_ENTRIES = ("state_dict_ema", "model_ema", "state_dict", "model")
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
    try:
        content = _load(data) if data.startswith(b"PK") else _load_old(data)
    except _Forbidden as error:
        raise DataError(f"{path} is refused: {error}; {error.fix}") from error
    except Exception as error:  # a damaged pickle may raise any type
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise DataError(f"{path} is damaged, or no file of PyTorch's ({reason})") from error
    entry, arrays = "", _arrays(content)
    for key in _ENTRIES:
        if not arrays and isinstance(content, Mapping) and (arrays := _arrays(content.get(key))):
            entry = key
    if not arrays:
        raise DataError(f"{path} holds no weights by name: {_RESAVE}")
    return arrays, entry


class _Forbidden(Exception):
    """The pickle wants what this reader does not do."""

    def __init__(self, reason: str, fix: str = _RESAVE):
        super().__init__(reason)
        self.fix = fix


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
        storages: dict[str, _Held] = {}

        def storage(key: str, dtype: np.dtype, count: int) -> _Held:
            if key not in storages:
                values = np.frombuffer(record(f"data/{key}"), np.uint8)
                storages[key] = _Held(values[: count * dtype.itemsize].view(dtype))
            return storages[key]

        return _Unpickler(_next_pickle(io.BytesIO(record("data.pkl"))), storage).load()


def _load_old(data: bytes) -> Any:
    """The object in a file from before PyTorch 1.6."""
    file, left = io.BytesIO(data), len(data)
    storages: dict[str, np.ndarray] = {}

    def storage(key: str, dtype: np.dtype, count: int) -> _Held:
        """Zeros, because the elements come after the object."""
        nonlocal left
        if key not in storages:
            left -= count * dtype.itemsize
            if left < 0 or count < 0:
                raise ValueError("its storages are larger than the file")
            storages[key] = np.zeros(count, dtype)
        if storages[key].dtype != dtype:
            raise ValueError(f"its storage {key} has two dtypes")
        return _Held(storages[key])

    magic, protocol, system = (_Unpickler(_next_pickle(file), storage).load() for _ in range(3))
    if (magic, protocol) != (_MAGIC, _PROTOCOL):
        raise ValueError("it begins with another number")
    if not system["little_endian"]:
        raise _Forbidden("its numbers are big-endian")
    content = _Unpickler(_next_pickle(file), storage).load()
    keys = _Unpickler(_next_pickle(file), storage).load()
    if sorted(keys) != sorted(storages):
        raise ValueError("its list of storages is not that of its arrays")
    for key in keys:
        values = storages[key]
        count = int.from_bytes(file.read(8), "little")
        elements = file.read(values.nbytes)
        if count != values.size or len(elements) != values.nbytes:
            raise ValueError(
                f"its storage {key} has {count:,} elements in {len(elements):,} bytes, not "
                f"{values.size:,} in {values.nbytes:,}"
            )
        values[...] = np.frombuffer(elements, values.dtype)
    return content


def _next_pickle(file: io.BytesIO) -> bytes:
    """Reads one pickle without executing it."""
    start, size = file.tell(), len(file.getbuffer())
    for operation, argument, _ in pickletools.genops(file):
        if operation.name in _REFUSED:
            raise _Forbidden(f"its pickle has the operation {operation.name}")
        if operation.name.endswith("PUT") and int(argument or 0) > size:
            raise ValueError("its pickle's memo is larger than the file")
    end = file.tell()
    file.seek(start)
    return file.read(end - start)


class _Unpickler(pickle.Unpickler):
    """Calls only functions of this file."""

    def __init__(self, content: bytes, storage: Callable[[str, np.dtype, int], _Held]):
        super().__init__(io.BytesIO(content))
        self._storage = storage

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if name == "collections.OrderedDict":
            return _Dictionary
        if module_name == "torch" and global_name in _DTYPES:
            return _Function(lambda: global_name)  # `persistent_load` calls it
        if name in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
            return _Function(_tensor)
        if name == "torch.nn.parameter.Parameter":
            return _Parameter
        if name == "torch._utils._rebuild_parameter":
            return _Function(lambda data, *_: data)
        if name in _HARMLESS:
            return _StandIn
        if re.fullmatch(r"torch\.\w{1,40}Storage", name) or name == _ODD_DTYPES:
            raise _Forbidden(f"it has arrays of another dtype ({name!r})", _RESAVE_FLOATS)
        raise _Forbidden(f"its pickle asks for {name[:200]!r}, which is no part of weights")

    def persistent_load(self, pid: Any, /) -> Any:
        kind, storage_type, key, _, count, *view = pid
        if kind != "storage":
            raise _Forbidden("its pickle holds the code of a model")
        held = self._storage(key, _DTYPES[storage_type()], count)
        if view and view[0] is not None:  # before PyTorch 1.6: a part of the storage
            _, start, size = view[0]
            return _tensor(held, start, (size,), (1,))
        return held


class _Dictionary(dict[Any, Any]):
    """A dictionary without attributes: PyTorch's `_metadata` is left out, so is any other."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        del state


class _Held:
    """An array that a pickle can hand on, and not change."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray):
        self.array = array

    def __setstate__(self, state: Any) -> None:
        raise _Forbidden("its pickle changes an array")


class _Parameter(_Held):
    """A parameter before PyTorch 0.4: made of its array, or made empty and filled by its state."""

    __slots__ = ()

    def __new__(cls, data: Any = None, *_: Any) -> _Parameter:
        parameter = super().__new__(cls)
        if isinstance(data, _Held):
            parameter.array = data.array
        return parameter

    def __init__(self, *_: Any):
        """Without the base's, which would set the array again."""

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state[0], _Held):
            return  # requires_grad, volatile, hooks
        if hasattr(self, "array"):
            raise _Forbidden("its pickle changes an array")
        self.array = state[0].array


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
        is_array = isinstance(value, _Held) and hasattr(value, "array")
        if isinstance(name, str) and is_array and name != "n_averaged":
            while prefix := next((p for p in _PREFIXES if name.startswith(p)), ""):
                name = name.removeprefix(prefix)
            arrays[name] = value.array
    return arrays
