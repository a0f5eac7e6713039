"""Writes files of PyTorch without PyTorch, in the forms that torch.save gives them."""

import io
import pickle
import struct
import zipfile
from typing import Any

import numpy as np

W = np.arange(12, dtype=np.float32).reshape(3, 4)


class Global:
    """Pickled as the global of a name: `GLOBAL module name`."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self):
        raise AssertionError


class Call:
    """Pickled as the call of a global."""

    def __init__(self, module, name, *arguments, state=None):
        self.function, self.arguments, self.state = Global(module, name), arguments, state


class Storage:
    """Pickled as PyTorch pickles a storage; before 1.6 with `view`, None or a part."""

    def __init__(self, key, kind, count, *view):
        self.pid = ("storage", Global("torch", kind), key, "cpu", count, *view)


_Pickler: Any = pickle._Pickler  # written in Python, so that its methods can be replaced


class Pickler(_Pickler):
    """Writes globals that need not exist here."""

    def persistent_id(self, obj):
        return obj.pid if isinstance(obj, Storage) else None

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Global):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Call):
            self.save(obj.function)
            self.save(obj.arguments)
            self.write(pickle.REDUCE)
            if obj.state is not None:
                self.save(obj.state)
                self.write(pickle.BUILD)
        else:
            super().save(obj, save_persistent_id)


def tensor(key, array, kind="FloatStorage", offset=0, size=None, stride=None, count=None):
    """The call that PyTorch pickles for a tensor."""
    steps = [s // array.itemsize for s in array.strides]
    return Call(
        *("torch._utils", "_rebuild_tensor_v2"),
        Storage(key, kind, array.size if count is None else count),
        offset,
        array.shape if size is None else size,
        tuple(steps) if stride is None else stride,
        False,
        Call("collections", "OrderedDict"),
    )


def dumps(content):
    file = io.BytesIO()
    Pickler(file, 2).dump(content)
    return file.getvalue()


def old_pth(content, arrays, magic=0x1950A86A20F9469CFC6C):
    """The bytes that torch.save wrote before PyTorch 1.6."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}
    heads = (magic, 1001, system, content, list(arrays))
    storages = (struct.pack("<q", a.size) + a.tobytes() for a in arrays.values())
    return b"".join((*map(dumps, heads), *storages))


def write_pth(path, content, arrays):
    """Writes what torch.save writes: a pickle, or an object to pickle, and storages."""
    with zipfile.ZipFile(path, "w") as archive:
        data = content if isinstance(content, bytes) else dumps(content)
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        for key, array in arrays.items():
            archive.writestr(f"archive/data/{key}", array.tobytes())
    return str(path)
