"""Saves a run, restores it, and refuses to save a step that is not finite."""

import functools
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.base import Identity
from common.errors import UserError
from engine.checkpoint import resuming
from engine.checkpoint.manager import Checkpointer
from engine.cluster import processes, watchdog
from engine.cluster.guard import Guard
from engine.plan import Plan
from engine.report.starts import cost_summary, past_starts, starts_now
from engine.report.writers import Reporter
from engine.run import Run, restore_state
from engine.step import TrainState, checkpoint_items


class Diverged(UserError):
    """The loss or the gradient is not a finite number."""


class Position(NamedTuple):
    """Where a run is: the steps done, the state after them, the totals of the log interval."""

    step: int
    state: TrainState
    totals: Any


class Saver:
    """Saves the run and restores it; refuses to save a step that is not finite."""

    def __init__(
        self, run: Run, plan: Plan, guard: Guard, reporter: Reporter, splits: Sequence[str]
    ):
        self._run, self._plan, self._guard, self._reporter = run, plan, guard, reporter
        self._splits = splits  # the splits whose data the run needs
        self._before: dict[str, Any] = {"data": {}, "accepted_data": []}  # of the newest manifest
        self.abstract = run.programs.abstract_state(plan)
        self.abstract_totals = run.programs.abstract_totals(self.abstract)
        self.checkpoints = Checkpointer(
            run.checkpoints_dir,
            keep=run.settings.keep_checkpoints,
            best=lambda: reporter.history.best(run.metrics[0]),
        )
        self._init_from = ""  # the checkpoint that the run's first weights are from
        self._starts: list[dict[str, Any]] = []  # of the run up to now, by `describe_start`
        self.saved = 0  # the newest step that is in a checkpoint or on its way there

    @functools.cached_property
    def _data(self) -> list[Identity]:
        """What the data are; each asks for the sizes of all files, so it is made once."""
        return [self._run.benchmark.identity(split) for split in self._splits]

    @functools.cached_property
    def _facts(self) -> dict[str, Any]:
        """What the manifest says about the run; made late, because it opens the data."""
        facts = self._run.facts(self._plan.num_examples, data=self._data)
        return {**facts, "data": {**self._before["data"], **facts["data"]}}

    def find_newest(self) -> int:
        """The newest checkpoint's step, 0 if there is none; compares it with the run and its data.

        The run ends if the hosts see different checkpoints or data.
        """
        newest = max(self.checkpoints.steps(), default=0)
        view = {"newest checkpoint": newest, "training examples": self._plan.num_examples}
        view |= {"metrics": len(self._reporter.history.rows)}
        processes.barrier("comparing what the hosts see", view)
        then: dict[str, Any] = {}
        if newest:
            programs, say = self._run.programs, self._run.say
            items = checkpoint_items(self.abstract, self.abstract_totals)
            then, accepted = resuming.compare(
                programs, say, self.checkpoints, newest, items, self._data
            )
            accepted = [*then.get("accepted_data", []), *accepted]
            self._before = {"data": then.get("data", {}), "accepted_data": accepted}
            resuming.note_changes(programs, say, then, self._facts, self.abstract)
            resuming.fix_metrics(self._reporter, self._plan, then)
            self._init_from = then.get("init_from", "")
        self._starts = past_starts(then, self._reporter.history.rows)
        return newest

    def add_start(self, start: dict[str, Any]) -> None:
        """Adds this start of the run, by `describe_start`, to those before it."""
        self._starts.append(start)

    def cost(self) -> str:
        """What the run has cost up to now, in one line."""
        return cost_summary(self._starts, self._reporter.history.rows)

    def start(self, position: Position, init_from: str) -> Position:
        """Notes where the weights are from; drops the metrics of a run without checkpoints."""
        self._init_from = init_from
        _ = self._facts  # now, because a file of the data may be gone later
        if self._reporter.history.rows:
            self._reporter.say(
                "NOTE no checkpoint here: starting at step 0, the old metrics.jsonl is dropped"
            )
            self._reporter.cut(0)
        return position

    def restore(self, step: int) -> Position:
        """Restores a checkpoint and drops the metrics after its step."""
        watchdog.doing(f"restoring {self.checkpoints.directory}/{step}", step)
        position = restore_state(self.checkpoints, step, self.abstract, self.abstract_totals)
        self._reporter.cut(step)
        self.saved = step
        return Position(step, *position)

    def save(self, position: Position) -> float:
        """Begins to save in the background; Diverged if a step since the last save was not finite.

        A step that is saved already is not saved again. Returns the seconds that this took.
        """
        started, (step, state, totals) = time.monotonic(), position
        if step != self.saved:
            self.check(totals)
            self._guard.check()
            with watchdog.during(f"saving {self.checkpoints.directory}/{step}", step):
                facts = {**self._facts, "init_from": self._init_from}
                facts["starts"] = starts_now(self._starts)
                facts |= {"accepted_data": self._before["accepted_data"], "saved": time.time()}
                facts["evaluations"] = self._reporter.history.evaluations()
                self.checkpoints.save(step, **checkpoint_items(state, totals), facts=facts)
            self.saved = step
        return time.monotonic() - started

    def verify(self, position: Position) -> None:
        """Reads the last checkpoint back and compares it with the state."""
        self.checkpoints.verify(position.step, checkpoint_items(position.state, position.totals))

    def check(self, totals: Any) -> None:
        """Raises Diverged if a step in `totals` (None: there are none) was not finite."""
        bad = 0 if totals is None else int(totals["bad_step"])
        if not bad:
            return
        is_in_steps = self._run.settings.warmup_steps
        key = "warmup_steps" if is_in_steps else "warmup_epochs"
        good = "there is no checkpoint yet"
        if self.saved:
            good = f"checkpoint {self.saved} is the last good one"
        raise Diverged(
            f"the loss or the gradient of step {bad} is not finite (nan or inf)"
            f"{_examples_of(self._run, bad)}; {good}. A lower "
            f"--config.base_learning_rate or a longer --config.{key} often helps"
        )


def _examples_of(run: Run, step: int) -> str:
    """Which examples a step has seen, in words; a file next to host 0's log lists all of them."""
    if jax.process_index():
        return ""  # process 0 names the examples of all hosts
    try:
        ids = run.benchmark.train_ids(run.settings.train_batch_size, step - 1)
    except Exception:  # the message matters more than its details
        ids = []
    if not ids:
        return ""
    text = json.dumps({"step": step, "ids": ids, "places": run.benchmark.describe(ids)})
    path = run.log.note(f"step-{step}.json", text + "\n")
    return f", its examples are {', '.join(map(str, ids[:4]))} ... (all in {path})"
