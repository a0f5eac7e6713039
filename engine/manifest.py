"""What the manifest of a checkpoint says of its arrays, its config and the libraries."""

from __future__ import annotations

import importlib.metadata
import json
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

LIBRARIES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "tensorflow-cpu")


def describe(tree: Any) -> dict[str, str]:
    """{"params/conv_stem/kernel": "float32[7,7,3,64]", ...} of arrays or ShapeDtypeStructs."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"
        )
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def pieces(x: jax.Array) -> list[bytes]:
    """The bytes of an array's distinct pieces on this process's devices."""
    distinct = {str(shard.index): shard.data for shard in x.addressable_shards}
    return [np.asarray(data).tobytes() for data in distinct.values()]


def checksums(tree: Any) -> dict[str, int | None]:
    """{"params/conv_stem/kernel": CRC-32 of its bytes}; None if no process holds it whole."""

    def checksum(x: jax.Array | np.ndarray) -> int | None:
        if isinstance(x, np.ndarray):
            return zlib.crc32(x.tobytes())
        if x.is_fully_replicated:
            x = x.addressable_data(0)
        return zlib.crc32(np.asarray(x).tobytes()) if x.is_fully_addressable else None

    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): checksum(x)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def differences(saved: dict[str, str], wanted: dict[str, str]) -> Iterator[str]:
    """The leaves that differ between two of `describe`, in words."""
    for name in sorted(saved.keys() | wanted.keys()):
        have, want = saved.get(name, "nothing"), wanted.get(name, "nothing")
        if have != want:
            yield f"{name}: the checkpoint has {have}, the config wants {want}"


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The keys that differ between two trees of JSON values, in words."""
    old, new = _flat(then), _flat(json.loads(json.dumps(now)))
    return [
        f"{key} was {old.get(key)!r}, is now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + key
        found |= _flat(value, name + ".") if isinstance(value, dict) else {name: value}
    return found


def versions() -> dict[str, str]:
    """The libraries that shape a run, as installed."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
