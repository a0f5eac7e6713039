"""What a run is asked to do: its settings, read from the config, and its plan in steps.

`read` turns the config into `Settings`; `plan` converts their durations to steps and makes the
recipe of the train step. Neither needs devices or a workdir.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

import benchmarks
import keys
from benchmarks import base
from benchmarks.base import Benchmark
from engine import mesh as meshes
from engine import mlperf, optim, schedules
from engine.cadence import Every, to_steps
from engine.cluster import guard
from engine.parts import Parts
from engine.step import Recipe
from errors import ConfigError
from keys import BatchSize, Decay, Seed
from ops.trees import by_name


@dataclasses.dataclass(frozen=True)
class Keys:
    """The config's keys that the loop reads; configs/_loop.py says what they mean."""

    benchmark: str
    seed: Seed
    train_batch_size: BatchSize
    eval_batch_size: BatchSize
    gradient_accumulation_steps: Annotated[int, "[1, 1e6]"]
    gradient_clip_per_device: bool
    gradient_precision: Literal["float32", "bfloat16"]
    train_steps: int | str
    moving_average_decay: Decay
    moving_average_every: Annotated[int, "[1, 1e6]"]
    accept_other_data: bool
    init_from: str
    init_env: str
    init_without: str
    freeze: str
    optimizer: optim.Optimizer
    schedule: schedules.Schedule
    steps_per_eval: int | str
    eval_offset: int | str
    stop_at_target: bool
    patience: Annotated[int, "[0, 1e6]"]
    steps_per_checkpoint: int | str
    keep_checkpoints: Annotated[int, "[1, 1e6]"]
    log_step_count_steps: int | str
    profile_steps: str
    tracker: Literal["", "wandb"]
    check_devices_every: Annotated[int, "[0, 1e9]"]
    limits: guard.Limits
    compilation_cache: str
    mlperf: mlperf.Settings


@dataclasses.dataclass(frozen=True)
class Settings(Keys):
    """What a run was asked to do.

    Attributes:
      workdir: folder, local or gs://, for everything that the run writes; "" for --mode=preflight.
      recipe: every value of the config, nested as there: for `config.json` and for checkpoints.
      load_benchmark: makes the benchmark, with a folder that may keep facts about the data.
      origin: {"file": the recipe's file, "changes": {key: [the file's value, this run's]}}; {}
        where it is not known.
    """

    workdir: str
    recipe: Mapping[str, Any]
    load_benchmark: Callable[[str], Benchmark]
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def lacks_weights(self) -> str:
        """What is missing where the recipe expects another model's weights; "" if nothing is."""
        if self.init_from or not self.init_env:
            return ""
        return (
            "all weights, the backbone's too, begin at random, and the score will be lower: "
            f"neither --config.init_from nor ${self.init_env} names a trained model"
        )


def read(config: Any, workdir: str = "", origin: Mapping[str, Any] | None = None) -> Settings:
    """Reads and checks the config; `origin` as in `Settings`.

    Raises:
      ConfigError: a key is missing, or a value cannot work.
    """
    values = keys.read(Keys, config)
    if values.gradient_clip_per_device and not values.optimizer.gradient_clip_norm:
        raise ConfigError(
            "config.gradient_clip_per_device=True needs a norm: set config.gradient_clip_norm"
        )
    fields = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    return Settings(
        **fields,
        workdir=workdir,
        recipe=config.to_dict(),
        load_benchmark=functools.partial(benchmarks.load, config),
        origin=origin or {},
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run in steps, which follows from its settings and the number of training examples."""

    num_examples: int
    recipe: Recipe
    eval_every: Every  # the last step is evaluated in any case
    save_every: Every
    log_every: Every


def plan(settings: Settings, benchmark: Benchmark, num_examples: int) -> Plan:
    """Converts durations to steps, for so many training examples; tells the benchmark how many.

    Raises:
      ConfigError: a duration, schedule or optimizer cannot work. The recipe's functions of
        parameters raise it for parts that the model lacks.
    """
    sizes: Any = {"batch_size": settings.train_batch_size, "num_examples": num_examples}

    def every(key: str) -> Every:
        return Every.parse(getattr(settings, key), **sizes, name=key)

    total = to_steps(settings.train_steps, **sizes, name="train_steps")
    every_average = settings.moving_average_every
    # train.py plans with one example before it counts them.
    if settings.moving_average_decay and every_average > total and num_examples > 1:
        raise ConfigError(
            f"config.moving_average_every={every_average}: the run has only {total} steps, so that "
            "the average would stay at the initial weights"
        )
    benchmark.planned(total)
    rate = schedules.make(settings.schedule, train_steps=total, **sizes)
    clip = settings.optimizer.gradient_clip_norm if settings.gradient_clip_per_device else 0.0
    optimizer = settings.optimizer
    if clip:  # each device clips its own gradient instead
        optimizer = dataclasses.replace(optimizer, gradient_clip_norm=0.0)

    parts = _parts(settings)

    def of_group(attribute: str) -> Callable[[Any], Any]:
        def tree(params: Any) -> Any:
            for named in parts.values():
                named.check(by_name(params))
            groups = jax.tree_util.tree_map_with_path(
                lambda path, _: _group(benchmark, path, parts.get("freeze", ())), params
            )
            if settings.freeze and not any(group.rate for group in jax.tree.leaves(groups)):
                raise ConfigError(f"config.freeze={settings.freeze!r} leaves nothing to train")
            return jax.tree.map(lambda group: getattr(group, attribute), groups)

        return tree

    recipe = Recipe(
        seed=settings.seed,
        total_steps=total,
        learning_rate=rate,
        optimizer=optim.make(optimizer, rate, of_group("decayed"), of_group("rate")),
        accumulation=settings.gradient_accumulation_steps,
        ema_decay=settings.moving_average_decay,
        device_clip=clip,
        sum_dtype=jnp.bfloat16 if settings.gradient_precision == "bfloat16" else None,
        ema_every=settings.moving_average_every,
        frozen=lambda params: jax.tree.map(lambda rate: rate == 0, of_group("rate")(params)),
    )
    eval_every = every("steps_per_eval").since(settings.eval_offset, **sizes, name="eval_offset")
    save_every, log_every = every("steps_per_checkpoint"), every("log_step_count_steps")
    return Plan(num_examples, recipe, eval_every, save_every, log_every)


def _parts(settings: Settings) -> dict[str, Parts]:
    """The parameters that config keys name, by key; keys that name none are left out."""
    texts = {key: getattr(settings, key) for key in ("freeze", "init_without")}
    if not any(texts.values()):
        return {}
    return {key: Parts(key, text) for key, text in texts.items() if text}


def _group(benchmark: Benchmark, path: Any, frozen: Container[str]) -> base.Group:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name in frozen:
        return base.Group(rate=0.0)
    label = benchmark.label(name)
    if label not in benchmark.groups:
        known = ", ".join(map(repr, benchmark.groups))
        raise ConfigError(f"{name} has the label {label!r}, but the benchmark's groups are {known}")
    return benchmark.groups[label]


def is_due(every: Every, step: int) -> bool:
    """Whether it is time, on every process alike; call it once per step."""
    if not every.by_clock or jax.process_count() == 1:
        return every.due(step)
    # Hosts' clocks differ; asking each other at every step would cost too much.
    return step % 10 == 0 and bool(meshes.broadcast(every.due(step)))
