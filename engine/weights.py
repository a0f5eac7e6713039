"""Loads the weights of another model, for `config.init_from`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from etils import epath

from engine.checkpoint import Checkpointer
from engine.manifest import check
from errors import CheckpointError, parse_json


class Weights(NamedTuple):
    """The weights of a checkpoint as NumPy arrays: their average where the run kept one."""

    source: str  # the folder of the checkpoint
    params: Any
    model_state: Any


def load_weights(path: str) -> Weights:
    """Loads the weights of a checkpoint; `find` says what `path` may be.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    checkpoints, step = find(path, "config.init_from")
    weights = read(checkpoints, step)
    checkpoints.close()
    return weights


def split(path: str) -> tuple[str, int | None]:
    """The folder of checkpoints that a path means, and the step if it is WORKDIR/checkpoints/STEP.

    A workdir may itself be named as a number.
    """
    path = path.rstrip("/")
    parent, _, last = path.rpartition("/")
    if last.isdigit() and parent.rpartition("/")[2] == "checkpoints":
        return parent, int(last)
    return f"{path}/checkpoints", None


def find(path: str, name: str) -> tuple[Checkpointer, int]:
    """Opens the folder of checkpoints that a person names; returns it with the step to read.

    Args:
      path: a workdir, whose newest checkpoint is taken, or WORKDIR/checkpoints/STEP; local or
        gs://.
      name: the flag or config key that `path` is from, for messages.

    Raises:
      CheckpointError: there is no such checkpoint.
    """
    folder, last = split(path)
    if not epath.Path(folder).exists():
        missing = folder if epath.Path(path).exists() else path
        raise CheckpointError(
            f"{name}={path}: there is no {missing}; give a workdir that has checkpoints, "
            "WORKDIR/checkpoints/STEP, or weights of another library"
        )
    checkpoints = Checkpointer(folder, keep=1, best=None)
    steps = checkpoints.steps()
    step = max(steps, default=0) if last is None else last
    if step not in steps:
        raise CheckpointError(f"{name}={path}: {folder} has the checkpoints {steps}")
    return checkpoints, step


def peek(path: str) -> dict[str, Any] | None:
    """The manifest of the checkpoint that `find` would find; None if there is none.

    This needs no other host and no Orbax. A manifest that cannot be read is None as well: whoever
    restores the checkpoint says why.
    """
    parent, step = split(path)
    folder = epath.Path(parent)
    try:
        if step is None:
            step = max(int(p.name) for p in folder.iterdir() if p.name.isdigit())
        manifest = parse_json((folder / str(step) / "manifest/metadata").read_bytes())
        check(manifest)
        return manifest if {"benchmark", "config"} <= manifest.keys() else None
    except Exception:  # each file system raises its own types
        return None


def read(checkpoints: Checkpointer, step: int) -> Weights:
    """Reads the weights of one step.

    Raises:
      CheckpointError: the checkpoint is damaged.
    """
    model = load_model(checkpoints, step)
    weights = model["ema"] or model
    source = f"{checkpoints.directory}/{step}"
    return Weights(source, weights["params"], weights["model_state"])


def load_model(checkpoints: Checkpointer, step: int) -> dict[str, Any]:
    """Loads the item "model" of a step as it was saved, as NumPy arrays.

    Raises:
      CheckpointError: the checkpoint is damaged, or another program wrote it.
    """
    empty = {"params": {}, "model_state": {}, "ema": {}}
    model = empty | placeholders(checkpoints.manifest(step)["tree"]["model"])
    if model["ema"]:
        model["ema"] = {"model_state": {}} | model["ema"]
    return checkpoints.restore(step, {"model": model})["model"]


def placeholders(description: dict[str, str]) -> dict[str, Any]:
    """Returns nested dicts of NumPy arrays with the shapes and dtypes that `describe` wrote.

    Every array is a view of a single zero, so it takes no memory.
    """
    tree: dict[str, Any] = {}
    for name, text in description.items():
        dtype, _, shape = text.removesuffix("]").partition("[")
        sizes = tuple(map(int, filter(None, shape.split(","))))
        *parents, leaf = name.split("/")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = np.broadcast_to(np.zeros((), jnp.dtype(dtype)), sizes)
    return tree
