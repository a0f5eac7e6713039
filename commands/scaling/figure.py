"""The picture of a law, for whoever decides whether to pay for more labels."""

import math
import textwrap
from collections.abc import Sequence
from typing import IO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from commands.scaling.law import AHEAD, Interval, Law, Point, Unclear
from common import palette

_LAW, _MARKS, _LINES = palette.BLUE, palette.ORANGE, palette.GREY
_TEXTS = 0.27  # of the height, at the bottom, for the texts of the marks
_LETTERS = 108  # in a line below the title


def draw(
    file: str | IO[bytes],
    points: Sequence[Point],
    law: Law | Unclear,
    *,
    title: str,
    unit: str,
    metric: str,
    percent: bool = False,
    target: float = 0.0,
) -> Figure:
    """Writes a PNG, 990 pixels wide: the runs, the law, what 2 and 4 times the data would bring.

    `unit` names the training examples ("photos"), `metric` the score; `percent` shows it in per
    cent. A `target` above 0 is a line. If the law is Unclear, the reason stands below the title.
    """
    figure = Figure(figsize=(9, 5.6), dpi=110, layout="constrained")
    figure.suptitle(textwrap.fill(title, 80), fontsize=14, fontweight="bold")
    axes = figure.subplots()
    points = [point for point in points if math.isfinite(point.score)]
    runs, scores = [point.examples for point in points], [point.score for point in points]
    axes.plot(runs, scores, "o", color="black", ms=7, mec="white", label="measured runs", zorder=4)
    if target > 0:
        label = f"target {_text(percent, target)}"
        axes.axhline(target, color=_LINES, ls=":", lw=2, label=label)
        scores.append(target)
    numbers, lowest = sorted(set(runs)), math.inf
    if isinstance(law, Law):
        marks = {times: law.score(times * law.largest) for times in AHEAD}
        scores += [end for mark in marks.values() for end in (mark.low, mark.high)]
        scores += _draw_law(axes, law, numbers[0])
        _draw_marks(axes, law.largest, marks, percent)
        numbers += [times * law.largest for times in AHEAD]
        lowest = min(mark.low for mark in marks.values())
        ceiling = law.ceiling
        shown = max(scores) - min(scores)
        sure = ceiling.high - ceiling.low < shown / 2
        if sure and ceiling.median < max(scores) + 0.3 * shown:
            ends = _text(percent, ceiling.low, ceiling.high)
            label = f"ceiling {_text(percent, ceiling.median)} ({ends})"
            axes.axhline(ceiling.median, color=_LINES, ls="--", lw=1.5, label=label)
            scores.append(ceiling.median)
    else:
        reason = f"Cannot tell what more data would bring: {law.reason}."
        axes.set_title(textwrap.fill(reason, _LETTERS), fontsize=10, loc="left")
    low, high = min(scores, default=0.0), max(scores, default=1.0)
    margin = 0.06 * (high - low) or 0.01
    low, high = low - margin, high + margin
    low = min(low, max((lowest - _TEXTS * high) / (1 - _TEXTS), -margin))
    axes.set_ylim(low, high)
    axes.set_xscale("log", base=2)
    if numbers:
        axes.set_xlim(numbers[0] / 1.3, numbers[-1] * 1.5)
    axes.xaxis.set_major_locator(FixedLocator(numbers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda n, _: f"{n / 1e6:g}M" if n >= 1e6 else f"{n:,.0f}")
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axes.set_xlabel(f"training {unit}", fontsize=12)
    axes.set_ylabel(metric.replace("_", " "), fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=10, frameon=False)
    figure.savefig(file, format="png")
    return figure


def _draw_law(axes: Axes, law: Law, smallest: int) -> list[float]:
    """Draws the law with its band; returns the scores at the edges of the band."""
    x = np.geomspace(smallest, AHEAD[-1] * law.largest, 60)
    band = [law.mean(n) for n in x]
    low, high = [mean.low for mean in band], [mean.high for mean in band]
    axes.plot(x, [mean.median for mean in band], color=_LAW, lw=2, label="power law")
    axes.fill_between(x, low, high, color=_LAW, alpha=0.18, lw=0, label="its 80 % band")
    return [*low, *high]


def _draw_marks(axes: Axes, largest: int, marks: dict[int, Interval], percent: bool) -> None:
    """Draws the scores to expect, with their numbers in the lowest part of the picture."""
    x = [times * largest for times in marks]
    y = np.array([mark.median for mark in marks.values()])
    ends = np.array([(mark.low, mark.high) for mark in marks.values()]).T
    label = "score to expect from a run (80 %)"
    errors = abs(ends - y)
    axes.errorbar(x, y, errors, fmt="D", color=_MARKS, ms=7, capsize=6, lw=2, label=label)
    for n, (times, mark) in zip(x, marks.items(), strict=True):
        axes.axvline(n, color=_LINES, lw=0.8, ls=":")
        interval = _text(percent, mark.low, mark.high)
        axes.text(
            n,
            0.02,
            f"{times}x\n{_text(percent, mark.median)}\n{interval}",
            transform=axes.get_xaxis_transform(),
            ha="center",
            fontsize=9.5,
            fontweight="bold",
            color=_MARKS,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )


def _text(percent: bool, *scores: float) -> str:
    """Scores as "91.2 %", "89.3–92.8 %", or "0.893–0.928"; with more digits near 1."""
    digits = 2 if percent and 0.99 < min(scores) < 1 else 1 if percent else 3
    texts = (f"{100**percent * score:.{digits}f}" for score in scores)
    return "–".join(texts) + " %" * percent
