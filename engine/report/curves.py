"""Draws the learning curves of a run."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from typing import Any

from etils import epath


def draw(rows: list[dict[str, Any]], path: str, title: str, metrics: Sequence[str] = ()) -> None:
    """Draws the losses, the target metrics with scores of their kind, and the learning rate.

    Args:
      rows: the rows of metrics.jsonl, with "split", "epoch" and numbers.
      path: PNG file, local or gs://; the old picture stays until the new one is complete.
      title: heading of the picture.
      metrics: the metrics of the run's targets.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {"loss": ("loss",), ", ".join(metrics): metrics, "learning rate": ("learning_rate",)}
    panels = {name.replace("_", " "): kind for name, kind in panels.items() if kind}
    figure = Figure(figsize=(4 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, (name, kind) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for split, marker in (("train", ""), ("eval", "o")):
            of_split = [row for row in rows if row["split"] == split]
            for key in sorted({k for row in of_split for k in row if is_like(k, kind)}):
                points = {row.get("epoch", 0): row[key] for row in of_split if key in row}
                x, y = zip(*sorted(points.items()), strict=True)
                label = f"{split} {key.replace('_', ' ')}"
                axes.plot(x, y, marker=marker, markersize=3, label=label)
        axes.set(xlabel="epoch", title=name)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    part = epath.Path(path + ".part")
    part.write_bytes(picture.getvalue())
    part.replace(epath.Path(path))


def is_like(name: str, metrics: Collection[str]) -> bool:
    """Whether `name` is of the kind of one of `metrics`: both end in the same word.

    So top_5_accuracy is like top_1_accuracy, and an auxiliary loss is like loss.
    """
    return name.rpartition("_")[2] in {metric.rpartition("_")[2] for metric in metrics}
