"""The classes of a picture: a row for programs, a line for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from modes.predict.rows import cell, cut, name_width
from modes.predict.sources import exact, shown
from ops import limits


@dataclasses.dataclass(frozen=True)
class Row:
    """The prediction for one file.

    Attributes:
      path: of the file.
      kind: of `values`, 'probability' or 'logit'.
      error: why there is no prediction, in one line; '' if there is one.
      labels: the names of the best classes, best first.
      indices: their numbers, from 0.
      values: their probabilities, or logits.
      truth: the class whose name the folder has; '' if it has another name.
    """

    path: str
    kind: str
    error: str = ""
    labels: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    truth: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the best class is another one than the folder's name says."""
        return bool(self.truth and self.labels and self.labels[0] != self.truth)

    def content(self) -> dict[str, Any]:
        """See `rows.Row`."""
        content: dict[str, Any] = {"path": exact(self.path)}
        if self.error:
            return content | {"error": self.error}
        ranks = zip(self.labels, self.indices, self.values, strict=True)
        content["predictions"] = [
            {"label": label, "index": index, self.kind: value} for label, index, value in ranks
        ]
        return content | ({"folder_label": self.truth} if self.truth else {})

    def cells(self) -> list[dict[str, Any]]:
        """See `rows.Row`; the columns are those of `Classes`."""
        cells: dict[str, Any] = {"path": exact(self.path), "folder_label": self.truth}
        ranks = zip(self.labels, self.values, self.indices, strict=True)
        for rank, values in enumerate(ranks, 1):
            cells |= dict(zip(_rank_columns(rank, self.kind), values, strict=True))
        return [cells | {"error": self.error}]


def _rank_columns(rank: int, kind: str) -> tuple[str, str, str]:
    value = "prob" if kind == "probability" else "logit"
    return f"label_{rank}", f"{value}_{rank}", f"index_{rank}"


@dataclasses.dataclass(frozen=True)
class Classes:
    """The classes of a model, and how many of them a row names.

    Attributes:
      names: one for each class.
      top_k: how many classes a row has.
      kind: 'probability' or 'logit'.
    """

    names: list[str]
    top_k: int
    kind: str

    @property
    def columns(self) -> list[str]:
        """Of a CSV."""
        ranks = range(1, self.top_k + 1)
        named = [name for rank in ranks for name in _rank_columns(rank, self.kind)]
        return ["path", *named, "folder_label", "error"]

    def shown(self, value: float) -> str:
        """A probability or logit as text for people."""
        return f"{value:.1%}" if self.kind == "probability" else f"{value:.3f}"

    def failed(self, path: str, error: str) -> Row:
        """The row of a file without a prediction."""
        return Row(path, self.kind, error)

    def row(self, path: str, logits: np.ndarray, folder: str) -> Row:
        """The row of a file, for logits f32[classes]."""
        if not np.isfinite(logits).all():
            return self.failed(path, "the model's logits are not finite: its run has diverged")
        best = np.argsort(-logits, kind="stable")[: self.top_k]
        values, digits = logits.astype(np.float64), 9  # which tell float32 numbers apart
        if self.kind == "probability":
            digits = 6
            values = np.exp(values - values.max())
            values /= values.sum()
        return Row(
            path=path,
            kind=self.kind,
            labels=tuple(self.names[i] for i in best),
            indices=tuple(map(int, best)),
            values=tuple(float(f"{value:.{digits}g}") for value in values[best]),
            truth=next((n for n in self.names if limits.same(n) == limits.same(folder)), ""),
        )


def table(rows: Iterator[Row], classes: Classes, paths: Sequence[str], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns, one for each file and one above them."""
    names = name_width(paths, width)
    label_width = max(4, min(max(len(shown(name)) for name in classes.names), 20))
    shown_k = max(1, min(classes.top_k, (width - names) // (label_width + 11)))
    yield f"{'file':{names}}  {'classes, most probable first'}\n"
    for row in rows:
        ranks = [
            f"{cut(shown(label), label_width):{label_width}} {classes.shown(value):>7}"
            for label, value in zip(row.labels[:shown_k], row.values, strict=False)
        ]
        text = "  ".join(ranks) if not row.error else f"ERROR {row.error}"
        mark = f"  (folder: {shown(row.truth)})" if row.is_wrong else ""
        yield f"{cell(row.path, names):{names}}  {text}{mark}\n"
