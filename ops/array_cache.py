"""Keeps arrays that take long to compute in a file, with a key that says what they depend on."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from etils import epath

from ops import files, progress
from ops.shards import tensorflow

T = TypeVar("T")
_PART = 64 << 20  # bytes that are written at a time


def stamps(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """Path, bytes and time of modification (ns, but whole seconds) of files, for keys.

    Raises:
      DataError: a file is missing or may not be read.
    """
    sizes, gfile = files.sizes(paths), tensorflow().io.gfile
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        times = pool.map(lambda path: int(gfile.stat(path).mtime_nsec), paths)
        return list(zip(paths, sizes, times, strict=True))


def cached(kind: type[T], path: str, key: str, compute: Callable[[], T]) -> T:
    """The result of `compute`, or what an earlier call with the same key has written to `path`.

    Args:
      kind: a dataclass of arrays. Of other fields, NumPy's arrays of them are read back.
      path: local or gs://; "" computes and writes nothing.
      key: says what the arrays depend on. With another one, or if the file is damaged, they are
        computed again.
      compute: makes a `kind`.
    """
    if not path:
        return compute()
    names = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    if (arrays := _read(path, key, names)) is not None:
        return kind(**arrays)
    result = compute()
    content = io.BytesIO()
    np.savez(content, key=np.array(key), **vars(result))
    progress.report(f"writing {path}")
    view = content.getbuffer()
    files.write(path, (bytes(view[i : i + _PART]) for i in range(0, len(view), _PART)))
    return result


def _read(path: str, key: str, names: Sequence[str]) -> dict[str, Any] | None:
    """The arrays; None if there is no file, its key is another, or it is damaged."""
    if not epath.Path(path).exists():
        return None
    progress.report(f"reading {path}")
    try:
        with np.load(io.BytesIO(epath.Path(path).read_bytes())) as arrays:
            return {n: arrays[n] for n in names} if arrays["key"].item() == key else None
    except (ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
        return None
