"""Keeps the rows of metrics.jsonl, the record of a run; says how sure a share in them is.

Each line is a JSON object whose "split" is "train" or "eval". When a run resumes, the file is cut
back to the restored step, so that it has neither gaps nor duplicates.
"""

import contextlib
import json
import math
import operator
from collections.abc import Container, Iterator, Sequence
from typing import Any

from etils import epath

from common.errors import OutputError, one_line, parse_json
from engine.cluster import watchdog

# The keys of an evaluation's row that are no scores.
_NOT_SCORES = ("split", "step", "epoch", "examples", "seconds")
FEW = 2000  # examples from which on a share is shown without its interval
_step = operator.itemgetter("step")  # rows of one step stay in the order of their writing
_Z = 1.959964  # the normal distribution's 97.5 % quantile


class History:
    """The rows of `metrics.jsonl` in a workdir, local or gs://; only process 0 writes."""

    def __init__(self, workdir: str, writes: bool):
        self._path = epath.Path(workdir) / "metrics.jsonl"
        self._writes = writes
        with watchdog.during(f"reading {self._path}"):
            text = self._path.read_bytes() if self._path.exists() else b""
        parsed = [_parse(line) for line in text.splitlines()]
        self.rows = sorted((row for row in parsed if row is not None), key=_step)
        self.damaged = parsed[:-1].count(None)  # lines, without the last one
        # A kill may have cut the last line short; without a rewrite the next row would continue it.
        if len(self.rows) < len(parsed) or not text.endswith(b"\n"):
            self._rewrite()

    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of the evaluations, as JSON values, for `restore`."""
        return [json.loads(_json(row)) for row in self.rows if row["split"] == "eval"]

    def restore(self, evaluations: Sequence[dict[str, Any]]) -> int:
        """Adds the rows of evaluations that the file has lost; returns their number."""
        known = self.scores()
        lost = [row for row in map(_row, evaluations) if row and row["step"] not in known]
        if lost:
            self.rows = sorted([*self.rows, *lost], key=_step)
            self._rewrite(make=True)
        return len(lost)

    def cut(self, step: int) -> None:
        """Drops the rows after `step`, because these steps will run again."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        self._rewrite()

    def add(self, row: dict[str, Any]) -> None:
        """Adds one row and writes it at once; a score that comes late goes to its step."""
        self.rows.append(row)
        if row["step"] < self.rows[-2:][0]["step"]:
            self.rows.sort(key=_step)
            self._rewrite()
        elif self._writes:
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
        """The earliest step with the best `metric`, of all or `among` some; else None.

        The best is the highest; of a loss it is the lowest.
        """
        sense = -1 if lower_is_better(metric) else 1
        scores = {
            step: row[metric]
            for step, row in self.scores().items()
            if not math.isnan(row.get(metric, math.nan)) and (among is None or step in among)
        }
        return max(scores, key=lambda step: (sense * scores[step], -step), default=None)

    def _rewrite(self, make: bool = False) -> None:
        if self._writes and (make or self._path.exists()):
            part = self._path.parent / "metrics.jsonl.part"
            with writing(self._path):
                part.write_text("".join(_json(row) + "\n" for row in self.rows))
                part.replace(self._path)


@contextlib.contextmanager
def writing(path: Any) -> Iterator[None]:
    """Notes the writing as this process's activity; an error becomes an OutputError of one line."""
    try:
        with watchdog.during(f"writing {path}"):
            yield
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise OutputError(f"cannot write {path}: {one_line(error)}") from error


def _parse(line: bytes) -> dict[str, Any] | None:
    """The row in a line; None if the line is damaged."""
    try:
        return _row(parse_json(line))
    except ValueError:
        return None


def _row(value: Any) -> dict[str, Any] | None:
    """A row with nan for null, without values that are no numbers; None if it is no row."""
    if not isinstance(value, dict) or value.get("split") not in ("train", "eval"):
        return None
    row = {k: math.nan if v is None else v for k, v in value.items()}
    row = {k: v for k, v in row.items() if isinstance(v, int | float) and not abs(v) > 1e300}
    is_row = type(step := row.get("step")) is int and step >= 0
    return {"split": value["split"], **row} if is_row else None


def _json(row: dict[str, Any]) -> str:
    """A row as JSON; nan and infinity, which JSON lacks, become null."""
    is_null = {k: isinstance(v, float) and not math.isfinite(v) for k, v in row.items()}
    return json.dumps({k: None if is_null[k] else v for k, v in row.items()})


def lower_is_better(metric: str) -> bool:
    """Whether a score is a loss; of all others, also of a class "f1/hair_loss", more is better."""
    return "/" not in metric and metric.rpartition("_")[2] == "loss"


def other_best(history: History, steps: Sequence[int], then: str, now: str) -> str:
    """What another `config.best_by` means for the checkpoints of `steps`; "" if it is the same.

    `then` and `now` are the scores that chose the best checkpoint, and that choose it.
    """
    before, best, kept = history.best(then), history.best(now), history.best(now, among=steps)
    if then == now or not history.scores():
        return ""
    text = f"the best checkpoint was by {then}, it is now by {now}: "
    if best is None:
        text += "no evaluation up to now has this score"
    else:
        text += "none that is left" if kept is None else f"step {kept:,}"
        text += f" (step {best:,} was better; its checkpoint is deleted)" * (kept != best)
    gone = before in steps and before != kept
    return text + f"; step {before}, the best by {then}, stays only while it is new" * gone


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share of `count` examples (Wilson 1927).

    With p = share, n = count and z = 1.96 it is

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    spread = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    middle, scale = share + _Z**2 / (2 * count), 1 + _Z**2 / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def share_interval(share: float, count: int) -> str:
    """The interval of a share in words, for a line of a report; "" for `FEW` examples or more."""
    if not 0 < count < FEW or not 0 <= share <= 1:
        return ""
    low, high = wilson_interval(share, count)
    return f" (95 % interval {100 * low:.1f} to {100 * high:.1f})"
