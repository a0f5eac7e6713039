"""Loads the weights of another model, for `config.init_from`, and puts them into this one.

`Adoption` says which arrays are taken and which are new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from common.errors import CheckpointError, parse_json, some
from common.trees import Parts, by_name
from engine.checkpoint import Checkpointer
from engine.manifest import array_differences, check_manifest, describe_arrays


class Weights(NamedTuple):
    """The weights of a checkpoint as NumPy arrays: their average where the run kept one."""

    source: str  # the folder of the checkpoint
    params: Any
    model_state: Any


def load_initial_weights(path: str, read_foreign: Callable[[str], Any]) -> Weights:
    """Loads the weights of a checkpoint, or of another library's file.

    Args:
      path: the value of `config.init_from`.
      read_foreign: the benchmark's `read_foreign`.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged.
      DataError: the other library's file cannot be used.
    """
    foreign = read_foreign(path)
    return Weights(*foreign[:3]) if foreign else load_weights(path)


def load_weights(path: str) -> Weights:
    """Loads the weights of a checkpoint; `find_checkpoint` says what `path` may be.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    checkpoints, step = find_checkpoint(path, "config.init_from")
    weights = read_step(checkpoints, step)
    checkpoints.close()
    return weights


def find_checkpoint(path: str, name: str) -> tuple[Checkpointer, int]:
    """Opens the folder of checkpoints that the user names; returns it with the step to read.

    Args:
      path: a workdir, whose newest checkpoint is taken, or WORKDIR/checkpoints/STEP; local or
        gs://.
      name: the flag or config key that `path` is from, for messages.

    Raises:
      CheckpointError: there is no such checkpoint.
    """
    folder, last = split_path(path)
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


def split_path(path: str) -> tuple[str, int | None]:
    """The folder of checkpoints that a path means, and the step if it is WORKDIR/checkpoints/STEP.

    A workdir may itself be named as a number.
    """
    path = path.rstrip("/")
    parent, _, last = path.rpartition("/")
    if last.isdigit() and parent.rpartition("/")[2] == "checkpoints":
        return parent, int(last)
    return f"{path}/checkpoints", None


def peek_manifest(path: str) -> dict[str, Any] | None:
    """The manifest of the checkpoint that `find_checkpoint` would find; None if there is none.

    This needs no other host and no Orbax. A manifest that cannot be read is None as well: whoever
    restores the checkpoint says why.
    """
    parent, step = split_path(path)
    folder = epath.Path(parent)
    try:
        if step is None:
            step = max(int(p.name) for p in folder.iterdir() if p.name.isdigit())
        manifest = parse_json((folder / str(step) / "manifest/metadata").read_bytes())
        check_manifest(manifest)
        return manifest if {"benchmark", "config"} <= manifest.keys() else None
    except Exception:  # each file system raises its own types
        return None


def read_step(checkpoints: Checkpointer, step: int) -> Weights:
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
    """Returns nested dicts of NumPy arrays with the shapes and dtypes that `describe_arrays` wrote.

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


class Adoption(NamedTuple):
    """Which arrays `adopt` has taken from another model; names such as "params/head/kernel"."""

    taken: list[str]
    part: list[str]  # of this model, with some of the other's values
    new: list[str]  # of this model, with their initial values
    left: list[str]  # of the other model, without a place here, or not taken as they are

    @property
    def is_complete(self) -> bool:
        """Whether all of the other model's parameters that have a place here were taken."""
        changed = {*self.new, *self.part} & {*self.left}
        return not any(name.startswith("params/") for name in changed)

    @property
    def summary(self) -> str:
        """One line."""

        def listed(names: list[str]) -> str:
            return f" ({some(names)})" if names else ""

        part = f"{len(self.part)} taken in part{listed(self.part)}, " if self.part else ""
        return (
            f"{len(self.taken)} arrays taken, {part}{len(self.new)} new{listed(self.new)}, "
            f"{len(self.left)} left{listed(self.left)}"
        )

    @property
    def listing(self) -> str:
        """One line for each array."""
        groups = self._asdict().items()
        return "".join(f"{what}\t{name}\n" for what, names in groups for name in names)


def adopt(
    merge: Callable[[Any, Any, Any], tuple[Any, Any]],
    params: Any,
    model_state: Any,
    weights: Weights,
    new: Parts,
) -> tuple[Any, Any, Adoption]:
    """Puts another model's weights into this one's initial arrays; all are on the host.

    Args:
      merge: the benchmark's `adopt`.
      params: this model's initial parameters.
      model_state: this model's initial state.
      weights: the other model's.
      new: parts of this model that keep their initial arrays.

    Returns:
      (params, model_state, adoption).

    Raises:
      CheckpointError: too few of the arrays fit, or `merge` made arrays of another shape.
    """
    theirs = {"params": weights.params, "model_state": weights.model_state}
    ours = {"params": params, "model_state": model_state}
    try:
        mixed = dict(zip(ours, merge(params, model_state, theirs), strict=True))
    except CheckpointError as error:
        raise CheckpointError(f"config.init_from={weights.source}: {error}") from error
    mixed = jax.tree_util.tree_map_with_path(
        lambda path, own, other: (
            own if jax.tree_util.keystr(path[1:], simple=True, separator="/") in new else other
        ),
        *(ours, mixed),
    )
    wrong = list(array_differences(describe_arrays(mixed), describe_arrays(ours)))
    if wrong:
        raise CheckpointError(f"config.init_from={weights.source}: {wrong[0]}")
    before, after, others = by_name(ours), by_name(mixed), by_name(theirs)
    used, known = ({id(leaf) for leaf in leaves.values()} for leaves in (after, others))
    groups: dict[str, list[str]] = {"taken": [], "part": [], "new": []}
    for name, leaf in after.items():
        kind = "new" if leaf is before[name] else "taken" if id(leaf) in known else "part"
        groups[kind].append(name)
    left = [name for name, leaf in others.items() if id(leaf) not in used]
    adoption = Adoption(**groups, left=left)
    if not any(name.startswith("params/") for name in adoption.taken):
        raise CheckpointError(
            f"config.init_from={weights.source}: none of its {len(adoption.left)} arrays has the "
            "name and the shape of a parameter of this model; is it another architecture?"
        )
    return mixed["params"], mixed["model_state"], adoption
