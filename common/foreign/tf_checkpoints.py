"""Finds TensorFlow's checkpoints, formats V1 and V2, and reads a model's arrays from them.

V2 is `PREFIX.index` with `PREFIX.data-00000-of-00001` and so on. V1 is one file `PREFIX`, or
`PREFIX-00000-of-00008` and so on. Only the arrays of layers are read: optimizer slots, the moving
averages of weights and counters, which may be much larger, stay on the disk.
"""

import atexit
import functools
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from typing import Any

import numpy as np
from etils import epath

from common.data import storage
from common.errors import DataError, one_line, some
from common.tensorflow import tensorflow

_MAGIC = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"  # a V1 checkpoint ends with it, as LevelDB's tables do
# What the names of a checkpoint's files have after its prefix; the last is a shard of V1.
_SUFFIX = re.compile(r"(\.index|\.meta|\.data-\d{5}-of-\d{5}|-\d{5}-of-\d{5})$")
_LATEST = re.compile(r'^model_checkpoint_path:\s*"(.*)"\s*$', re.MULTILINE)
# Layers by the names that TensorFlow gives them; "tower/conv2d_3/kernel/Momentum" is no layer.
_ARRAY = re.compile(
    r"(?:.+/)?(conv2d(_\d+)?/kernel|dense(_\d+)?/(kernel|bias)"
    r"|batch_normalization(_\d+)?/(gamma|beta|moving_mean|moving_variance))"
)


def find(path: str) -> str:
    """The prefix of the checkpoint that a prefix or one of its files means; "" for other files."""
    prefix = _SUFFIX.sub("", path)
    return prefix if is_one(prefix) else ""


def newest(folder: epath.Path, names: Collection[str]) -> str:
    """The prefix of the checkpoint in a folder of these files; "" if there is no checkpoint.

    Of several checkpoints it is the one that TensorFlow's file `checkpoint` names.
    """
    bare = {_SUFFIX.sub("", name) for name in names if _SUFFIX.search(name)}
    shards = {name.rpartition("-of-")[0] for name in names}
    prefixes = {p for p in bare if {f"{p}.index", p} & {*names} or f"{p}-00000" in shards}
    state = folder / "checkpoint"
    if prefixes and state.name in names and (latest := _LATEST.search(state.read_text())):
        name = latest[1].rpartition("/")[2]  # the folder may have moved
        if name not in prefixes:
            raise DataError(f"{folder} lacks {name}, the checkpoint that {state} names")
        return str(folder / name)
    if len(prefixes) > 1:
        raise DataError(f"{folder} has the checkpoints {some(sorted(prefixes))}: name one of them")
    return str(folder / prefixes.pop()) if prefixes else ""


def is_one(prefix: str) -> bool:
    """Whether a path is the prefix of a checkpoint, of either format."""
    item = epath.Path(prefix)
    if epath.Path(f"{prefix}.index").exists():
        return True
    if not item.exists():
        return bool(storage.matching_paths(f"{prefix}-?????-of-?????", prefix))
    if item.is_dir() or (size := item.stat().length) < len(_MAGIC):
        return False
    with item.open("rb") as file:
        file.seek(size - len(_MAGIC))
        return file.read() == _MAGIC


def read(prefix: str) -> tuple[dict[str, np.ndarray], str, str]:
    """Reads (arrays of layers by name, their SHA-256, a note or "") of a checkpoint.

    The digest covers names, dtypes, shapes and values.
    """
    reader, shapes = _opened(prefix)
    names = sorted(name for name in shapes if _ARRAY.fullmatch(name))
    if not names:
        raise DataError(
            f"{prefix} has none of the layers conv2d, batch_normalization and dense: its arrays "
            f"are {listed(prefix)}"
        )
    arrays, digest = {}, hashlib.sha256()
    for name in names:
        try:
            array = arrays[name] = np.atleast_1d(reader.get_tensor(name))
        except Exception as error:  # a missing, short or changed file of values
            raise DataError(f"{prefix} is damaged: {name}: {one_line(error)}") from error
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    has_averages = any(f"{name}/ExponentialMovingAverage" in shapes for name in names)
    note = f"{prefix} also has moving averages of its weights, which are not taken"
    return arrays, digest.hexdigest(), note if has_averages else ""


def listed(prefix: str) -> str:
    """Names of arrays of a checkpoint in words, without counters; DataError if it is damaged."""
    return some(sorted(name for name, shape in _opened(prefix)[1].items() if shape))


def _opened(prefix: str) -> tuple[Any, dict[str, list[int]]]:
    """TensorFlow's reader of a checkpoint, and the shapes of its arrays by name."""
    try:
        reader: Any = tensorflow().train.load_checkpoint(_plain(prefix))
        return reader, reader.get_variable_to_shape_map()
    except Exception as error:  # TensorFlow's own classes, RuntimeError and others
        raise DataError(f"{prefix} is damaged: {one_line(error)}") from error


@functools.cache
def _plain(prefix: str) -> str:
    """The prefix of links to the files, because TensorFlow takes a prefix for a pattern."""
    if "://" in prefix or not glob.has_magic(prefix):
        return prefix
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    name = os.path.basename(prefix)
    for path in storage.matching_paths(f"{prefix}*", prefix):
        link = f"{folder}/model{os.path.basename(path).removeprefix(name)}"
        os.symlink(os.path.abspath(path), link)
    return f"{folder}/model"
