"""Learning curves as a picture."""

from __future__ import annotations

import io
from typing import Any

from etils import epath

# Quantities that share one panel, as (name in the rows, scale of the axis).
_PANELS = (("loss", "linear"), ("accuracy", "linear"), ("learning_rate", "linear"))


def draw(rows: list[dict[str, Any]], path: str, title: str) -> None:
    """Draws loss, accuracies and learning rate over epochs.

    Args:
      rows: those of metrics.jsonl; "split", "epoch" and numbers.
      path: PNG file to write, local or gs://; replaced whole, never half.
      title: heading of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, (panel, scale) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for split, marker in (("train", ""), ("eval", "o")):
            mine = [row for row in rows if row["split"] == split]
            for name in sorted({k for row in mine for k in row if k.endswith(panel)}):
                points = sorted({row["epoch"]: row[name] for row in mine if name in row}.items())
                label = f"{split} {name.replace('_', ' ')}"
                axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=label)
        axes.set(xlabel="epoch", title=panel.replace("_", " "), yscale=scale)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    save(figure, path)


def save(figure: Any, path: str) -> None:
    """Writes a figure as PNG, to a local path or gs://; replaced whole, never half."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    part = epath.Path(path + ".part")
    part.write_bytes(picture.getvalue())
    part.replace(epath.Path(path))
