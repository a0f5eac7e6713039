"""Learning curves of MLPerf's logs, the user's beside published ones, for `check --curves`."""

import io
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from etils import epath

from benchmarks import mlperf
from common.errors import UserError
from scripts.mlperf import logs

_HEAD = "| benchmark | logs | epochs to the target | minutes | score at 1/4, 1/2, 3/4 |"
_WIDTH = 3  # panels in a row


class Runs(NamedTuple):
    """The runs of one system for one benchmark; each has an evaluation."""

    entry: mlperf.Entry
    label: str
    runs: Sequence[logs.Run]


def draw(results: Sequence[tuple[str, str, Sequence[logs.Run]]], path: str) -> list[str]:
    """Draws the runs that have evaluations; returns the lines of their table, in Markdown.

    `results` are (system, benchmark, runs) of each set; the system's name in a log takes
    precedence. `path` is the .svg or .png.
    """
    sets = list[Runs]()
    for system, benchmark, all_runs in results:
        entries = mlperf.entries().values()  # maskrcnn is "mask" in v0.6
        entry = next((e for e in entries if e.name.startswith(benchmark)), None)
        runs = [run for run in all_runs if run.evals]
        if entry and runs:
            system = runs[0].values.get("submission_platform", system)
            form = "" if runs[0].form == "mllog" else f"{runs[0].form} "
            sets.append(Runs(entry, form + system, runs))
    if not sets:
        raise UserError(f"--curves={path}: no log of the six benchmarks has an evaluation")
    _draw(sets, path)
    return [_HEAD, "|---|---|---|---|---|", *map(_row, sets)]


def _row(group: Runs) -> str:
    """A row of the table: ranges over the runs, and mean scores on the way.

    The score at 1/4 is the latest one by a quarter of the epochs that the longest run has; "-" if
    there was no evaluation yet. Mask R-CNN's score is that of its boxes.
    """
    curves = [[(epoch, scores[0]) for epoch, scores in _scores(run)] for run in group.runs]
    last = max(curve[-1][0] for curve in curves)
    quarters = []
    for part in (1, 2, 3):
        before = [[s for epoch, s in curve if epoch <= last * part / 4] for curve in curves]
        known = [scores[-1] for scores in before if scores]
        quarters.append(f"{statistics.fmean(known):.3f}" if known else "-")
    epochs = _range([run.epochs for run in group.runs], "g")
    minutes = _range([run.minutes for run in group.runs], ".1f")
    return f"| {group.entry.name} | {group.label} | {epochs} | {minutes} | {', '.join(quarters)} |"


def _draw(sets: Sequence[Runs], path: str) -> None:
    """Writes a PNG or SVG with a panel for each benchmark and a line for each run and score."""
    import matplotlib
    from matplotlib.figure import Figure

    entries = list({group.entry.name: group.entry for group in sets}.values())
    labels = list(dict.fromkeys(group.label for group in sets))
    columns = min(len(entries), _WIDTH)
    rows = -(-len(entries) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.9 * rows), layout="constrained", facecolor="white")
    for place, entry in enumerate(entries, 1):
        axis = figure.add_subplot(rows, columns, place)
        metrics = "; dotted: ".join(entry.targets[entry.form])
        targets = dict[float, str]()
        axis.set(title=entry.name, xlabel="epoch", ylabel=metrics)
        for line, group in enumerate(group for group in sets if group.entry is entry):
            color, form = f"C{labels.index(group.label)}", group.runs[0].form
            for run in group.runs:
                epochs, scores = zip(*_scores(run), strict=True)
                for style, each in zip("-:", zip(*scores, strict=True), strict=False):
                    axis.plot(epochs, each, style, color=color, lw=0.8, marker=".", markevery=[-1])
            low, corner = 0.04 + 0.09 * line, axis.transAxes  # the lower right, below the curves
            axis.text(0.97, low, group.label, color=color, ha="right", transform=corner)
            values = entry.targets.get(form, entry.targets[entry.form]).values()
            targets |= dict.fromkeys(values, "top" if form == "v0.5" else "bottom")
        for target, side in targets.items():  # v0.5 has lower targets
            axis.axhline(target, color="gray", ls="--", lw=0.8)
            at_left = axis.get_yaxis_transform()
            axis.text(0, target, f" target {target:g}", va=side, transform=at_left, size=8)
    file, form = io.BytesIO(), path.rpartition(".")[2]
    metadata = {"Date": None} if form == "svg" else None  # the same bytes from the same logs
    with matplotlib.rc_context({"svg.hashsalt": "curves", "svg.fonttype": "none"}):
        figure.savefig(file, format=form, dpi=120, metadata=metadata)
    epath.Path(path).write_bytes(file.getvalue())


def _scores(run: logs.Run) -> list[tuple[float, list[float]]]:
    """(epoch, scores as fractions) of each evaluation; v0.5 and v0.6 have BLEU in per cent."""
    lists = [[*v.values()] if isinstance(v, dict) else v for _, v in run.evals]
    lists = [v if isinstance(v, list) else [v] for v in lists]
    scale = 100 if max(map(max, lists)) > 1 else 1
    return [(run.evals[i][0], [v / scale for v in scores]) for i, scores in enumerate(lists)]


def _range(values: Sequence[float | None], form: str) -> str:
    """The least and the largest value, such as "60 to 64"; "?" at the end if a run has no value."""
    known = sorted(value for value in values if value is not None)
    ends = dict.fromkeys(f"{value:{form}}" for value in (known[:1] + known[-1:]))
    return " to ".join([*ends, *["?"] * (len(known) < len(values))])
