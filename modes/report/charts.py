"""Lays out the charts of the report: from rows of numbers to points of an SVG."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from engine.report.curves import is_like
from modes.report.record import Record

WIDTH, HEIGHT = 420, 260  # of the drawing, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 36  # margins
_MOST_POINTS = 500  # of a line; more would not be seen
_DOTS = 40  # lines with at most so many points have a dot for each


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    kind: str  # a class of the style sheet: "train" or "eval", and "other" of a compared run
    values: Sequence[tuple[float, float]]  # (epoch, value)


@dataclasses.dataclass(frozen=True)
class Mark:
    """A vertical mark at an epoch, such as a resume."""

    epoch: float
    label: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart with its lines in coordinates of the drawing."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[Mark]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    level: tuple[float, str] | None  # a horizontal mark, such as the target

    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
    width, height = WIDTH, HEIGHT

    @property
    def marks_label(self) -> str:
        """The marks in words, for the legend."""
        if len(self.marks) == 1:
            return self.marks[0].label
        return f"{len(self.marks)} resumes"

    @property
    def level_shift(self) -> int:
        """How far below the level its label stands: above it, unless the drawing ends there."""
        return -5 if self.level and self.level[0] > self.top + 14 else 14

    @staticmethod
    def points(line: Line) -> str:
        """The attribute "points" of a polyline."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in line.values)

    @staticmethod
    def has_dots(line: Line) -> bool:
        """Whether each point of a line gets a dot."""
        return line.kind.startswith("eval") and len(line.values) <= _DOTS


def of(record: Record, other: Record | None) -> list[Chart]:
    """The charts of a run: the loss, each target's metric, the learning rate."""
    percent = [target.metric for target in record.targets if target.percent]
    panels: list[tuple[str, tuple[float, str] | None]] = [("loss", None)]
    for target in record.targets:
        label = f"target {record.number(target.metric, target.value)}"
        level = (target.value, label) if target.value > 0 else None
        panels.append((target.metric, level))
    panels.append(("learning_rate", None))
    marks = [
        Mark(record.epoch(start["step"]), f"resumed at step {start['step']:,}")
        for start in record.starts
        if start["step"]
    ]
    charts = []
    for key, level in panels:
        lines = _lines(record, key, "")
        lines += _lines(other, key, other.name) if other else []
        if lines:
            charts.append(_chart(titled(key), lines, marks, level, is_like(key, percent)))
    return charts


def titled(metric: str) -> str:
    """The name of a metric as a heading; one with capitals, such as mAP, keeps its form."""
    words = metric.replace("_", " ")
    return words.capitalize() if words.islower() else words


def _lines(record: Record, key: str, name: str) -> list[Line]:
    """The lines of one metric."""
    lines = []
    for split, words in (("train", "training"), ("eval", "evaluation")):
        rows = record.rows(split)
        values = [
            (float(row["epoch"]), float(row[key]))
            for row in rows
            if key in row and math.isfinite(row[key])
        ]
        if values:
            label, kind = (f"{words}, {name}", f"{split} other") if name else (words, split)
            lines.append(Line(label, kind, _thinned(values)))
    return lines


def _thinned(values: list[tuple[float, float]]) -> list[tuple[float, float]]:
    stride = -(-len(values) // _MOST_POINTS)
    return values[::stride] + ([values[-1]] if (len(values) - 1) % stride else [])


def _chart(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[Mark],
    level: tuple[float, str] | None,
    percent: bool,
) -> Chart:
    xs = [x for line in lines for x, _ in line.values]
    ys = [y for line in lines for _, y in line.values]
    ys += [level[0]] if level else []
    x_ticks = ticks(0.0, max(xs))
    y_ticks = ticks(min(ys), max(ys))
    if percent:  # an accuracy has no room above 100 %
        y_ticks = [tick for tick in y_ticks if tick <= 1.0 + 1e-9]
    (x0, x1), (y0, y1) = (0.0, max(xs) or 1.0), (y_ticks[0], max(y_ticks[-1], *ys))

    def x_of(x: float) -> float:
        return _LEFT + (x - x0) / (x1 - x0) * (WIDTH - _LEFT - _RIGHT)

    def y_of(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - _TOP - _BOTTOM)

    def text(value: float) -> str:
        return f"{100 * value:g} %" if percent else f"{value:g}"

    return Chart(
        title=title,
        lines=[
            dataclasses.replace(line, values=[(x_of(x), y_of(y)) for x, y in line.values])
            for line in lines
        ],
        marks=[Mark(x_of(mark.epoch), mark.label) for mark in marks],
        x_ticks=[(x_of(tick), f"{tick:g}") for tick in x_ticks if tick <= x1 * 1.001],
        y_ticks=[(y_of(tick), text(tick)) for tick in y_ticks],
        level=(y_of(level[0]), level[1]) if level else None,
    )


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers, at least two, of which the first is not above `low` and the last not below
    `high`.
    """
    if not high > low:
        low, high = low - (abs(low) or 1.0) / 2, low + (abs(low) or 1.0) / 2
    raw = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]
