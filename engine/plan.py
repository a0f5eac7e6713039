"""Settings, Plan and Programs of a run, before it is opened.

`read_settings` turns the config into `Settings`. `make_plan` converts their durations to steps and
makes the optimizer and the learning rate: the `Plan`. `Programs` are the train step, the predict
step and the initial state on some devices. Nothing here needs data or a workdir, so that
--mode=preflight plans and compiles what a run does. `engine.run.Run` is the opened run.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import benchmarks
from benchmarks import base
from benchmarks.base import BATCH_AXES, Benchmark, Target
from common import keys
from common.errors import ConfigError
from common.keys import BatchSize, Decay, Seed
from common.trees import Parts, by_name
from engine import compiler, optim, schedules, sharding, step
from engine.cadence import Every, to_steps
from engine.cluster import guard
from engine.report.history import lower_is_better
from engine.step import StepSettings, TrainState


@dataclasses.dataclass(frozen=True)
class LogKeys:
    """The keys of `config.mlperf`; configs/_loop.py says what they mean."""

    format: Literal["", "mllog", "v0.5"]
    org: str
    clear_caches: bool
    platform: str
    division: Literal["closed", "open"]
    status: Literal["cloud", "onprem", "preview", "research"]


@dataclasses.dataclass(frozen=True)
class RunKeys:
    """The keys of the run itself: batches, durations, weights to begin with, reports."""

    benchmark: str
    seed: Seed
    train_batch_size: BatchSize
    eval_batch_size: BatchSize
    gradient_accumulation_steps: Annotated[int, "[1, 1e6]"] | Literal["auto"]
    gradient_precision: Literal["float32", "bfloat16"]
    train_steps: int | str
    moving_average_decay: Decay
    moving_average_every: Annotated[int, "[1, 1e6]"]
    accept_other_data: bool
    init_from: str
    init_env: str
    init_without: str
    freeze: str
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
    compilation_cache: str
    mlperf: LogKeys
    # Checkpoints of before 0.4.0 have none of these.
    best_by: str = dataclasses.field(default="", kw_only=True)
    steps_of: str = dataclasses.field(default="", kw_only=True)
    train_fraction: Annotated[float, "(0, 1]"] = dataclasses.field(default=1.0, kw_only=True)
    train_fraction_seed: Seed = dataclasses.field(default=0, kw_only=True)


@dataclasses.dataclass(frozen=True)
class LoopKeys(guard.Limits, schedules.Schedule, optim.Optimizer, RunKeys):
    """The config's keys that the loop reads; configs/_loop.py says what they mean."""


@dataclasses.dataclass(frozen=True)
class Settings(LoopKeys):
    """What a run was asked to do."""

    workdir: str  # folder for everything that the run writes; "" for --mode=preflight
    config: Mapping[str, Any]  # every value, nested: for `config.json` and for checkpoints
    load_benchmark: Callable[[str], Benchmark]  # its argument: a folder for facts about the data
    # {"file": the recipe's file, "changes": {key: [the file's value, this run's]}}, if it is known.
    origin: Mapping[str, Any]

    @property
    def lacks_weights(self) -> str:
        """What is missing where the recipe expects another model's weights; "" if nothing is."""
        if self.init_from or not self.init_env:
            return ""
        return (
            "all weights, the backbone's too, begin at random, and the score will be lower: "
            f"neither --config.init_from nor ${self.init_env} names a trained model"
        )


def read_settings(config: Any, workdir: str = "", origin: Mapping[str, Any] = {}) -> Settings:
    """Reads and checks the config; `origin` says which file it is from, and what was changed."""
    values = keys.read_config(LoopKeys, config)
    if values.gradient_clip_per_device and not values.gradient_clip_norm:
        raise ConfigError(
            "config.gradient_clip_per_device=True needs a norm: set config.gradient_clip_norm"
        )
    if values.gradient_accumulation_steps == "auto" and values.mlperf.format:
        raise ConfigError(
            "config.gradient_accumulation_steps='auto': MLPerf's log says the number before it is "
            "found; give one, or set config.mlperf.format=''"
        )
    if values.train_fraction < 1 and values.mlperf.format:
        raise ConfigError(
            f"config.train_fraction={values.train_fraction:g}: MLPerf's rules want all training "
            "data; leave it out, or set config.mlperf.format=''"
        )
    load = functools.partial(benchmarks.load, config)
    return Settings(
        **vars(values), workdir=workdir, config=config.to_dict(), load_benchmark=load, origin=origin
    )


def targets_of(settings: Settings, benchmark: Benchmark) -> tuple[Target, ...]:
    """The targets of a run; the first one is the score that chooses its best checkpoint.

    If `config.best_by` is no target, it has the value 0, so that nothing has to reach it.
    """
    targets, by = benchmark.targets, settings.best_by
    percent = targets[0].percent and not lower_is_better(by)
    first = [t for t in targets if t.metric == by] or [Target(by, 0.0, percent)] * bool(by)
    return (*first, *(target for target in targets if target.metric != by))


def intervals(settings: Settings, sizes: Any) -> list[Every]:
    """When a run evaluates, saves and logs."""
    keys = "steps_per_eval", "steps_per_checkpoint", "log_step_count_steps"
    evals, *others = (Every.parse(getattr(settings, key), **sizes, name=key) for key in keys)
    return [evals.since(settings.eval_offset, **sizes, name="eval_offset"), *others]


def _is_due(every: Every, step: int) -> bool:
    """Whether it is time, on every process alike; call it once per step."""
    if not every.by_clock or jax.process_count() == 1:
        return every.due(step)
    # Hosts' clocks differ; asking each other at every step would cost too much.
    return step % 10 == 0 and bool(sharding.broadcast(every.due(step)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run in steps, which follows from its settings and the number of training examples."""

    num_examples: int
    total_steps: int
    learning_rate: optim.Rate
    step_settings: StepSettings
    eval_every: Every  # the last step is evaluated in any case
    save_every: Every
    log_every: Every

    # Each is asked once per step, on every process.

    def logs(self, step: int) -> bool:
        """Whether an interval of the log ends at a step; the last one always does."""
        return _is_due(self.log_every, step) or step == self.total_steps

    def saves(self, step: int) -> bool:
        """Whether a step is saved; the last one always is."""
        return _is_due(self.save_every, step) or step == self.total_steps

    def evaluates(self, step: int) -> bool:
        """Whether a step is evaluated; the last one always is."""
        return _is_due(self.eval_every, step) or step == self.total_steps

    @property
    def evaluations(self) -> int:
        """How many evaluations the run has."""
        number, due = 1, self.eval_every.next_after(0)  # the last step's
        while due is not None and due < self.total_steps:
            number, due = number + 1, self.eval_every.next_after(due)
        return number


def make_plan(settings: Settings, benchmark: Benchmark, num_examples: int) -> Plan:
    """Converts durations to steps, for so many training examples; tells the benchmark how many.

    ConfigError if a duration, schedule or optimizer cannot work. The step's functions
    of parameters raise it for parts that the model lacks.
    """
    sizes: Any = {"batch_size": settings.train_batch_size, "num_examples": num_examples}
    eval_every, save_every, log_every = intervals(settings, sizes)
    total = to_steps(settings.train_steps, **sizes, name="train_steps")
    every_average = settings.moving_average_every
    if settings.moving_average_decay and every_average > total:
        raise ConfigError(
            f"config.moving_average_every={every_average}: the run has only {total} steps, so the "
            "average would stay at the initial weights: give at most that many"
        )
    benchmark.set_total_steps(total)
    rate = schedules.make(settings, train_steps=total, **sizes)

    # The parameters that config keys name.
    texts = {"freeze": settings.freeze, "init_without": settings.init_without}
    parts = {key: Parts(key, text) for key, text in texts.items() if text}

    def of_group(attribute: str) -> Callable[[Any], Any]:
        def tree(params: Any) -> Any:
            names = by_name(params)
            for named in parts.values():
                named.check(names)
            groups = [_group(benchmark, name, parts.get("freeze", ())) for name in names]
            if settings.freeze and not any(group.rate for group in groups):
                raise ConfigError(f"config.freeze={settings.freeze!r} leaves nothing to train")
            values = [getattr(group, attribute) for group in groups]
            return jax.tree.unflatten(jax.tree.structure(params), values)

        return tree

    step_settings = StepSettings(
        optimizer=optim.make(settings, rate, of_group("decayed"), of_group("rate")),
        ema_decay=settings.moving_average_decay,
        device_clip=settings.gradient_clip_norm if settings.gradient_clip_per_device else 0.0,
        sum_dtype=jnp.bfloat16 if settings.gradient_precision == "bfloat16" else None,
        ema_every=settings.moving_average_every,
        frozen=lambda params: jax.tree.map(lambda rate: rate == 0, of_group("rate")(params)),
    )
    return Plan(num_examples, total, rate, step_settings, eval_every, save_every, log_every)


def _group(benchmark: Benchmark, name: str, frozen: Container[str]) -> base.Group:
    if name in frozen:
        return base.Group(rate=0.0)
    label = benchmark.label(name)
    if label not in benchmark.groups:
        names = ", ".join(map(repr, benchmark.groups))
        raise ConfigError(f"{name} has the label {label!r}, but the benchmark's groups are {names}")
    return benchmark.groups[label]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a run on some devices."""

    settings: Settings
    benchmark: Benchmark
    mesh: Mesh
    micro_batches: int = 1  # of a step; until `engine.fit` finds how many fit, the fewest

    @classmethod
    def make(
        cls,
        settings: Settings,
        cache_dir: str = "",
        devices: Sequence[Any] | None = None,
        trains: bool = True,
    ) -> Self:
        """Checks the BatchNorm span and the batch sizes for `devices` (None: this run's).

        Programs that do not train need neither the span nor the training batch.
        """
        benchmark, size = settings.load_benchmark(cache_dir), settings.train_batch_size
        parts = 1
        if trains:
            span, asked = str(benchmark.bn_span), settings.gradient_accumulation_steps
            if asked != "auto":
                parts = asked
            elif "/" in span:  # it says how many images a forward pass has
                parts = max(1, size // sharding.parse_image_span(span)[1])
            if "/" in span:
                sharding.check_image_span(span, size, parts)
            mesh = sharding.make(BATCH_AXES, benchmark.bn_span, devices)
            sharding.check_batch(mesh, "train_batch_size", size, parts)
        else:
            mesh = sharding.make(BATCH_AXES, 1, devices)
        sharding.check_batch(mesh, "eval_batch_size", settings.eval_batch_size)
        return cls(settings, benchmark, mesh, parts)

    @property
    def examples_per_pass(self) -> int:
        """The size of the global batch of one forward pass."""
        return self.settings.train_batch_size // self.micro_batches

    @property
    def norm_examples(self) -> int:
        """How many examples of a forward pass share the statistics of BatchNorm."""
        return self.examples_per_pass * self.mesh.devices.shape[1] // self.mesh.size

    def check_random_start(self) -> None:
        """Raises ConfigError if a run without `config.init_from` would keep random weights."""
        if self.settings.config.get("dataset") == benchmarks.FAKE:
            return
        if freeze := self.settings.freeze:
            raise ConfigError(
                f"config.freeze={freeze!r} would freeze random weights: "
                f"give --config.init_from={self.benchmark.published}"
            )
        self.benchmark.check_random_start(self.norm_examples)

    def batch_specs(self, split: str, size: int = 0) -> tuple[Any, ...]:
        """Every shape of a global batch of `size` examples, with shardings; 0: as configured."""
        size = size or getattr(self.settings, f"{split}_batch_size")
        specs = self.benchmark.batch_spec(split, size)
        return tuple(sharding.abstract(spec, sharding.batch_sharding(self.mesh)) for spec in specs)

    def abstract_state(self, plan: Plan) -> TrainState:
        """The state as ShapeDtypeStructs, replicated."""
        make = _initial(self.benchmark.init, plan.step_settings, self.mesh)
        return sharding.abstract(make.eval_shape(self._seed_spec), sharding.replicated(self.mesh))

    def abstract_totals(self, plan: Plan, state: TrainState) -> Any:
        """The totals of the train step as ShapeDtypeStructs, replicated."""
        arguments = self._seed_spec, state, self.batch_specs("train")[0]
        loss, parts = self.benchmark.loss, self.micro_batches
        return step.totals_spec(loss, self.mesh, plan.step_settings, arguments, parts)

    @property
    def _seed_spec(self) -> jax.ShapeDtypeStruct:
        """The seed's shape; with the sharding of `seed()`, so that jax takes the same trace."""
        return jax.ShapeDtypeStruct((), jnp.uint32, sharding=sharding.replicated(self.mesh))

    def initial_state(self, plan: Plan) -> TrainState:
        """The state before the first step, on the devices."""
        return _initial(self.benchmark.init, plan.step_settings, self.mesh)(self.seed())

    def seed(self) -> jax.Array:
        """The seed u32[] on all devices, for the train step."""
        value = np.uint32(self.settings.seed)
        return jax.make_array_from_callback((), sharding.replicated(self.mesh), lambda _: value)

    def zeros(self, totals: Any) -> Callable[[], Any]:
        """A compiled function that makes totals of this form, all zero, on the devices."""
        return jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), totals),
            out_shardings=sharding.replicated(self.mesh),
        )

    def lower_train(self, plan: Plan, state: TrainState, totals: Any) -> list[Any]:
        """The train step, lowered for each shape of its batches; `totals` are `abstract_totals`."""
        options = compiler.options(self.mesh, self.benchmark.larger_windows)
        train = step.make_train_step(
            self.benchmark.loss, self.mesh, plan.step_settings, options, self.micro_batches
        )
        arguments = self._seed_spec, state, totals
        return step.lower(train, arguments, self.batch_specs("train"))

    def lower_predict(self, state: TrainState, size: int = 0) -> list[Any]:
        """The predict step, lowered for each shape of the evaluation batches of `size` examples."""
        weights, specs = evaluated_weights(state), self.batch_specs("eval", size)
        predict_step = step.make_predict_step(self.benchmark.predict, self.mesh)
        return step.lower(predict_step, weights, specs)


@functools.lru_cache(1)
def _initial(init: Callable[..., Any], settings: StepSettings, mesh: Mesh) -> Any:
    """The jitted function from a seed to the initial state, so that it is traced once."""
    make = functools.partial(step.init_state, init, settings)
    options = compiler.options(mesh, runs_once=True)
    return jax.jit(make, out_shardings=sharding.replicated(mesh), compiler_options=options)


def evaluated_weights(state: TrainState) -> tuple[Any, Any]:
    """(params, model_state) to evaluate: their average where the run keeps one."""
    if state.ema:
        return state.ema["params"], state.ema["model_state"]
    return state.params, state.model_state
