"""Draws the charts of a report."""

from __future__ import annotations

import base64
import io
import math

from engine.report.curves import is_like
from modes.report.record import Record

_SPLITS = {"train": ("training", "#1f6fb2"), "eval": ("evaluation", "#c8591a")}
_GREEN, _GREY = "#1b7f4b", "#5b6876"
_MOST_POINTS = 500  # of a line; nobody sees more
_MOST_DOTS = 40  # evaluations that have a dot each


def draw(record: Record, other: Record | None) -> list[tuple[str, str]]:
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
