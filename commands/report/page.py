"""Renders the page of a report, and draws its charts."""

from __future__ import annotations

import base64
import datetime
import io
import math
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from benchmarks.uses import Exhibit, Picture
from commands.report.record import Examined, Record, Speed
from common.console import hms
from common.keys import flat
from engine.report import history
from engine.report.writers import is_like

_FOLDER = pathlib.Path(__file__).parent
_PICTURE_BYTES = 3_500_000  # of all pictures in base64, so that the page stays below 5 MB
_PERCENT = "\u00a0%"  # behind a no-break space
_SHORT = 30  # letters; a column of such texts is not wrapped
_SPLITS = {"train": ("training", "#1f6fb2"), "eval": ("evaluation", "#c8591a")}
_GREEN, _GREY = "#1b7f4b", "#5b6876"
_MOST_POINTS = 500  # of a line of a chart; nobody sees more
_MOST_DOTS = 40  # evaluations that have a dot each


def render(record: Record, examined: Examined, other: Record | None) -> str:
    """The HTML of the report; every text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"kinds": _kinds, "fill": _fill, "shade": _shade}
    verdict = _verdict(record, examined, other)
    return environment.get_template("report.html").render(
        record=record,
        other=other,
        verdict=verdict,
        notes=_notes(record, examined),
        charts=draw_charts(record, other),
        tables=[table for table in _tables(record, other) if table.rows or table.text],
        exhibits=_with_images(examined.exhibits),
        fault=examined.fault,
        uses=_uses(record),
        config=[(key, _value(value)) for key, value in sorted(flat(_config(record)).items())],
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


# The verdict.


def _verdict(record: Record, examined: Examined, other: Record | None) -> list[dict[str, Any]]:
    """One entry for each target: the score of the evaluated checkpoint, and how it compares."""
    scores = examined.scores or record.history.scores().get(examined.step, {})
    entries = []
    for target in record.targets:
        metric, value = target.metric, scores.get(target.metric, math.nan)
        facts, state = [], ""
        if target.value > 0:
            state = "good" if value >= target.value else "bad"
            verb, goal = "reaches" if state == "good" else "misses", target.value
            facts.append(f"{verb} the target of {record.number(metric, goal)}")
        if metric in record.benchmark.proportions:
            facts += _interval(value, examined.examples, record.benchmark.unit)
        facts.append(_best(record, metric, ""))
        if other:
            facts += [_best(other, metric, f" of {other.name}"), *_doubt(record, other, metric)]
        score = record.number(metric, value)
        entries.append({"name": titled(metric), "score": score, "facts": facts, "state": state})
    return entries


def _doubt(record: Record, other: Record, metric: str) -> list[str]:
    """Says so where the best scores of two runs may differ by chance alone."""
    bounds = []
    for one in (record, other):
        rows = {row["step"]: row for row in one.rows("eval")}
        best = rows.get(one.history.best(metric))
        if best is None or metric not in one.benchmark.proportions:
            return []
        if not 0 < best.get("examples", 0) < history.FEW or not 0 <= best[metric] <= 1:
            return []
        bounds.append(history.wilson_interval(best[metric], best["examples"]))
    (low, high), (other_low, other_high) = bounds
    if other_low > high or low > other_high:
        return []
    return ["the 95 % intervals of the two overlap: chance may be the difference"]


def _interval(share: float, count: int, unit: str) -> list[str]:
    """The confidence interval of a share of few examples."""
    interval = history.share_interval(share, count)
    return [f"{interval.strip(' ()')}\u00a0%, on {count:,} {unit}"] if interval else []


def _best(record: Record, metric: str, of_run: str) -> str:
    """The best evaluation of a run, in words."""
    best, scores = record.history.best(metric), record.history.scores()
    if best is None:
        return f"no {'defined score' if scores else 'evaluation'}{of_run} during training"
    highest = record.number(metric, scores[best][metric])
    return f"best evaluation{of_run}: {highest} at step {best:,}"


def _notes(record: Record, examined: Examined) -> list[str]:
    """Sentences about the evidence: what was evaluated, and what to doubt."""
    data = f"{examined.examples:,} {record.benchmark.unit}" if examined.examples else "no data"
    about = f"step {examined.step:,} (epoch {record.epoch(examined.step):.2f}), evaluated again"
    if record.imported:
        about = "the imported model, evaluated"
    notes = [record.end, f"This report is about the checkpoint of {about} on {data}."]
    then = record.history.scores().get(examined.step, {})
    for target in record.targets:
        old, new = then.get(target.metric), examined.scores.get(target.metric)
        if old is not None and new is not None and abs(old - new) > 1e-6:
            notes.append(
                f"During training this checkpoint had a {target.metric.replace('_', ' ')} of "
                f"{record.number(target.metric, old)}: the data or the devices differ."
            )
    dirty = [start["commit"] for start in record.starts if start["commit"].endswith("-dirty")]
    if dirty:
        notes.append(f"The program had changes that are in no commit ({dirty[-1]}).")
    if not record.starts and not record.imported:
        notes.append("The run is of an older program, which did not record its starts and recipe.")
    return notes


# Tables of names and values.


class Table(NamedTuple):
    """A table of the page; all its values are text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""


def _tables(record: Record, other: Record | None) -> list[Table]:
    columns = ["", record.name, other.name] if other else []
    losses = (
        "Steps that were lost in a kill and done again do not count, nor do saving checkpoints and "
        "opening the data."
    )
    speed = _joined(_speed_rows, record, other)
    return [
        Table("Speed and cost", columns, speed, "" if record.imported else losses),
        Table("Data", columns, _joined(_data_rows, record, other)),
        _config_table(record),
        *([_differences(record, other)] if other else []),
        _starts_table(record),
        Table("Software", columns, _joined(_software_rows, record, other)),
    ]


def _joined(
    rows_of: Callable[[Record], list[tuple[str, str]]], record: Record, other: Record | None
) -> list[tuple[str, ...]]:
    """Rows (name, value), or (name, value, the other run's value)."""
    if other is None:
        return list(rows_of(record))
    first, second = dict(rows_of(record)), dict(rows_of(other))
    return [(k, first.get(k, "–"), second.get(k, "–")) for k in first | second]


def _speed_rows(record: Record) -> list[tuple[str, str]]:
    speed, starts = Speed.of(record), record.starts
    device = f" ({starts[-1]['device']})" if starts else ""
    rows = [("devices", f"{speed.chips:,}{device}")] if speed.chips else []
    if not math.isnan(speed.rate):
        chip = f", {speed.rate / speed.chips:,.0f} per device" if speed.chips > 1 else ""
        rows.append(("throughput, median", f"{speed.rate:,.0f} {speed.unit}/s{chip}"))
    if not math.isnan(speed.input_wait):
        rows.append(("waiting for input", f"{speed.input_wait:.0%} of the training time"))
    known = [("training", speed.training), ("evaluation", speed.evaluating)]
    rows += [(name, _duration(seconds)) for name, seconds in known if seconds]
    if not math.isnan(speed.compiling):
        count = len(starts)
        times = "" if count == 1 else f", {count} times"
        rows.append(("compilation", f"{_duration(speed.compiling)}{times}"))
    if record.cost:
        return [*rows, *record.cost.rows()]
    rows += [("device hours", f"{speed.chip_hours:,.2f}")] if speed.chips else []
    return rows


def _data_rows(record: Record) -> list[tuple[str, str]]:
    evaluated = [row["examples"] for row in record.rows("eval") if "examples" in row]
    examples = f"{record.manifest['num_train_examples']:,} {record.benchmark.unit}"
    rows = [] if record.imported else [("training", examples)]
    rows += [("evaluation", f"{evaluated[-1]:,} {record.benchmark.unit}")] if evaluated else []
    if names := record.manifest.get("class_names"):
        rows.append(("classes", f"{len(names):,}"))
    folder = _config(record).get("data_dir", "")
    return [*rows, ("folder", folder)] if folder else rows


def _config_table(record: Record) -> Table:
    recipe = record.manifest.get("recipe", {})
    file, changes = str(recipe.get("file", "")), recipe.get("changes", {})
    changes = changes if isinstance(changes, dict) else {}
    changes = {
        key: pair for key, pair in changes.items() if isinstance(pair, list) and len(pair) == 2
    }
    text = f"All other values are those of {file}." if file else ""
    if file and not changes:
        text = f"The run used {file} as it is."
    rows = [(key, *map(_value, change)) for key, change in sorted(changes.items())]
    return Table("Changes to the recipe", ["key", "recipe", "this run"], rows, text)


def _differences(record: Record, other: Record) -> Table:
    """The keys of the config that differ between two runs."""
    ours, theirs = flat(_config(record)), flat(_config(other))
    keys = [key for key in sorted(ours | theirs) if ours.get(key) != theirs.get(key)]
    rows = [(key, _value(ours.get(key)), _value(theirs.get(key))) for key in keys]
    return Table("Differences between the runs", ["key", record.name, other.name], rows)


def _starts_table(record: Record) -> Table:
    rows = [
        (
            f"resumed at step {start['step']:,}" if i or start["step"] else "start",
            start["time"].replace("T", " ")[:16] + " UTC",
            f"{start['chips']} x {start['device']}",
            start["commit"] or "unknown",
        )
        for i, start in enumerate(record.starts)
    ]
    return Table("Starts", ["", "time", "devices", "commit"], rows)


def _software_rows(record: Record) -> list[tuple[str, str]]:
    return [
        (name, str(version))
        for name, version in sorted(record.manifest.get("versions", {}).items())
    ]


def _config(record: Record) -> Mapping[str, Any]:
    return record.manifest["config"]


def _value(value: Any) -> str:
    return "''" if value == "" else str(value)


def _kinds(rows: Sequence[Sequence[str]]) -> list[str]:
    """How each column of a table is shown: a class of the style sheet."""
    return [_kind([text for text in column if text]) for column in zip(*rows, strict=True)]


def _kind(texts: Sequence[str]) -> str:
    if texts and all(_is_number(text) for text in texts):
        return "share" if any(text.endswith(_PERCENT) for text in texts) else "number"
    return "short" if max(map(len, texts), default=0) <= _SHORT else ""


def _is_number(text: str) -> bool:
    return text.removesuffix(_PERCENT).replace(",", "").replace(".", "").isdigit() or text == "–"


def _fill(text: str) -> str:
    """The style of a cell with a percentage: a bar below it, as long as the share."""
    if not text.endswith(_PERCENT):
        return ""
    share = float(text.removesuffix(_PERCENT))
    return f"background-image: linear-gradient(90deg, #9cc3e4 {share}%, #edf0f3 {share}%)"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else hms(seconds)


# Exhibits and commands.


def _shade(count: int, total: int, right: bool) -> str:
    """The style of a cell of the confusion matrix: the stronger, the more of its row it holds."""
    share = count / total
    strength = 0.12 + 0.78 * (share if right else min(1.0, 3 * share))
    colour = "31, 111, 178" if right else "200, 89, 26"
    text = "; color: #fff" if strength > 0.55 else ""
    return f"background: rgba({colour}, {strength:.2f}){text}"


def _with_images(exhibits: Sequence[Exhibit]) -> list[tuple[Exhibit, list[tuple[Picture, str]]]]:
    """Each exhibit with its pictures as data: URIs, as many as the page has room for."""
    left, shown = _PICTURE_BYTES, []
    for exhibit in exhibits:
        images = []
        for picture in exhibit.pictures:
            text = base64.b64encode(picture.data).decode()
            left -= len(text)
            kind = "png" if picture.data.startswith(b"\x89PNG") else "jpeg"
            if left > 0:
                images.append((picture, f"data:image/{kind};base64,{text}"))
        shown.append((exhibit, images))
    return shown


def _uses(record: Record) -> list[tuple[str, str]]:
    """Commands that use the model: (what for, the command)."""
    workdir = shlex.quote(record.settings.workdir)
    recipe = str(record.manifest.get("recipe", {}).get("file", ""))
    uses = dict(record.benchmark.uses.commands)
    if recipe:
        uses["evaluate again"] = (
            f"python main.py --config={shlex.quote(recipe)} --mode=eval --workdir={{workdir}}"
        )
    uses["all curves"] = "tensorboard --logdir={workdir}"
    return [(what, command.replace("{workdir}", workdir)) for what, command in uses.items()]


# Charts.


def draw_charts(record: Record, other: Record | None) -> list[tuple[str, str]]:
    """(title, SVG as a data: URI) for the loss, each target's metric and the learning rate.

    The lines of `other` are dotted. A metric without values has no chart.
    """
    metrics = ["loss", *(target.metric for target in record.targets), "learning_rate"]
    charts = ((titled(metric), _chart(record, other, metric)) for metric in metrics)
    return [
        (title, f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}")
        for title, svg in charts
        if svg
    ]


def titled(metric: str) -> str:
    """The name of a metric as a heading; one with capitals, such as mAP, stays as it is."""
    words = metric.replace("_", " ")
    return words.capitalize() if words.islower() else words


def _chart(record: Record, other: Record | None, metric: str) -> bytes:
    """The SVG of one metric over the epochs, or b""."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    axes = figure.subplots()
    for run in filter(None, (record, other)):
        for split, (name, colour) in _SPLITS.items():
            rows = run.rows(split)
            points = [(row.get("epoch", math.nan), row.get(metric, math.nan)) for row in rows]
            points = [point for point in points if all(map(math.isfinite, point))]
            stride = -(-len(points) // _MOST_POINTS)
            if points:
                x, y = zip(*points[::-stride], strict=True)  # the last one always
                dots = "o" if split == "eval" and len(points) <= _MOST_DOTS else ""
                label = f"{name}, {run.name}" if run is other else name
                style = {"linestyle": ":" if run is other else "-", "marker": dots, "markersize": 4}
                axes.plot(x, y, color=colour, label=label.replace("$", r"\$"), **style)
    if not axes.lines:
        return b""
    resumes = [start["step"] for start in record.starts if start["step"]]
    for i, step in enumerate(resumes):
        text = f"resumed at step {step:,}" if len(resumes) == 1 else f"{len(resumes)} resumes"
        axes.axvline(record.epoch(step), color=_GREY, linestyle="--", label="" if i else text)
    for target in record.targets:
        if target.metric == metric and target.value > 0:
            text = f"target {record.number(metric, target.value)}"
            axes.axhline(target.value, color=_GREEN, linestyle="--", label=text)
    if is_like(metric, [target.metric for target in record.targets if target.percent]):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("epoch")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
