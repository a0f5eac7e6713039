"""Evaluates a model: predicts every example and scores the predictions.

Every example counts exactly once, whatever the batch size and the number of hosts and devices. The
devices predict; process 0 scores the rows of all predictions and tells the other processes.

`examining` opens a checkpoint to evaluate it; --mode=eval is `evaluate`. In a training run an
`Evaluator` evaluates, and `engine.stopping` decides which steps.
"""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from benchmarks.uses import Exhibit
from common.errors import CheckpointError, DataError
from engine import compiler, mlperf, sharding
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.manifest import compare_data
from engine.checks import check_best_by, check_evaluates
from engine.cluster import preemption, processes, watchdog
from engine.cluster.watchdog import Background
from engine.fit import Fit
from engine.plan import Plan, Settings, evaluated_weights, make_plan
from engine.report.writers import Reporter
from engine.run import Run
from engine.sharding import Feed
from engine.step import CompiledStep, TrainState, model_items

Scores = dict[str, float]
_log = logging.getLogger("tpu_suite")


class Evaluation:
    """One evaluation: its predictions are made, its score may still be computed."""

    def __init__(
        self,
        run: Run,
        step: int,
        rows: list[dict[str, np.ndarray]],
        started: float,
        complete: bool = False,
    ):
        """Starts to score `rows` on process 0, in a thread; the others have no rows.

        `started` is when the evaluation began, by `time.monotonic`. A `complete` one has all scores
        of the benchmark, some of which take long.
        """
        self.step, self.rows, self.started = step, rows, started
        self._run = run
        self._background: Background[Scores] | None = None
        if jax.process_index() == 0:
            score = run.benchmark.all_scores if complete else run.benchmark.score
            self._background = Background(lambda: score(iter(rows)), "scoring")

    @property
    def is_ready(self) -> bool:
        """Whether process 0 has the score; False on the other processes."""
        return self._background is not None and self._background.is_done

    def scores(self) -> Scores:
        """Waits for the scores and returns them on every process; all must call it."""
        with watchdog.during("scoring", self.step):
            scores = self._background.result() if self._background else None
            processes.barrier("waiting for host 0 to score")
            scores = sharding.broadcast(scores)
        for metric in self._run.metrics:
            if metric not in scores:
                name = self._run.settings.benchmark
                raise DataError(
                    f"benchmark {name}: score() returned no {metric!r}, which is a target or "
                    "config.best_by"
                )
        return scores


def predict_all(run: Run, predict: CompiledStep, state: TrainState) -> Iterator[Any]:
    """Predicts every evaluation example once; yields the rows of each batch, without padding.

    Processes other than 0 yield nothing.
    """
    shard = jax.process_index(), jax.process_count()
    benchmark = run.benchmark
    feed = Feed(benchmark.eval_batches(predict.batch_size, *shard), run.mesh)
    weights, counted = evaluated_weights(state), 0

    def real_rows(output: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        nonlocal counted
        real = np.asarray(output["mask"]) > 0
        counted += int(real.sum())
        if shard[0]:
            return {}
        return {name: np.asarray(x)[real] for name, x in output.items() if name != "mask"}

    def read(output: dict[str, jax.Array], stop: Callable[[], Sequence[bool]]) -> Any:
        if any(stop()):
            raise preemption.answer(agreed=True)
        return real_rows(output)

    previous = None  # read one batch behind, so that the devices never wait for the host
    for batch in feed:
        watchdog.doing("evaluating")
        output = predict(*weights, batch)
        stop = sharding.ask_processes(run.mesh, lambda: (preemption.requested(),))
        if previous is not None:
            yield read(*previous)
        previous = output, stop
    if previous is not None:
        yield read(*previous)
    if counted != (expected := benchmark.eval_rows):
        raise DataError(f"evaluation saw {counted:,} examples, the data hold {expected:,}")


def begin_evaluation(
    run: Run, predict: CompiledStep, state: TrainState, step: int, complete: bool = False
) -> Evaluation:
    """Predicts every example and starts to score; a `complete` evaluation has all scores."""
    started = time.monotonic()
    rows = [rows for rows in predict_all(run, predict, state) if rows]
    return Evaluation(run, step, rows, started, complete)


def report_scores(
    run: Run, reporter: Reporter, step: int, num_examples: int, scores: Scores, seconds: float
) -> None:
    """Records the scores of an evaluation; `num_examples` make an epoch."""
    unit, count = run.benchmark.unit, run.benchmark.num_examples("eval")
    epoch = step * run.settings.train_batch_size / num_examples
    row = {"step": step, "epoch": epoch, **scores, "examples": count, "seconds": seconds}
    headline = {**run.benchmark.headline(scores), run.metrics[0]: scores[run.metrics[0]]}
    shown = "  ".join(reporter.quantity(name, value, count) for name, value in headline.items())
    reporter.eval(row, f"EVAL step {step:,}  {shown}  ({count:,} {unit} in {seconds:.1f} s)")


def exhibits(run: Run, evaluation: Evaluation, state: TrainState | None = None) -> list[Exhibit]:
    """What the benchmark shows of its predictions; [] on processes other than 0.

    With `state`, the evaluated one, it shows what takes the weights, too.
    """
    if jax.process_index():
        return []
    with watchdog.during("looking at the predictions", evaluation.step):
        uses = run.benchmark.uses
        if state is not None:
            uses = uses.with_weights(*jax.device_get(evaluated_weights(state)))
        return uses.exhibits(iter(evaluation.rows))


@dataclasses.dataclass(frozen=True)
class Examination:
    """The checkpoints of a run, and the compiled program that predicts with them."""

    run: Run
    checkpoints: Checkpointer
    choose: Callable[[], int]  # returns the step that was asked for
    step: int  # what it returned
    plan: Plan
    abstract: TrainState
    predict: CompiledStep

    def restore(self, after: int = -1, seconds: float = 0.0) -> tuple[int, TrainState] | None:
        """(step, model) of the checkpoint that was asked for.

        With `after` it waits up to `seconds` for a checkpoint after that step, and returns None if
        none comes.
        """

        def choose() -> int:
            return self.choose() if after < 0 else next_step(self.checkpoints, after, seconds)

        def model(step: int) -> Any:
            if step < 0:
                return {}
            return self.checkpoints.restore(step, {"model": model_items(self.abstract)})["model"]

        step, items = self.checkpoints.read(choose, model, self.step if after < 0 else None)
        return (step, self.abstract._replace(**items)) if items else None


@contextlib.contextmanager
def examining(settings: Settings, checkpoint: str, wait: float = 0.0) -> Iterator[Examination]:
    """Opens the evaluation data and a checkpoint of a run, and compiles the predict step.

    `checkpoint` is latest, best (in the evaluations of that run) or a step. It waits up to `wait`
    seconds for the first checkpoint.
    """
    folder = epath.Path(settings.workdir) / "checkpoints"
    if not wait and not folder.exists():  # before anything is made in a mistyped folder
        raise CheckpointError(f"no checkpoint in {folder}; is --workdir right?")
    run = Run.open(settings, trains=False)
    with run.watched():
        check_evaluates(run.programs)
        run.open_data("eval")
        check_best_by(run.programs)
        checkpoints = Checkpointer(str(folder), keep=settings.keep_checkpoints, best=None)
        if wait and checkpoint == "latest":
            next_step(checkpoints, -1, wait)
        choose = functools.partial(checkpoints.choose, checkpoint, settings.best_by)
        step, then = checkpoints.read(choose, checkpoints.manifest)
        source = f"{checkpoints.directory}/{step}"
        data = [run.benchmark.identity("eval")]
        for note in compare_data(run.programs, then, source, data)[1]:
            _log.info("NOTE %s", note)
        plan = make_plan(settings, run.benchmark, then["num_train_examples"])
        programs, abstract = run.programs, run.programs.abstract_state(plan)
        with compiler.watched():
            _, predict = Fit.of_run(programs, abstract, "eval").predict(
                lambda size: CompiledStep(programs.lower_predict(abstract, size))
            )
        processes.barrier("waiting for the other hosts to compile")
        yield Examination(run, checkpoints, choose, step, plan, abstract, predict)


def next_step(checkpoints: Checkpointer, step: int, seconds: float) -> int:
    """Waits up to `seconds` for a checkpoint after `step`; returns its step, -1 if none came."""
    start = time.monotonic()
    while True:
        if newer := [other for other in checkpoints.steps() if other > step]:
            return newer[0]
        if time.monotonic() - start > seconds:
            return -1
        for _ in range(10):
            preemption.raise_if_requested()
            time.sleep(0.2)


class Evaluator:
    """Evaluates during training; where the benchmark wants it, scores while the devices train."""

    def __init__(self, run: Run, plan: Plan, reporter: Reporter, log: mlperf.Log):
        self._run, self._plan, self._reporter, self._log = run, plan, reporter, log
        self.pending: Evaluation | None = None
        self.newest = 0  # the newest step that is scored

    @property
    def is_ready(self) -> bool:
        """Whether the score of the pending evaluation is known to this process."""
        return self.pending is not None and self.pending.is_ready

    def start(self, predict: CompiledStep | None, step: int, state: TrainState) -> float:
        """Predicts and starts to score; returns the seconds that the devices could not train.

        `predict` is the compiled predict step.
        """
        started = time.monotonic()
        assert predict is not None
        watchdog.doing("evaluating", step)
        self._reporter.live(f"step {step:,}: evaluating")
        self._log.eval_starts(step)
        self.pending = begin_evaluation(self._run, predict, state, step)
        return time.monotonic() - started

    def finish(self) -> float:
        """Waits for the pending score and records it; returns the seconds that this took."""
        started, pending = time.monotonic(), self.pending
        assert pending is not None
        scores, self.pending, self.newest = pending.scores(), None, pending.step
        self._log.eval_ends(pending.step, scores)
        examples, seconds = self._plan.num_examples, time.monotonic() - pending.started
        report_scores(self._run, self._reporter, pending.step, examples, scores, seconds)
        return time.monotonic() - started


def evaluate(settings: Settings, checkpoint: str, watch_seconds: float) -> Scores:
    """Evaluates a checkpoint of the workdir; results go to its folder `eval`.

    Where the run keeps an average of the weights (EMA), that is evaluated. `checkpoint` is
    "latest", "best" (in the evaluations of the run) or a step. With `watch_seconds` it goes on with
    new checkpoints as they appear, until the run's last step is evaluated or no checkpoint came for
    so long. Returns the scores of the last checkpoint.
    """
    with examining(settings, checkpoint, watch_seconds) as examination:
        run, plan = examination.run, examination.plan
        title = f"{run.title}, evaluation"
        reporter = Reporter(settings.workdir, subdir="eval", title=title, **run.shown_metrics)
        with contextlib.closing(reporter):
            started, scores, restored = time.monotonic(), {}, examination.restore()
            while restored is not None:
                step, state = restored
                evaluation = begin_evaluation(run, examination.predict, state, step, True)
                del restored, state  # else the next one would need as much memory again
                scores, seconds = evaluation.scores(), time.monotonic() - started
                report_scores(run, reporter, step, plan.num_examples, scores, seconds)
                for exhibit in exhibits(run, evaluation):
                    for name, data in exhibit.files.items():
                        reporter.say(f"wrote {reporter.write(name, data)}")
                if not watch_seconds or step >= plan.total_steps:
                    for note in run.benchmark.score_notes(scores):
                        reporter.say(f"NOTE {note}")
                    return scores
                restored = examination.restore(step, watch_seconds)
                started = time.monotonic()
            reporter.say(f"no new checkpoint for {watch_seconds:.0f} s: stopped watching")
            return scores
