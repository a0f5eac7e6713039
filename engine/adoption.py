"""Begins a run with another model's weights: which arrays are taken, which are new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from engine.manifest import describe, differences
from engine.parts import Parts
from engine.weights import Weights, load_weights
from errors import CheckpointError, some
from ops.trees import by_name


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


def load(path: str, read_foreign: Callable[[str], Any]) -> Weights:
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
    wrong = list(differences(describe(mixed), describe(ours)))
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
