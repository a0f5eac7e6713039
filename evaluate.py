"""Evaluation of every benchmark, during training or of the checkpoints of a run.

Every example counts exactly once, whatever the batch size and the number of hosts and devices. The
devices predict, process 0 scores the rows of all predictions and tells the other processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath

import run as runs
from engine import compile_cache, mlperf
from engine import mesh as meshes
from engine.checkpoint import Checkpointer
from engine.cluster import preemption, processes, watchdog
from engine.cluster.background import Background
from engine.cluster.guard import afford, start_watchdog
from engine.mesh import Feed
from engine.report.history import History
from engine.report.writers import Reporter
from engine.step import Compiled, TrainState, model_items
from errors import CheckpointError, ConfigError, DataError
from run import Plan, Run, Settings

if TYPE_CHECKING:
    from benchmarks.uses import Exhibit

Scores = dict[str, float]


class Evaluation:
    """One evaluation: its predictions are made, its score may still be computed."""

    def __init__(self, run: Run, step: int, rows: list[dict[str, np.ndarray]], started: float):
        """Starts to score `rows` on process 0, in a thread; the others have no rows.

        `started` is when the evaluation began, by `time.monotonic`.
        """
        self.step = step
        self.started = started
        self._run, self._rows = run, rows
        self._background: Background[Scores] | None = None
        if jax.process_index() == 0:
            self._background = Background(lambda: run.benchmark.score(iter(rows)), "scoring")

    @property
    def is_ready(self) -> bool:
        """Whether process 0 has the score; False on the other processes."""
        return self._background is not None and self._background.is_done

    def scores(self) -> Scores:
        """Waits for the scores and returns them on every process; all must call it."""
        with watchdog.during("scoring", self.step):
            scores = self._background.result() if self._background else None
            processes.barrier("waiting for host 0 to score")
            scores = meshes.broadcast(scores)
        for metric in self._run.metrics:
            if metric not in scores:
                name = self._run.settings.benchmark
                raise DataError(
                    f"benchmark {name}: score() returned no {metric!r}, which is a target"
                )
        return scores

    def exhibits(self) -> list[Exhibit]:
        """What the benchmark shows of its predictions; all processes may call it, 0 gets them."""
        if jax.process_index():
            return []
        with watchdog.during("looking at the predictions", self.step):
            return self._run.benchmark.uses.exhibits(iter(self._rows))

    def write_files(self, reporter: Reporter) -> None:
        """Writes the benchmark's files about the predictions; all processes may call it."""
        for exhibit in self.exhibits():
            for name, data in exhibit.files.items():
                reporter.say(f"wrote {reporter.write(name, data)}")


def predict_all(
    run: Run, predict: Callable[..., Any], state: TrainState, split: str = "eval"
) -> Iterator[Any]:
    """Predicts every example of a split once; yields the rows of each batch, without padding.

    Processes other than 0 yield nothing.

    Raises:
      DataError: the number of examples is not what the data hold.
      Preempted: a signal arrived.
    """
    shard = jax.process_index(), jax.process_count()
    benchmark, size = run.benchmark, run.settings.eval_batch_size
    batches = benchmark.eval_batches if split == "eval" else benchmark.uses.plain_train_batches
    feed = Feed(batches(size, *shard), run.mesh)
    weights, counted = runs.evaluated_weights(state), 0

    def real_rows(output: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        nonlocal counted
        real = np.asarray(output["mask"]) > 0
        counted += int(real.sum())
        if shard[0]:
            return {}
        return {name: np.asarray(x)[real] for name, x in output.items() if name != "mask"}

    previous = None  # read one batch behind, so that the devices never wait for the host
    for batch in feed:
        watchdog.doing("evaluating")
        if meshes.any_process(preemption.requested()):
            preemption.raise_stop()
        output = predict(*weights, batch)
        if previous is not None:
            yield real_rows(previous)
        previous = output
    if previous is not None:
        yield real_rows(previous)
    expected = benchmark.num_examples(split)
    if counted != expected:
        raise DataError(f"evaluation saw {counted:,} examples, the data hold {expected:,}")


def begin(run: Run, predict: Callable[..., Any], state: TrainState, step: int) -> Evaluation:
    """Predicts every evaluation example and starts to score; errors are those of `predict_all`."""
    started = time.monotonic()
    rows = [rows for rows in predict_all(run, predict, state) if rows]
    return Evaluation(run, step, rows, started)


def report(
    run: Run, reporter: Reporter, step: int, num_examples: int, scores: Scores, seconds: float
) -> None:
    """Records the scores of an evaluation; `num_examples` make an epoch."""
    unit, count = run.benchmark.unit, run.benchmark.num_examples("eval")
    epoch = step * run.settings.train_batch_size / num_examples
    row = {"step": step, "epoch": epoch, **scores, "examples": count, "seconds": seconds}
    headline = run.benchmark.headline(scores)
    shown = "  ".join(reporter.quantity(name, value, count) for name, value in headline.items())
    reporter.eval(row, f"EVAL step {step:,}  {shown}  ({count:,} {unit} in {seconds:.1f} s)")


class Evaluator:
    """Evaluates during training; where the benchmark wants it, scores while the devices train."""

    def __init__(
        self, run: Run, plan: Plan, reporter: Reporter, log: mlperf.Log, predict: Any | None
    ):
        """`predict` is the compiled predict step; None in a run that does not evaluate."""
        self._run, self._plan, self._reporter, self._log = run, plan, reporter, log
        self._predict = predict
        self.pending: Evaluation | None = None
        self.newest = 0  # the newest step that is scored

    @property
    def is_ready(self) -> bool:
        """Whether the score of the pending evaluation is known to this process."""
        return self.pending is not None and self.pending.is_ready

    def start(self, step: int, state: TrainState) -> float:
        """Predicts and starts to score; returns the seconds that the devices could not train."""
        started = time.monotonic()
        assert self._predict is not None
        watchdog.doing("evaluating", step)
        self._reporter.live(f"step {step:,}: evaluating")
        self._log.eval_starts(step)
        self.pending = begin(self._run, self._predict, state, step)
        return time.monotonic() - started

    def finish(self) -> float:
        """Waits for the pending score and records it; returns the seconds that this took."""
        started, pending = time.monotonic(), self.pending
        assert pending is not None
        scores, self.pending, self.newest = pending.scores(), None, pending.step
        self._log.eval_ends(pending.step, scores)
        examples, seconds = self._plan.num_examples, time.monotonic() - pending.started
        report(self._run, self._reporter, pending.step, examples, scores, seconds)
        return time.monotonic() - started


class Judge:
    """Decides which steps are evaluated, whether the targets are reached, how the run ended."""

    def __init__(self, run: Run, plan: Plan, reporter: Reporter, evaluating: bool):
        """Raises ConfigError if `config.patience` waits for evaluations that never come."""
        self._run, self._plan, self._reporter = run, plan, reporter
        self.evaluating = evaluating
        patience, first = run.settings.patience, plan.eval_every.next_after(0)
        if patience and not evaluating:
            raise ConfigError(
                f"config.patience={patience} needs evaluations, which --mode=train leaves to "
                "another process: use --mode=train_and_eval or --config.patience=0"
            )
        if patience and (first is None or first >= plan.recipe.total_steps):
            raise ConfigError(
                f"config.patience={patience} needs evaluations before the last step, but "
                f"config.steps_per_eval={run.settings.steps_per_eval!r} has none: set it to "
                "'1 epoch', or --config.patience=0"
            )

    def scores(self, step: int) -> Scores:
        """The scores of a step; {} if it was not evaluated."""
        return self._reporter.history.scores().get(step, {})

    def is_due(self, step: int) -> bool:
        """Whether a step is evaluated; the last one always is."""
        last = step == self._plan.recipe.total_steps
        return self.evaluating and (runs.is_due(self._plan.eval_every, step) or last)

    def lacks_evaluation(self, step: int, saved: int) -> bool:
        """Whether a restored step should have been evaluated and was not."""
        return 0 < step == saved and self.is_due(step) and not self.scores(step)

    def is_reached(self, step: int) -> bool:
        """Whether a step ends the run because it has reached all targets."""
        if not self._run.settings.stop_at_target:
            return False
        scores = self.scores(step)
        return all(scores.get(t.metric, -math.inf) >= t.value for t in self._run.benchmark.targets)

    def is_stuck(self, step: int) -> bool:
        """Whether `config.patience` evaluations up to a step had no better score than before."""
        patience = self._run.settings.patience
        if not patience or not self.scores(step):
            return False
        return self._reporter.history.since_best(self._run.metrics[0], step) >= patience

    def is_over(self, step: int) -> bool:
        """Whether a step ends the run before its last one."""
        return self.is_reached(step) or self.is_stuck(step)

    def is_finished(self, step: int) -> bool:
        """Whether nothing is left to do for a run that is at `step`."""
        if self.is_over(step):
            return True
        done = step >= self._plan.recipe.total_steps
        return done and (not self.evaluating or bool(self.scores(step)))

    def result(self, step: int) -> str:
        """How the run ended, in words."""
        total, scores = self._plan.recipe.total_steps, self.scores(step)
        number = self._reporter.number
        text = f"step {step:,} of {total:,}"
        if step > total:
            text = f"step {step:,}, beyond the {total:,} that config.train_steps asks for"
        for target in self._run.benchmark.targets if scores else ():
            metric, score = target.metric, scores[target.metric]
            best = self._reporter.history.best(metric)
            best = step if best is None else best  # every score may be nan
            met = "reached" if score >= target.value else "NOT reached"
            goal = f"; target {number(metric, target.value)} {met}" if target.value > 0 else ""
            highest = number(metric, self.scores(best)[metric])
            count = self._run.benchmark.num_examples("eval")
            shown = self._reporter.quantity(metric, score, count)
            text += f", {shown} (best {highest} at step {best:,}){goal}"
        if self.is_stuck(step):
            name, count = self._run.metrics[0].replace("_", " "), self._run.settings.patience
            text += f"; stopped because {count} evaluations brought no better {name}"
        return text


def evaluate(settings: Settings, checkpoint: str, watch_seconds: float) -> Scores:
    """Evaluates checkpoints of the workdir; results go to its folder `eval`.

    Args:
      settings: those of the run that wrote the checkpoints.
      checkpoint: "latest", "best" (in that run's own evaluations) or a step.
      watch_seconds: > 0: go on with new checkpoints as they appear, until the run's last step is
        evaluated or none came for so long.

    Returns:
      The scores of the last checkpoint evaluated.

    Raises:
      UserError: a mistake that the person can mend.
      Preempted: a signal arrived.
    """
    with examining(settings, checkpoint, watch_seconds) as examination:
        run, step = examination.run, examination.step
        title = f"{run.title}, evaluation"
        reporter = Reporter(settings.workdir, subdir="eval", title=title, **run.shown_metrics)
        with contextlib.closing(reporter):
            while True:
                started, scores = time.monotonic(), {}
                if evaluation := examination.begin(step, watching=bool(watch_seconds)):
                    scores = evaluation.scores()
                    seconds, count = time.monotonic() - started, examination.num_examples
                    report(run, reporter, step, count, scores, seconds)
                    evaluation.write_files(reporter)
                if not watch_seconds or step >= examination.plan.recipe.total_steps:
                    return scores
                newer = examination.checkpoints.newer(
                    step, watch_seconds, preemption.raise_if_requested
                )
                newer = meshes.broadcast(newer)  # hosts look at different times
                if newer is None:
                    run.say(f"no new checkpoint for {watch_seconds:.0f} s: stopped watching")
                    return scores
                step = newer


@dataclasses.dataclass(frozen=True)
class Examination:
    """The checkpoints of a run, and the compiled program that predicts with them."""

    run: Run
    checkpoints: Checkpointer
    step: int  # the checkpoint that was asked for
    num_examples: int  # to train on
    plan: Plan
    abstract: TrainState
    predict: Callable[..., Any]

    def begin(self, step: int, watching: bool = False) -> Evaluation | None:
        """Predicts with a checkpoint; None if the run has deleted it while this process watches.

        Raises:
          CheckpointError: the checkpoint cannot be used; further errors are those of `predict_all`.
        """
        model = _restore_model(self.checkpoints, step, self.abstract, watching)
        if meshes.any_process(model is None) or model is None:
            return None
        return begin(self.run, self.predict, self.abstract._replace(**model), step)


@contextlib.contextmanager
def examining(settings: Settings, checkpoint: str, wait: float = 0.0) -> Iterator[Examination]:
    """Opens the data to evaluate and a checkpoint, and compiles; arguments as of `evaluate`."""
    folder = epath.Path(settings.workdir) / "checkpoints"
    if not wait and not folder.exists():  # before anything is made in a mistyped folder
        raise CheckpointError(f"no checkpoint in {folder}; is --workdir right?")
    run = Run.open(settings, trains=False)
    watched = start_watchdog(
        settings.limits.watchdog_seconds, run.log, runs.pending_work, lambda: "nothing to save"
    )
    with contextlib.closing(watched):
        processes.first_process_first(lambda: run.benchmark.num_examples("eval"))
        afford(run.host_bytes("eval"), settings.recipe)
        checkpoints = Checkpointer(run.checkpoints_dir, keep=settings.keep_checkpoints, best=None)
        step = meshes.broadcast(_choose(checkpoints, run, checkpoint, wait))
        num_examples = checkpoints.manifest(step)["num_train_examples"]
        plan = runs.plan(settings, run.benchmark, num_examples)
        abstract = run.programs.abstract_state(plan.recipe)
        with compile_cache.watched(run.say):
            predict = Compiled(run.programs.lower_predict(abstract))
        processes.barrier("waiting for the other hosts to compile")
        yield Examination(run, checkpoints, step, num_examples, plan, abstract, predict)


def _restore_model(
    checkpoints: Checkpointer, step: int, abstract: TrainState, watching: bool
) -> dict[str, Any] | None:
    """The item "model" of a step; None if the run has deleted it while this process watches."""
    try:
        return checkpoints.restore(step, {"model": model_items(abstract)})["model"]
    except CheckpointError:
        if watching and step not in checkpoints.steps():
            return None
        raise


def _choose(checkpoints: Checkpointer, run: Run, wanted: str, wait: float) -> int:
    """The step that "latest", "best" or a number means."""
    if wait and wanted == "latest" and not checkpoints.steps():
        checkpoints.newer(-1, wait, preemption.raise_if_requested)
    return choose(checkpoints, run.settings.workdir, run.metrics[0], wanted)


def choose(checkpoints: Checkpointer, workdir: str, metric: str, wanted: str) -> int:
    """The step that --checkpoint names: latest, best (in the run's own evaluations) or a number.

    Raises:
      CheckpointError: there is no such checkpoint.
    """
    steps = checkpoints.steps()
    if not steps:
        raise CheckpointError(f"no checkpoint in {checkpoints.directory}; is --workdir right?")
    if wanted == "latest":
        return steps[-1]
    if wanted == "best":
        history = History(workdir, writes=False)
        history.mend(checkpoints.manifest(steps[-1]).get("evaluations", []))
        chosen = history.best(metric)
    else:
        chosen = int(wanted) if wanted.isdigit() else None
    if chosen not in steps:
        raise CheckpointError(
            f"--checkpoint={wanted} is not in {checkpoints.directory}; use latest, best (if the "
            f"run evaluated) or one of {steps}"
        )
    return chosen
