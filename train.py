"""The training loop of every benchmark: start or resume, train, evaluate, save, stop.

`train_and_evaluate` is a run from its start to its end. `Trainer.open` builds the parts of the run,
in the order in which they need each other; the other methods are what the run does with them, one
after the other. `Trainer.train` is the loop over steps.

Nothing here knows what is being trained: that is `benchmarks.base.Benchmark`. The train step is in
`engine.step`.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import jax
from etils import epath

from common.errors import some
from engine import compiler, mlperf
from engine.checkpoint.saver import Position, Saver, check_start, first_state
from engine.checks import check_plan, check_schedule, notes_of
from engine.cluster import preemption, processes, watchdog
from engine.cluster.guard import Guard
from engine.corruption import DeviceCheck
from engine.evaluate import Evaluator, Scores
from engine.fit import Fit
from engine.intervals import Intervals
from engine.plan import Plan, Programs, Settings, make_plan
from engine.report.starts import describe_start
from engine.report.writers import Profiler, Reporter, synced_to_wandb
from engine.run import Run
from engine.sharding import Feed
from engine.step import CompiledStep
from engine.stopping import StoppingRule

_GARBAGE_STEPS = 50  # between two collections; each takes a millisecond beside a running step


class Compiled(NamedTuple):
    """What the loop calls, compiled from `Programs`; None where a run does not need it."""

    train: Callable[..., Any]
    zeros: Callable[[], Any]
    predict: CompiledStep | None
    check: DeviceCheck | None = None


def train_and_evaluate(settings: Settings, evaluating: bool = True) -> Scores:
    """Trains in the workdir, from its newest checkpoint if it has one.

    Args:
      settings: what was asked; `engine.plan.read_settings` makes it from a config.
      evaluating: False leaves evaluation to another process.

    Returns:
      The scores of the last evaluation; {} if there was none.

    Raises:
      UserError: a mistake that the user can fix; Diverged, if the loss is not finite.
      Preempted: a signal arrived; the run is saved.
    """
    check_schedule(settings)
    if settings.mlperf.format:  # its clock runs before the data are opened, so it counts them first
        settings = mlperf.declare_examples(settings, evaluating)
    with Trainer.open(settings, evaluating) as trainer:
        newest = trainer.saver.find_newest()
        if newest and trainer.stopping.is_finished(newest):
            trainer.reporter.say(f"already finished: {trainer.stopping.result(newest)}")
            return trainer.stopping.scores(newest)
        compiled, position = trainer.start(newest)
        with preemption.deferred():
            processes.barrier("waiting for the other hosts to compile")
            position = trainer.train(compiled, position)
            trainer.saver.verify(position)
        trainer.conclude(position.step)
        return trainer.stopping.scores(position.step)


@contextlib.contextmanager
def _without_automatic_collection() -> Iterator[None]:
    """Python collects no garbage by itself inside the block.

    A collection of all objects takes 0.2 s after the imports, at another step on each host, and the
    other hosts wait for it. Inside the block it looks only at objects that are made there.
    """
    was_enabled, freezes = gc.isenabled(), not gc.get_freeze_count()  # else somebody else has
    if freezes:
        gc.collect()
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A run, and the parts that it is made of."""

    run: Run  # the devices, the benchmark, the workdir and this host's log
    evaluating: bool  # whether this process evaluates
    guard: Guard  # the workdir's lock, the memory, the hosts' vote to stop
    log: mlperf.Log  # MLPerf's; writes nothing in other runs
    reporter: Reporter  # the terminal, metrics.jsonl, TensorBoard and the learning curves
    profiler: Profiler | None
    plan: Plan  # the run in steps
    saver: Saver  # the checkpoints
    stopping: StoppingRule
    evaluator: Evaluator

    @classmethod
    @contextlib.contextmanager
    def open(cls, settings: Settings, evaluating: bool) -> Iterator[Self]:
        """Builds the parts; the end of the block closes them, the last one first."""
        with contextlib.ExitStack() as exits:
            # The lock comes first: nobody else writes into the workdir from here on. Data on a
            # bucket may hang, so the watchdog looks on while they are opened.
            run, guard = exits.enter_context(Run.at_work(settings))
            evaluating = evaluating and not run.benchmark.no_evaluation
            log = mlperf.begin_log(run.programs, time.time())
            # wandb copies TensorBoard's events, so it begins before the reporter writes any.
            if settings.tracker and jax.process_index() == 0:
                exits.enter_context(synced_to_wandb(settings.workdir, settings.config))
            reporter = Reporter(settings.workdir, title=run.title, **run.shown_metrics)
            exits.callback(_close, reporter.close)
            profiler = None
            if settings.profile_steps:
                profiler = Profiler(settings.profile_steps, settings.workdir)
                exits.callback(_close, profiler.close)
            # The length of the run follows from the data.
            splits = ("train", "eval") if evaluating else ("train",)
            plan = _plan(run, splits)
            # The best checkpoint is one of the reporter's history. The last save ends before the
            # reporter closes, and MLPerf's log before both.
            saver = Saver(run.programs, run.log, plan, guard, reporter, splits)
            exits.callback(_close, saver.checkpoints.close)
            exits.callback(log.close)
            check_plan(run.programs, plan, saver.abstract, evaluating)
            stopping = StoppingRule(run, plan, reporter, evaluating)
            evaluator = Evaluator(run, plan, reporter, log)
            yield cls(
                run=run,
                evaluating=evaluating,
                guard=guard,
                log=log,
                reporter=reporter,
                profiler=profiler,
                plan=plan,
                saver=saver,
                stopping=stopping,
                evaluator=evaluator,
            )

    def start(self, newest: int) -> tuple[Compiled, Position]:
        """Compiles, opens the data, and restores the checkpoint `newest`; 0: makes the first state.

        What is wrong with the weights to begin with is found before anything is compiled.
        """
        run, plan, saver = self.run, self.plan, self.saver
        weights = None if newest else check_start(run.programs, saver.abstract)
        self._introduce()
        self.log.describe(plan, saver.abstract.params, run.mesh)
        start, begun = describe_start(newest, run.mesh), time.monotonic()
        compiled, programs = self._compile()
        saver.add_start({**start, "compile_seconds": round(time.monotonic() - begun, 1)})
        initial, source = (None, "") if newest else first_state(run.programs, plan, weights)
        self.log.run_starts()
        if run.settings.mlperf.format:  # its clock runs by now
            run.open_data("train", "eval")
        self._introduce_data(programs.norm_examples)
        if initial is None:
            position = saver.restore(newest)
            folder = saver.checkpoints.directory
            self.reporter.say(f"resuming at step {newest:,} from {folder}/{newest}")
            return compiled, position
        return compiled, saver.start(Position(0, initial, compiled.zeros()), source)

    @_without_automatic_collection()
    def train(self, compiled: Compiled, start: Position) -> Position:
        """Trains, reports, saves and evaluates until the last step, or until the run is to stop."""
        run, plan, saver, evaluator = self.run, self.plan, self.saver, self.evaluator
        (step, state, totals), total = start, plan.total_steps
        shard = jax.process_index(), jax.process_count()
        batches = run.benchmark.train_batches(run.settings.train_batch_size, *shard, step)
        feed = Feed(batches, run.mesh)
        intervals = Intervals(self.reporter, feed, run, plan, step, self.evaluating)
        if self.stopping.lacks_evaluation(step, saver.saved):  # the run was stopped before it
            seconds = evaluator.start(compiled.predict, step, state)
            intervals.pause(seconds + evaluator.finish())
        next_batch, in_flight = iter(feed), []
        while step < total and not self.stopping.is_over(step):
            if self.profiler:
                self.profiler.before(step)
            watchdog.doing("waiting for input", step)
            batch = next(next_batch)
            if compiled.check:
                compiled.check.before(step, state, batch)
            watchdog.doing("training", step)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, totals, done = compiled.train(state, totals, batch)
            step += 1
            # Wait for the step before the last: the host stays close, the devices stay busy.
            in_flight = [*in_flight, (done, self.guard.vote(evaluator.is_ready))][-2:]
            jax.block_until_ready(in_flight[0][0])
            saver.check(intervals.report())
            intervals.show_progress(step)
            if self.profiler and (trace := self.profiler.after(step, done)):
                self.reporter.say(trace)
            if plan.logs(step):
                intervals.close(step, totals)
                totals = compiled.zeros()
            saves, evaluates = plan.saves(step), self.stopping.evaluates(step)
            vote = in_flight[0][1]
            stop = vote.stop
            if evaluator.pending and (saves or evaluates or stop or vote.score_ready):
                if stop:  # the evaluated step is saved; the next run scores it again
                    self._stop(stop)
                intervals.pause(evaluator.finish(), evaluated=True)
                if self.stopping.is_over(evaluator.newest):  # later steps do not count
                    return saver.restore(evaluator.newest)
            if saves or evaluates or stop:
                saver.check(intervals.report())
                intervals.pause(saver.save(Position(step, state, totals)))
            if stop:
                self._stop(stop)
            if evaluates:
                seconds = evaluator.start(compiled.predict, step, state)
                if step == total or not run.benchmark.scores_in_background:
                    seconds += evaluator.finish()
                intervals.pause(seconds, evaluated=True)
            # The objects of a score that is still computed would take seconds to look through.
            if (evaluates or step % _GARBAGE_STEPS == 0) and not evaluator.pending:
                gc.collect()
        return Position(step, state, totals)

    def conclude(self, step: int) -> None:
        """Says how the run ended, where its results are and what it took."""
        self.reporter.say(f"finished: {self.stopping.result(step)}")
        for note in self.stopping.notes():
            self.reporter.say(f"NOTE {note}")
        files = {"checkpoints": "checkpoints/", "metrics": "metrics.jsonl"}
        files |= {"learning curves": "learning_curves.png"} if self.evaluating else {}
        for what, name in files.items():
            self.reporter.say(f"  {what}: {epath.Path(self.run.settings.workdir) / name}")
        if cost := self.saver.cost():
            self.reporter.say(f"  {cost}")

    def _introduce(self) -> None:
        """Says what will be trained, and writes the config."""
        run, plan, say = self.run, self.plan, self.reporter.say
        total, size = plan.total_steps, run.settings.train_batch_size
        params = run.programs.abstract_state(plan).params
        say(f"{run.title}: {self.reporter.overview(params)} (table in parameters.txt)")
        sizes = jax.tree.map(
            lambda x, frozen: frozen * x.size, params, plan.step_settings.frozen(params)
        )
        if frozen := sum(jax.tree.leaves(sizes)):
            say(f"frozen: {frozen:,} of these parameters never change")
        for note in notes_of(plan):
            say(f"NOTE {note}")
        epochs = total * size / plan.num_examples
        say(f"{total:,} steps of {size:,} {run.benchmark.unit} = {epochs:.2f} epochs")
        text = json.dumps(run.settings.config, indent=2, sort_keys=True)
        self.reporter.write("config.json", text + "\n")

    def _introduce_data(self, norm_examples: int) -> None:
        """Says how many examples the data hold, and what else is to be known about them."""
        run, say = self.run, self.reporter.say
        text = f"data: {self.plan.num_examples:,} {run.benchmark.unit} to train"
        if part := run.benchmark.part.describe():
            text += f" ({part})"
        if self.evaluating:
            text += f"; {run.benchmark.num_examples('eval'):,} to evaluate"
        say(text)
        if why := run.benchmark.no_evaluation:
            keys = ["patience", "stop_at_target"] + ["best_by"] * (not run.settings.steps_of)
            unused = some(f"config.{key}" for key in keys if getattr(run.settings, key))
            effect = f" (without effect: {unused})" if unused else ""
            say(f"NOTE {why}: no example is held out, so the run only trains{effect}")
        notes = functools.partial(run.benchmark.run_notes, norm_examples, self.evaluating)
        for note in processes.first_process_first(notes):
            say(f"NOTE {note}")

    def _compile(self) -> tuple[Compiled, Programs]:
        """Compiles what the loop calls; returns the programs with what `engine.fit` found."""
        watchdog.doing("compiling")
        self.reporter.say("compiling ...")
        self.reporter.prepare()
        programs, plan, saver = self.run.programs, self.plan, self.saver
        state, totals, predict = saver.abstract, saver.abstract_totals, None
        splits = ("train", "eval") if self.evaluating else ("train",)
        fitting = Fit.of_run(programs, state, *splits)
        with compiler.watched():
            programs, train = fitting.train(
                lambda cut: CompiledStep(cut.lower_train(plan, state, totals))
            )
            saver.settle(programs)
            train = functools.partial(train, programs.seed())
            zeros = programs.zeros(totals)
            jax.jit(plan.learning_rate)(0)  # the reports', one program instead of ten
            if self.evaluating:
                _, predict = fitting.predict(
                    lambda size: CompiledStep(programs.lower_predict(state, size))
                )
            check = None
            if self.run.settings.check_devices_every:
                check = DeviceCheck(programs, saver.checkpoints, state)
        return Compiled(train, zeros, predict, check), programs

    def _stop(self, reason: BaseException) -> None:
        """Waits for the last checkpoint and raises the reason to stop."""
        self.saver.checkpoints.wait()
        step = self.saver.saved
        self.reporter.say(f"saved step {step:,}; the same command continues from here")
        raise reason


def _plan(run: Run, splits: Sequence[str]) -> Plan:
    """The run in steps; opens the data, but for MLPerf's runs, whose clock must run before.

    If the config declares how many examples there are, mistakes in it are found before that.
    """
    benchmark = run.benchmark
    declared = 0 if benchmark.part else benchmark.declared_examples("train")
    plan = make_plan(run.settings, benchmark, declared) if declared else None
    if not run.settings.mlperf.format:
        run.open_data(*splits)
    return plan or make_plan(run.settings, benchmark, benchmark.num_examples("train"))


def _close(close: Callable[[], None]) -> None:
    """Calls `close`, except after a failure that another host does not know of.

    After such a failure it would wait for the other hosts.
    """
    if not (processes.is_joined() and isinstance(sys.exception(), Exception)):
        with preemption.deferred():
            close()
