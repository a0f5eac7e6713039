"""Evaluation of every benchmark, during training or of the checkpoints of a run.

Every example counts exactly once, whatever the batch size and the number of hosts and devices.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

import benchmarks
from benchmarks.base import BATCH_AXES, Benchmark
from engine import compile_cache, optim, schedules
from engine import mesh as meshes
from engine.cadence import Every, to_steps
from engine.checkpoint import Checkpointer, check_folder
from engine.cluster import activity, hostlog, preemption, session
from engine.cluster.guard import watchdog
from engine.mesh import Feed
from engine.report.writers import History, Reporter, quantity
from engine.step import (
    Compiled,
    Recipe,
    TrainState,
    init_state,
    items,
    lower,
    make_predict_step,
    make_train_step,
    model_items,
    totals_spec,
)
from errors import CheckpointError, ConfigError, DataError
from ops import files


def make_recipe(config: Any, num_examples: int) -> Recipe:
    """Reads the recipe from the config.

    Raises:
      ConfigError, ConfigError, ConfigError: a value cannot work.
    """
    if not 0 <= config.moving_average_decay < 1:
        raise ConfigError(
            f"config.moving_average_decay={config.moving_average_decay}: must be in [0, 1)"
        )
    batch_size = config.train_batch_size
    total = to_steps(
        config.train_steps, batch_size=batch_size, num_examples=num_examples, name="train_steps"
    )
    schedule = _settings(schedules.Schedule, config)
    rate = schedules.make(
        schedule, batch_size=batch_size, train_steps=total, num_examples=num_examples
    )
    optimizer = optim.make(_settings(optim.Optimizer, config), rate, kernels, _no_multipliers)
    accumulation, ema = config.gradient_accumulation_steps, config.moving_average_decay
    return Recipe(config.seed, total, rate, optimizer, accumulation, ema)


def make_cadence(config: Any, num_examples: int) -> Every:
    """When a run is evaluated, but for its last step, which always is.

    Raises:
      ConfigError: a value cannot work.
    """
    sizes: Any = {"batch_size": config.train_batch_size, "num_examples": num_examples}
    every = Every.parse(config.steps_per_eval, **sizes, name="steps_per_eval")
    return every.since(config.eval_offset, **sizes, name="eval_offset")


def _settings(kind: Any, config: Any) -> Any:
    """The keys of the config that the dataclass has as fields."""
    return kind(**{field.name: config[field.name] for field in dataclasses.fields(kind)})


def kernels(params: Any) -> Any:
    """Which parameters weight decay applies to: those named 'kernel'."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) == "kernel", params
    )


def _no_multipliers(params: Any) -> Any:
    return jax.tree.map(lambda _: 1.0, params)


@dataclasses.dataclass
class Plan:
    """What a run compiles: a function of the config and the devices, without data or workdir."""

    config: Any
    benchmark: Benchmark
    mesh: Any

    @classmethod
    def of(cls, config: Any, cache_dir: str, devices: Sequence[Any] | None = None) -> Plan:
        """Checks span and batch sizes for `devices`, which are this run's if None."""
        benchmark = benchmarks.load(config, cache_dir)
        for key in ("train_batch_size", "eval_batch_size", "gradient_accumulation_steps"):
            if config[key] < 1:
                raise ConfigError(f"config.{key}={config[key]}: must be at least 1")
        accumulation = config.gradient_accumulation_steps
        meshes.check_span(benchmark.bn_span, config.train_batch_size, accumulation)
        mesh = meshes.make(BATCH_AXES, benchmark.bn_span, devices)
        meshes.check_batch(mesh, "train_batch_size", config.train_batch_size, accumulation)
        meshes.check_batch(mesh, "eval_batch_size", config.eval_batch_size)
        return cls(config, benchmark, mesh)

    def specs(self, split: str) -> tuple[Any, ...]:
        """Every shape of a global batch, with shardings."""
        found = self.benchmark.batch_spec(split, self.config[f"{split}_batch_size"])
        return tuple(meshes.abstract(spec, meshes.batch_sharding(self.mesh)) for spec in found)

    def state(self, recipe: Recipe) -> TrainState:
        """The state as ShapeDtypeStructs, replicated."""
        shapes = jax.eval_shape(functools.partial(init_state, self.benchmark.init, recipe))
        return meshes.abstract(shapes, meshes.replicated(self.mesh))

    def totals(self, state: TrainState) -> Any:
        """The totals of the train step as ShapeDtypeStructs, replicated."""
        return totals_spec(self.benchmark.loss, self.mesh, state, self.specs("train")[0])

    def fresh(self, recipe: Recipe) -> TrainState:
        """The state before the first step, on the devices."""
        make = functools.partial(init_state, self.benchmark.init, recipe)
        return jax.jit(make, out_shardings=meshes.replicated(self.mesh))()

    def zeros(self, totals: Any) -> Callable[[], Any]:
        """A compiled function that makes such totals anew, all zero, on the devices."""
        return jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), totals),
            out_shardings=meshes.replicated(self.mesh),
        )

    def lower_train(self, recipe: Recipe, state: TrainState) -> list[Any]:
        """The train step, lowered; see `engine.step.lower`."""
        step = make_train_step(self.benchmark.loss, self.mesh, recipe)
        return lower(step, (state, self.totals(state)), self.specs("train"))

    def lower_predict(self, state: TrainState) -> list[Any]:
        """The predict step, lowered for evaluation batches; see `engine.step.lower`."""
        step = make_predict_step(self.benchmark.predict, self.mesh)
        return lower(step, evaluated_weights(state), self.specs("eval"))


@dataclasses.dataclass
class Setup(Plan):
    """What training and evaluation share: a plan on this run's devices, its folder and log."""

    workdir: str
    log: hostlog.HostLog

    @classmethod
    def make(cls, config: Any, workdir: str) -> Setup:
        """Checks devices, workdir and batch sizes; opens no data."""
        files.on_progress = _progress
        meshes.check_platform()
        compile_cache.use(config.compilation_cache)
        check_folder(workdir)
        plan = Plan.of(config, str(epath.Path(workdir) / "data_index"))
        log = hostlog.attach(workdir, jax.process_index())
        return cls(config, plan.benchmark, plan.mesh, workdir, log)

    def log_line(self, text: str) -> None:
        """One line in each host's log and on process 0's terminal."""
        logging.getLogger("tpu_suite").info("%s", text)

    @property
    def title(self) -> str:
        """What is trained on what, for headings."""
        chips, device = meshes.num_chips(self.mesh), self.mesh.devices.flat[0].device_kind
        return f"{self.config.benchmark} on {chips} x {device}"

    def compile_predict(self, state: TrainState) -> Callable[..., Any]:
        """The predict step, compiled for evaluation batches."""
        return Compiled(self.lower_predict(state))

    def evaluate(self, predict: Callable[..., Any], state: TrainState) -> dict[str, float]:
        """Scores every evaluation example exactly once.

        Raises:
          DataError: another number of examples came than the data hold.
          Preempted: a signal arrived.
        """
        size, counted = self.config.eval_batch_size, 0
        place = jax.process_index(), jax.process_count()
        feed = Feed(self.benchmark.eval_batches(size, *place), self.mesh)
        weights = evaluated_weights(state)

        def rows() -> Iterator[dict[str, np.ndarray]]:
            nonlocal counted
            before = None  # read one batch behind, so that the devices never wait for the host
            for batch in feed:
                activity.at("evaluating")
                if meshes.any_process(preemption.requested()):
                    preemption.raise_stop()
                now = predict(*weights, batch)
                if before is not None:
                    yield strip(before)
                before = now
            if before is not None:
                yield strip(before)

        def strip(found: dict[str, jax.Array]) -> dict[str, np.ndarray]:
            nonlocal counted
            real = np.asarray(found["mask"]) > 0
            counted += int(real.sum())
            return {k: np.asarray(v)[real] for k, v in found.items() if k != "mask"}

        scores = self.benchmark.score(rows())
        expected = self.benchmark.num_eval_examples
        if counted != expected:
            raise DataError(f"evaluation saw {counted:,} examples, the data hold {expected:,}")
        return scores

    def report(
        self,
        reporter: Reporter,
        step: int,
        examples: int,
        scores: dict[str, float],
        seconds: float,
    ) -> None:
        """Records an evaluation; `examples` make an epoch."""
        unit, count = self.benchmark.unit, self.benchmark.num_eval_examples
        epoch = step * self.config.train_batch_size / examples
        row = {"step": step, "epoch": epoch, **scores, "examples": count, "seconds": seconds}
        shown = "  ".join(quantity(k, v) for k, v in scores.items())
        reporter.eval(row, f"EVAL step {step:,}  {shown}  ({count:,} {unit} in {seconds:.1f} s)")


def _progress(text: str) -> None:
    """Notes what the input is at before its first batch; nothing is lost if it is left there."""
    activity.at(text)
    preemption.raise_if_requested()


def waiting() -> str:
    """What this process waits for, in words, for the watchdog."""
    return "; ".join(session.others() + files.unanswered(10.0))


def evaluated_weights(state: TrainState) -> tuple[Any, Any]:
    """(params, model_state) to evaluate: their average where there is one."""
    if state.ema:
        return state.ema["params"], state.ema["model_state"]
    return state.params, state.model_state


def restore(
    checkpoints: Checkpointer, step: int, state: TrainState, totals: Any
) -> tuple[TrainState, Any]:
    """(state, totals) of a step, for ShapeDtypeStructs of both.

    Raises:
      CheckpointError: the checkpoint cannot be used, or holds another step.
    """
    found = checkpoints.restore(step, items(state, totals))
    totals = found["optimizer"].pop("totals")
    restored = TrainState(**found["optimizer"], **found["model"])
    if (inside := int(restored.step)) != step:
        where = f"{checkpoints.directory}/{step}"
        raise CheckpointError(f"{where} holds step {inside}; delete it to go on before it")
    return restored, totals


def evaluate(
    config: Any, workdir: str, checkpoint: str, watch_seconds: float, charts: bool = False
) -> dict[str, float]:
    """Evaluates checkpoints of `workdir`; results go to its folder `eval`.

    Args:
      config: the configuration of the run that wrote them.
      workdir: that run's workdir.
      checkpoint: "latest", "best" (in that run's own evaluations) or a step.
      watch_seconds: > 0: go on with new checkpoints as they appear, until the run's last step is
        evaluated or none came for so long.
      charts: print charts as JSON lines; see `engine.report.charts`.

    Returns:
      The scores of the last checkpoint evaluated.

    Raises:
      USER_ERRORS: something that the person can mend; the message says what.
      Preempted: a signal arrived.
    """
    folder = epath.Path(workdir) / "checkpoints"
    if not watch_seconds and not folder.exists():  # before anything is made in a mistyped place
        raise CheckpointError(f"no checkpoint in {folder}; is --workdir right?")
    setup = Setup.make(config, workdir)
    watched = watchdog(config.watchdog_seconds, setup.log, waiting, lambda: "nothing to save")
    title = f"{setup.title}, evaluation"
    reporter = Reporter(workdir, subdir="eval", title=title, charts=charts)
    benchmark = setup.benchmark
    try:
        session.first_process_first(lambda: benchmark.num_eval_examples)
        checkpoints = Checkpointer(
            str(epath.Path(workdir) / "checkpoints"), keep=config.keep_checkpoints, best=None
        )
        metric = benchmark.target.metric
        step = meshes.agree(_choose(checkpoints, workdir, checkpoint, metric, watch_seconds))
        manifest = checkpoints.manifest(step)
        examples = manifest["num_train_examples"]
        recipe = make_recipe(config, examples)
        abstract = setup.state(recipe)
        with compile_cache.watched(reporter.say):
            predict = setup.compile_predict(abstract)
        while True:
            begun = time.monotonic()
            try:
                found = checkpoints.restore(step, {"model": model_items(abstract)})["model"]
            except CheckpointError:
                if watch_seconds and step not in checkpoints.steps():
                    found = None  # the training run has deleted it meanwhile
                else:
                    raise
            scores: dict[str, float] = {}
            if not meshes.any_process(found is None) and found is not None:
                scores = setup.evaluate(predict, abstract._replace(**found))
                setup.report(reporter, step, examples, scores, time.monotonic() - begun)
            if not watch_seconds or step >= recipe.total_steps:
                return scores
            newer = checkpoints.newer(step, watch_seconds, preemption.raise_if_requested)
            newer = meshes.agree(-1 if newer is None else newer)  # hosts look at different times
            if newer < 0:
                reporter.say(f"no new checkpoint for {watch_seconds:.0f} s: stopped watching")
                return scores
            step = newer
    finally:
        watched.close()
        reporter.close()


def _choose(checkpoints: Checkpointer, workdir: str, wanted: str, metric: str, wait: float) -> int:
    """The step that "latest", "best" or a number means."""
    if wait and wanted == "latest" and not checkpoints.steps():
        checkpoints.newer(-1, wait, preemption.raise_if_requested)
    steps = checkpoints.steps()
    if not steps:
        raise CheckpointError(f"no checkpoint in {checkpoints.directory}; is --workdir right?")
    if wanted == "latest":
        return steps[-1]
    if wanted == "best":
        chosen = History(workdir, writes=False).best(metric)
    else:
        chosen = int(wanted) if wanted.isdigit() else None
    if chosen not in steps:
        raise CheckpointError(
            f"--checkpoint={wanted} is not in {checkpoints.directory}; use latest, best (if the "
            f"run evaluated) or one of {steps}"
        )
    return chosen
