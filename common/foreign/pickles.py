"""Reads the arrays of PyTorch's .pth and .pt files without PyTorch, and executes nothing.

Such a file is a zip archive: one pickle, and one record for each storage. Before PyTorch 1.6 it is
five pickles, and then the storages: each int64 count and its elements. A pickle names functions
that its reader is to call. This reader calls only its own classes: for a tensor, a parameter and an
`OrderedDict`, and for everything else, such as the settings of a training run, a stand-in that does
nothing.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from common.errors import DataError, one_line

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # the first two pickles before PyTorch 1.6
_DTYPES = {
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "HalfStorage": np.dtype("<f2"),
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
# Where training programs keep the weights; their running average comes first.
_ENTRIES = ("state_dict_ema", "model_ema", "state_dict", "model")
_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")  # of several devices and of compilation


def read(data: bytes, path: str) -> tuple[dict[str, np.ndarray], str]:
    """Reads arrays by name, with the dtypes of a file, from its bytes; `path` is for messages.

    The second value is the entry of a training checkpoint that they are from, or "".
    """
    try:
        content = _load(data) if data.startswith(b"PK") else _load_old(io.BytesIO(data))
    except Exception as error:  # a damaged pickle may raise any type
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise DataError(f"{path} is damaged, or no file of PyTorch's ({reason})") from error
    content = content if isinstance(content, dict) else {}
    for entry, candidate in [("", content), *((key, content.get(key)) for key in _ENTRIES)]:
        if arrays := _arrays(candidate):
            return arrays, entry
    raise DataError(
        f"{path} holds no weights by name: save only the weights there, with "
        "torch.save(model.float().state_dict(), FILE)"
    )


def _arrays(content: Any) -> dict[str, np.ndarray]:
    """The arrays of a dictionary by name, without the prefixes of wrappers."""
    rows = content.items() if isinstance(content, dict) else ()
    return {
        _WRAPPERS.sub("", name): value.array
        for name, value in rows
        if isinstance(name, str) and isinstance(value, _Array) and name != "n_averaged"
        if value.array is not None
    }


def _load(data: bytes) -> Any:
    """The object in a zip archive of PyTorch's."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("it has no data.pkl")
        folder, storages = pickles[0].removesuffix("data.pkl"), {}

        def storage(key: str, dtype: np.dtype, count: int) -> np.ndarray:
            if key not in storages:
                storages[key] = np.frombuffer(archive.read(f"{folder}data/{key}"), dtype)[:count]
            return storages[key]

        return _Unpickler(io.BytesIO(archive.read(pickles[0])), storage).load()


def _load_old(file: io.BytesIO) -> Any:
    """The object in a file from before PyTorch 1.6."""
    size = len(file.getbuffer())
    storages: dict[str, np.ndarray] = {}

    def storage(key: str, dtype: np.dtype, count: int) -> np.ndarray:
        """Zeros, because the elements come after the object."""
        if not 0 <= count * dtype.itemsize <= size:
            raise ValueError("its storages are larger than the file")
        return storages.setdefault(key, np.zeros(count, dtype))

    magic, protocol, _, content, keys = (_Unpickler(file, storage).load() for _ in range(5))
    if (magic, protocol) != (_MAGIC, _PROTOCOL):
        raise ValueError("it does not begin as PyTorch writes it")
    if sorted(keys) != sorted(storages):
        raise ValueError("its list of storages differs from the storages of its arrays")
    for key in keys:
        values = storages[key]
        count = int.from_bytes(file.read(8), "little")
        if count != values.size:
            raise ValueError(f"its storage {key} has {count:,} elements, not {values.size:,}")
        values[...] = np.frombuffer(file.read(values.nbytes), values.dtype)
    return content


class _Unpickler(pickle.Unpickler):
    """Calls only the classes of this file, whatever functions a pickle names."""

    def __init__(self, file: io.BytesIO, storage: Callable[[str, np.dtype, int], np.ndarray]):
        super().__init__(file)
        self._storage = storage

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and global_name.endswith("Storage"):
            return global_name  # for `persistent_load`
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor"):
            raise ValueError(
                "PyTorch before 0.4 wrote it: write it again with a newer one, "
                "torch.save(torch.load(FILE), FILE)"
            )
        return _CLASSES.get(f"{module_name}.{global_name}", _StandIn)

    def persistent_load(self, pid: Any, /) -> _Array:
        kind, storage_type, key, _, count, *view = pid
        if kind != "storage":
            raise ValueError("it holds the code of a model: save its state_dict() there")
        if storage_type not in _DTYPES:
            raise ValueError(f"it has a {storage_type}: save model.float().state_dict() there")
        storage = _Array()
        storage.array = self._storage(key, _DTYPES[storage_type], count)
        if view and view[0] is not None:  # before PyTorch 1.6: a part of the storage
            _, start, size = view[0]
            return _Tensor(storage, start, (size,), (1,))
        return storage


class _Inert:
    """An object whose attributes a pickle cannot set, such as `_metadata` of a dictionary."""

    def __setstate__(self, state: Any) -> None:
        del state


class _Dictionary(_Inert, dict[Any, Any]):
    """An `OrderedDict`."""


class _StandIn(_Inert):
    """Takes the place of an object that is no array, and forgets what it gets."""

    def __init__(self, *arguments: Any, **named: Any):
        del arguments, named

    def __setitem__(self, key: Any, value: Any) -> None:
        del key, value

    def append(self, value: Any) -> None:
        """The method of lists and, named `add`, of sets."""
        del value

    add = append


class _Array(_Inert):
    """A storage, a tensor or a parameter."""

    array: np.ndarray | None = None

    def __new__(cls, data: Any = None, *_: Any) -> _Array:
        self = super().__new__(cls)
        self.array = data.array if isinstance(data, _Array) else None
        return self


class _Tensor(_Array):
    """A view of a storage; ValueError if it would reach beyond, or repeat elements."""

    def __new__(cls, storage: _Array, offset: int, size: Any, stride: Any, *_: Any) -> _Array:
        self, values = super().__new__(cls, storage), storage.array
        if values is None or math.prod(size) > values.size:
            raise ValueError("a tensor is larger than its storage")
        steps = [step * values.itemsize for step in stride]
        self.array = np.ndarray(size, values.dtype, values, offset * values.itemsize, steps)
        return self


_CLASSES: Mapping[str, type] = {
    "collections.OrderedDict": _Dictionary,
    "torch._utils._rebuild_tensor_v2": _Tensor,
    "torch._utils._rebuild_parameter": _Array,
}
