"""Sends the rows of a run's metrics.jsonl to Weights & Biases or MLflow.

    python -m scripts.track --workdir=DIR --tracker=wandb

A run with config.tracker does it by itself, docs/operations.md. Rows that were sent before are not
sent again: WORKDIR/tracker.json keeps the tracker's run and the last steps.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from etils import epath

from engine import paths
from errors import ConfigError, DataError, UserError, one_line, parse_json
from ops import console

_EVERY = 5.0  # seconds between two looks at the file
_LONGEST = 500  # characters of a parameter, the limit of older servers of MLflow


class Tracker(Protocol):
    """One run of a tracker.

    Attributes:
      id: names the run, for a later start.
    """

    id: str

    def send(self, step: int, values: dict[str, float]) -> None:
        """Sends the values of a step; steps never fall."""
        ...

    def end(self, done: bool) -> None:
        """Sends what is still waiting; `done`: the run reached its end."""
        ...


class Wandb:
    """A run of Weights & Biases; $WANDB_PROJECT, $WANDB_ENTITY, $WANDB_MODE, ... are its own."""

    def __init__(self, workdir: str, run_id: str, recipe: dict[str, Any]):
        """Begins a run, or goes on with the one of that id."""
        wandb = importlib.import_module("wandb")
        settings = wandb.Settings(console="off", x_disable_stats=True, silent=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or recipe.get("benchmark"),
            name=os.environ.get("WANDB_NAME") or _title(workdir),
            id=run_id or os.environ.get("WANDB_RUN_ID"),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or (None if "://" in workdir else workdir),
            config=recipe,
            settings=settings,
        )
        self.id = self._run.id

    def send(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def end(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


class Mlflow:
    """A run of MLflow; $MLFLOW_TRACKING_URI, $MLFLOW_EXPERIMENT_NAME, ... are its own."""

    def __init__(self, workdir: str, run_id: str, recipe: dict[str, Any]):
        """Begins a run, or goes on with the one of that id."""
        self._mlflow = mlflow = importlib.import_module("mlflow")
        if not os.environ.get("MLFLOW_EXPERIMENT_NAME"):
            mlflow.set_experiment(recipe.get("benchmark"))
        if run_id:
            run = mlflow.start_run(run_id=run_id)
        else:
            run = mlflow.start_run(run_name=_title(workdir))
            mlflow.log_params({k: str(v)[:_LONGEST] for k, v in _flat(recipe).items()})
        self.id = run.info.run_id

    def send(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step)

    def end(self, done: bool) -> None:
        self._mlflow.end_run("FINISHED" if done else "KILLED")


TRACKERS = {"wandb": Wandb, "mlflow": Mlflow}


class Sender:
    """Sends the rows of a workdir that have not been sent."""

    def __init__(self, workdir: str, name: str):
        """Reads what was sent before.

        Raises:
          DataError: tracker.json is damaged.
        """
        self._workdir, self._name = workdir, name
        self._rows = epath.Path(workdir) / "metrics.jsonl"
        self._state_file = epath.Path(workdir) / "tracker.json"
        self._tracker: Tracker | None = None
        self._read: Any = None  # the file's size and time when it was read
        # {tracker: {"id": of its run, "steps": {split: the last one that was sent}}}
        self._states: dict[str, Any] = {}
        try:
            if self._state_file.exists():
                self._states = parse_json(self._state_file.read_bytes())
            self._steps = dict(self._states.get(name, {}).get("steps", {}))
        except (ValueError, AttributeError, TypeError) as error:
            raise DataError(
                f"{self._state_file} is damaged ({one_line(error)}): delete it to send all rows "
                "to a new run"
            ) from error

    def send(self) -> int:
        """Sends the new rows; returns their number."""
        stat = self._rows.stat() if self._rows.exists() else None
        if stat is None or self._read == (stat.length, stat.mtime):
            return 0
        rows = [row for row in map(_row, self._rows.read_bytes().splitlines(keepends=True)) if row]
        # A resume writes the rows after its checkpoint again; they are the same.
        new = [row for row in rows if row["step"] > self._steps.get(row["split"], -1)]
        if new:
            self._send(sorted(new, key=lambda row: row["step"]))
        self._read = (stat.length, stat.mtime)
        return len(new)

    def _send(self, rows: Sequence[dict[str, Any]]) -> None:
        tracker = self._open()
        try:
            for row in rows:
                tracker.send(row["step"], _values(row))
                self._steps[row["split"]] = row["step"]
        finally:
            self._states[self._name] = {"id": tracker.id, "steps": self._steps}
            self._state_file.write_text(json.dumps(self._states, indent=1) + "\n")

    def end(self, done: bool) -> None:
        """Ends the tracker's run, if it was begun."""
        if self._tracker is not None:
            self._tracker.end(done)

    def _open(self) -> Tracker:
        if self._tracker is None:
            config = epath.Path(self._workdir) / "config.json"
            recipe = parse_json(config.read_bytes()) if config.exists() else {}
            run_id = self._states.get(self._name, {}).get("id", "")
            make: Callable[..., Tracker] = TRACKERS[self._name]
            self._tracker = make(self._workdir, run_id, recipe)
        return self._tracker


def main(argv: Sequence[str] | None = None) -> int:
    """Sends the rows of a run; returns the exit code."""
    parser = console.Parser(
        prog="python -m scripts.track",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", required=True, help="of the run, local or gs://")
    parser.add_argument("--tracker", required=True, choices=sorted(TRACKERS))
    parser.add_argument(
        "--follow", action="store_true", help="send new rows until the standard input ends"
    )
    flags = parser.parse_args(argv)
    try:
        workdir = paths.check(flags.workdir, "--workdir")
        if not (flags.follow or (epath.Path(workdir) / "metrics.jsonl").exists()):
            raise ConfigError(f"--workdir={workdir} has no metrics.jsonl: is it a run's folder?")
        sender = Sender(workdir, flags.tracker)
        done = _follow(sender) if flags.follow else True
        count = sender.send()
        sender.end(done)
    except ModuleNotFoundError as error:
        return _failed(f"pip install {error.name}: the package is not installed")
    except UserError as error:
        return _failed(str(error))
    except Exception as error:  # of the libraries, of the network
        return _failed(f"{type(error).__name__}: {one_line(error)}")
    if not flags.follow:
        print(f"track: sent {count} rows of {workdir} to {flags.tracker}")
    return 0


def _failed(text: str) -> int:
    print(f"ERROR: {text}", file=sys.stderr)
    return 1


def _follow(sender: Sender) -> bool:
    """Sends rows until the standard input ends; returns whether the run reached its end.

    What fails is tried again with the next rows, for the last time by the caller.
    """
    ended, words = threading.Event(), []

    def wait() -> None:
        words.append(sys.stdin.buffer.read())
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while not ended.wait(_EVERY):
        try:
            sender.send()
        except Exception as error:  # of the libraries, of the network
            print(f"{type(error).__name__}: {one_line(error)}", file=sys.stderr, flush=True)
    return words == [b"done"]


def _row(line: bytes) -> dict[str, Any] | None:
    """A row of metrics.jsonl; None for a line that is not complete yet or damaged."""
    try:
        row = parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return row if isinstance(row.get("split"), str) else None


def _values(row: dict[str, Any]) -> dict[str, float]:
    """{"train/loss": 2.3, ...}: the names of TensorBoard's curves."""
    values = {k: v for k, v in row.items() if type(v) in (int, float) and k != "step"}
    return {f"{row['split']}/{name}": float(value) for name, value in values.items()}


def _title(workdir: str) -> str:
    return os.path.basename(workdir.rstrip("/")) or "run"


def _flat(recipe: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested keys, as {"mlperf.org": ""}."""
    flat: dict[str, Any] = {}
    for name, value in recipe.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {}
        flat |= {} if isinstance(value, dict) else {prefix + name: value}
    return flat


if __name__ == "__main__":
    raise SystemExit(main())
