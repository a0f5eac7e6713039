"""--mode=scaling: the score to expect of more training data, before anybody collects it.

It trains the recipe on nested parts of the training data, evaluates each on the complete evaluation
data, and fits a law to the scores (`law`). A part is a run of its own in WORKDIR/scaling; the run
on all data is the one in WORKDIR. docs/scaling.md says what the law rests on.
"""

import contextlib
import dataclasses
import io
import json
import logging
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
from etils import epath

import train
from commands.scaling import figure, law, summary
from commands.scaling.summary import Result
from common import entry
from common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    UserError,
    one_line,
    parse_json,
    visible,
)
from common.progress import duration
from common.text import aligned
from engine import cadence, pace, sharding
from engine.checkpoint import model_source
from engine.checkpoint.manifest import changes
from engine.checkpoint.saver import Diverged
from engine.checks import check_evaluates, check_plan
from engine.cluster import processes
from engine.evaluate import begin_evaluation, examining
from engine.plan import Settings, make_plan, read_settings
from engine.report.history import History, lower_is_better, writing
from engine.run import Run

_log = logging.getLogger("tpu_suite")

FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 1.0)
_REPEATED = 1 / 4  # larger parts are trained once, whatever --seeds says
# Where a recipe counts epochs, a part with a share f of the data takes f ** _LENGTH of the steps:
# with as many epochs (1.0) the small parts learn too little. docs/scaling.md has measurements.
_LENGTH = 0.5
_APART = 0.8  # a part has at most this share of the next larger one
_FEW = 200  # evaluated examples: chance moves a score of fewer by 3.5 points and more
_DURATIONS = (
    *("train_steps", "warmup_steps", "decay_steps", "learning_rate_decay_steps"),
    *("steps_per_eval", "eval_offset", "steps_per_checkpoint"),
)
# Keys in which one run may differ from another one of the same scores.
_MAY_DIFFER = (
    *("data_dir", "compilation_cache", "target", "mask_target", "keep_checkpoints", "tracker"),
    *("log_step_count_steps", "profile_steps", "watchdog_seconds", "host_memory_limit"),
    *("hosts_wait_seconds", "host_silence_seconds", "check_devices_every", "accept_other_data"),
)


@dataclasses.dataclass(frozen=True)
class PartRun:
    """A run on a share of the training data that the config asks for."""

    fraction: float
    settings: Settings
    count: int  # of training examples

    @property
    def name(self) -> str:
        """The part in words, for messages."""
        seed = self.settings.train_fraction_seed
        return f"{summary.part_name(self.fraction)} of the data" + f", seed {seed}" * bool(seed)


def run(settings: Settings, seeds: int) -> None:
    """Trains the parts that are missing, and writes WORKDIR/scaling.

    Args:
      settings: of the run on all data.
      seeds: how often the parts up to a quarter are trained, each time with another seed.
    """
    about, parts = _plan(settings, seeds)
    results: list[Result] = []
    for number, part in enumerate(parts, 1):
        _log.info("part %d of %d: %s", number, len(parts), part.name)
        try:
            results.append(_measure(part, about["metric"]))
        except (ConfigError, DataError, Diverged) as error:
            _leave_out(about, part.fraction, part.name, error)
    if jax.process_index() == 0:
        _write(settings.workdir, about, results)
    processes.barrier("waiting for host 0 to write the law")


def _leave_out(about: dict[str, Any], fraction: float, name: str, error: Exception) -> None:
    """Notes why a part is left out; raises the error if it concerns all data."""
    if fraction == 1:
        raise error
    about["left_out"].append(f"{name}: {one_line(error)}")
    _log.info("NOTE left out: %s", about["left_out"][-1])


def _plan(settings: Settings, seeds: int) -> tuple[dict[str, Any], list[PartRun]]:
    """What the scores are about, and the parts, the smallest first; says what each costs."""
    begun = time.monotonic()
    with Run.at_work(settings) as (opened, _):
        check_evaluates(opened.programs)
        opened.open_data("train", "eval")
        benchmark, target = opened.benchmark, opened.targets[0]
        if lower_is_better(target.metric):
            raise ConfigError(
                f"config.best_by={target.metric!r}: the law is for scores that rise with the data; "
                "give another one, or ''"
            )
        complete = benchmark.num_examples("train")
        collected, unit = benchmark.collected(complete)
        data = {split: dict(benchmark.identity(split).content) for split in ("train", "eval")}
        plan = make_plan(settings, benchmark, complete)
        check_plan(opened.programs, plan, opened.programs.abstract_state(plan), True)
        if (count := benchmark.num_examples("eval")) < _FEW:
            _log.info(
                "NOTE only %d %s to evaluate: chance alone moves a score by about %.0f points; "
                "prepare the data with more of them (--validation_fraction)",
                *(count, benchmark.unit, 50 / count**0.5),
            )
        _log.info("measuring a step and an evaluation ...")
        step = pace.seconds_per_step(opened.programs, plan)
        evaluation = pace.seconds_per_evaluation(opened.programs, plan)
    start = time.monotonic() - begun  # every part opens the data and compiles
    about = {
        **{"metric": target.metric, "percent": target.percent, "target": target.value},
        **{"unit": unit, "per_example": collected / complete, "left_out": []},
        "evaluated": count,
        "evaluated_unit": benchmark.unit,
    }
    parts, total, larger = [], 0.0, math.inf
    for fraction in sorted(FRACTIONS, reverse=True):
        for seed in range(seeds if fraction <= _REPEATED else 1):
            own = _settings_of(settings, fraction, seed, data)
            part = PartRun(fraction, own, complete)
            try:
                if own is not settings:
                    part = dataclasses.replace(part, count=_open_part(own, settings.workdir, data))
                if not seed and part.count > _APART * larger:
                    raise DataError("it has hardly fewer examples than the next larger part")
                own_plan = make_plan(own, benchmark, part.count)
            except (ConfigError, DataError) as error:
                _leave_out(about, fraction, part.name, error)
                continue
            parts.append(part)
            known = model_source.peek(own.workdir) or {"step": 0}
            left = max(0.0, 1 - known["step"] / own_plan.total_steps)
            seconds = own_plan.total_steps * step + (own_plan.evaluations + 1) * evaluation
            seconds = bool(left) * start + left * seconds
            total += seconds
            _log.info(
                "%s: %s %s, %s steps, about %s, in %s",
                *(part.name, f"{round(part.count * about['per_example']):,}", unit),
                *(f"{own_plan.total_steps:,}", duration(seconds), own.workdir),
            )
        larger = parts[-1].count
    if (sizes := len({part.fraction for part in parts})) < 3:
        raise DataError(
            f"a law needs three parts, and there are {sizes}: {'; '.join(about['left_out'])}"
        )
    _log.info("together about %s; after a stop the same command goes on", duration(total))
    return about, sorted(parts, key=lambda x: (x.fraction, x.settings.train_fraction_seed))


def _settings_of(
    settings: Settings, fraction: float, seed: int, data: Mapping[str, Mapping[str, str]]
) -> Settings:
    """The settings of the run on a share of the data.

    The run on all data is that of the workdir itself, if it has none with another config or data.
    """
    own = f"{settings.workdir.rstrip('/')}/{summary.FOLDER}"
    if fraction == 1 and not settings.stop_at_target:
        if not (differs := _difference(settings, {**data["train"], **data["eval"]})):
            return settings
        _log.info("NOTE %s holds another run (%s): not taken", settings.workdir, differs)
    values = {
        "train_fraction_seed": settings.train_fraction_seed + seed,
        "train_fraction": fraction * settings.train_fraction,
        "stop_at_target": False,
        "keep_checkpoints": 1,
    }
    for key in _DURATIONS:
        values[key] = cadence.stretched(getattr(settings, key), fraction ** (_LENGTH - 1))
    config = ml_collections.ConfigDict(dict(settings.config))
    config.update(values)
    folder = f"{own}/{summary.part_name(fraction).replace('/', '-of-')}"
    folder += f"_seed-{seed}" * bool(seed)
    return read_settings(config.lock(), folder, settings.origin)


def _open_part(settings: Settings, workdir: str, data: Mapping[str, Mapping[str, str]]) -> int:
    """Opens the training data of a part, with the index in the workdir; returns their number.

    CheckpointError if the folder of the part holds a run with another config or other data.
    """
    benchmark = settings.load_benchmark(f"{workdir}/data_index")

    def opened() -> tuple[int, str]:
        try:
            return benchmark.open("train"), ""
        except UserError as error:  # on every host
            return 0, str(error)

    count, problem = processes.first_process_first(opened)
    if problem:
        raise DataError(problem)
    differs = _difference(settings, {**data["eval"], **benchmark.identity("train").content})
    if differs:
        raise CheckpointError(
            f"{settings.workdir} holds a part of another run ({differs}): give another --workdir, "
            f"or delete {workdir}/{summary.FOLDER}"
        )
    index, own = (epath.Path(x) / "data_index" for x in (workdir, settings.workdir))
    if jax.process_index() == 0 and index.exists() and not own.exists():
        own.mkdir(parents=True)  # so that the run need not read all records again
        for file in index.iterdir():
            file.copy(own / file.name)
    return count


def _difference(settings: Settings, data: Mapping[str, str]) -> str:
    """How the run in a workdir differs from the settings or the data; "" if it is the same."""
    if not (manifest := model_source.peek(settings.workdir)):
        return ""
    # Of before these keys.
    whole = {"train_fraction": 1.0, "train_fraction_seed": 0, "best_by": ""}
    then, now = (
        {key: value for key, value in config.items() if key not in _MAY_DIFFER}
        for config in ({**whole, **manifest["config"]}, settings.config)
    )
    lines = changes({"config": then}, {"config": now})
    saved = manifest.get("data", {})
    lines += [f"other {what}" for what, text in data.items() if saved.get(what, text) != text]
    return "; ".join(lines[:3])


def _measure(part: PartRun, metric: str) -> Result:
    """Trains a part, or goes on with it, and evaluates the groups of its best checkpoint."""
    settings = part.settings
    entry.BEGUN = time.monotonic()  # the manifest says what this run takes, not all of them
    train.train_and_evaluate(settings)
    history = History(settings.workdir, writes=False)
    best = sharding.broadcast(history.best(metric))
    if best is None:
        raise DataError(f"{settings.workdir} has no score {metric}")
    score, groups = history.scores()[best][metric], _groups(settings, best)
    seed = settings.train_fraction_seed
    return Result(part.fraction, seed, part.count, score, best, groups, settings.workdir)


def _groups(settings: Settings, step: int) -> dict[str, tuple[float, int]]:
    """The scores of the groups at a step, which are kept in a file of the workdir."""
    file = epath.Path(settings.workdir) / "groups.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        content = parse_json(file.read_bytes())
        if content["step"] == step:
            return {name: tuple(row) for name, row in content["groups"].items()}
    with examining(settings, "best") as examination:
        opened, restored = examination.run, examination.restore()
        assert restored is not None  # it does not wait for another checkpoint
        evaluation = begin_evaluation(opened, examination.predict, restored[1], step)
        evaluation.scores()
        if jax.process_index():
            return {}
        groups = opened.benchmark.group_scores(iter(evaluation.rows))
    with writing(file):
        file.write_text(json.dumps({"step": step, "groups": groups}))
    return groups


def _write(workdir: str, about: dict[str, Any], results: Sequence[Result]) -> None:
    """Writes scaling.json and scaling.png, and prints the table."""
    points = summary.points(about, results)
    unit = f"training {about['unit']}"
    found = law.fit(points, about["evaluated"], unit=unit, percent=about["percent"])
    content = summary.describe(about, results, found)
    picture = io.BytesIO()
    shown = {key: about[key] for key in ("unit", "metric", "percent", "target")}
    title = f"{workdir.rstrip('/').rpartition('/')[2]}: would more {about['unit']} help?"
    figure.draw(picture, points, found, title=title, **shown)
    folder = epath.Path(workdir) / summary.FOLDER
    text = json.dumps(content, indent=2) + "\n"
    files = {summary.PNG: picture.getvalue(), summary.JSON: text.encode()}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        with writing(folder / name):
            (folder / name).write_bytes(data)
    head, rows = summary.table(content)
    print("\n".join(aligned([head, *rows], {2, 3})))
    for line in summary.sentences(content):
        print(visible(line))
    print(visible(f"wrote {folder / summary.JSON} and {summary.PNG}"))
    shown = f"python main.py --mode=report --workdir={shlex.quote(results[-1].workdir)}"
    print(visible(f"they are in the report, too: {shown}"))
