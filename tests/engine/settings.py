"""Optimizers and learning rates from the defaults of configs/_loop.py, with changes."""

import math
from typing import Any

import jax

from common import keys
from configs import _loop
from engine import optim, schedules


def settings(kind: Any, **changes: Any) -> Any:
    """An `optim.Optimizer` or a `schedules.Schedule` with the defaults of every recipe."""
    config = _loop.get_config()
    with config.ignore_type():
        config.update(changes)
    return keys.read_config(kind, config)


def kernels(params: Any) -> Any:
    """True for each parameter named 'kernel'."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) == "kernel", params
    )


def ones(params: Any) -> Any:
    return jax.tree.map(lambda _: 1.0, params)


def _function(tree: Any) -> Any:
    return tree if callable(tree) else lambda params: tree


def make_optimizer(
    rate: Any, *, decayed: Any = kernels, multipliers: Any = ones, **changes: Any
) -> Any:
    """An optimizer; `rate` is a `Rate`, a schedule whose peak is unknown, or a constant."""
    if not isinstance(rate, optim.Rate):
        peak = math.nan if callable(rate) else rate
        rate = optim.Rate(rate if callable(rate) else lambda step: peak, peak, 0)
    keys = settings(optim.Optimizer, **changes)
    return optim.make(keys, rate, *map(_function, (decayed, multipliers)))


def make_rate(
    train_steps: int, *, batch_size: int = 256, num_examples: int = 256, **changes: Any
) -> optim.Rate:
    """A learning rate; an epoch is one step unless the sizes say otherwise."""
    return schedules.make(
        settings(schedules.Schedule, **changes),
        batch_size=batch_size,
        train_steps=train_steps,
        num_examples=num_examples,
    )
