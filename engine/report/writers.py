"""Writes the reports of a run: terminal, metrics.jsonl, TensorBoard, curves, profiles."""

from __future__ import annotations

import importlib
import logging
import math
import shutil
import sys
import time
import types
from collections.abc import Collection, Sequence
from typing import Any

import jax
from etils import epath

from engine.cluster import watchdog
from engine.report import curves, history
from engine.report.history import History, writing
from errors import OutputError, one_line

_log = logging.getLogger("tpu_suite")
_DRAWING_SECONDS = 20.0  # between two drawings of the curves, which take half a second each


def _metric_writers() -> Any:
    """Imports clu's writers, and TensorFlow, but not Keras.

    TensorBoard's module of a callback for Keras, which clu never uses, imports it with scikit-learn
    and SciPy: that takes a fifth of the CPU time of a short run. An empty module takes its place.
    """
    name = "tensorboard.plugins.hparams._keras"
    if "clu.metric_writers" in sys.modules or name in sys.modules:
        return importlib.import_module("clu.metric_writers")
    empty: Any = types.ModuleType(name)
    empty.Callback = object
    sys.modules[name] = empty
    try:
        return importlib.import_module("clu.metric_writers")
    finally:
        del sys.modules[name]


class Reporter:
    """Writes the rows of a run to all of its outputs; processes other than 0 only keep them."""

    def __init__(
        self,
        workdir: str,
        *,
        subdir: str = "",
        title: str = "",
        metrics: Sequence[str] = (),
        percent: Collection[str] = (),
        proportions: Collection[str] = (),
    ):
        """Reads the rows of an earlier start from the folder `subdir` of the workdir.

        The learning curves have a `title` and show the `metrics` of the run's targets. Metrics that
        are like one in `percent` are written in per cent; `proportions` are shares of the examples.
        """
        self._folder = str(epath.Path(workdir) / subdir) if subdir else workdir
        self._events = f"TensorBoard events in {self._folder}"
        self._title, self._metrics, self._percent = title, metrics, percent
        self._proportions = proportions
        self._main = jax.process_index() == 0
        with writing(self._folder):
            epath.Path(self._folder).mkdir(parents=True, exist_ok=True)
            self.history = History(self._folder, self._main)
        self._writer: Any = None
        self._live = sys.stdout.isatty()
        self._live_shown = 0.0
        self._drawn = time.monotonic()  # when the curves were drawn, or would have been empty
        self._has_news = False  # whether evaluations came after the last drawing

    def prepare(self) -> None:
        """Imports what writes TensorBoard's events; no step should wait for it."""
        if self._main:
            _metric_writers()

    def cut(self, step: int) -> None:
        """Drops the rows after `step`, because these steps will run again."""
        self.history.cut(step)
        if self._main and any(".tfevents." in x.name for x in epath.Path(self._folder).iterdir()):
            import tensorflow as tf

            v1 = tf.compat.v1
            # TensorBoard then drops the events of this step and later ones in earlier files.
            begin = v1.SessionLog(status=v1.SessionLog.START)
            with writing(self._events), tf.Graph().as_default():
                file = v1.summary.FileWriter(self._folder)
                for _ in range(2):  # a folder's first one drops nothing
                    file.add_session_log(begin, step + 1)
                file.close()

    def train(self, row: dict[str, Any], text: str) -> None:
        """Records a training interval: `row` has "step"; `text` is its line on the terminal."""
        self._record({"split": "train", **row})
        self.say(text)

    def eval(self, row: dict[str, Any], text: str) -> None:
        """Records an evaluation; now and then, it draws the learning curves again."""
        self._record({"split": "eval", **row})
        self.say(text)
        self._has_news = True
        if time.monotonic() - self._drawn >= _DRAWING_SECONDS:
            self._draw()

    def number(self, name: str, value: float) -> str:
        """A value in words, in per cent if its metric is written so."""
        if name in self._metrics and math.isnan(value):  # as mAP without an object to find
            return "not defined"
        return f"{100 * value:.2f} %" if curves.is_like(name, self._percent) else f"{value:.4f}"

    def quantity(self, name: str, value: float, count: int = 0) -> str:
        """A name and its value in words; a share of a small `count` with its interval."""
        sure = history.interval(value, count) if name in self._proportions else ""
        return f"{name.replace('_', ' ')} {self.number(name, value)}{sure}"

    def say(self, text: str) -> None:
        """Writes one line to each host's log and to process 0's terminal."""
        self._clear()
        _log.info("%s", text)

    def live(self, text: str) -> None:
        """Shows a line that the next one overwrites: on a terminal, at most twice a second."""
        now = time.monotonic()
        if self._main and self._live and now - self._live_shown > 0.5:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", flush=True)
            self._live_shown = now

    def overview(self, params: Any) -> str:
        """Writes the table of parameters to parameters.txt; returns their number in words."""
        leaves = jax.tree.leaves(params)
        if self._main:
            from clu import parameter_overview

            table = parameter_overview.get_parameter_overview(params, include_stats=False)
            self.write("parameters.txt", table + "\n")
        return f"{sum(x.size for x in leaves):,} parameters in {len(leaves)} arrays"

    def write(self, name: str, data: str | bytes) -> str:
        """Process 0 writes a file of the workdir; returns its path."""
        path = epath.Path(self._folder) / name
        if self._main:
            with writing(path):
                path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return str(path)

    def close(self) -> None:
        """Ends the live line; writes the curves and events that are still in memory.

        During another exception a failure is only logged, because the run shows that exception.

        Raises:
          OutputError: the curves or the events cannot be written.
        """
        is_failing = sys.exception() is not None
        self._clear()
        for end in (self._draw, self._end_events):
            try:
                end()
            except OutputError as error:
                if not is_failing:
                    raise
                _log.error("%s", error)

    def _draw(self) -> None:
        """Draws the learning curves if they lack an evaluation."""
        if not (self._main and self._has_news):
            return
        path, self._has_news = f"{self._folder}/learning_curves.png", False
        with writing(path):
            curves.draw(self.history.rows, path, self._title, self._metrics)
        self._drawn = time.monotonic()

    def _end_events(self) -> None:
        """Writes the events that are still in memory."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                with watchdog.during(f"writing {self._events}"):
                    writer.close()
            except Exception as error:
                raise self._failure(error) from error

    def _record(self, row: dict[str, Any]) -> None:
        self.history.add(row)
        if not self._main:
            return
        if self._writer is None:
            metric_writers = _metric_writers()

            with writing(self._events):
                writer = metric_writers.SummaryWriter(self._folder)
            self._writer = metric_writers.AsyncWriter(writer)
        split, step = row["split"], row["step"]
        scalars = {f"{split}/{k}": v for k, v in row.items() if k not in ("step", "split")}
        try:
            self._writer.write_scalars(step, scalars)
        except Exception as error:  # TensorFlow raised it in a thread, for an earlier row
            raise self._failure(error) from error

    def _failure(self, error: BaseException) -> OutputError:
        while error.__cause__:  # clu wraps it, twice
            error = error.__cause__
        return OutputError(f"cannot write {self._events}: {one_line(error)}")

    def _clear(self) -> None:
        if self._live and self._live_shown:
            print("\r\x1b[K", end="", flush=True)
            self._live_shown = 0.0
