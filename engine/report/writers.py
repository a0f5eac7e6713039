"""What a run says: terminal, metrics.jsonl, TensorBoard, learning curves, profiles.

The only file that imports clu. `metrics.jsonl` is the record: one JSON object per line, "split"
being "train" or "eval". It is cut back to the restored step when a run resumes, so that it has
neither gaps nor duplicates.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Container, Iterator
from typing import Any

import jax
from etils import epath

from engine.report import curves
from engine.report.charts import Charts
from errors import OutputError, one_line

# What an evaluation's row has besides its scores.
_NOT_SCORES = ("split", "step", "epoch", "examples", "seconds")
_log = logging.getLogger("tpu_suite")


class History:
    """The rows of `metrics.jsonl` in a workdir, local or gs://; only process 0 writes."""

    def __init__(self, workdir: str, writes: bool):
        self._path = epath.Path(workdir) / "metrics.jsonl"
        self._writes = writes
        self.rows: list[dict[str, Any]] = []
        if self._path.exists():
            text = self._path.read_bytes()
            whole = text.endswith(b"\n") or not text
            for line in text.splitlines():
                try:
                    row = json.loads(line)
                    self.rows.append({k: math.nan if v is None else v for k, v in row.items()})
                except ValueError:
                    whole = False
                    break  # a line that a kill cut short; what follows cannot be trusted
            if not whole:
                self._rewrite()  # or the next row would continue that line

    def cut(self, step: int) -> None:
        """Forgets everything after `step`, because it will happen again."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        self._rewrite()

    def add(self, row: dict[str, Any]) -> None:
        """Appends one row, on disk at once."""
        self.rows.append(row)
        if self._writes:
            with _writing(self._path), self._path.open("a") as file:
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
        known = [
            step
            for step, score in scores.items()
            if not math.isnan(score) and (among is None or step in among)
        ]
        return max(known, key=lambda step: (scores[step], -step), default=None)

    def _rewrite(self) -> None:
        if self._writes and self._path.exists():
            part = self._path.parent / "metrics.jsonl.part"
            with _writing(self._path):
                part.write_text("".join(_json(row) + "\n" for row in self.rows))
                part.replace(self._path)


class Progress:
    """Clocks a training run: rates over windows that leave out evaluation and saving."""

    def __init__(self, step: int, total_steps: int):
        self._total = total_steps
        self._window_step, self._window_begun = step, time.monotonic()
        self._paused = 0.0
        self._step_seconds = math.nan
        self.eval_seconds = 0.0
        self.evals_left = 0

    def pause(self, seconds: float) -> None:
        """Leaves out time that was not spent on training steps."""
        self._paused += seconds

    def window(self, step: int) -> tuple[float, int]:
        """Closes the window at `step`: its (seconds, steps), pauses left out."""
        now = time.monotonic()
        elapsed = max(now - self._window_begun - self._paused, 1e-9)
        steps = max(step - self._window_step, 1)
        self._step_seconds = elapsed / steps
        self._window_step, self._window_begun, self._paused = step, now, 0.0
        return elapsed, steps

    def foresee(self, step: int, next_eval: Callable[[int], int | None] | None) -> None:
        """Estimates how many evaluations are left after `step`.

        `next_eval` gives the step of the first one after a step, None if only the clock knows;
        it is None itself where nothing is evaluated.
        """
        following = next_eval and next_eval(step)
        after = next_eval(following) if next_eval and following else None
        if following is None or after is None:
            self.evals_left = int(next_eval is not None)
        else:
            self.evals_left = max(1, math.ceil((self._total - step) / (after - following)))

    def remaining(self, step: int) -> float:
        """Estimated seconds to the end, evaluations included; nan before the first window."""
        return (self._total - step) * self._step_seconds + self.evals_left * self.eval_seconds


class Reporter:
    """Writes rows everywhere they belong; on processes other than 0 it only remembers them."""

    def __init__(self, workdir: str, *, subdir: str = "", title: str = "", charts: bool = False):
        self.workdir = workdir
        self._folder = str(epath.Path(workdir) / subdir) if subdir else workdir
        self._title = title
        self._main = jax.process_index() == 0
        self._charts = Charts() if charts and self._main else None
        with _writing(self._folder):
            epath.Path(self._folder).mkdir(parents=True, exist_ok=True)
            self.history = History(self._folder, self._main)
        self._writer: Any = None
        self._live = sys.stdout.isatty()
        self._live_shown = 0.0

    def train(self, row: dict[str, Any], text: str) -> None:
        """Records a training interval: `row` has "step"; `text` is its line on the terminal."""
        self._record({"split": "train", **row})
        self.say(text)
        if self._charts:
            self._charts.train(row)

    def eval(self, row: dict[str, Any], text: str) -> None:
        """Records an evaluation and draws the learning curves anew."""
        self._record({"split": "eval", **row})
        self.say(text)
        if self._charts:
            self._charts.eval(row["step"], self.history.scores()[row["step"]])
        if self._main:
            with _writing(self._folder):
                curves.draw(self.history.rows, f"{self._folder}/learning_curves.png", self._title)

    def say(self, text: str) -> None:
        """One line in each host's log, and on process 0's terminal."""
        self._clear()
        _log.info("%s", text)

    def live(self, text: str) -> None:
        """A line that the next one overwrites; only on a terminal, and twice a second at most."""
        now = time.monotonic()
        if self._main and self._live and now - self._live_shown > 0.5:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", flush=True)
            self._live_shown = now

    def overview(self, params: Any) -> str:
        """Writes the table of parameters to parameters.txt; returns its sum in words."""
        leaves = jax.tree.leaves(params)
        if self._main:
            from clu import parameter_overview

            table = parameter_overview.get_parameter_overview(params, include_stats=False)
            self.write("parameters.txt", table + "\n")
        return f"{sum(x.size for x in leaves):,} parameters in {len(leaves)} arrays"

    def write(self, name: str, text: str) -> None:
        """Writes a file of the workdir, on process 0."""
        path = epath.Path(self._folder) / name
        if self._main:
            with _writing(path):
                path.write_text(text)

    def close(self) -> None:
        """Ends the live line and flushes what is not yet written; a failure there is only told.

        A run that fails has its own error to show, often of the same cause.
        """
        self._clear()
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except Exception as error:
                _log.error("%s", self._failure(error))

    def _record(self, row: dict[str, Any]) -> None:
        self.history.add(row)
        if not self._main:
            return
        if self._writer is None:
            from clu import metric_writers  # imports TensorFlow: not before it is needed

            with _writing(self._folder):
                writer = metric_writers.SummaryWriter(self._folder)
            self._writer = metric_writers.AsyncWriter(writer)
        split, step = row["split"], row["step"]
        scalars = {f"{split}/{k}": v for k, v in row.items() if k not in ("step", "split")}
        try:
            self._writer.write_scalars(step, scalars)
        except Exception as error:  # of the row before: whatever TensorFlow raised in a thread
            raise self._failure(error) from error

    def _failure(self, error: BaseException) -> OutputError:
        while error.__cause__:  # clu wraps it, twice
            error = error.__cause__
        return OutputError(f"cannot write TensorBoard events in {self._folder}: {one_line(error)}")

    def _clear(self) -> None:
        if self._live and self._live_shown:
            print("\r\x1b[K", end="", flush=True)
            self._live_shown = 0.0


class Profiler:
    """Writes a TensorBoard (XProf) trace of steps [begin, end) given as "begin:end"; "" never."""

    def __init__(self, steps: str, workdir: str):
        """Raises OutputError if `steps` is neither "" nor "begin:end" with begin < end."""
        begin, _, end = steps.partition(":")
        try:
            self._begin, self._end = (int(begin), int(end)) if steps else (-1, -1)
        except ValueError:
            self._begin, self._end = 0, 0
        if steps and not 0 <= self._begin < self._end:
            raise OutputError(f"config.profile_steps={steps!r} is not begin:end, such as 100:110")
        self._folder, self._running = workdir, False

    def before(self, step: int) -> None:
        """Called before the step number `step` (from 0) is dispatched."""
        if self._begin <= step < self._end and not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, ticket: Any) -> str:
        """Called when `step` steps are dispatched; says where the trace lies when it is done."""
        if not self._running or step < self._end:
            return ""
        jax.block_until_ready(ticket)
        self.close()
        return f"profile of steps {self._begin}:{self._end}: tensorboard --logdir {self._folder}"

    def close(self) -> None:
        """Ends a trace that is still running."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False


def duration(seconds: float) -> str:
    """1:02:03 or 4:05 in words a person reads; "?" where it is not known."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def number(name: str, value: float) -> str:
    """A value as a person reads it: accuracies in per cent."""
    return f"{100 * value:.2f} %" if name.endswith("accuracy") else f"{value:.4f}"


def quantity(name: str, value: float) -> str:
    """A name and its value as a person reads them."""
    return f"{name.replace('_', ' ')} {number(name, value)}"


@contextlib.contextmanager
def _writing(path: Any) -> Iterator[None]:
    """Turns whatever a file system raises into one line."""
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
