"""Begins a run with a checkpoint: its own, which it continues, or another model's.

It compares the run with the checkpoint and says what differs.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from benchmarks.base import Identity
from common.errors import CheckpointError, DataError, DeviceError, count
from common.keys import flat
from common.trees import Parts
from engine import sharding, step
from engine.checkpoint.manager import Checkpointer
from engine.checkpoint.model_source import Model, initial_weights, peek
from engine.checkpoint.weights import Adoption, Weights, adopt
from engine.cluster import watchdog
from engine.plan import Plan, Programs
from engine.report.writers import Reporter
from engine.step import StepSettings, TrainState

Manifest = Mapping[str, Any]  # what `engine.run.Run.facts` wrote
Say = Callable[[str], None]  # writes a line for the user
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # a SHA-256; messages show 12 digits


class OtherData(DataError):
    """The data have other classes, or another vocabulary, than the model knows."""


def read_weights(programs: Programs, state: TrainState) -> tuple[Weights, Adoption]:
    """Reads the weights of the model that `config.init_from` names, and says what the run takes.

    `state` is the run's initial state, or its shapes. UserError if too few of the arrays fit.
    """
    settings, benchmark = programs.settings, programs.benchmark
    watchdog.doing(f"reading {settings.init_from}")
    weights = initial_weights(settings.init_from, benchmark.uses.read_foreign)
    new = Parts("init_without", settings.init_without)
    return weights, adopt(benchmark.adopt, state.params, state.model_state, weights, new)[2]


def adopt_weights(
    programs: Programs, say: Say, step_settings: StepSettings, initial: TrainState, weights: Weights
) -> TrainState:
    """Puts another model's weights into an initial state.

    It says how many arrays were taken, and writes the names of all arrays to `init_from.txt`.
    """
    settings, benchmark = programs.settings, programs.benchmark
    arrays = jax.tree.map(np.asarray, (initial.params, initial.model_state))
    new = Parts("init_without", settings.init_without)
    params, model_state, adoption = adopt(benchmark.adopt, arrays[0], arrays[1], weights, new)
    say(f"init_from {weights.source}: {adoption.summary}; all names are in init_from.txt")
    if jax.process_index() == 0:
        (epath.Path(settings.workdir) / "init_from.txt").write_text(adoption.listing)
    if settings.mlperf.format and adoption.is_complete:
        check_origin(programs, say, weights, adoption)
    make = functools.partial(step.state_of, settings=step_settings)
    put = jax.jit(make, out_shardings=sharding.replicated(programs.mesh))
    return put(params, model_state)


def check_origin(programs: Programs, say: Say, weights: Weights, adoption: Adoption) -> None:
    """Raises OtherData if weights that keep their meaning were trained on other data."""
    settings, data = programs.settings, programs.benchmark.identity("train")
    # New classes are learnt by a new classifier; all layers of a translator rest on its vocabulary.
    new_vocabulary = "vocabulary" in data.meaning and not settings.init_without
    if adoption.is_complete or new_vocabulary:
        then = peek(weights.source) or {}
        check_meaning(programs, say, then, weights.source, [data])


def check_meaning(
    programs: Programs, say: Say, then: Manifest, source: str, data: Sequence[Identity]
) -> list[str]:
    """Compares the run's classes or vocabulary with those that a checkpoint was trained on.

    `then` is the manifest of the checkpoint in the folder `source`; `data` are the identities of
    the splits that the run needs. Returns, and says, a line for each value that differs; OtherData
    unless `config.accept_other_data` accepts that.
    """
    settings = programs.settings
    lines = [line for split in data for line in other_meaning(then, split.meaning)]
    # Other libraries name the classes otherwise: "tench" where the records have "n01440764".
    accepted = settings.accept_other_data or "imported" in then
    recipe = "" if settings.origin else "--config=RECIPE "  # a report needs none
    flag = f"{recipe}--config.accept_other_data=True"
    return refuse_other_data([*dict.fromkeys(lines)], source, say, "" if accepted else flag)


def refuse_other_data(lines: list[str], source: str, say: Say, flag: str) -> list[str]:
    """Says how the data differ, the `lines` of `other_meaning`, and returns the lines.

    OtherData if there are lines and the user has not given the `flag` that accepts them; "" where
    it was given.
    """
    if lines and flag:
        raise OtherData(
            f"{source} was trained on other data: {'; '.join(lines)}. Its numbers would mean "
            "something else: give the data that it was trained on, or go on knowingly with " + flag
        )
    for line in lines:
        say(f"NOTE {source} was trained on other data: {line}")
    return lines


def check_data(model: Model, accepted: bool, say: Say) -> None:
    """Raises OtherData if a model and its data have different classes, unless `accepted`.

    It reads one small file; if that is on gs:// and the model is not, it reads nothing. An imported
    model has other names than its data.
    """
    folder = model.config.get("data_dir", "")
    if "imported" in model.manifest or ("://" in folder and "://" not in model.source):
        return
    try:
        lines = other_meaning(model.manifest, model.benchmark.uses.data_meaning())
    except DataError as error:
        say(f"NOTE the data cannot be compared with the model's: {error}")
    else:
        refuse_other_data(lines, model.source, say, "" if accepted else "--accept_other_data")


def compare_data(
    programs: Programs, say: Say, then: Manifest, source: str, data: Sequence[Identity]
) -> list[str]:
    """Compares the data's meaning by `check_meaning`, then says which files have changed."""
    lines = check_meaning(programs, say, then, source, data)
    known, now = then.get("data", {}), {k: v for split in data for k, v in split.content.items()}
    for what, text in now.items():
        if known.get(what, text) != text:
            change = f"{what} before: {known[what]}; now: {text}"
            say(f"NOTE the data have changed since {source}: {change}")
    return lines


def compare(
    programs: Programs,
    say: Say,
    checkpoints: Checkpointer,
    number: int,
    items: dict[str, Any],
    data: Sequence[Identity],
) -> tuple[dict[str, Any], list[str]]:
    """Compares the run with its checkpoint of a step, whose arrays should be like `items`.

    Returns the manifest, and a line for each difference of the data that the user has accepted.
    CheckpointError if the arrays do not fit; OtherData if that is because of other data.
    """
    source = f"{checkpoints.directory}/{number}"
    try:
        then = checkpoints.compare(number, items)
    except CheckpointError:
        check_meaning(programs, lambda line: None, peek(source) or {}, source, data)
        raise
    return then, compare_data(programs, say, then, source, data)


def other_meaning(then: Manifest, now: Mapping[str, Any]) -> list[str]:
    """A line for each value of `now` that differs from the value in the manifest `then`.

    Of lists, such as the names of classes, the line shows the first entry that differs.
    """

    def shown(value: Any) -> str:
        return "nothing" if value is None else _DIGEST.sub(r"\1...", repr(value))

    lines = []
    for key, value in json.loads(json.dumps(now)).items():
        old, value = (_named(entries) for entries in (then.get(key), value))
        if not old or not value or old == value:  # imported models know no names
            continue
        if isinstance(old, list) and isinstance(value, list):
            pairs = [*itertools.zip_longest(old, value)]
            other = [i for i, (before, after) in enumerate(pairs) if before != after]
            sizes = "" if len(old) == len(value) else f"; {len(old):,} then, {len(value):,} now"
            key = f"entry {other[0]} of {key} ({len(other)} differ{sizes})"
            old, value = pairs[other[0]]
        lines.append(f"{key}: {shown(old)} in the checkpoint, {shown(value)} in the data")
    return lines


def _named(value: Any) -> Any:
    """A value of `Identity.meaning`; a list without the empty names at its end."""
    if not isinstance(value, list):
        return value
    return value[: max((i + 1 for i, name in enumerate(value) if name != ""), default=0)]


def note_changes(
    programs: Programs, say: Say, then: Manifest, now: Manifest, state: TrainState
) -> None:
    """Says which settings have changed.

    `then` is the checkpoint's manifest, `now` has the same facts about this run.
    """
    for key in ("config", "num_train_examples"):
        for change in changes({key: then[key]}, {key: now[key]}):
            say(f"NOTE {change}")
    if note := norm_change(programs, then.get("norm_examples"), state):
        say(f"NOTE {note}")


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each key that differs between two trees of JSON values."""
    old, new = flat(then), flat(json.loads(json.dumps(now)))
    return [
        f"{key} was {old.get(key)!r}, is now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def norm_change(programs: Programs, then: int | None, state: TrainState) -> str:
    """How BatchNorm's batches differ from batches of `then` examples; "" if they do not."""
    statistics = [x for x in jax.tree.leaves(state.model_state) if x.dtype != jnp.int32]
    if then in (None, programs.norm_examples) or not statistics:
        return ""
    unit, per_pass = programs.benchmark.unit, programs.examples_per_pass
    try:
        sharding.group_size(f"{then}/{per_pass}", programs.mesh.size)
        fix = f"--config.bn_span={then}/{per_pass} keeps {then}"
    except DeviceError as error:
        fix = str(error)
    return (
        f"BatchNorm averaged over {then} {unit} before and averages over {programs.norm_examples} "
        f"now, which changes the loss a little: {fix}"
    )


def fix_metrics(reporter: Reporter, plan: Plan, then: Manifest) -> None:
    """Says what metrics.jsonl has lost; takes lost scores from the newest checkpoint."""
    history, newest = reporter.history, then["step"]
    if history.damaged:
        reporter.say(f"NOTE {count(history.damaged, 'damaged line')} of metrics.jsonl dropped")
    last = max((row["step"] for row in history.rows if row["split"] == "train"), default=0)
    due = plan.log_every.next_after(last)
    if due is not None and due <= newest:
        reporter.say(f"NOTE metrics.jsonl lacks the training of steps {due} to {newest}")
    if lost := history.restore(then.get("evaluations", [])):
        reporter.say(f"NOTE {lost} scores that it lacked are from checkpoint {newest}")
