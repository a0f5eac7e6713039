"""The training loop of every benchmark: start or resume, train, evaluate, save, stop.

`train_and_evaluate` tells the story of a run from top to bottom; `Loop.train` is the loop over
steps. Nothing here knows what is being trained: that is `benchmarks.base.Benchmark`. The train step
is in `engine.step`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import jax
from etils import epath

import run as runs
from engine import compile_cache, mlperf
from engine import mesh as meshes
from engine.checkpoint import Checkpointer
from engine.cluster import preemption, processes, watchdog
from engine.cluster.guard import Guard
from engine.manifest import changes
from engine.mesh import Feed
from engine.report import starts
from engine.report.intervals import Intervals, Outlook
from engine.report.writers import Reporter
from engine.step import Compiled, TrainState, items
from errors import DataError, UserError
from evaluate import Evaluator, Judge, Scores
from run import Plan, Settings
from start import Run, first_state, pending_work, restore

if TYPE_CHECKING:
    from engine.report.profiler import Profiler

# The activities of the loop between steps; a run that hangs there can still be saved.
_INPUT, _STEP = "waiting for input", "training"


class Closable(Protocol):
    """A part of the run that is closed at its end."""

    def close(self) -> None:
        """Releases what the part holds."""
        ...


Part = TypeVar("Part", bound=Closable)


class Diverged(UserError):
    """The loss or the gradient is not a finite number."""


class Position(NamedTuple):
    """Where a run is: the steps done, the state after them, the totals of the log interval."""

    step: int
    state: TrainState
    totals: Any


class Programs(NamedTuple):
    """The compiled programs of the loop; `predict` is None in a run that does not evaluate."""

    train: Callable[..., Any]
    zeros: Callable[[], Any]
    predict: Callable[..., Any] | None


def train_and_evaluate(settings: Settings, evaluating: bool = True) -> Scores:
    """Trains in the workdir, from its newest checkpoint if it has one.

    Args:
      settings: the run's; see `run.read`.
      evaluating: False leaves evaluation to another process.

    Returns:
      The scores of the last evaluation; {} if there was none.

    Raises:
      UserError: a mistake that the person can mend; Diverged, if the loss is not finite.
      Preempted: a signal arrived; the run is saved.
    """
    started, run = time.time(), Run.open(settings)
    with contextlib.ExitStack() as exits:
        guard = Guard(settings.workdir, run.mesh, settings.limits.host_memory_limit)
        exits.callback(guard.close)
        log = _mlperf_log(run, evaluating, started)
        saver: Saver | None = None
        seconds = settings.limits.watchdog_seconds
        guard.watch(seconds, run.log, pending_work, lambda: saver.rescue() if saver else "")
        reporter = Reporter(settings.workdir, title=run.title, **run.shown_metrics)
        _closed_at_the_end(exits, reporter)
        profiler = None
        if settings.profile_steps:
            from engine.report.profiler import Profiler

            profiler = Profiler(settings.profile_steps, settings.workdir)
            _closed_at_the_end(exits, profiler)
        plan = _plan(run, evaluating)
        saver = Saver(run, plan, guard, reporter, ("train", "eval") if evaluating else ("train",))
        _closed_at_the_end(exits, saver.checkpoints)
        exits.callback(log.close)

        judge = Judge(run, plan, reporter, evaluating)
        newest = saver.find_newest()
        if newest and judge.is_finished(newest):
            reporter.say(f"already finished: {judge.result(newest)}")
            return judge.scores(newest)
        if not newest and not settings.init_from:
            run.programs.check_random_start()
        _introduce(run, plan, reporter)
        log.describe(plan.recipe, saver.abstract.params, run.mesh, plan.eval_every.next_after)
        compiling = time.monotonic()
        programs = _compile(run, plan, saver, reporter, evaluating)
        saver.starts += [starts.describe(newest, time.monotonic() - compiling, run.mesh)]
        initial, source = (None, "") if newest else first_state(run, plan)
        log.run_starts()
        _open_data(run, plan, reporter, evaluating)
        if initial is None:
            position = saver.restore(newest)
            reporter.say(f"resuming at step {newest:,} from {saver.checkpoints.directory}/{newest}")
        else:
            position = saver.start(Position(0, initial, programs.zeros()), source)
        with preemption.deferred():
            processes.barrier("waiting for the other hosts to compile")
            evaluator = Evaluator(run, plan, reporter, log, programs.predict)
            loop = Loop(run, plan, guard, profiler, saver, judge, evaluator, programs)
            position = loop.train(position)
            saver.verify(position)
        _conclude(run, reporter, judge.result(position.step), evaluating)
        return judge.scores(position.step)


@dataclasses.dataclass(frozen=True)
class Loop:
    """The loop over steps, and the parts of the run that it works with."""

    run: Run
    plan: Plan
    guard: Guard
    profiler: Profiler | None
    saver: Saver
    judge: Judge
    evaluator: Evaluator
    programs: Programs

    def train(self, start: Position) -> Position:
        """Trains, reports, saves and evaluates until the last step or until the judge ends it."""
        run, saver, evaluator = self.run, self.saver, self.evaluator
        (step, state, totals), total = start, self.plan.recipe.total_steps
        shard = jax.process_index(), jax.process_count()
        batches = run.benchmark.train_batches(run.settings.train_batch_size, *shard, step)
        feed = Feed(batches, run.mesh)
        intervals = Intervals(
            saver.reporter, feed, _outlook(run, self.plan, self.judge.evaluating), step
        )
        saver.report = intervals.report
        if self.judge.lacks_evaluation(step, saver.saved):  # the run was stopped before it
            intervals.pause(evaluator.start(step, state) + evaluator.finish())
        next_batch, in_flight = iter(feed), []
        while step < total and not self.judge.is_over(step):
            if self.profiler:
                self.profiler.before(step)
            watchdog.doing(_INPUT, step)
            batch = next(next_batch)
            watchdog.doing(_STEP, step)
            state, totals, done = self.programs.train(state, totals, batch)
            step += 1
            # Wait for the step before the last: the host stays close, the devices stay busy.
            in_flight = [*in_flight, (done, self.guard.vote(evaluator.is_ready))][-2:]
            jax.block_until_ready(in_flight[0][0])
            saver.check(intervals.report())
            intervals.show_progress(step)
            if self.profiler and (trace := self.profiler.after(step, done)):
                saver.reporter.say(trace)
            if runs.is_due(self.plan.log_every, step) or step == total:
                intervals.close(step, totals)
                totals = self.programs.zeros()
            position = saver.latest = Position(step, state, totals)
            saves, evaluates = runs.is_due(self.plan.save_every, step), self.judge.is_due(step)
            vote = in_flight[0][1]
            stop = vote.stop
            if evaluator.pending and (saves or evaluates or stop or vote.score_ready):
                if stop:  # the evaluated step is saved; the next run scores it again
                    self._stop(stop)
                intervals.pause(evaluator.finish(), evaluated=True)
                if self.judge.is_over(evaluator.newest):  # later steps do not count
                    return saver.restore(evaluator.newest)
            if saves or evaluates or stop or step == total:
                saver.check(intervals.report())
                intervals.pause(saver.save(position))
            if stop:
                self._stop(stop)
            if evaluates:
                seconds = evaluator.start(step, state)
                if step == total or not run.benchmark.scores_in_background:
                    seconds += evaluator.finish()
                intervals.pause(seconds, evaluated=True)
        return Position(step, state, totals)

    def _stop(self, reason: BaseException) -> None:
        """Waits for the last checkpoint and raises the reason to stop."""
        self.saver.checkpoints.wait()
        saved = self.saver.saved
        self.saver.reporter.say(f"saved step {saved:,}; the same command continues from here")
        raise reason


class Saver:
    """Saves the run and restores it; refuses to save a step that is not finite."""

    def __init__(
        self, run: Run, plan: Plan, guard: Guard, reporter: Reporter, splits: Sequence[str]
    ):
        self._run, self._plan, self._guard, self.reporter = run, plan, guard, reporter
        self._splits = splits  # those whose data the run needs
        self._before: dict[str, Any] = {"data": {}, "accepted_data": []}  # of the newest manifest
        self.abstract = run.programs.abstract_state(plan.recipe)
        self.abstract_totals = run.programs.abstract_totals(self.abstract)
        self.checkpoints = Checkpointer(
            run.checkpoints_dir,
            keep=run.settings.keep_checkpoints,
            best=lambda: reporter.history.best(run.metrics[0]),
        )
        self._init_from = ""  # the checkpoint that the run's first weights are from
        self.starts: list[dict[str, Any]] = []  # of the run up to now, see `engine.report.starts`
        self.report: Callable[[], Any] = lambda: None  # of the log interval that was closed last
        self.saved = 0  # the newest step that is in a checkpoint or on its way there
        self.latest: Position | None = None  # for `rescue`

    @functools.cached_property
    def _facts(self) -> dict[str, Any]:
        """What the manifest says about the run; made late, because it opens the data."""
        facts = self._run.facts(self._plan.num_examples, splits=self._splits)
        return {**facts, "data": {**self._before["data"], **facts["data"]}}

    def find_newest(self) -> int:
        """The newest checkpoint's step; 0 if there is none.

        Raises:
          HostError: the hosts see different checkpoints or data.
          CheckpointError: the checkpoint is another model's.
        """
        newest = max(self.checkpoints.steps(), default=0)
        view = {"newest checkpoint": newest, "training examples": self._plan.num_examples}
        view |= {"metrics": len(self.reporter.history.rows)}
        processes.barrier("comparing what the hosts see", view)
        if newest:
            then = self.checkpoints.compare(newest, items(self.abstract, self.abstract_totals))
            folder = f"{self.checkpoints.directory}/{newest}"
            others = self._run.check_meaning(then, folder, self._splits)
            self._run.note_changes(then, folder, self._splits)
            self._before = {
                "data": then.get("data", {}),
                "accepted_data": [*then.get("accepted_data", []), *others],
            }
            for key in ("config", "num_train_examples"):
                for change in changes({key: then[key]}, {key: self._facts[key]}):
                    self.reporter.say(f"NOTE {change}")
            self._init_from, self.starts = then.get("init_from", ""), then.get("starts", [])
            self._mend_metrics(newest, then.get("evaluations", []))
            if note := self._run.programs.norm_change(then.get("norm_examples"), self.abstract):
                self.reporter.say(f"NOTE {note}")
        return newest

    def _mend_metrics(self, newest: int, evaluations: list[dict[str, Any]]) -> None:
        """Says what metrics.jsonl has lost; takes lost scores from the newest checkpoint."""
        history = self.reporter.history
        if history.damage:
            self.reporter.say(f"NOTE {history.damage}")
        last = max((row["step"] for row in history.rows if row["split"] == "train"), default=0)
        due = self._plan.log_every.next_after(last)
        if due is not None and due <= newest:
            self.reporter.say(f"NOTE metrics.jsonl lacks the training of steps {due} to {newest}")
        if count := history.mend(evaluations):
            self.reporter.say(f"NOTE {count} scores that it lacked are from checkpoint {newest}")

    def start(self, position: Position, init_from: str) -> Position:
        """Notes where the weights are from; drops the metrics of a run without checkpoints."""
        self._init_from = init_from
        if self.reporter.history.rows:
            self.reporter.say(
                "NOTE no checkpoint here: starting at step 0, the old metrics.jsonl is dropped"
            )
            self.reporter.history.cut(0)
        return position

    def restore(self, step: int) -> Position:
        """Restores a checkpoint and drops the metrics after its step."""
        folder = f"{self.checkpoints.directory}/{step}"
        watchdog.doing(f"restoring {folder}", step)
        position = restore(self.checkpoints, step, self.abstract, self.abstract_totals)
        self.reporter.history.cut(step)
        self.saved = step
        return Position(step, *position)

    def save(self, position: Position) -> float:
        """Begins to save in the background, unless the step is saved; returns the seconds it took.

        Raises:
          Diverged: a step since the last checkpoint was not finite.
        """
        started, (step, state, totals) = time.monotonic(), position
        if step != self.saved:
            self.check(totals)
            self._guard.check()
            with watchdog.during(f"saving {self.checkpoints.directory}/{step}", step):
                facts = {**self._facts, "init_from": self._init_from, "starts": self.starts}
                facts["accepted_data"] = self._before["accepted_data"]
                facts["evaluations"] = self.reporter.history.evaluations()
                self.checkpoints.save(step, **items(state, totals), facts=facts)
            self.saved = step
        return time.monotonic() - started

    def verify(self, position: Position) -> None:
        """Reads the last checkpoint back and compares it with the state."""
        self.checkpoints.verify(position.step, items(position.state, position.totals))

    def check(self, totals: Any) -> None:
        """Raises Diverged if a step in `totals` (None: there are none) was not finite."""
        if totals is not None and (bad := int(totals["bad_step"])):
            raise diverged(self._run, bad, self.saved)

    def rescue(self) -> str:
        """Saves the newest step for the watchdog, while the loop hangs; returns what it did."""
        kept = "nothing is saved"
        if self.saved:
            kept = f"the last checkpoint is step {self.saved}, if it was complete"
        if jax.process_count() > 1 or self.latest is None or self.latest.step <= self.saved:
            return kept  # with several hosts all would have to save, and one of them hangs
        if watchdog.activity().what not in (_INPUT, _STEP):
            return kept  # the loop is in the middle of something that this would disturb
        self.check(self.report())
        self.save(self.latest)
        self.checkpoints.wait()
        return f"saved step {self.saved:,}"


def _mlperf_log(run: Run, evaluating: bool, started: float) -> mlperf.Log:
    if not run.settings.mlperf.format:
        return mlperf.Log()
    import mlperf_log

    return mlperf_log.begin(run, evaluating, started)


def _plan(run: Run, evaluating: bool) -> Plan:
    """The run in steps; finds mistakes in the config before it reads data to count them."""
    declared = run.benchmark.declared_examples("train")
    plan = runs.plan(run.settings, run.benchmark, declared or 1)
    if declared:
        return plan
    return runs.plan(run.settings, run.benchmark, run.count_examples(evaluating))


def _introduce(run: Run, plan: Plan, reporter: Reporter) -> None:
    """Says what will be trained, and writes the config."""
    total, size, unit = plan.recipe.total_steps, run.settings.train_batch_size, run.benchmark.unit
    params = run.programs.abstract_state(plan.recipe).params
    reporter.say(f"{run.title}: {reporter.overview(params)} (table in parameters.txt)")
    sizes = jax.tree.map(lambda x, frozen: frozen * x.size, params, plan.recipe.frozen(params))
    if frozen := sum(jax.tree.leaves(sizes)):
        reporter.say(f"frozen: {frozen:,} of these parameters never change")
    epochs = total * size / plan.num_examples
    reporter.say(f"{total:,} steps of {size:,} {unit} = {epochs:.2f} epochs")
    text = json.dumps(run.settings.recipe, indent=2, sort_keys=True)
    reporter.write("config.json", text + "\n")


def _compile(run: Run, plan: Plan, saver: Saver, reporter: Reporter, evaluating: bool) -> Programs:
    watchdog.doing("compiling")
    reporter.say("compiling ...")
    reporter.prepare()
    programs, state = run.programs, saver.abstract
    with compile_cache.watched(reporter.say):
        train = Compiled(programs.lower_train(plan.recipe, state, saver.abstract_totals))
        train = functools.partial(train, programs.seed(plan.recipe))
        zeros = programs.zeros(saver.abstract_totals)
        predict = Compiled(programs.lower_predict(state)) if evaluating else None
    return Programs(train, zeros, predict)


def _open_data(run: Run, plan: Plan, reporter: Reporter, evaluating: bool) -> None:
    """Opens the data, if that has not happened yet, and says how many examples they hold."""
    unit, count = run.benchmark.unit, plan.num_examples
    if run.benchmark.declared_examples("train"):
        count = run.count_examples(evaluating)
    if count != plan.num_examples:
        raise DataError(
            f"the data hold {count:,} {unit} to train, declared are {plan.num_examples:,}"
        )
    held = f"; {run.benchmark.num_examples('eval'):,} to evaluate" if evaluating else ""
    reporter.say(f"data: {count:,} {unit} to train{held}")
    notes = functools.partial(run.benchmark.notes, run.programs.norm_examples, evaluating)
    for note in processes.first_process_first(notes):
        reporter.say(f"NOTE {note}")


def _outlook(run: Run, plan: Plan, evaluating: bool) -> Outlook:
    """What the reports of the log intervals need to know about the run."""
    return Outlook(
        total_steps=plan.recipe.total_steps,
        batch_size=run.settings.train_batch_size,
        num_examples=plan.num_examples,
        unit=run.benchmark.unit,
        throughput=run.benchmark.throughput,
        chips=meshes.num_chips(run.mesh),
        learning_rate=plan.recipe.learning_rate,
        next_evaluation=plan.eval_every.next_after if evaluating else None,
        advice=run.benchmark.advice,
    )


def _conclude(run: Run, reporter: Reporter, result: str, evaluating: bool) -> None:
    """Says how the run ended and where its results are."""
    reporter.say(f"finished: {result}")
    files = {"checkpoints": "checkpoints/", "metrics": "metrics.jsonl"}
    files |= {"learning curves": "learning_curves.png"} if evaluating else {}
    for what, name in files.items():
        reporter.say(f"  {what}: {epath.Path(run.settings.workdir) / name}")


def _closed_at_the_end(exits: contextlib.ExitStack, part: Part) -> Part:
    """Has `part` closed, except after a failure that another host does not know of.

    Closing would then wait for the other hosts.
    """

    def close() -> None:
        if not (processes.is_joined() and isinstance(sys.exception(), Exception)):
            with preemption.deferred():
                part.close()

    exits.callback(close)
    return part


def diverged(run: Run, step: int, saved: int) -> Diverged:
    """The error for a step that is not finite; `saved` is the newest checkpoint's step."""
    key = "warmup_steps" if run.settings.schedule.warmup_steps else "warmup_epochs"
    good = f"checkpoint {saved} is the last good one" if saved else "there is no checkpoint yet"
    return Diverged(
        f"the loss or the gradient of step {step} is not finite (nan or inf)"
        f"{_examples_of(run, step)}; {good}. --replay={step} shows the step in detail. A lower "
        f"--config.base_learning_rate or a longer --config.{key} often helps"
    )


def _examples_of(run: Run, step: int) -> str:
    """Which examples a step has seen, in words; a file beside host 0's log lists all of them."""
    if jax.process_index():
        return ""  # process 0 names those of all hosts
    try:
        ids = run.benchmark.train_ids(run.settings.train_batch_size, step - 1)
    except Exception:  # the message matters more than its details
        ids = []
    if not ids:
        return ""
    text = json.dumps({"step": step, "ids": ids, "places": run.benchmark.describe(ids)})
    path = run.log.note(f"step-{step}.json", text + "\n")
    return f", its examples are {', '.join(map(str, ids[:4]))} ... (all in {path})"
