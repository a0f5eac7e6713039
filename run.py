"""What a run is: its settings, its plan in steps, the programs it compiles, its initial state.

Training, evaluation and the modes (doctor, preflight, replay) all begin here. `read` turns the
config into `Settings`; `Run.open` adds the devices and the workdir.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

import benchmarks
import keys
from benchmarks import base
from benchmarks.base import BATCH_AXES, Benchmark
from engine import compile_cache, compiler, environment, mlperf, optim, paths, schedules, step
from engine import mesh as meshes
from engine.adoption import adopt
from engine.cadence import Every, to_steps
from engine.checkpoint import Checkpointer
from engine.cluster import guard, hostlog, preemption, processes, stalls, watchdog
from engine.parts import Parts
from engine.step import Recipe, TrainState
from engine.weights import Weights, load_weights
from errors import CheckpointError, ConfigError, DeviceError
from keys import BatchSize, Decay, NotNegative, Seed
from ops import files, progress
from ops.trees import by_name

_log = logging.getLogger("tpu_suite")
_SEED = jax.ShapeDtypeStruct((), jnp.uint32)


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
    sam_radius: NotNegative
    sam_every: Annotated[int, "[1, 1e6]"]
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
    load_benchmark = functools.partial(benchmarks.load, config)
    return Settings(
        **fields,
        workdir=workdir,
        recipe=config.to_dict(),
        load_benchmark=load_benchmark,
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

    parts = {key: Parts(key, getattr(settings, key)) for key in ("freeze", "init_without")}

    def of_group(attribute: str) -> Callable[[Any], Any]:
        def tree(params: Any) -> Any:
            for named in parts.values():
                named.check(by_name(params))
            groups = jax.tree_util.tree_map_with_path(
                lambda path, _: _group(benchmark, path, parts["freeze"]), params
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
        sam_radius=settings.sam_radius,
        sam_every=settings.sam_every,
        frozen=lambda params: jax.tree.map(lambda rate: rate == 0, of_group("rate")(params)),
    )
    eval_every = every("steps_per_eval").since(settings.eval_offset, **sizes, name="eval_offset")
    save_every, log_every = every("steps_per_checkpoint"), every("log_step_count_steps")
    return Plan(num_examples, recipe, eval_every, save_every, log_every)


def _group(benchmark: Benchmark, path: Any, frozen: Parts) -> base.Group:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name in frozen:
        return base.Group(rate=0.0)
    label = benchmark.label(name)
    if label not in benchmark.groups:
        known = ", ".join(map(repr, benchmark.groups))
        raise ConfigError(f"{name} has the label {label!r}, but the benchmark's groups are {known}")
    return benchmark.groups[label]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a run: functions of the settings and the devices, without data or workdir."""

    settings: Settings
    benchmark: Benchmark
    mesh: Mesh

    @classmethod
    def make(
        cls,
        settings: Settings,
        cache_dir: str = "",
        devices: Sequence[Any] | None = None,
        trains: bool = True,
    ) -> Programs:
        """Checks the BatchNorm span and the batch sizes for `devices` (None: this run's).

        Programs that do not train need neither the span nor the training batch.
        """
        benchmark = settings.load_benchmark(cache_dir)
        if trains:
            accumulation = settings.gradient_accumulation_steps
            meshes.check_span(benchmark.bn_span, settings.train_batch_size, accumulation)
            mesh = meshes.make(BATCH_AXES, benchmark.bn_span, devices)
            meshes.check_batch(mesh, "train_batch_size", settings.train_batch_size, accumulation)
        else:
            mesh = meshes.make(BATCH_AXES, 1, devices)
        meshes.check_batch(mesh, "eval_batch_size", settings.eval_batch_size)
        return cls(settings, benchmark, mesh)

    @property
    def _examples_per_pass(self) -> int:
        """The size of the global batch of one forward pass."""
        return self.settings.train_batch_size // self.settings.gradient_accumulation_steps

    @property
    def norm_examples(self) -> int:
        """How many examples of a forward pass share the statistics of BatchNorm."""
        return self._examples_per_pass * self.mesh.devices.shape[1] // self.mesh.size

    def norm_change(self, then: int | None, state: TrainState) -> str:
        """How BatchNorm's batches differ from those of `then` examples; "" if they do not."""
        statistics = [x for x in jax.tree.leaves(state.model_state) if x.dtype != jnp.int32]
        if then in (None, self.norm_examples) or not statistics:
            return ""
        unit, per_pass = self.benchmark.unit, self._examples_per_pass
        try:
            meshes.group_size(f"{then}/{per_pass}", self.mesh.size)
            remedy = f"--config.bn_span={then}/{per_pass} keeps {then}"
        except DeviceError as error:
            remedy = str(error)
        return (
            f"BatchNorm averaged over {then} {unit} before and averages over {self.norm_examples} "
            f"now, which changes the loss a little: {remedy}"
        )

    def batch_specs(self, split: str) -> tuple[Any, ...]:
        """Every shape of a global batch, with shardings."""
        specs = self.benchmark.batch_spec(split, getattr(self.settings, f"{split}_batch_size"))
        return tuple(meshes.abstract(spec, meshes.batch_sharding(self.mesh)) for spec in specs)

    def abstract_state(self, recipe: Recipe) -> TrainState:
        """The state as ShapeDtypeStructs, replicated."""
        sharding = meshes.replicated(self.mesh)
        shapes = _initial(self.benchmark.init, recipe, sharding).eval_shape(_SEED)
        return meshes.abstract(shapes, sharding)

    def abstract_totals(self, state: TrainState) -> Any:
        """The totals of the train step as ShapeDtypeStructs, replicated."""
        return step.totals_spec(self.benchmark.loss, self.mesh, state, self.batch_specs("train")[0])

    def initial_state(self, recipe: Recipe) -> TrainState:
        """The state before the first step, on the devices."""
        make = _initial(self.benchmark.init, recipe, meshes.replicated(self.mesh))
        return make(self.seed(recipe))

    def seed(self, recipe: Recipe) -> jax.Array:
        """The seed u32[] on all devices, for the train step."""
        value = np.uint32(recipe.seed)
        return jax.make_array_from_callback((), meshes.replicated(self.mesh), lambda _: value)

    def zeros(self, totals: Any) -> Callable[[], Any]:
        """A compiled function that makes such totals anew, all zero, on the devices."""
        return jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), totals),
            out_shardings=meshes.replicated(self.mesh),
        )

    def lower_train(self, recipe: Recipe, state: TrainState, totals: Any) -> list[Any]:
        """The train step, lowered; see `engine.step.lower`. `totals` are `abstract_totals`."""
        options = compiler.larger_windows(self.mesh) if self.benchmark.larger_windows else None
        train_step = step.make_train_step(self.benchmark.loss, self.mesh, recipe, options)
        seed = meshes.abstract(_SEED, meshes.replicated(self.mesh))
        arguments = seed, state, totals
        return step.lower(train_step, arguments, self.batch_specs("train"))

    def lower_predict(self, state: TrainState) -> list[Any]:
        """The predict step, lowered for evaluation batches; see `engine.step.lower`."""
        predict_step = step.make_predict_step(self.benchmark.predict, self.mesh)
        return step.lower(predict_step, evaluated_weights(state), self.batch_specs("eval"))


@functools.lru_cache(1)
def _initial(init: Callable[..., Any], recipe: Recipe, sharding: Any) -> Any:
    """The jitted function from a seed to the initial state, so that it is traced once."""
    return jax.jit(functools.partial(step.init_state, init, recipe), out_shardings=sharding)


def evaluated_weights(state: TrainState) -> tuple[Any, Any]:
    """(params, model_state) to evaluate: their average where the run keeps one."""
    if state.ema:
        return state.ema["params"], state.ema["model_state"]
    return state.params, state.model_state


@dataclasses.dataclass(frozen=True)
class Run:
    """A run on this process's devices, with its workdir and its log."""

    settings: Settings
    programs: Programs
    log: hostlog.HostLog

    @classmethod
    def open(cls, settings: Settings, trains: bool = True) -> Run:
        """Checks devices, workdir and batch sizes; opens no data."""
        progress.set_listener(_note_progress)
        meshes.check_platform()
        if jax.default_backend() == "cpu":
            environment.keep_freed_memory()
        compile_cache.use(settings.compilation_cache)
        paths.check_folder(settings.workdir)
        cache_dir = str(epath.Path(settings.workdir) / "data_index")
        programs = Programs.make(settings, cache_dir, trains=trains)
        return cls(settings, programs, hostlog.attach(settings.workdir, jax.process_index()))

    @property
    def benchmark(self) -> Benchmark:
        """The benchmark that is trained or evaluated."""
        return self.programs.benchmark

    @property
    def mesh(self) -> Mesh:
        """All devices of the run."""
        return self.programs.mesh

    @property
    def title(self) -> str:
        """What is trained on which devices, for headings."""
        chips, device = meshes.num_chips(self.mesh), self.mesh.devices.flat[0].device_kind
        return f"{self.settings.benchmark} on {chips} x {device}"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of the targets; the first one chooses the best checkpoint."""
        return tuple(target.metric for target in self.benchmark.targets)

    @property
    def shown_metrics(self) -> dict[str, Any]:
        """How a `Reporter` shows the targets' metrics."""
        percent = tuple(t.metric for t in self.benchmark.targets if t.percent)
        proportions = self.benchmark.proportions
        return {"metrics": self.metrics, "percent": percent, "proportions": proportions}

    @property
    def checkpoints_dir(self) -> str:
        """The folder of the run's checkpoints."""
        return str(epath.Path(self.settings.workdir) / "checkpoints")

    def say(self, text: str) -> None:
        """Writes one line to each host's log and to process 0's terminal."""
        _log.info("%s", text)

    def count_examples(self, evaluating: bool) -> int:
        """Opens the data and returns the number of training examples.

        Raises:
          DataError: the data cannot be used.
          ConfigError: the hosts have too little memory for the input.
        """
        settings, benchmark = self.settings, self.benchmark
        with watchdog.during("opening the data"):
            count = processes.first_process_first(lambda: benchmark.num_examples("train"))
            if evaluating:
                processes.first_process_first(lambda: benchmark.num_examples("eval"))
        guard.afford(self.host_bytes("train", *(["eval"] if evaluating else [])), settings.recipe)
        return count

    def host_bytes(self, *splits: str) -> dict[tuple[str, ...], int]:
        """What the input of splits needs in this host's memory, see `Benchmark.host_bytes`."""
        sizes = {"train": self.settings.train_batch_size, "eval": self.settings.eval_batch_size}
        needed: dict[tuple[str, ...], int] = {}
        for split in splits:
            needed |= self.benchmark.host_bytes(split, sizes[split], jax.process_count())
        return needed

    def mlperf_log(self, evaluating: bool, started: float) -> mlperf.Log:
        """The log that `config.mlperf` asks for; `started` is in seconds since 1970.

        Raises:
          ConfigError: a run with this config and workdir cannot be MLPerf's.
        """
        settings, form = self.settings, self.settings.mlperf.format
        if not form:
            return mlperf.Log()
        from benchmarks import mlperf as rules
        from engine import mlperf_formats

        entry, recipe = rules.entry(settings.benchmark), settings.recipe
        rules.check_form(entry, form)
        examples = {split: self.benchmark.declared_examples(split) for split in ("train", "eval")}
        closed = settings.mlperf.division == "closed"
        subject = mlperf_formats.Subject(
            settings=settings.mlperf,
            workdir=settings.workdir,
            seed=settings.seed,
            batch_size=settings.train_batch_size,
            accumulation=settings.gradient_accumulation_steps,
            examples=examples,
            undeclared=tuple(key for key in entry.declares if not recipe[key]),
            targets={target.metric: target.value for target in self.benchmark.targets},
            stops_at_target=settings.stop_at_target,
            evaluates=evaluating,
            entry=entry,
            facts=lambda **known: rules.facts(
                settings.benchmark, rules.Run(form, closed, recipe, examples, **known)
            ),
        )
        return mlperf_formats.begin(subject, started)

    def facts(self, num_examples: int, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the manifest of a checkpoint says about the run.

        Without `metadata` the benchmark gives them, which opens the data.
        """
        return {
            "benchmark": self.settings.benchmark,
            "config": dict(self.settings.recipe),
            "recipe": dict(self.settings.origin),
            "num_train_examples": num_examples,
            "norm_examples": self.programs.norm_examples,
            "target_metric": self.metrics[0],
            "target_metrics": list(self.metrics),
            **(self.benchmark.metadata if metadata is None else metadata),
        }


def check_random_start(settings: Settings, programs: Programs) -> None:
    """Raises ConfigError if a run without `config.init_from` would keep random weights."""
    if freeze := settings.freeze:
        raise ConfigError(
            f"config.freeze={freeze!r} would freeze random weights: give --config.init_from=WORKDIR"
        )
    programs.benchmark.check_random_start(programs.norm_examples)


def first_state(run: Run, plan: Plan) -> tuple[TrainState, str]:
    """The state before the first step; with `config.init_from`, another model's weights in it.

    Says which arrays were taken, and writes the names of all of them to `init_from.txt`.

    Returns:
      (state, the checkpoint that the weights are from or "").

    Raises:
      CheckpointError: the checkpoint cannot be read, or too few of its arrays fit.
    """
    state = run.programs.initial_state(plan.recipe)
    if not run.settings.init_from:
        if note := run.settings.lacks_weights:
            run.say(f"NOTE {note}")
        return state, ""
    watchdog.doing(f"reading {run.settings.init_from}")
    foreign = run.benchmark.uses.read_foreign(run.settings.init_from)
    weights = Weights(*foreign[:3]) if foreign else load_weights(run.settings.init_from)
    initial = jax.tree.map(np.asarray, (state.params, state.model_state))
    new = Parts("init_without", run.settings.init_without)
    params, model_state, adoption = adopt(run.benchmark.adopt, initial[0], initial[1], weights, new)
    run.say(f"init_from {weights.source}: {adoption.summary}; all names are in init_from.txt")
    if jax.process_index() == 0:
        (epath.Path(run.settings.workdir) / "init_from.txt").write_text(adoption.listing)
    replicated = meshes.replicated(run.mesh)
    place = jax.jit(functools.partial(step.state_of, recipe=plan.recipe), out_shardings=replicated)
    return place(params, model_state), weights.source


def _note_progress(text: str) -> None:
    """Notes what the input does before its first batch; a signal may end the run there."""
    watchdog.doing(text)
    preemption.raise_if_requested()


def pending_work() -> str:
    """What this process waits for, in words, for the watchdog."""
    libraries = stalls.in_libraries(compile_cache.folder_in_use())
    return "; ".join([*libraries, *processes.others(), *files.unanswered(10.0)])


def is_due(every: Every, step: int) -> bool:
    """Whether it is time, on every process alike; call it once per step."""
    if not every.by_clock or jax.process_count() == 1:
        return every.due(step)
    # Hosts' clocks differ; asking each other at every step would cost too much.
    return step % 10 == 0 and bool(meshes.broadcast(every.due(step)))


def restore(
    checkpoints: Checkpointer, number: int, state: TrainState, totals: Any
) -> tuple[TrainState, Any]:
    """(state, totals) of the checkpoint of a step, for ShapeDtypeStructs of both.

    Raises:
      CheckpointError: the checkpoint cannot be used, or holds another step.
    """
    items = checkpoints.restore(number, step.items(state, totals))
    totals = items["optimizer"].pop("totals")
    restored = TrainState(**items["optimizer"], **items["model"])
    if (inside := int(restored.step)) != number:
        folder = f"{checkpoints.directory}/{number}"
        raise CheckpointError(f"{folder} holds step {inside}; delete it to go on before it")
    return restored, totals
