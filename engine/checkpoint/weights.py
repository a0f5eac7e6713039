"""Reads the weights of a checkpoint, and puts another model's weights into this one.

`Adoption` says which arrays are taken and which are new.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.errors import CheckpointError, some
from common.trees import Parts, by_name
from engine.checkpoint.manager import Checkpointer


class Weights(NamedTuple):
    """The weights of a checkpoint as NumPy arrays: their average where the run kept one."""

    source: str  # the folder of the checkpoint
    params: Any
    model_state: Any


def read_step(checkpoints: Checkpointer, step: int) -> Weights:
    """Reads the weights of one step."""
    description = checkpoints.manifest(step)["tree"]["model"]
    model = {"params": {}, "model_state": {}, "ema": {}} | placeholders(description)
    if model["ema"]:
        model["ema"] = {"model_state": {}} | model["ema"]
    model = checkpoints.restore(step, {"model": model})["model"]
    weights, source = model["ema"] or model, f"{checkpoints.directory}/{step}"
    return Weights(source, weights["params"], weights["model_state"])


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
    """The names of arrays that `adopt` has taken or not, such as "params/head/kernel"."""

    taken: list[str]
    part: list[str]  # arrays of this model with some of the other model's values
    new: list[str]  # arrays of this model with their initial values
    left: list[str]  # arrays of the other model that are not taken, or only in part

    @property
    def is_complete(self) -> bool:
        """Whether all parameters that both models have were taken."""
        changed = {*self.new, *self.part} & {*self.left}
        return not any(name.startswith("params/") for name in changed)

    @property
    def summary(self) -> str:
        """The numbers of arrays, and some names, in one line."""
        counts = {"taken in part": self.part, "new": self.new, "left": self.left}
        parts = [f"{len(self.taken)} arrays taken"] + [
            f"{len(names)} {what}" + (f" ({some(names)})" if names else "")
            for what, names in counts.items()
            if names or what != "taken in part"
        ]
        return ", ".join(parts)

    @property
    def listing(self) -> str:
        """One line for each array, with what happened to it."""
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

    `merge` is the benchmark's `adopt`; `params` and `model_state` are this model's, and its parts
    `new` keep their initial arrays. Returns (params, model_state, adoption).
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
        ours,
        mixed,
    )
    before, after, others = by_name(ours), by_name(mixed), by_name(theirs)
    used, known = ({id(leaf) for leaf in leaves.values()} for leaves in (after, others))
    groups: dict[str, list[str]] = {"taken": [], "part": [], "new": []}
    for name, leaf in after.items():
        kind = "new" if leaf is before[name] else "taken" if id(leaf) in known else "part"
        groups[kind].append(name)
    left = [name for name, leaf in others.items() if id(leaf) not in used]
    if not any(name.startswith("params/") for name in groups["taken"]):
        raise CheckpointError(
            f"config.init_from={weights.source}: none of its {len(left)} arrays has the name and "
            "the shape of a parameter of this model; is it another architecture?"
        )
    return mixed["params"], mixed["model_state"], Adoption(**groups, left=left)
