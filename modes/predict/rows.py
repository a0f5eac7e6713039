"""The predictions as text: a table for people; CSV, JSON and JSON lines for programs."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from modes.predict.sources import exact, shown
from ops.tables import csv_text

FORMATS = ("csv", "json", "jsonl")


@dataclasses.dataclass(frozen=True)
class Row:
    """The prediction for one file.

    Attributes:
      path: of the file.
      error: why there is no prediction, in one line; '' if there is one.
      labels: the names of the best classes, best first.
      indices: their numbers, from 0.
      values: their probabilities, or logits.
      truth: the class whose name the folder has; '' if it has another name.
    """

    path: str
    error: str = ""
    labels: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    truth: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the best class is another one than the folder's name says."""
        return bool(self.truth and self.labels and self.labels[0] != self.truth)


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

    def shown(self, value: float) -> str:
        """A probability or logit as text for people."""
        return f"{value:.1%}" if self.kind == "probability" else f"{value:.3f}"

    def row(self, path: str, logits: np.ndarray, folder: str) -> Row:
        """The row of a file, for logits f32[classes]."""
        if not np.isfinite(logits).all():
            return Row(path, error="the model's logits are not finite: its run has diverged")
        best = np.argsort(-logits, kind="stable")[: self.top_k]
        values, digits = logits.astype(np.float64), 9  # which tell float32 numbers apart
        if self.kind == "probability":
            digits = 6
            values = np.exp(values - values.max())
            values /= values.sum()
        return Row(
            path=path,
            labels=tuple(self.names[i] for i in best),
            indices=tuple(map(int, best)),
            values=tuple(float(f"{value:.{digits}g}") for value in values[best]),
            truth=folder if folder in self.names else "",
        )


def lines(form: str, rows: Iterator[Row], classes: Classes) -> Iterator[str]:
    """The text of a file of predictions in one of `FORMATS`, piece by piece."""
    if form == "csv":
        return _csv(rows, classes)
    if form == "json":
        return _json(rows, classes)
    return (f"{json.dumps(_object(row, classes), ensure_ascii=False)}\n" for row in rows)


def _csv(rows: Iterator[Row], classes: Classes) -> Iterator[str]:
    ranks = range(1, classes.top_k + 1)
    value = "prob" if classes.kind == "probability" else "logit"
    columns = [name for k in ranks for name in (f"label_{k}", f"{value}_{k}", f"index_{k}")]
    yield csv_text([["path", *columns, "folder_label", "error"]])
    for row in rows:
        cells = [c for rank in zip(row.labels, row.values, row.indices, strict=True) for c in rank]
        cells = cells or [""] * len(columns)
        yield csv_text([[exact(row.path), *cells, row.truth, row.error]])


def _json(rows: Iterator[Row], classes: Classes) -> Iterator[str]:
    start = "[\n"
    for row in rows:
        yield start + json.dumps(_object(row, classes), ensure_ascii=False)
        start = ",\n"
    yield "[]\n" if start == "[\n" else "\n]\n"


def _object(row: Row, classes: Classes) -> dict[str, Any]:
    content: dict[str, Any] = {"path": exact(row.path)}
    if row.error:
        return content | {"error": row.error}
    ranks = zip(row.labels, row.indices, row.values, strict=True)
    content["predictions"] = [
        {"label": label, "index": index, classes.kind: value} for label, index, value in ranks
    ]
    return content | ({"folder_label": row.truth} if row.truth else {})


def table(rows: Iterator[Row], classes: Classes, paths: Sequence[str], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns, one for each file and one above them."""
    name_width = min(max([len(_cell(path, 10**6)) for path in paths], default=4), width // 2, 60)
    label_width = max(4, min(max(len(shown(name)) for name in classes.names), 20))
    shown_k = max(1, min(classes.top_k, (width - name_width) // (label_width + 11)))
    yield f"{'file':{name_width}}  {'classes, most probable first'}\n"
    for row in rows:
        ranks = [
            f"{_short(shown(label), label_width):{label_width}} {classes.shown(value):>7}"
            for label, value in zip(row.labels[:shown_k], row.values, strict=False)
        ]
        text = "  ".join(ranks) if not row.error else f"ERROR {row.error}"
        mark = f"  (folder: {shown(row.truth)})" if row.is_wrong else ""
        yield f"{_cell(row.path, name_width):{name_width}}  {text}{mark}\n"


def _cell(path: str, width: int) -> str:
    """The end of a path, which says more than its beginning."""
    text = shown(path)
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def name_of(path: str) -> str:
    """The name of a file without its folders, as text."""
    return shown(os.path.basename(path))
