"""--mode=eval: evaluates checkpoints of a workdir; with --watch, new ones as they appear."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from benchmarks.uses import Exhibit
from common.errors import CheckpointError
from engine import compiler, resuming
from engine import mesh as meshes
from engine.checkpoint import Checkpointer
from engine.cluster import preemption, processes, watchdog
from engine.cluster.guard import afford
from engine.evaluate import Evaluation, Scores, begin_evaluation, report_scores
from engine.report.history import History
from engine.report.writers import Reporter
from engine.run import Plan, Settings, evaluated_weights, make_plan
from engine.start import Run
from engine.step import CompiledStep, TrainState, model_items


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
      UserError: a mistake that the user can fix.
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
                    report_scores(run, reporter, step, count, scores, seconds)
                    for exhibit in exhibits(run, evaluation):
                        for name, data in exhibit.files.items():
                            run.say(f"wrote {reporter.write(name, data)}")
                if not watch_seconds or step >= examination.plan.recipe.total_steps:
                    return scores
                newer = next_step(examination.checkpoints, step, watch_seconds)
                newer = meshes.broadcast(newer)  # hosts look at different times
                if newer is None:
                    run.say(f"no new checkpoint for {watch_seconds:.0f} s: stopped watching")
                    return scores
                step = newer


def exhibits(run: Run, evaluation: Evaluation, state: TrainState | None = None) -> list[Exhibit]:
    """What the benchmark shows of its predictions; [] on processes other than 0.

    With the `state` that has predicted, what the model does inside as well.
    """
    if jax.process_index():
        return []
    uses, rows = run.benchmark.uses, evaluation.rows
    with watchdog.during("looking at the predictions", evaluation.step):
        shown = uses.exhibits(iter(rows))
        if state is not None:
            params, model_state = (
                jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), weights)
                for weights in evaluated_weights(state)
            )
            shown += uses.insights(params, model_state, iter(rows))
        return shown


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
          CheckpointError: the checkpoint cannot be used; further errors are those of
            `engine.evaluate.predict_all`.
        """
        state = self.restore(step, watching)
        return None if state is None else begin_evaluation(self.run, self.predict, state, step)

    def restore(self, step: int, watching: bool = False) -> TrainState | None:
        """The model of a checkpoint; see `begin`."""
        model = _restore_model(self.checkpoints, step, self.abstract, watching)
        if meshes.any_process(model is None) or model is None:
            return None
        return self.abstract._replace(**model)


@contextlib.contextmanager
def examining(settings: Settings, checkpoint: str, wait: float = 0.0) -> Iterator[Examination]:
    """Opens the data to evaluate and a checkpoint, and compiles; arguments as of `evaluate`."""
    folder = epath.Path(settings.workdir) / "checkpoints"
    if not wait and not folder.exists():  # before anything is made in a mistyped folder
        raise CheckpointError(f"no checkpoint in {folder}; is --workdir right?")
    run = Run.open(settings, trains=False)
    with run.watched():
        processes.first_process_first(lambda: run.benchmark.num_examples("eval"))
        afford(run.host_bytes("eval"), settings.config)
        checkpoints = Checkpointer(run.checkpoints_dir, keep=settings.keep_checkpoints, best=None)
        step = meshes.broadcast(_choose(checkpoints, run, checkpoint, wait))
        then = checkpoints.manifest(step)
        source = f"{checkpoints.directory}/{step}"
        data = [run.benchmark.identity("eval")]
        resuming.compare_data(run.programs, run.say, then, source, data)
        num_examples = then["num_train_examples"]
        plan = make_plan(settings, run.benchmark, num_examples)
        abstract = run.programs.abstract_state(plan.recipe)
        with compiler.watched(run.say):
            predict = CompiledStep(run.programs.lower_predict(abstract))
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
        next_step(checkpoints, -1, wait)
    return choose(checkpoints, run.settings.workdir, run.metrics[0], wanted)


def next_step(checkpoints: Checkpointer, step: int, seconds: float) -> int | None:
    """Waits up to `seconds` for a checkpoint after `step`, and returns its step or None.

    Raises:
      Preempted: a signal arrived.
    """
    start = time.monotonic()
    while True:
        if newer := [other for other in checkpoints.steps() if other > step]:
            return newer[0]
        if time.monotonic() - start > seconds:
            return None
        for _ in range(10):
            preemption.raise_if_requested()
            time.sleep(0.2)


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
        history.restore(checkpoints.manifest(steps[-1]).get("evaluations", []))
        chosen = history.best(metric)
    else:
        chosen = int(wanted) if wanted.isdigit() else None
    if chosen not in steps:
        raise CheckpointError(
            f"--checkpoint={wanted} is not in {checkpoints.directory}; use latest, best (if the "
            f"run evaluated) or one of {steps}"
        )
    return chosen
