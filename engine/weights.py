"""Loads the weights of another model, for `config.init_from`."""

from __future__ import annotations

from typing import Any, NamedTuple

from etils import epath

from engine.checkpoint import Checkpointer
from errors import CheckpointError


class Weights(NamedTuple):
    """The weights of a checkpoint as NumPy arrays: their average where the run kept one."""

    source: str  # the folder of the checkpoint
    params: Any
    model_state: Any


def load_weights(path: str) -> Weights:
    """Loads the weights of a checkpoint.

    Args:
      path: a workdir, whose newest checkpoint is taken, or WORKDIR/checkpoints/STEP; local or
        gs://.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    path = path.rstrip("/")
    parent, _, name = path.rpartition("/")
    folder = parent if name.isdigit() else f"{path}/checkpoints"
    if not epath.Path(folder).exists():
        raise CheckpointError(
            f"config.init_from={path}: there is no {folder}; give a workdir that has checkpoints, "
            "or WORKDIR/checkpoints/STEP"
        )
    checkpoints = Checkpointer(folder, keep=1, best=None)
    steps = checkpoints.steps()
    step = int(name) if name.isdigit() else max(steps, default=0)
    if step not in steps:
        raise CheckpointError(f"config.init_from={path}: {folder} has the checkpoints {steps}")
    model = checkpoints.load_model(step)
    checkpoints.close()
    weights = model.get("ema") or model
    return Weights(f"{folder}/{step}", weights["params"], weights.get("model_state", {}))
