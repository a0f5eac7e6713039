"""The training loop of every benchmark: start or resume, train, evaluate, save, stop.

Nothing here knows what is being trained; that is `benchmarks.base.Benchmark`. How it is trained is
`engine.step`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from typing import Any

import jax
import numpy as np
from etils import epath

from engine import compile_cache, mlperf
from engine import mesh as meshes
from engine.cadence import Every
from engine.checkpoint import Checkpointer
from engine.cluster import preemption, processes, watchdog
from engine.cluster.guard import Guard, afford
from engine.manifest import changes
from engine.mesh import Feed
from engine.report.bottleneck import Bottleneck
from engine.report.progress import Progress, duration
from engine.report.writers import Profiler, Reporter
from engine.step import Compiled, TrainState, items
from errors import DataError, UserError
from evaluate import Setup, make_cadence, make_recipe, restore, waiting

# The activities of the loop between steps; a run that hangs there can still be saved.
_INPUT, _STEP = "waiting for input", "training"


class Diverged(UserError):
    """The loss or the gradient is not a finite number."""


def diverged(setup: Setup, step: int, saved: int) -> Diverged:
    """The error for a step that is not finite; `saved` is the newest checkpoint's step."""
    good = f"checkpoint {saved} is the last good one" if saved > 0 else "there is no checkpoint yet"
    return Diverged(
        f"the loss or the gradient of step {step} is not finite (nan or inf)"
        f"{_suspects(setup, step)}; {good}. --replay={step} looks closely. A lower "
        "--config.base_learning_rate or a longer --config.warmup_epochs often helps"
    )


def _suspects(setup: Setup, step: int) -> str:
    """Which examples a step saw, in words; all are in a file beside host 0's log."""
    if jax.process_index():
        return ""  # process 0 names those of all hosts
    try:
        ids = setup.benchmark.train_ids(setup.config.train_batch_size, step - 1)
    except Exception:  # what it was about matters more than that this cannot be said
        ids = []
    if not ids:
        return ""
    text = json.dumps({"step": step, "ids": ids, "places": setup.benchmark.places(ids)})
    where = setup.log.note(f"step-{step}.json", text + "\n")
    return f", its examples are {', '.join(map(str, ids[:4]))} ... (all in {where})"


class Trainer:
    """One training run in one workdir."""

    def __init__(self, setup: Setup, guard: Guard, evaluating: bool, log: mlperf.Log):
        """Opens the data and the checkpoints; `evaluating` False leaves evaluation to others."""
        self.setup, self.guard, self.mlperf = setup, guard, log
        self.config, self.benchmark, self.mesh = setup.config, setup.benchmark, setup.mesh
        config, workdir = setup.config, setup.workdir
        guard.watch(config.watchdog_seconds, setup.log, waiting, self._rescue)
        self.reporter = Reporter(workdir, title=self.setup.title, **setup.metrics)
        self.profiler = Profiler(config.profile_steps, workdir)
        self.evaluating = evaluating
        declared = self.benchmark.declared_examples("train")
        self._plan(declared or 1)  # finds slips in the config before data are read to count them
        self.checkpoints = Checkpointer(
            str(epath.Path(workdir) / "checkpoints"),
            keep=config.keep_checkpoints,
            best=lambda: self.reporter.history.best(self.benchmark.target.metric),
        )
        if not declared:
            self._plan(self._count())
        self.step = 0  # steps done
        self.saved = -1  # the newest step that is in a checkpoint or on its way there
        self._pending: tuple[int, Any] | None = None  # totals of a step not yet read
        self._latest: tuple[int, TrainState, Any] | None = None  # for the watchdog

    @property
    def _facts(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of the run."""
        return {
            "benchmark": self.config.benchmark,
            "config": self.config.to_dict(),
            "num_train_examples": self.examples,
            "target_metric": self.benchmark.target.metric,
            **self.benchmark.metadata,
        }

    def _plan(self, examples: int) -> None:
        """Turns the config's durations into steps, for so many training examples."""

        def every(key: str) -> Every:
            size = self.config.train_batch_size
            return Every.parse(self.config[key], batch_size=size, num_examples=examples, name=key)

        self.examples, self.recipe = examples, make_recipe(self.config, examples)
        self.eval_every = make_cadence(self.config, examples)
        self.save_every = every("steps_per_checkpoint")
        self.log_every = every("log_step_count_steps")

    def _count(self) -> int:
        """Opens the data; returns the number of training examples."""
        count = processes.first_process_first(lambda: self.benchmark.num_train_examples)
        if self.evaluating:
            processes.first_process_first(lambda: self.benchmark.num_eval_examples)
        size = self.config.train_batch_size
        advice = self.benchmark.advice.get("memory", "use hosts with more memory")
        afford(self.benchmark.host_bytes(size, jax.process_count()), advice)
        return count

    # The run.

    def run(self) -> dict[str, float]:
        """Trains to the end and returns the last scores ({} if it does not evaluate).

        Raises:
          Preempted: a signal arrived; the state is saved.
          Diverged: a loss or gradient was not finite; nothing of it is saved.
        """
        say = self.reporter.say
        abstract = self.setup.state(self.recipe)
        totals = self.setup.totals(abstract)
        steps = self.checkpoints.steps()
        found = {"newest checkpoint": steps[-1:], "training examples": self.examples}
        found |= {"metrics": len(self.reporter.history.rows)}
        processes.barrier("comparing what the hosts see", found)
        if steps:
            self._recognise(steps[-1], abstract, totals)
        if steps and self._finished(steps[-1]):
            say(f"already finished: {self._result(steps[-1])}")
            return self._scored().get(steps[-1], {})
        self._introduce(abstract)
        self.mlperf.describe(self.recipe, abstract.params, self.mesh, self.eval_every.next_after)
        self._compile(abstract, totals)
        fresh = None if steps else self.setup.fresh(self.recipe)  # compiles, too
        self.mlperf.run_starts()
        self._open()
        if fresh is None:
            state, totals = self._restore(steps[-1], abstract, totals)
        else:
            state, totals = self._start(fresh), self._zeros()
        self.progress = Progress(self.step, self.recipe.total_steps)
        self.bottleneck = Bottleneck(self.benchmark.advice)
        with preemption.deferred():
            processes.barrier("waiting for the other hosts to compile")
            if self.step in steps and self._eval_due() and self.step not in self._scored():
                self._evaluate(state)  # the run was stopped between saving and evaluating
            state, totals = self._loop(state, totals)
            self.checkpoints.verify(self.step, items(state, totals))
        say(f"finished: {self._result(self.step)}")
        files = {"checkpoints": "checkpoints/", "metrics": "metrics.jsonl"}
        for what, name in (files | {"learning curves": "learning_curves.png"}).items():
            if self.evaluating or what in files:
                say(f"  {what}: {epath.Path(self.setup.workdir) / name}")
        return self._scored().get(self.step, {})

    def close(self) -> None:
        """Ends traces, writers and background saves."""
        with preemption.deferred(), contextlib.ExitStack() as stack:
            for part in (self.reporter, self.checkpoints, self.profiler):
                stack.callback(part.close)

    def _loop(self, state: TrainState, totals: Any) -> tuple[TrainState, Any]:
        config, total = self.config, self.recipe.total_steps
        place = jax.process_index(), jax.process_count()
        self._feed = Feed(
            self.benchmark.train_batches(config.train_batch_size, *place, self.step), self.mesh
        )
        batches, flights = iter(self._feed), []
        reached = self._reached(self.step)
        while self.step < total and not reached:
            self.profiler.before(self.step)
            watchdog.doing(_INPUT, self.step)
            batch = next(batches)
            watchdog.doing(_STEP, self.step)
            state, totals, ticket = self._train_step(state, totals, batch)
            self.step += 1
            # Wait for the step before the last: the host stays close, the devices stay busy.
            flights = [*flights, (ticket, self.guard.vote())][-2:]
            jax.block_until_ready(flights[0][0])
            self._read()
            self._live()
            if traced := self.profiler.after(self.step, ticket):
                self.reporter.say(traced)
            last = self.step == total
            if self._due(self.log_every) or last:
                self._pending, totals = (self.step, totals), self._zeros()
            self._latest = self.step, state, totals
            evaluate, save = self._eval_due(), self._due(self.save_every)
            stop = flights[0][1].stop
            if save or evaluate or last or stop:
                self._read()
                self._save(self.step, state, totals)
            if stop:
                self.checkpoints.wait()
                self.reporter.say(f"saved step {self.step:,}; the same command continues from here")
                raise stop
            if evaluate:
                self._evaluate(state)
                reached = self._reached(self.step)
        return state, totals

    def _due(self, every: Every) -> bool:
        if not every.by_clock or jax.process_count() == 1:
            return every.due(self.step)
        # Hosts' clocks differ; asking each other at every step would cost too much.
        return self.step % 10 == 0 and bool(meshes.agree(every.due(self.step)))

    def _eval_due(self) -> bool:
        last = self.step == self.recipe.total_steps
        return self.evaluating and (self._due(self.eval_every) or last)

    # Its parts.

    def _introduce(self, abstract: TrainState) -> None:
        config, total, say = self.config, self.recipe.total_steps, self.reporter.say
        size, unit = config.train_batch_size, self.benchmark.unit
        count = self.reporter.overview(abstract.params)
        say(f"{self.setup.title}: {count} (table in parameters.txt)")
        say(f"{total:,} steps of {size:,} {unit} = {total * size / self.examples:.2f} epochs")
        text = json.dumps(config.to_dict(), indent=2, sort_keys=True)
        self.reporter.write("config.json", text + "\n")

    def _open(self) -> None:
        """Opens the data, at the latest now, and says what they are."""
        unit, count = self.benchmark.unit, self.examples
        if self.benchmark.declared_examples("train") and (count := self._count()) != self.examples:
            raise DataError(
                f"the data hold {count:,} {unit} to train, declared are {self.examples:,}"
            )
        held = f"; {self.benchmark.num_eval_examples:,} to evaluate" if self.evaluating else ""
        self.reporter.say(f"data: {count:,} {unit} to train{held}")

    def _start(self, fresh: TrainState) -> TrainState:
        if self.reporter.history.rows:
            say = self.reporter.say
            say("NOTE no checkpoint here: starting at step 0, the old metrics.jsonl is dropped")
            self.reporter.history.cut(0)
        return fresh

    def _recognise(self, step: int, abstract: TrainState, totals: Any) -> None:
        """Refuses a checkpoint of another model and tells what else is not as it was."""
        then = self.checkpoints.compare(step, items(abstract, totals))
        for key in ("config", "num_train_examples"):
            for change in changes({key: then[key]}, {key: self._facts[key]}):
                self.reporter.say(f"NOTE {change}")

    def _restore(self, step: int, abstract: TrainState, totals: Any) -> tuple[TrainState, Any]:
        watchdog.doing(f"restoring {self.checkpoints.directory}/{step}", step)
        state, totals = restore(self.checkpoints, step, abstract, totals)
        self.reporter.history.cut(step)
        self.step = self.saved = step
        self.reporter.say(f"resuming at step {step:,} from {self.checkpoints.directory}/{step}")
        return state, totals

    def _compile(self, abstract: TrainState, totals: Any) -> None:
        watchdog.doing("compiling")
        self.reporter.say("compiling ...")
        with compile_cache.watched(self.reporter.say):
            self._train_step = Compiled(self.setup.lower_train(self.recipe, abstract))
            self._zeros = self.setup.zeros(totals)
            if self.evaluating:
                self._predict = self.setup.compile_predict(abstract)

    def _save(self, step: int, state: TrainState, totals: Any) -> None:
        if step == self.saved:
            return
        begun = time.monotonic()
        self._check(totals)
        self.guard.check()
        with watchdog.during(f"saving {self.checkpoints.directory}/{step}", step):
            self.checkpoints.save(step, **items(state, totals), facts=self._facts)
        self.saved = step
        self.progress.pause(time.monotonic() - begun)

    def _check(self, totals: Any) -> None:
        if bad := int(totals["bad_step"]):
            raise diverged(self.setup, bad, self.saved)

    def _rescue(self) -> str:
        """Saves the newest step for the watchdog, while the loop hangs."""
        kept = "nothing is saved"
        if self.saved > 0:
            kept = f"the last checkpoint is step {self.saved}, if it was complete"
        if jax.process_count() > 1 or self._latest is None or self._latest[0] <= self.saved:
            return kept  # with several hosts all would have to save, and one of them hangs
        if watchdog.activity().what not in (_INPUT, _STEP):
            return kept  # the loop is in the middle of something that this would disturb
        step, state, totals = self._latest
        self._read()
        self._save(step, state, totals)
        self.checkpoints.wait()
        return f"saved step {step:,}"

    def _read(self) -> None:
        """Reports the totals that were set aside; their step is done by now."""
        if self._pending is None:
            return
        (step, totals), self._pending = self._pending, None
        totals = jax.tree.map(np.asarray, totals)
        self._check(totals)
        totals.pop("bad_step")
        means = {k: float(value / weight) for k, (value, weight) in totals.items()}
        seconds, steps = self.progress.window(step)
        shares, warning = self.bottleneck.interval(seconds, self._feed)
        rate = self.config.train_batch_size * steps / seconds
        chips, unit = meshes.num_chips(self.mesh), self.benchmark.unit
        epoch = step * self.config.train_batch_size / self.examples
        row = {
            **{"step": step, "epoch": epoch},
            **means,
            "learning_rate": float(self.recipe.learning_rate(step - 1)),
            f"{unit}_per_second": rate,
            f"{unit}_per_second_per_chip": rate / chips,
            "step_seconds": seconds / steps,
            **{k: share for k, share in shares.items() if not math.isnan(share)},
        }
        self.progress.foresee(step, self.eval_every.next_after if self.evaluating else None)
        left = self.progress.remaining(step)
        quantity = self.reporter.quantity
        shown = "  ".join(quantity(k, v) for k, v in means.items() if k != "gradient_norm")
        self.reporter.train(
            {**row, "eta_seconds": left},
            f"step {step:,}/{self.recipe.total_steps:,}  epoch {epoch:.2f}  {shown}  "
            f"lr {row['learning_rate']:.4g}  {rate:,.0f} {unit}/s ({rate / chips:,.0f} per chip)  "
            f"{1e3 * seconds / steps:.1f} ms/step  input wait {shares['input_wait']:.0%}  "
            f"{duration(left)} left",
        )
        if warning:
            logging.getLogger("tpu_suite").warning("%s", warning)  # on every host's terminal

    def _live(self) -> None:
        left = duration(self.progress.remaining(self.step))
        self.reporter.live(f"step {self.step:,}/{self.recipe.total_steps:,}  {left} left")

    def _evaluate(self, state: TrainState) -> None:
        begun = time.monotonic()
        watchdog.doing("evaluating", self.step)
        self.reporter.live(f"step {self.step:,}: evaluating")
        self.mlperf.eval_starts(self.step)
        scores = self.setup.evaluate(self._predict, state)
        self.mlperf.eval_ends(self.step, scores[self.benchmark.target.metric])
        seconds = time.monotonic() - begun
        self.progress.eval_seconds = seconds
        self.setup.report(self.reporter, self.step, self.examples, scores, seconds)
        self.progress.pause(time.monotonic() - begun)

    def _scored(self) -> dict[int, dict[str, float]]:
        return self.reporter.history.scores()

    def _reached(self, step: int) -> bool:
        target, found = self.benchmark.target, self._scored().get(step, {})
        return self.config.stop_at_target and found.get(target.metric, -math.inf) >= target.value

    def _finished(self, step: int) -> bool:
        if self._reached(step):
            return True
        return step >= self.recipe.total_steps and (not self.evaluating or step in self._scored())

    def _result(self, step: int) -> str:
        metric, value = self.benchmark.target.metric, self.benchmark.target.value
        total, scores = self.recipe.total_steps, self._scored()
        text = f"step {step:,} of {total:,}"
        if step > total:
            text = f"step {step:,}, beyond the {total:,} that config.train_steps asks for"
        if step in scores:
            best = self.reporter.history.best(metric)
            best = step if best is None else best  # every score may be nan
            met = "reached" if scores[step][metric] >= value else "NOT reached"
            goal = f"; target {self.reporter.number(metric, value)} {met}" if value > 0 else ""
            text += (
                f", {self.reporter.quantity(metric, scores[step][metric])} (best "
                f"{self.reporter.number(metric, scores[best][metric])} at step {best:,}){goal}"
            )
        return text


def train_and_evaluate(config: Any, workdir: str, evaluating: bool = True) -> dict[str, float]:
    """Trains in `workdir`, from its newest checkpoint if it has one.

    Args:
      config: the run's configuration; see `configs/`.
      workdir: folder, local or gs://, for everything the run writes.
      evaluating: False trains only.

    Returns:
      The scores of the last evaluation; {} if there was none.

    Raises:
      USER_ERRORS: something that the person can mend; the message says what.
      Preempted: a signal arrived; what was trained is saved.
    """
    begun, setup = time.time(), Setup.make(config, workdir)
    with contextlib.closing(Guard(workdir, setup.mesh, config.host_memory_limit)) as guard:
        log = mlperf.begin(config, setup.benchmark, workdir, evaluating, begun)
        trainer = Trainer(setup, guard, evaluating, log)
        try:
            return trainer.run()
        finally:
            log.close()
            # After a failure of one host the others would have to take part in what close does.
            if not (processes.is_joined() and isinstance(sys.exception(), Exception)):
                trainer.close()
