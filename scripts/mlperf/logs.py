"""Reads times and results from the logs of MLPerf runs: v0.5's lines, v0.6's and later ones."""

import dataclasses
import re
import statistics
from collections.abc import Collection, Iterator
from typing import Any

from common.errors import UserError, parse_json

_V05 = re.compile(r":::MLPv0\.5\.0 (\S+) ([\d.]+) \(\S+\) (\w+)(?:: (.*))?$")
_V06 = re.compile(r":::MLL ([\d.]+) (\w+): (.*)$")


@dataclasses.dataclass
class Run:
    """The content of one run's log."""

    form: str = ""  # "mllog", "v0.6" or "v0.5"; "" if no line is MLPerf's
    values: dict[str, Any] = dataclasses.field(default_factory=dict)  # the first of each key
    # (epochs, score) of every evaluation before the clock stopped; a score is a number, or several
    # by name or in a list.
    evals: list[tuple[float, Any]] = dataclasses.field(default_factory=list)
    started: float | None = None  # the clock's start, in seconds since 1970, if the log has it
    ended: float | None = None  # the clock's stop
    success: bool = False  # whether the run reached its target, according to the log
    complete: bool = False  # whether the run ended by itself, after an evaluation

    @property
    def minutes(self) -> float | None:
        """The time between the start and the stop of the clock; None if one is missing."""
        if self.started is None or self.ended is None:
            return None
        return (self.ended - self.started) / 60

    @property
    def epochs(self) -> float | None:
        """Epochs to the target; None if the run did not reach it."""
        return self.evals[-1][0] if self.success and self.evals else None

    def __str__(self) -> str:
        minutes = "?" if self.minutes is None else f"{self.minutes:.2f}"
        reached = "target NOT reached" if self.epochs is None else f"epoch {self.epochs:g}"
        return f"{minutes} minutes, {reached}"


def load(path: Any) -> Run:
    """Reads the log in a file; other lines are skipped, a damaged line is a UserError."""
    run, before, first_epoch, started_evals = Run(), "", 1, list[float]()
    text = path.read_bytes().decode(errors="replace")
    for key, value, metadata, seconds in _lines(run, text):
        run.values.setdefault(key, value)
        if key == "block_start":
            first_epoch = min(first_epoch, metadata.get("first_epoch_num", 1))
        elif key == "eval_start" and "epoch_num" in metadata:
            started_evals.append(metadata["epoch_num"])
        elif key == "eval_accuracy" and run.ended is None:  # Google's SSD of v0.6 has one later
            # Google's Transformer of v0.6 has the right epoch only where an evaluation starts, and
            # NVIDIA's Mask R-CNN counts from 0.
            epoch = started_evals.pop(0) if started_evals else metadata["epoch_num"]
            run.evals.append((epoch + 1 - first_epoch, value))
        elif key == "run_start":
            run.started = seconds
        elif key == "run_stop":
            run.ended, run.success = seconds, metadata["status"] == "success"
            run.complete = before == "eval_stop"
        before = key
    return run


def _lines(run: Run, text: str) -> Iterator[tuple[str, Any, dict[str, Any], float]]:
    """Yields (key, value, metadata, seconds since 1970), and notes the form of the lines."""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if ":::MLLOG " in line:
                run.form = "mllog"
                row = parse_json(line.split(":::MLLOG ", 1)[1])
                yield row["key"], row["value"], row["metadata"], row["time_ms"] / 1e3
            elif match := _V06.search(line):
                run.form, row = "v0.6", parse_json(match[3])
                yield match[2], row["value"], row["metadata"], float(match[1])
            elif match := _V05.search(line):
                run.form = "v0.5"
                benchmark, seconds, key, value = match.groups()
                run.values.setdefault("submission_benchmark", benchmark)
                value = None if value is None else parse_json(value)
                yield *_v05(key, value), float(seconds)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"line {number} is damaged: {line[:80]!r} ({error!r})") from error


def _v05(key: str, value: Any) -> tuple[str, Any, dict[str, Any]]:
    """Key, value and metadata of v0.5 as later logs have them; its epochs count from 0."""
    if key == "run_set_random_seed":
        return "seed", value, {}
    if key == "run_stop":
        return key, None, {"status": "success" if value["success"] in ("true", True) else "aborted"}
    if key == "eval_accuracy":
        scores = {name: number for name, number in value.items() if name != "epoch"}
        return key, scores.get("value", scores), {"epoch_num": value["epoch"] + 1}
    return key, value, {}


def olympic(runs: Collection[Run], key: str) -> float | None:
    """Returns the mean "epochs" or "minutes" to the target, without the best and the worst run.

    A run that did not converge is the worst. The mean is None for fewer than three runs, or if more
    than one did not converge.
    """
    values = (getattr(run, key) for run in runs if run.success)
    finite = sorted(value for value in values if value is not None)
    if len(runs) < 3 or len(finite) < len(runs) - 1:
        return None
    return statistics.fmean(finite[1 : len(runs) - 1])
