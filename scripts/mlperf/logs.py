"""What the logs of MLPerf runs say, in both formats: `:::MLLOG` and `:::MLPv0.5.0`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

_V05 = re.compile(r":::MLPv0\.5\.0 (\S+) ([\d.]+) \(\S+\) (\w+)(?:: (.*))?$")


class LogError(ValueError):
    """A log that cannot be read; the message is one line."""


@dataclasses.dataclass
class Run:
    """One run as its log has it.

    Attributes:
      values: the first value under each key.
      evals: (epochs, accuracy) of every evaluation.
      begun, ended: of the clock, in seconds since 1970; None where the log does not say.
      success: whether it reached the target.
      complete: whether it ended by itself, after an evaluation, and was not cut short.
      is_v05: whether the log is in the format of v0.5.
    """

    values: dict[str, Any]
    evals: list[tuple[float, float]]
    begun: float | None = None
    ended: float | None = None
    success: bool = False
    complete: bool = False
    is_v05: bool = False
    training: bool = False  # since the last evaluation, as far as the log has been read

    @property
    def benchmark(self) -> str:
        """MLPerf's name of the benchmark; "" if the log does not say."""
        return self.values.get("submission_benchmark", "")

    @property
    def minutes(self) -> float | None:
        """How long the clock ran."""
        if self.begun is None or self.ended is None:
            return None
        return (self.ended - self.begun) / 60

    @property
    def epochs(self) -> float | None:
        """Epochs to the target; None if it was not reached."""
        return self.evals[-1][0] if self.success and self.evals else None


def load(path: Any) -> Run:
    """Reads the log in a file; see `read`.

    Raises:
      LogError: it is damaged.
      OSError: the file cannot be read; for gs:// other kinds, too.
    """
    try:
        return read(path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise LogError(f"is damaged: byte {error.start:,} is not UTF-8 text") from error


def read(text: str) -> Run:
    """Reads a log, with whatever else was printed between its lines.

    Raises:
      LogError: a line of it is damaged.
    """
    run = Run({}, [])
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if ":::MLLOG " in line:
                _mllog(run, json.loads(line.split(":::MLLOG ", 1)[1]))
            elif match := _V05.search(line):
                _v05(run, *match.groups())
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(f"line {number} is damaged: {line[:80]!r} ({error!r})") from error
    return run


def _mllog(run: Run, row: dict[str, Any]) -> None:
    key, value, about = row["key"], row["value"], row["metadata"]
    run.values.setdefault(key, value)
    if key == "eval_accuracy":
        run.evals.append((about["epoch_num"], value))
    elif key == "run_start":
        run.begun = row["time_ms"] / 1e3
    elif key == "run_stop":
        run.ended, run.success = row["time_ms"] / 1e3, about["status"] == "success"
    _follow(run, key)


def _v05(run: Run, benchmark: str, seconds: str, key: str, text: str | None) -> None:
    value: Any = None if text is None else json.loads(text)
    run.is_v05 = True
    run.values.setdefault("submission_benchmark", benchmark)
    run.values.setdefault("seed" if key == "run_set_random_seed" else key, value)
    if key == "eval_accuracy":
        run.evals.append((value["epoch"] + 1, value["value"]))
    elif key == "run_start":
        run.begun = float(seconds)
    elif key == "run_stop":
        run.ended, run.success = float(seconds), value["success"] in ("true", True)
    _follow(run, key)


def _follow(run: Run, key: str) -> None:
    """Whether it trains, or was evaluating, when the clock stops."""
    if key in ("run_start", "block_start", "train_epoch"):
        run.training = True
    elif key == "eval_stop":
        run.training = False
    elif key == "run_stop":
        run.complete = not run.training


def olympic(values: Sequence[float | None]) -> float | None:
    """The mean without the best and the worst; None (not converged) counts as the worst.

    None if fewer than three runs there are, or more than one did not converge.
    """
    known = sorted(value for value in values if value is not None)
    if len(values) < 3 or len(known) < len(values) - 1:
        return None
    kept = known[1 : len(values) - 1]
    return sum(kept) / len(kept)
