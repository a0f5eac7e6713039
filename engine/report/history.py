"""Keeps the rows of metrics.jsonl, the record of a run.

Each line is a JSON object whose "split" is "train" or "eval". When a run resumes, the file is cut
back to the restored step, so that it has neither gaps nor duplicates.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Container, Iterator
from typing import Any

from etils import epath

from errors import OutputError, one_line

# What an evaluation's row has besides its scores.
_NOT_SCORES = ("split", "step", "epoch", "examples", "seconds")


class History:
    """The rows of `metrics.jsonl` in a workdir, local or gs://; only process 0 writes."""

    def __init__(self, workdir: str, writes: bool):
        self._path = epath.Path(workdir) / "metrics.jsonl"
        self._writes = writes
        self.rows: list[dict[str, Any]] = []
        if self._path.exists():
            text = self._path.read_bytes()
            is_complete = text.endswith(b"\n") or not text
            for line in text.splitlines():
                try:
                    row = json.loads(line)
                    self.rows.append({k: math.nan if v is None else v for k, v in row.items()})
                except ValueError:
                    is_complete = False
                    break  # a line that a kill cut short; what follows cannot be trusted
            if not is_complete:
                self._rewrite()  # or the next row would continue that line

    def cut(self, step: int) -> None:
        """Forgets everything after `step`, because it will happen again."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        self._rewrite()

    def add(self, row: dict[str, Any]) -> None:
        """Appends one row and writes it at once."""
        self.rows.append(row)
        if self._writes:
            with writing(self._path), self._path.open("a") as file:
                file.write(_json(row) + "\n")

    def scores(self) -> dict[int, dict[str, float]]:
        """The scores of the evaluations so far, by step."""
        return {
            row["step"]: {k: v for k, v in row.items() if k not in _NOT_SCORES}
            for row in self.rows
            if row["split"] == "eval"
        }

    def best(self, metric: str, among: Container[int] | None = None) -> int | None:
        """The step with the highest `metric`, the earliest of equals; None if no step has one.

        With `among` only the steps in it count.
        """
        scores = {k: v.get(metric, math.nan) for k, v in self.scores().items()}
        steps = [
            step
            for step, score in scores.items()
            if not math.isnan(score) and (among is None or step in among)
        ]
        return max(steps, key=lambda step: (scores[step], -step), default=None)

    def _rewrite(self) -> None:
        if self._writes and self._path.exists():
            part = self._path.parent / "metrics.jsonl.part"
            with writing(self._path):
                part.write_text("".join(_json(row) + "\n" for row in self.rows))
                part.replace(self._path)


@contextlib.contextmanager
def writing(path: Any) -> Iterator[None]:
    """Turns whatever a file system raises into an OutputError of one line."""
    try:
        yield
    except Exception as error:  # for gs://, TensorFlow's own kinds
        raise OutputError(f"cannot write {path}: {one_line(error)}") from error


def _json(row: dict[str, Any]) -> str:
    """A row as JSON, which has no word for nan and infinity: null."""
    clean = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }
    return json.dumps(clean)
