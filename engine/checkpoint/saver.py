"""Saves a run and restores it; begins a run without a checkpoint, with other weights or at random.

`compare` says how a run differs from its checkpoint, `Adoption` which arrays of the model that
`config.init_from` names are taken.
"""

import functools
import json
import logging
import time
import types
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from benchmarks.base import Identity
from common.errors import CheckpointError, UserError, count, some
from common.trees import Parts, by_name
from engine import sharding
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.manifest import (
    changed_settings,
    compare_data,
    describe_batches,
    describe_run,
    norm_change,
)
from engine.checkpoint.model_source import Weights, initial_weights, peek
from engine.cluster import processes, watchdog
from engine.cluster.guard import Guard
from engine.cluster.processes import HostLog
from engine.plan import Plan, Programs, targets_of
from engine.report.history import other_best
from engine.report.starts import cost_summary, past_starts, starts_now
from engine.report.writers import Reporter
from engine.step import TrainState, checkpoint_items, state_of

_log = logging.getLogger("tpu_suite")


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
        self,
        programs: Programs,
        log: HostLog,
        plan: Plan,
        guard: Guard,
        reporter: Reporter,
        splits: Sequence[str],
    ):
        """Opens the checkpoints of the workdir; the run needs the data of `splits`."""
        self._programs, self._log, self._plan = programs, log, plan
        self._guard, self._reporter, self._splits = guard, reporter, splits
        self.abstract = programs.abstract_state(plan)
        self._best_by = targets_of(programs.settings, programs.benchmark)[0].metric
        self._gone: Set[int] = set()  # evaluated steps whose checkpoints are deleted
        self.checkpoints = Checkpointer(
            str(epath.Path(programs.settings.workdir) / "checkpoints"),
            keep=programs.settings.keep_checkpoints,
            best=lambda: reporter.history.best(
                self._best_by, among=reporter.history.scores().keys() - self._gone
            ),
        )
        self._manifest: dict[str, Any] = {}  # what stays the same in all manifests of this start
        self._norm_examples: int | None = None  # of the checkpoint to resume
        self._starts: list[dict[str, Any]] = []  # of the run up to now, by `describe_start`
        self.saved = 0  # the newest step that is in a checkpoint or on its way there

    @functools.cached_property
    def abstract_totals(self) -> Any:
        """The totals of the train step as ShapeDtypeStructs, from a trace that takes seconds."""
        return self._programs.abstract_totals(self._plan, self.abstract)

    @functools.cached_property
    def _data(self) -> list[Identity]:
        """What the data are; each asks for the sizes of all files, so it is made once."""
        return [self._programs.benchmark.identity(split) for split in self._splits]

    def _describe(self, init_from: str, before: Mapping[str, Any], accepted: Sequence[str]) -> None:
        """Notes what the manifests say of the run, after that of an earlier start; opens the data.

        The earlier start may have read other splits, and the user has `accepted` other data now.
        """
        manifest = describe_run(self._programs, self._plan.num_examples, data=self._data)
        self._manifest = {**manifest, "data": {**before.get("data", {}), **manifest["data"]}}
        accepted = [*before.get("accepted_data", []), *accepted]
        self._manifest |= {"init_from": init_from, "starts": [], "accepted_data": accepted}

    def find_newest(self) -> int:
        """The newest checkpoint's step, 0 if there is none; compares it with the run and its data.

        The run ends if the hosts see different checkpoints or data.
        """
        newest, examples = max(self.checkpoints.steps(), default=0), self._plan.num_examples
        view = {"newest checkpoint": newest, "training examples": examples}
        view |= {"metrics": len(self._reporter.history.rows)}
        processes.barrier("comparing what the hosts see", view)
        manifest: dict[str, Any] = {}
        if newest:
            items = checkpoint_items(self.abstract, self.abstract_totals)
            manifest, accepted, notes = compare(
                self._programs, self.checkpoints, newest, items, examples, self._data
            )
            for note in notes:
                _log.info("NOTE %s", note)
            self._describe(manifest.get("init_from", ""), manifest, accepted)
            self._norm_examples = manifest.get("norm_examples")
            restore_metrics(self._reporter, self._plan, manifest)
            history, steps = self._reporter.history, self.checkpoints.steps()
            self._gone = {s for s in history.scores() if s <= newest} - {*steps}
            if note := other_best(history, steps, manifest.get("target_metric", ""), self._best_by):
                self._reporter.say(f"NOTE {note}")
        self._starts = past_starts(manifest, self._reporter.history.rows)
        return newest

    def settle(self, programs: Programs) -> None:
        """Takes the programs that train, where "auto" was found; says what that changes."""
        if programs is self._programs:
            return
        self._programs = programs
        if self._manifest:  # the run resumes
            self._manifest |= describe_batches(programs)
            note = norm_change(programs, self._norm_examples, self.abstract.model_state)
            if note:
                _log.info("NOTE %s", note)

    def add_start(self, start: dict[str, Any]) -> None:
        """Adds this start of the run, by `describe_start`, to those before it."""
        self._starts.append(start)

    def cost(self) -> str:
        """What the run has cost up to now, in one line."""
        return cost_summary(self._starts, self._reporter.history.rows)

    def start(self, position: Position, init_from: str) -> Position:
        """Notes where the weights are from; drops the metrics of a run without checkpoints."""
        self._describe(init_from, {}, [])  # now, because a file of the data may be gone later
        if self._reporter.history.rows:
            self._reporter.say(
                "NOTE no checkpoint here: starting at step 0, the old metrics.jsonl is dropped"
            )
            self._reporter.cut(0)
        return position

    def restore(self, step: int) -> Position:
        """Restores a checkpoint and drops the metrics after its step."""
        folder = f"{self.checkpoints.directory}/{step}"
        watchdog.doing(f"restoring {folder}", step)
        items = checkpoint_items(self.abstract, self.abstract_totals)
        items = self.checkpoints.restore(step, items)
        totals = items["optimizer"].pop("totals")
        state = TrainState(**items["optimizer"], **items["model"])
        if (inside := int(state.step)) != step:
            raise CheckpointError(f"{folder} holds step {inside}; delete it to go on before it")
        self._reporter.cut(step)
        self.saved = step
        return Position(step, state, totals)

    def save(self, position: Position) -> float:
        """Begins to save in the background; Diverged if a step since the last save was not finite.

        A step that is saved already is not saved again. Returns the seconds that this took.
        """
        started, (step, state, totals) = time.monotonic(), position
        if step != self.saved:
            self.check(totals)
            self._guard.check()
            with watchdog.during(f"saving {self.checkpoints.directory}/{step}", step):
                manifest = {
                    **self._manifest,
                    "starts": starts_now(self._starts),
                    "saved": time.time(),
                    "evaluations": self._reporter.history.evaluations(),
                }
                self.checkpoints.save(step, **checkpoint_items(state, totals), manifest=manifest)
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
        is_in_steps = self._programs.settings.warmup_steps
        key = "warmup_steps" if is_in_steps else "warmup_epochs"
        good = "there is no checkpoint yet"
        if self.saved:
            good = f"checkpoint {self.saved} is the last good one"
        raise Diverged(
            f"the loss or the gradient of step {bad} is not finite (nan or inf)"
            f"{self._examples_of(bad)}; {good}. A lower "
            f"--config.base_learning_rate or a longer --config.{key} often helps"
        )

    def _examples_of(self, step: int) -> str:
        """Which examples a step has seen, in words; a file by host 0's log lists all of them."""
        if jax.process_index():
            return ""  # process 0 names the examples of all hosts
        benchmark, size = self._programs.benchmark, self._programs.settings.train_batch_size
        try:
            ids = benchmark.train_ids(size, step - 1)
        except Exception:  # the message matters more than its details
            ids = []
        if not ids:
            return ""
        text = json.dumps({"step": step, "ids": ids, "places": benchmark.describe_examples(ids)})
        path = self._log.note(f"step-{step}.json", text + "\n")
        return f", its examples are {', '.join(map(str, ids[:4]))} ... (all in {path})"


def compare(
    programs: Programs,
    checkpoints: Checkpointer,
    number: int,
    items: dict[str, Any],
    num_examples: int,
    data: Sequence[Identity],
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Compares the run with its checkpoint of a step, whose arrays should be like `items`.

    Returns (the manifest, a line for each difference of the data that the user has accepted, notes
    on all that differs). CheckpointError if the arrays do not fit; OtherData if that is because of
    other data.
    """
    source = f"{checkpoints.directory}/{number}"
    try:
        manifest = checkpoints.compare(number, items)
    except CheckpointError:
        compare_data(programs, peek(source) or {}, source, data)
        raise
    settings, then = programs.settings, manifest["config"]
    now = settings.train_fraction, settings.train_fraction_seed
    part = then.get("train_fraction", 1.0), then.get("train_fraction_seed", 0)
    if part != now and min(part[0], now[0]) < 1:
        raise CheckpointError(
            f"config.train_fraction={now[0]:g} (seed {now[1]}), but {source} was trained on "
            f"{part[0]:g} of the data (seed {part[1]}): a run on another part is another run; give "
            "another --workdir"
        )
    accepted, notes = compare_data(programs, manifest, source, data)
    model_state = items["model"]["model_state"]
    notes += changed_settings(programs, manifest, num_examples, model_state)
    return manifest, accepted, notes


def restore_metrics(reporter: Reporter, plan: Plan, manifest: Mapping[str, Any]) -> None:
    """Says what metrics.jsonl has lost; takes lost scores from the newest checkpoint."""
    history, newest = reporter.history, manifest["step"]
    if history.damaged:
        reporter.say(f"NOTE {count(history.damaged, 'damaged line')} of metrics.jsonl dropped")
    last = max((row["step"] for row in history.rows if row["split"] == "train"), default=0)
    due = plan.log_every.next_after(last)
    if due is not None and due <= newest:
        reporter.say(f"NOTE metrics.jsonl lacks the training of steps {due} to {newest}")
    if lost := history.restore(manifest.get("evaluations", [])):
        reporter.say(f"NOTE {lost} scores that it lacked are from checkpoint {newest}")


class Adoption(NamedTuple):
    """The names of arrays that `adopt` has taken or not, such as "params/head/kernel"."""

    taken: list[str]
    part: list[str]  # arrays of this model with some of the other model's values
    new: list[str]  # arrays of this model with their initial values
    left: list[str]  # arrays of the other model that are not taken, or only in part

    @property
    def is_complete(self) -> bool:
        """Whether all parameters that both models have were taken."""
        changed = {*self.new, *self.part} & {*self.left}
        return not any(name.startswith("params/") for name in changed)

    @property
    def summary(self) -> str:
        """The numbers of arrays, and some names, in one line."""
        counts = {"taken in part": self.part, "new": self.new, "left": self.left}
        parts = [f"{len(self.taken)} arrays taken"] + [
            f"{len(names)} {what}" + (f" ({some(names)})" if names else "")
            for what, names in counts.items()
            if names or what != "taken in part"
        ]
        return ", ".join(parts)

    @property
    def listing(self) -> str:
        """One line for each array, with what happened to it."""
        groups = self._asdict().items()
        return "".join(f"{what}\t{name}\n" for what, names in groups for name in names)


def adopt(
    merge: Callable[[Any, Any, Any], tuple[Any, Any]],
    params: Any,
    model_state: Any,
    weights: Weights,
    new: Parts,
) -> tuple[Any, Any, Adoption]:
    """Puts another model's weights into this one's initial arrays; all are on the host.

    `merge` is the benchmark's `adopt`; `params` and `model_state` are this model's, and its parts
    `new` keep their initial arrays. Returns (params, model_state, adoption).
    """
    loaded = {"params": weights.params, "model_state": weights.model_state}
    origin = {"source": weights.source, "manifest": types.MappingProxyType(weights.manifest)}
    ours = {"params": params, "model_state": model_state}
    try:
        mixed = dict(zip(ours, merge(params, model_state, loaded | origin), strict=True))
    except CheckpointError as error:
        raise CheckpointError(f"config.init_from={weights.source}: {error}") from error
    before, after, others = by_name(ours), by_name(mixed), by_name(loaded)
    # Parts have the names of arrays in `params` or in `model_state`.
    after |= {name: leaf for name, leaf in before.items() if name.partition("/")[2] in new}
    mixed = jax.tree.unflatten(jax.tree.structure(mixed), after.values())
    used, theirs = ({id(leaf) for leaf in leaves.values()} for leaves in (after, others))
    groups: dict[str, list[str]] = {"taken": [], "part": [], "new": []}
    for name, leaf in after.items():
        group = "new" if leaf is before[name] else "taken" if id(leaf) in theirs else "part"
        groups[group].append(name)
    left = [name for name, leaf in others.items() if id(leaf) not in used]
    if not any(name.startswith("params/") for name in groups["taken"]):
        raise CheckpointError(
            f"config.init_from={weights.source}: none of its {len(left)} arrays has the name and "
            "the shape of a parameter of this model; is it another architecture?"
        )
    return mixed["params"], mixed["model_state"], Adoption(**groups, left=left)


def read_weights(programs: Programs, state: TrainState) -> tuple[Weights, Adoption]:
    """Reads the weights of the model that `config.init_from` names, and says what the run takes.

    `state` is the run's initial state, or its shapes. UserError if too few of the arrays fit.
    """
    settings, benchmark = programs.settings, programs.benchmark
    watchdog.doing(f"reading {settings.init_from}")
    weights = initial_weights(settings.init_from, benchmark.uses.read_foreign)
    new = Parts("init_without", settings.init_without)
    return weights, adopt(benchmark.adopt, state.params, state.model_state, weights, new)[2]


def check_start(programs: Programs, abstract: TrainState) -> Weights | None:
    """The weights of `config.init_from`, which fit a state with the shapes of `abstract`."""
    if not programs.settings.init_from:
        programs.check_random_start()
        return None
    weights, adoption = read_weights(programs, abstract)
    if not programs.settings.mlperf.format:  # its clock runs before the data are touched
        for note in compare_origin(programs, weights, adoption):
            _log.info("NOTE %s", note)
    return weights


def compare_origin(programs: Programs, weights: Weights, adoption: Adoption) -> list[str]:
    """Notes on the data of another model; OtherData if its weights would mean something else."""
    programs.benchmark.open("train")
    settings, data = programs.settings, programs.benchmark.identity("train")
    # New classes are learnt by a new classifier; all layers of a translator rest on its vocabulary.
    new_vocabulary = "vocabulary" in data.meaning and not settings.init_without
    if not (adoption.is_complete or new_vocabulary):
        return []
    manifest = peek(weights.source) or {}
    return compare_data(programs, manifest, weights.source, [data._replace(content={})])[1]


def first_state(
    programs: Programs, plan: Plan, weights: Weights | None = None
) -> tuple[TrainState, str]:
    """(the state before the first step, the checkpoint that its weights are from or "").

    With `config.init_from` it has the `weights` that `check_start` returned; without them, it reads
    them. It says how many arrays were taken; all names are in `init_from.txt` of the workdir.
    """
    settings, benchmark = programs.settings, programs.benchmark
    state = programs.initial_state(plan)
    if not settings.init_from:
        if note := settings.lacks_weights:
            _log.info("NOTE %s", note)
        return state, ""
    weights = weights or read_weights(programs, state)[0]
    params, model_state = (jax.tree.map(np.asarray, x) for x in (state.params, state.model_state))
    new = Parts("init_without", settings.init_without)
    params, model_state, adoption = adopt(benchmark.adopt, params, model_state, weights, new)
    summary = f"{adoption.summary}; all names are in init_from.txt"
    _log.info("init_from %s: %s", weights.source, summary)
    if jax.process_index() == 0:
        (epath.Path(settings.workdir) / "init_from.txt").write_text(adoption.listing)
    if settings.mlperf.format and adoption.is_complete:
        for note in compare_origin(programs, weights, adoption):
            _log.info("NOTE %s", note)
    make = functools.partial(state_of, settings=plan.step_settings)
    put = jax.jit(make, out_shardings=sharding.replicated(programs.mesh))
    return put(params, model_state), weights.source
