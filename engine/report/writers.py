"""Writes the reports of a run: terminal, metrics.jsonl, TensorBoard, curves, profiles, wandb."""

import contextlib
import importlib
import logging
import math
import os
import re
import shutil
import sys
import time
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
from etils import epath

from benchmarks.exhibits import curves
from common.errors import OutputError, one_line
from engine.cluster import watchdog
from engine.report.history import History, lower_is_better, share_interval, writing

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
        return f"{100 * value:.2f} %" if is_like(name, self._percent) else f"{value:.4f}"

    def quantity(self, name: str, value: float, count: int = 0) -> str:
        """A name and its value in words; a share of a small `count` with its interval."""
        sure = share_interval(value, count) if name in self._proportions else ""
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
        path, self._has_news = epath.Path(self._folder) / "learning_curves.png", False
        with writing(path):
            part = epath.Path(f"{path}.part")  # the old picture stays until this one is complete
            part.write_bytes(
                draw_curves(self.history.rows, self._title, self._metrics, self._percent)
            )
            part.replace(path)
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


def draw_curves(
    rows: list[dict[str, Any]], title: str, metrics: Sequence[str], percent: Collection[str]
) -> bytes:
    """A PNG of the losses, the targets' `metrics` with scores of their kind, the learning rate.

    `rows` are those of metrics.jsonl; scores like `percent` are shown in per cent. The axis has
    whole epochs, or steps if no epoch is complete.
    """
    metrics = [metric for metric in metrics if not lower_is_better(metric)]
    panels = {"loss": ("loss",), ", ".join(metrics): metrics, "learning rate": ("learning_rate",)}
    unit = "step" if max((row.get("epoch", 0) for row in rows), default=1) < 1 else "epoch"
    shown = []
    for name, kind in panels.items():
        lines: dict[tuple[str, str], dict[float, float]] = {}
        for row in rows:
            for key in filter(lambda key: is_like(key, kind), row):
                curve = lines.setdefault((row["split"], key.replace("_", " ")), {})
                curve[row.get(unit, 0)] = row[key]
        is_percent = any(is_like(metric, percent) for metric in kind)
        shown += [(name.replace("_", " "), lines, is_percent)] * bool(kind)
    return curves(shown, title, unit)


def is_like(name: str, metrics: Collection[str]) -> bool:
    """Whether `name` ends in the same word as one of `metrics`, so that both are of one kind.

    So top_5_accuracy is like top_1_accuracy, and an auxiliary loss is like loss. The scores of one
    class, such as "recall/hair_loss", are like no other score.
    """
    kinds = {metric.rpartition("_")[2] for metric in metrics if "/" not in metric}
    return name in metrics or ("/" not in name and name.rpartition("_")[2] in kinds)


class Profiler:
    """Writes a TensorBoard (XProf) trace of the steps in "begin:end", end excluded."""

    def __init__(self, steps: str, workdir: str):
        """Raises OutputError if `steps` is not "begin:end" with begin < end."""
        match = re.fullmatch(r"(\d+):(\d+)", steps)
        self._begin, self._end = map(int, match.groups()) if match else (0, 0)
        if self._begin >= self._end:
            raise OutputError(f"config.profile_steps={steps!r} is not begin:end, such as 100:110")
        self._folder, self._running = workdir, False

    def check(self, total_steps: int) -> None:
        """Raises OutputError if a run of so many steps has none to trace."""
        if self._begin >= total_steps:
            steps = f"{self._begin}:{self._end}"
            raise OutputError(
                f"config.profile_steps={steps!r}: the run has only {total_steps:,} steps; trace "
                "earlier ones, or set it to ''"
            )

    def before(self, step: int) -> None:
        """Starts the trace if `step`, counted from 0 and about to run, is in the range."""
        if self._begin <= step < self._end and not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, result: Any) -> str:
        """Ends the trace after `step` steps, of which the last one makes `result`.

        Returns the command that shows the trace; "" while there is none.
        """
        if not self._running or step < self._end:
            return ""
        jax.block_until_ready(result)
        self.close()
        return f"profile of steps {self._begin}:{self._end}: tensorboard --logdir {self._folder}"

    def close(self) -> None:
        """Ends a trace that is still running."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False


@contextlib.contextmanager
def synced_to_wandb(workdir: str, config: Any) -> Iterator[None]:
    """Has wandb read the events that the block writes to the workdir, local or gs://.

    wandb notices only writers that are made after its start. Whatever it raises becomes one line,
    and the block goes on. WORKDIR/wandb_id.txt names wandb's run, which a resumed run continues.
    """
    run: Any = None
    file, code = epath.Path(workdir) / "wandb_id.txt", 1
    seconds = {"login_timeout": 20, "init_timeout": 30, "finish_timeout": 20}
    try:
        with watchdog.during("starting wandb"):
            wandb: Any = importlib.import_module("wandb")  # an optional package
            wandb.tensorboard.patch(root_logdir=workdir)  # else it warns of folders outside its own
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or config["benchmark"],
                name=os.environ.get("WANDB_NAME") or os.path.basename(workdir.rstrip("/")),
                id=file.read_text().strip() if file.exists() else None,
                resume="allow",
                dir=os.environ.get("WANDB_DIR") or (None if "://" in workdir else workdir),
                config=config,
                sync_tensorboard=True,
                settings={"console": "off", "finish_timeout_raises": True, **seconds},
            )
            file.write_text(f"{run.id}\n")
    except Exception as error:  # of the package, of its server, of the disk
        fix = ": pip install -r requirements-wandb.txt" * isinstance(error, ImportError)
        print(f"NOTE config.tracker=wandb: {one_line(error)}{fix}; the run goes on without it")
    try:
        yield
        code = 0
    finally:
        try:
            with watchdog.during("sending the last rows to wandb"):
                if run:
                    run.finish(exit_code=code)
        except Exception as error:
            print(f"NOTE config.tracker=wandb: {one_line(error)}; it may lack the last rows")
