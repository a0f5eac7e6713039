"""Renders the page of a report."""

import base64
import datetime
import math
import pathlib
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

import jinja2

from benchmarks.uses import Exhibit, Picture
from commands.report.record import Examined, Record
from common import palette
from common.keys import flat
from engine.report import history
from engine.report.starts import cost_rows
from engine.report.writers import draw_curves

_FOLDER = pathlib.Path(__file__).parent
_PICTURE_BYTES = 3_500_000  # of all pictures in base64, so that the page stays below 5 MB
_PERCENT = "\u00a0%"  # behind a no-break space
_SHORT = 30  # letters; a column of such texts is not wrapped


def render(record: Record, examined: Examined) -> str:
    """The HTML of the report; every text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["kinds"] = _kinds
    config = flat(record.manifest["config"])
    return environment.get_template("report.html").render(
        record=record,
        palette=palette,
        verdict=_verdict(record, examined),
        notes=_notes(record, examined),
        curves=base64.b64encode(_curves(record)).decode(),
        tables=[table for table in _tables(record) if table.rows or table.text],
        exhibits=_with_images(examined.exhibits),
        error=examined.error,
        uses=_uses(record),
        config=[(key, _value(value)) for key, value in sorted(config.items())],
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


# The verdict.


def _verdict(record: Record, examined: Examined) -> list[dict[str, Any]]:
    """One entry for each target: the score of the evaluated checkpoint, and how it compares."""
    if record.benchmark.no_evaluation:
        return []
    past = record.history.scores()
    scores = examined.scores or past.get(examined.step, {})
    entries = []
    for target in record.targets:
        metric, value = target.metric, scores.get(target.metric, math.nan)
        facts, state = [], ""
        if target.value > 0:
            state, verb = ("good", "reaches") if value >= target.value else ("bad", "misses")
            facts.append(f"{verb} the target of {record.number(metric, target.value)}")
        if metric in record.benchmark.proportions and (
            interval := history.share_interval(value, examined.examples)
        ):
            unit = record.benchmark.unit
            facts.append(f"{interval.strip(' ()')}{_PERCENT}, on {examined.examples:,} {unit}")
        best = record.history.best(metric)
        if best is None:
            facts.append(f"no {'defined score' if past else 'evaluation'} during training")
        else:
            highest = record.number(metric, past[best][metric])
            facts.append(f"best evaluation: {highest} at step {best:,}")
        name, score = metric.replace("_", " "), record.number(metric, value)
        name = name.capitalize() if name.islower() else name  # mAP stays as it is
        entries.append({"name": name, "score": score, "facts": facts, "state": state})
    return entries


def _notes(record: Record, examined: Examined) -> list[str]:
    """Sentences about the evidence: what was evaluated, and what to doubt."""
    data = f"{examined.examples:,} {record.benchmark.unit}" if examined.examples else "no data"
    again = "" if record.benchmark.no_evaluation else f", evaluated again on {data}"
    about = f"step {examined.step:,} (epoch {record.epoch(examined.step):.2f}){again}"
    if record.imported:
        about = f"the imported model, evaluated on {data}"
    notes = [record.end, f"This report is about the checkpoint of {about}."]
    targets = [target.metric for target in record.targets]
    shown = record.benchmark.headline(examined.scores) if examined.scores else {}
    others = [
        f"{name.replace('_', ' ')} {record.number(name, value)}"
        for name, value in shown.items()
        if name not in targets
    ]
    notes += [f"Its other scores: {', '.join(others)}."] if others else []
    then = record.history.scores().get(examined.step, {})
    remarks = record.benchmark.score_notes(examined.scores or then)
    notes += [f"{remark[:1].upper()}{remark[1:]}." for remark in remarks]
    for metric in targets:
        if abs(then.get(metric, math.nan) - examined.scores.get(metric, math.nan)) > 1e-6:
            notes.append(
                f"During training this checkpoint had a {metric.replace('_', ' ')} of "
                f"{record.number(metric, then[metric])}: the data or the devices differ."
            )
    dirty = [start["commit"] for start in record.starts if start["commit"].endswith("-dirty")]
    if dirty:
        notes.append(f"The program had changes that are in no commit ({dirty[-1]}).")
    return notes


# Tables of names and values.


def _tables(record: Record) -> list[Exhibit]:
    recipe = record.manifest.get("recipe", {})
    file, changes = recipe.get("file", ""), recipe.get("changes", {})
    kept = f"All other values are from {file}." if changes else f"The run used {file} as it is."
    changed = [(key, *map(_value, pair)) for key, pair in sorted(changes.items())]
    starts = [
        (
            f"resumed at step {start['step']:,}" if i or start["step"] else "start",
            start["time"].replace("T", " ")[:16] + " UTC",
            f"{start['chips']} x {start['device']}",
            start["commit"] or "unknown",
        )
        for i, start in enumerate(record.starts)
    ]
    versions = sorted(record.manifest.get("versions", {}).items())
    return [
        Exhibit(title="Speed and cost", rows=speed_rows(record)),
        Exhibit(title="Data", rows=_data_rows(record)),
        Exhibit(
            title="Changes to the recipe",
            text=kept if file else "",
            columns=["key", "recipe", "this run"],
            rows=changed,
        ),
        Exhibit(title="Starts", columns=["", "time", "devices", "commit"], rows=starts),
        Exhibit(title="Software", rows=[(name, str(version)) for name, version in versions]),
    ]


def speed_rows(record: Record) -> list[tuple[str, str]]:
    """How fast a run was and what it cost, as far as its files say so."""
    rates: dict[str, list[float]] = {}  # by unit, "images" or such as "tokens"
    for row in record.rows("train"):
        for key, value in row.items():
            if key.endswith("_per_second") and value > 0:
                rates.setdefault(key.removesuffix("_per_second"), []).append(value)
    shown = [
        ("throughput, median", f"{statistics.median(values):,.0f} {unit.replace('_', ' ')}/s")
        for unit, values in rates.items()
    ]
    return [*shown, *cost_rows(record.starts, record.history.rows).items()]


def _data_rows(record: Record) -> list[tuple[str, str]]:
    manifest, unit, rows = record.manifest, record.benchmark.unit, []
    if not record.imported:
        rows.append(("training", f"{manifest['num_train_examples']:,} {unit}"))
    if evaluated := [row["examples"] for row in record.rows("eval") if "examples" in row]:
        rows.append(("evaluation", f"{evaluated[-1]:,} {unit}"))
    if names := manifest.get("class_names"):
        rows.append(("classes", f"{len(names):,}"))
    if folder := manifest["config"].get("data_dir"):
        rows.append(("folder", folder))
    return rows


def _value(value: Any) -> str:
    return "''" if value == "" else str(value)


def _kinds(rows: Sequence[Sequence[str]]) -> list[str]:
    """How each column of a table is shown: a class of the style sheet."""
    kinds = []
    for column in zip(*rows, strict=True):
        texts = [text for text in column if text]
        numbers = [
            text.removesuffix(_PERCENT).replace(",", "").replace(".", "", 1) for text in texts
        ]
        if texts and all(text.isdigit() or text == "–" for text in numbers):
            is_share = any(text.endswith(_PERCENT) for text in texts)
            kinds.append("share" if is_share else "number")
        else:
            kinds.append("short" if max(map(len, texts), default=0) <= _SHORT else "")
    return kinds


# Exhibits and commands.


def _with_images(exhibits: Sequence[Exhibit]) -> list[tuple[Exhibit, list[tuple[Picture, str]]]]:
    """Each exhibit with its pictures as data: URIs, as many as the page has space for."""
    left, shown = _PICTURE_BYTES, []
    for exhibit in exhibits:
        images = []
        for picture in exhibit.pictures:
            text = base64.b64encode(picture.data).decode()
            left -= len(text)
            subtype = "png" if picture.data.startswith(b"\x89PNG") else "jpeg"
            if left > 0:
                images.append((picture, f"data:image/{subtype};base64,{text}"))
        shown.append((exhibit, images))
    return shown


def _uses(record: Record) -> list[tuple[str, str]]:
    """Commands that use the model: (what for, the command)."""
    workdir, uses = shlex.quote(record.settings.workdir), dict(record.benchmark.uses.commands)
    if recipe := record.manifest.get("recipe", {}).get("file"):
        uses["evaluate again"] = (
            f"python main.py --config={shlex.quote(recipe)} --mode=eval --workdir={{workdir}}"
        )
    uses["all curves"] = "tensorboard --logdir={workdir}"
    return [(what, command.replace("{workdir}", workdir)) for what, command in uses.items()]


def _curves(record: Record) -> bytes:
    """A PNG of the losses, the scores and the learning rate over the epochs; b"" without any."""
    if not record.history.rows:
        return b""
    shown = () if record.benchmark.no_evaluation else record.targets
    targets = [target.metric for target in shown]
    return draw_curves(record.history.rows, "", targets, record.percent)
