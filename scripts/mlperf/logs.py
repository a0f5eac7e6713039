"""Reads the logs of MLPerf runs in both formats: `:::MLLOG` and `:::MLPv0.5.0`."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.errors import UserError, parse_json

_V05 = re.compile(r":::MLPv0\.5\.0 (\S+) ([\d.]+) \(\S+\) (\w+)(?:: (.*))?$")

# Keys whose order says how the run went.
_PAIRS = (("block_start", "block_stop"), ("epoch_start", "epoch_stop"), ("eval_start", "eval_stop"))
_EVENTS = {"run_start", "run_stop", "eval_accuracy", *itertools.chain(*_PAIRS)}
# Keys whose values may differ between the runs of one result.
VARYING = {*_EVENTS, "seed", "train_epoch"}


@dataclasses.dataclass
class Run:
    """The content of one run's log.

    Attributes:
      values: the first value of each key.
      evals: (epochs, score) of every evaluation; a score is a number or {name: number}.
      started: when the clock started, in seconds since 1970; None if the log does not say.
      ended: when the clock stopped.
      success: whether the run reached its target.
      complete: whether the run ended by itself, after an evaluation.
      is_v05: whether the log is in the format of v0.5.
      trains: whether the run was training, not evaluating, at the last line.
      events: the keys of `_EVENTS`, in the order of the log.
    """

    values: dict[str, Any]
    evals: list[tuple[float, Any]]
    started: float | None = None
    ended: float | None = None
    success: bool = False
    complete: bool = False
    is_v05: bool = False
    trains: bool = False
    events: list[str] = dataclasses.field(default_factory=list)

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


def load(path: Any) -> Run:
    """Reads the log in a file; see `read`.

    Raises:
      UserError: the log is damaged.
      OSError: the file cannot be read; on gs:// also other exceptions.
    """
    try:
        return read(path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise UserError(f"is damaged: byte {error.start:,} is not UTF-8 text") from error


def read(text: str) -> Run:
    """Reads a log; other lines of the text are skipped.

    Raises:
      UserError: a line of the log is damaged.
    """
    run = Run({}, [])
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if ":::MLLOG " in line:
                _read_mllog(run, parse_json(line.split(":::MLLOG ", 1)[1]))
            elif match := _V05.search(line):
                _read_v05(run, *match.groups())
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"line {number} is damaged: {line[:80]!r} ({error!r})") from error
    return run


def _read_mllog(run: Run, row: dict[str, Any]) -> None:
    key, value, metadata = row["key"], row["value"], row["metadata"]
    run.values.setdefault(key, value)
    if key == "eval_accuracy":
        run.evals.append((metadata["epoch_num"], value))
    elif key == "run_start":
        run.started = row["time_ms"] / 1e3
    elif key == "run_stop":
        run.ended, run.success = row["time_ms"] / 1e3, metadata["status"] == "success"
    _follow(run, key)


def _read_v05(run: Run, benchmark: str, seconds: str, key: str, text: str | None) -> None:
    value: Any = None if text is None else parse_json(text)
    run.is_v05 = True
    run.values.setdefault("submission_benchmark", benchmark)
    run.values.setdefault("seed" if key == "run_set_random_seed" else key, value)
    if key == "eval_accuracy":
        scores = {name: number for name, number in value.items() if name != "epoch"}
        score = scores["value"] if set(scores) == {"value"} else scores
        run.evals.append((value["epoch"] + 1, score))
    elif key == "run_start":
        run.started = float(seconds)
    elif key == "run_stop":
        run.ended, run.success = float(seconds), value["success"] in ("true", True)
    _follow(run, key)


def _follow(run: Run, key: str) -> None:
    """Notes an event; updates whether the run trains and whether it ended after an evaluation."""
    if key in _EVENTS:
        run.events.append(key)
    if key in ("run_start", "block_start", "train_epoch"):
        run.trains = True
    elif key == "eval_stop":
        run.trains = False
    elif key == "run_stop":
        run.complete = not run.trains


def disorder(run: Run) -> Iterator[str]:
    """Yields what the events of a run lack, and which of them are in the wrong order."""
    for key in ("run_start", "run_stop"):
        if (count := run.events.count(key)) != 1:
            yield f"{key} occurs {count} times, not once"
            return
    begin, end = run.events.index("run_start"), run.events.index("run_stop")
    for key in run.events[:begin]:
        yield f"{key} comes before run_start"
    for key in run.events[end + 1 :]:
        yield f"{key} comes after run_stop"
    for start, stop in _PAIRS:
        is_open = False
        for key in run.events:
            if key == "eval_accuracy" and start == "eval_start" and not is_open:
                yield "an eval_accuracy comes outside of an evaluation"
            elif key == start and is_open:
                yield f"a {start} has no {stop}"
            elif key == stop and not is_open:
                yield f"a {stop} has no {start}"
            is_open = key == start if key in (start, stop) else is_open
        if is_open and run.success:
            yield f"the last {start} has no {stop}"


def reaches(score: Any, target: Any) -> bool:
    """Whether a logged score is at least the target, each a number or {name: number}."""
    if isinstance(target, Mapping):
        return all(score[name] >= value for name, value in target.items())
    return score >= target


def olympic(values: Sequence[float | None]) -> float | None:
    """Returns the mean without the best and the worst value; None (not converged) is the worst.

    The mean is None for fewer than three runs, or if more than one did not converge.
    """
    known = sorted(value for value in values if value is not None)
    if len(values) < 3 or len(known) < len(values) - 1:
        return None
    middle = known[1 : len(values) - 1]
    return sum(middle) / len(middle)
