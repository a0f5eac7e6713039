"""The training loop of every benchmark: start or resume, train, evaluate, save, stop.

`train_and_evaluate` tells the story of a run from top to bottom; `Loop.train` is the loop over
steps. Four words recur: the `Settings` are what was asked, the `Run` is opened for them, the `Plan`
is what follows from them in steps, and the `Programs` are what is compiled for them.

Nothing here knows what is being trained: that is `benchmarks.base.Benchmark`. The train step is in
`engine.step`.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from etils import epath

from engine import compiler, mlperf
from engine.checks import check_count, check_plan, notes_of
from engine.cluster import preemption, processes, watchdog
from engine.cluster.guard import Guard
from engine.corruption import DeviceCheck
from engine.evaluate import Evaluator, Judge, Scores
from engine.mesh import Feed
from engine.report.intervals import Intervals
from engine.report.starts import cost_summary, describe_start
from engine.report.writers import Profiler, Reporter, synced_to_wandb
from engine.run import Plan, Settings, is_due, make_plan
from engine.saving import Position, Saver
from engine.start import Run, check_start, first_state
from engine.step import CompiledStep


class Compiled(NamedTuple):
    """What the loop calls, compiled from `Programs`; None where a run does not need it."""

    train: Callable[..., Any]
    zeros: Callable[[], Any]
    predict: Callable[..., Any] | None
    check: DeviceCheck | None = None


def train_and_evaluate(settings: Settings, evaluating: bool = True) -> Scores:
    """Trains in the workdir, from its newest checkpoint if it has one.

    Args:
      settings: what was asked; `engine.run.read_settings` makes it from a config.
      evaluating: False leaves evaluation to another process.

    Returns:
      The scores of the last evaluation; {} if there was none.

    Raises:
      UserError: a mistake that the user can fix; Diverged, if the loss is not finite.
      Preempted: a signal arrived; the run is saved.
    """
    run = Run.open(settings)
    with contextlib.ExitStack() as exits:
        guard = Guard(settings.workdir, run.mesh, settings.limits.host_memory_limit)
        exits.callback(guard.close)
        exits.enter_context(run.watched())
        log = mlperf.Log()
        if settings.mlperf.format:
            run = mlperf.declare_examples(run, evaluating)
            settings = run.settings
            log = mlperf.begin_log(run.programs, time.time())
        if settings.tracker and jax.process_index() == 0:
            exits.enter_context(synced_to_wandb(settings.workdir, settings.config, print))
        reporter = Reporter(settings.workdir, title=run.title, **run.shown_metrics)
        _at_the_end(exits, reporter.close)
        profiler = None
        if settings.profile_steps:
            profiler = Profiler(settings.profile_steps, settings.workdir)
            _at_the_end(exits, profiler.close)
        plan = _plan(run, evaluating)
        saver = Saver(run, plan, guard, reporter, ("train", "eval") if evaluating else ("train",))
        _at_the_end(exits, saver.checkpoints.close)
        exits.callback(log.close)
        check_plan(run.programs, plan, saver.abstract, evaluating)

        judge = Judge(run, plan, reporter, evaluating)
        newest = saver.find_newest()
        if newest and judge.is_finished(newest):
            reporter.say(f"already finished: {judge.result(newest)}")
            return judge.scores(newest)
        weights = None if newest else check_start(run, saver.abstract)
        _introduce(run, plan, reporter)
        log.describe(plan.recipe, saver.abstract.params, run.mesh, plan.eval_every.next_after)
        saver.starts.append(describe_start(newest, run.mesh))
        started = time.monotonic()
        compiled = _compile(run, plan, saver, reporter, evaluating)
        saver.starts[-1]["compile_seconds"] = round(time.monotonic() - started, 1)
        initial, source = (None, "") if newest else first_state(run, plan, weights)
        log.run_starts()
        _open_data(run, plan, reporter, evaluating)
        if initial is None:
            position = saver.restore(newest)
            reporter.say(f"resuming at step {newest:,} from {saver.checkpoints.directory}/{newest}")
        else:
            position = saver.start(Position(0, initial, compiled.zeros()), source)
        with preemption.deferred():
            processes.barrier("waiting for the other hosts to compile")
            evaluator = Evaluator(run, plan, reporter, log, compiled.predict)
            loop = Loop(run, plan, guard, profiler, saver, judge, evaluator, compiled)
            position = loop.train(position)
            saver.verify(position)
        _conclude(run, saver, judge.result(position.step), evaluating)
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
    compiled: Compiled

    def train(self, start: Position) -> Position:
        """Trains, reports, saves and evaluates until the last step or until the judge ends it."""
        run, saver, evaluator = self.run, self.saver, self.evaluator
        (step, state, totals), total = start, self.plan.recipe.total_steps
        shard = jax.process_index(), jax.process_count()
        batches = run.benchmark.train_batches(run.settings.train_batch_size, *shard, step)
        feed = Feed(batches, run.mesh)
        intervals = Intervals(saver.reporter, feed, run, self.plan, step, self.judge.evaluating)
        if self.judge.lacks_evaluation(step, saver.saved):  # the run was stopped before it
            intervals.pause(evaluator.start(step, state) + evaluator.finish())
        next_batch, in_flight = iter(feed), []
        while step < total and not self.judge.is_over(step):
            if self.profiler:
                self.profiler.before(step)
            watchdog.doing("waiting for input", step)
            batch = next(next_batch)
            if self.compiled.check:
                self.compiled.check.before(step, state, batch)
            watchdog.doing("training", step)
            state, totals, done = self.compiled.train(state, totals, batch)
            step += 1
            # Wait for the step before the last: the host stays close, the devices stay busy.
            in_flight = [*in_flight, (done, self.guard.vote(evaluator.is_ready))][-2:]
            jax.block_until_ready(in_flight[0][0])
            saver.check(intervals.report())
            intervals.show_progress(step)
            if self.profiler and (trace := self.profiler.after(step, done)):
                saver.reporter.say(trace)
            if is_due(self.plan.log_every, step) or step == total:
                intervals.close(step, totals)
                totals = self.compiled.zeros()
            position = Position(step, state, totals)
            saves, evaluates = is_due(self.plan.save_every, step), self.judge.is_due(step)
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


def _plan(run: Run, evaluating: bool) -> Plan:
    """The run in steps; finds mistakes in the config before it counts the examples."""
    declared = run.benchmark.declared_examples("train")
    plan = make_plan(run.settings, run.benchmark, declared or 1)
    if declared and run.settings.mlperf.format:  # its clock runs before the data are touched
        return plan
    count = run.count_examples(evaluating)  # refuses data that are not as declared
    return plan if declared else make_plan(run.settings, run.benchmark, count)


def _introduce(run: Run, plan: Plan, reporter: Reporter) -> None:
    """Says what will be trained, and writes the config."""
    total, size, unit = plan.recipe.total_steps, run.settings.train_batch_size, run.benchmark.unit
    params = run.programs.abstract_state(plan.recipe).params
    reporter.say(f"{run.title}: {reporter.overview(params)} (table in parameters.txt)")
    sizes = jax.tree.map(lambda x, frozen: frozen * x.size, params, plan.recipe.frozen(params))
    if frozen := sum(jax.tree.leaves(sizes)):
        reporter.say(f"frozen: {frozen:,} of these parameters never change")
    for note in notes_of(plan):
        reporter.say(f"NOTE {note}")
    epochs = total * size / plan.num_examples
    reporter.say(f"{total:,} steps of {size:,} {unit} = {epochs:.2f} epochs")
    text = json.dumps(run.settings.config, indent=2, sort_keys=True)
    reporter.write("config.json", text + "\n")


def _compile(run: Run, plan: Plan, saver: Saver, reporter: Reporter, evaluating: bool) -> Compiled:
    """Compiles what the loop calls, and says how long that took."""
    watchdog.doing("compiling")
    reporter.say("compiling ...")
    reporter.prepare()
    programs, state = run.programs, saver.abstract
    with compiler.watched(reporter.say):
        train = CompiledStep(programs.lower_train(plan.recipe, state, saver.abstract_totals))
        train = functools.partial(train, programs.seed(plan.recipe))
        zeros = programs.zeros(saver.abstract_totals)
        jax.jit(plan.recipe.learning_rate)(0)  # the reports', one program instead of ten
        predict = CompiledStep(programs.lower_predict(state)) if evaluating else None
        check = None
        if run.settings.check_devices_every:
            check = DeviceCheck(run, plan.recipe, saver.checkpoints, state)
    return Compiled(train, zeros, predict, check)


def _open_data(run: Run, plan: Plan, reporter: Reporter, evaluating: bool) -> None:
    """Opens the data, if that has not happened yet, and says how many examples they hold."""
    unit, count = run.benchmark.unit, plan.num_examples
    if run.benchmark.declared_examples("train"):
        count = run.count_examples(evaluating)
    check_count(run.benchmark, count)
    evaluated = f"; {run.benchmark.num_examples('eval'):,} to evaluate" if evaluating else ""
    reporter.say(f"data: {count:,} {unit} to train{evaluated}")
    notes = functools.partial(run.benchmark.notes, run.programs.norm_examples, evaluating)
    for note in processes.first_process_first(notes):
        reporter.say(f"NOTE {note}")


def _conclude(run: Run, saver: Saver, result: str, evaluating: bool) -> None:
    """Says how the run ended, where its results are and what it took."""
    saver.reporter.say(f"finished: {result}")
    files = {"checkpoints": "checkpoints/", "metrics": "metrics.jsonl"}
    files |= {"learning curves": "learning_curves.png"} if evaluating else {}
    for what, name in files.items():
        saver.reporter.say(f"  {what}: {epath.Path(run.settings.workdir) / name}")
    if cost := cost_summary(saver.starts, saver.reporter.history.rows):
        saver.reporter.say(f"  {cost}")


def _at_the_end(exits: contextlib.ExitStack, close: Callable[[], None]) -> None:
    """Calls `close` when `exits` ends, except after a failure that another host does not know of.

    After such a failure it would wait for the other hosts.
    """

    def end() -> None:
        if not (processes.is_joined() and isinstance(sys.exception(), Exception)):
            with preemption.deferred():
                close()

    exits.callback(end)
