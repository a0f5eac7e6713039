"""Describes the arrays of a checkpoint, and compares such descriptions."""

import contextlib
import functools
import importlib.metadata
import pathlib
import subprocess
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from common.trees import by_name

LIBRARIES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "tensorflow-cpu")
_KINDS: Any = {  # of values of a manifest; an imported model lacks some
    dict: ("tree", "checksums", "config", "recipe", "data", "versions", "imported"),
    list: ("class_names", "starts", "evaluations", "accepted_data"),
    str: ("benchmark", "target_metric"),
    int: ("num_train_examples",),
}


def check_manifest(manifest: Any) -> None:
    """Raises ValueError if a manifest describes no arrays, or a value is of another kind."""
    if not isinstance(manifest, dict) or not {"tree", "checksums"} <= manifest.keys():
        raise ValueError("its manifest describes no arrays")
    for kind, names in _KINDS.items():
        for name in names:
            if not isinstance(value := manifest.get(name, kind()), kind):
                raise ValueError(f"its manifest has {name}: {str(value)[:40]}")


def describe_arrays(tree: Any) -> dict[str, str]:
    """Returns {"params/conv_stem/kernel": "float32[7,7,3,64]", ...}, also for their shapes."""
    return {
        name: f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"
        for name, x in by_name(tree).items()
    }


def array_pieces(x: jax.Array) -> list[bytes]:
    """Returns the bytes of an array's distinct pieces on this process's devices."""
    distinct = {str(shard.index): shard.data for shard in x.addressable_shards}
    return [np.asarray(data).tobytes() for data in distinct.values()]


def checksums(tree: Any) -> dict[str, int | None]:
    """Returns {"params/conv_stem/kernel": CRC-32 of its bytes, ...}.

    The checksum is None where the array's pieces lie on several processes.
    """

    def checksum(x: jax.Array | np.ndarray) -> int | None:
        if isinstance(x, jax.Array):
            x = x.addressable_data(0) if x.is_fully_replicated else x
            if not x.is_fully_addressable:
                return None
        return zlib.crc32(np.asarray(x).tobytes())

    return {name: checksum(x) for name, x in by_name(tree).items()}


def array_differences(saved: dict[str, str], wanted: dict[str, str]) -> Iterator[str]:
    """Yields one line for each array that differs between two results of `describe_arrays`."""
    for name in sorted(saved.keys() | wanted.keys()):
        have, want = saved.get(name, "nothing"), wanted.get(name, "nothing")
        if have != want:
            yield f"{name}: the checkpoint has {have}, the config wants {want}"


@functools.cache
def versions() -> dict[str, str]:
    """Returns {library: installed version} of the libraries that shape a run."""
    installed = {}
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[library] = importlib.metadata.version(library)
    return installed


def commit() -> str:
    """The commit of this program, with "-dirty" if files were changed; "" where git knows none."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    root = pathlib.Path(__file__).parents[2]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    return ""
