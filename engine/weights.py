"""Loads the weights of another model, for `config.init_from`."""

from __future__ import annotations

from typing import Any, NamedTuple

from etils import epath

from engine.checkpoint import Checkpointer
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
        raise CheckpointError(
            f"{name}={path}: there is no {folder}; give a workdir that has checkpoints, "
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
        return manifest if {"benchmark", "config"} <= manifest.keys() else None
    except Exception:  # each file system raises its own types
        return None


def read(checkpoints: Checkpointer, step: int) -> Weights:
    """Reads the weights of one step.

    Raises:
      CheckpointError: the checkpoint is damaged.
    """
    model = checkpoints.load_model(step)
    weights = model.get("ema") or model
    source = f"{checkpoints.directory}/{step}"
    return Weights(source, weights["params"], weights.get("model_state", {}))
