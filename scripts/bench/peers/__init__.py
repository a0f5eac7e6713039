"""Train steps to compare ours with, written in plain flax and optax without special optimisations.

`resnet` and `transformer` are the steps of flax's examples imagenet and wmt, rewritten. `gnmt`,
`ssd` and `mask_rcnn` are the plain forms of the same networks and losses. Each module has
`make(benchmark, freeze) -> Peer`; `scripts.bench.peers.step` makes a train step of it.

Dropout is drawn with the generator "rbg", as trainers on TPUs set it.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from benchmarks.base import Benchmark, Spec
from common.errors import ConfigError

NAMES = ("resnet", "transformer", "gnmt", "ssd", "mask_rcnn")


class Peer(NamedTuple):
    """The functions and the optimizer that a peer is trained with."""

    init: Callable[[jax.Array], tuple[Any, Any]]  # key -> (params, model_state)
    # (params, model_state, batch, key) -> (loss f32[], ({name: metric f32[]}, model_state)), all of
    # one device's share.
    loss: Callable[[Any, Any, Mapping[str, jax.Array], jax.Array], tuple[jax.Array, Any]]
    optimizer: optax.GradientTransformation
    # The global batch size -> the shapes of each kind of batch that the benchmark has.
    specs: Callable[[int], tuple[Spec, ...]]


def check(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a recipe whose benchmark has no peer, or whose peer lacks a part."""
    if (name := config["benchmark"]) not in NAMES:
        raise ConfigError(f"--peer: {name} has none; these have: {', '.join(NAMES)}")


def load(recipe: Mapping[str, Any], benchmark: Benchmark) -> Peer:
    """The peer of a benchmark, at the sizes of its settings; ConfigError if it has none.

    `recipe` are the values of the config; `freeze` is the only key of the loop that a peer reads.
    """
    check(recipe)
    package = importlib.import_module(f"{__name__}.{recipe['benchmark']}")
    return package.make(benchmark, recipe["freeze"])
