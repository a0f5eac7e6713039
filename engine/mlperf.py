"""The log of an MLPerf run: `workdir/mlperf.log`, and process 0's terminal.

The only file that imports mllog. `train.py` says what happens, the benchmark brings what is to be
said of it (`benchmarks.base.Mlperf`), and two formats write it: 'mllog', the `:::MLLOG` lines of
MLPerf Training 0.7 to 4.0, and 'v0.5', the `:::MLPv0.5.0` lines of 2018. See docs/mlperf.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from engine import mesh as meshes
from engine.cluster import processes
from engine.step import Recipe
from errors import ConfigError, one_line

LOG = "mlperf.log"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The step of the first evaluation after a step; None if only the clock knows.
NextEval = Callable[[int], int | None]
_STATUS = ("cloud", "onprem", "preview", "research")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The keys of `config.mlperf`; configs/_loop.py says what they mean."""

    format: str
    org: str
    clear_caches: bool
    platform: str
    division: str
    status: str


class Log:
    """A run that is not MLPerf's: nothing is logged."""

    def describe(self, recipe: Recipe, params: Any, mesh: Mesh, next_eval: NextEval) -> None:
        """Logs what is known before anything is compiled.

        Args:
          recipe: the run's.
          params: the model's, as arrays or ShapeDtypeStructs.
          mesh: of the run's devices; the second axis shares BatchNorm statistics.
          next_eval: see there.
        """

    def run_starts(self) -> None:
        """All is compiled; from here on data may be read. All processes call it."""

    def eval_starts(self, step: int) -> None:
        """The evaluation of `step` begins."""

    def eval_ends(self, step: int, score: float) -> None:
        """The evaluation of `step` has found `score`; at the target, the clock stops."""

    def close(self) -> None:
        """The run is over, however it ended."""


class _Silent(Log):
    """A process other than 0: it does what all must do."""

    def __init__(self, config: Any):
        self._config, self._cleared = config, False

    def describe(self, recipe: Recipe, params: Any, mesh: Mesh, next_eval: NextEval) -> None:
        if self._config.mlperf.clear_caches:
            missed = not clear_caches()
            processes.barrier("waiting for the other hosts to drop their file caches")
            self._cleared = not meshes.any_process(missed)

    def run_starts(self) -> None:
        processes.barrier("waiting for the other hosts to compile")  # no data before the clock runs


class _Recorder(_Silent):
    """What both formats share: the file, the terminal, and where the run is."""

    def __init__(self, config: Any, benchmark: Any, workdir: str, begun: float):
        super().__init__(config)
        self._benchmark, self._begun = benchmark, begun
        self._running = False
        self._file = _File(workdir)
        self._logger = logging.Logger("tpu_suite.mlperf", logging.INFO)
        self._logger.parent = logging.getLogger("tpu_suite")  # the terminal, the host's log
        self._logger.addHandler(self._file)
        processes.on_failure(self.close)

    def describe(self, recipe: Recipe, params: Any, mesh: Mesh, next_eval: NextEval) -> None:
        super().describe(recipe, params, mesh, next_eval)
        if self._config.mlperf.clear_caches and not self._cleared:
            logging.getLogger("tpu_suite").warning(
                "WARNING the file caches were not dropped on every host: that needs root or sudo "
                "-n. The log will not claim it, and mlperf_check will say FAIL"
            )
        self._chips = meshes.num_chips(mesh)
        self._steps, self._next_eval, config = recipe.total_steps, next_eval, self._config
        size, examples = config.train_batch_size, self._examples("train")
        span = size // config.gradient_accumulation_steps * mesh.devices.shape[1]
        span //= mesh.devices.size
        facts = self._benchmark.mlperf(
            config.mlperf.format, self._steps, recipe.learning_rate, span, params
        )
        self._name, self._target = facts.name, self._benchmark.target.value
        self._epoch = facts.steps_per_epoch or examples / size
        if self._target < facts.target and config.mlperf.division == "closed":
            raise ConfigError(
                f"config.target={self._target:g}: the quality of MLPerf's {facts.name} is "
                f"{facts.target:g}; give --config.target={facts.target:g}"
            )
        self._header(facts)
        self._file.flush()

    def run_starts(self) -> None:
        super().run_starts()
        self._start()
        self._file.flush()

    def eval_starts(self, step: int) -> None:
        self._before_eval(step)

    def eval_ends(self, step: int, score: float) -> None:
        reached = score >= self._target
        self._after_eval(step, score)
        if reached or step >= self._steps:
            self._end(reached)
        else:
            self._train(step)
        self._file.flush()

    def close(self) -> None:
        processes.on_failure(None)
        if self._running:
            self._end(False)
            with contextlib.suppress(ConfigError):  # what ended the run is more important
                self._file.flush()

    def _epochs(self, step: int) -> int | float:
        """Epochs done after `step`: whole where no other step is nearer to that epoch."""
        nearest = round(step / self._epoch)
        if abs(step - nearest * self._epoch) <= 0.5:
            return nearest
        return round(step / self._epoch, 3)

    def _examples(self, split: str) -> int:
        return self._benchmark.declared_examples(split)

    def _end(self, success: bool) -> None:
        self._running = False
        self._stop(success)

    # What a format writes.

    def _header(self, facts: Any) -> None:
        raise NotImplementedError

    def _start(self) -> None:
        raise NotImplementedError

    def _train(self, step: int) -> None:
        raise NotImplementedError

    def _before_eval(self, step: int) -> None:
        raise NotImplementedError

    def _after_eval(self, step: int, score: float) -> None:
        raise NotImplementedError

    def _stop(self, success: bool) -> None:
        raise NotImplementedError


class _Mllog(_Recorder):
    """MLPerf Training 0.7 to 4.0; compilation, before init_stop, is not timed."""

    def __init__(self, config: Any, benchmark: Any, workdir: str, begun: float):
        try:
            from mlperf_logging.mllog.mllog import MLLogger
        except ImportError as error:
            raise ConfigError(
                f"config.mlperf.format='mllog' needs a package ({error}): pip install "
                "--require-hashes -r requirements.txt, or pip install mlperf-logging"
            ) from error
        super().__init__(config, benchmark, workdir, begun)
        self._write = MLLogger(logger=self._logger, root_dir=re.escape(_ROOT))

    def _header(self, facts: Any) -> None:
        config, write = self._config, self._write
        write.start("init_start", time_ms=int(1e3 * self._begun))
        write.event("cache_clear", self._cleared)
        write.event("submission_benchmark", facts.name)
        for key, value in {
            "submission_org": config.mlperf.org,
            "submission_platform": config.mlperf.platform or _platform(),
            "submission_division": config.mlperf.division,
            "submission_status": config.mlperf.status,
            **_machine(self._chips),
            "global_batch_size": config.train_batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "train_samples": self._examples("train"),
            "eval_samples": self._examples("eval"),
        }.items():
            write.event(key, value)
        write.event("seed", config.seed)
        for key, value in facts.values:
            write.event(key, value)
        for name in facts.tensors:
            write.event("weights_initialization", metadata={"tensor": name})

    def _start(self) -> None:
        self._write.end("init_stop")
        self._write.start("run_start")
        self._running = True
        self._train(0)

    def _train(self, step: int) -> None:
        following = self._next_eval(step)
        until = self._steps if following is None else min(following, self._steps)
        done = self._epochs(step)
        count = round(self._epochs(until) - done, 3)
        self._block = {"first_epoch_num": done + 1, "epoch_count": count}
        self._write.start("block_start", metadata=self._block)

    def _before_eval(self, step: int) -> None:
        self._write.end("block_stop", metadata=self._block)
        self._write.start("eval_start", metadata={"epoch_num": self._epochs(step)})

    def _after_eval(self, step: int, score: float) -> None:
        epoch = {"epoch_num": self._epochs(step)}
        self._write.event("eval_accuracy", score, metadata=epoch)
        self._write.end("eval_stop", metadata=epoch)

    def _stop(self, success: bool) -> None:
        self._write.end("run_stop", metadata={"status": "success" if success else "aborted"})


class _V05(_Recorder):
    """MLPerf Training 0.5: epochs count from 0, and the clock also runs while compiling."""

    def _header(self, facts: Any) -> None:
        if self._cleared:
            self._write("run_clear_caches")
        self._write("run_start")
        self._running = True
        for key, value in facts.values:
            self._write(key, self._offset() if key == "eval_offset" else value)

    def _offset(self) -> int | float:
        """Epochs before the first evaluation, beyond whole periods of them: 0 for 4, 8, ..."""
        first = self._next_eval(0) or self._steps
        period = (self._next_eval(first) or 2 * first) - first
        return self._epochs(first % period)

    def _start(self) -> None:
        self._write("train_loop")
        self._train(0)

    def _train(self, step: int) -> None:
        self._write("train_epoch", self._epochs(step))

    def _before_eval(self, step: int) -> None:
        self._write("eval_start", self._epochs(step) - 1)

    def _after_eval(self, step: int, score: float) -> None:
        epoch = self._epochs(step) - 1
        self._write("eval_accuracy", {"epoch": epoch, "value": score})
        self._write("eval_size", self._examples("eval"))
        self._write("eval_stop", epoch)

    def _stop(self, success: bool) -> None:
        self._write("run_stop", {"success": "true" if success else "false"})
        self._write("run_final")

    def _write(self, key: str, value: Any = None) -> None:
        """`:::MLPv0.5.0 BENCHMARK SECONDS (FILE:LINE) KEY: JSON`."""
        caller = sys._getframe(1)
        file = caller.f_code.co_filename.removeprefix(f"{_ROOT}/")
        text = key if value is None else f"{key}: {json.dumps(value)}"
        place = f"{file}:{caller.f_lineno}"
        self._logger.info(":::MLPv0.5.0 %s %.9f (%s) %s", self._name, time.time(), place, text)


class _File(logging.Handler):
    """Lines for `workdir/mlperf.log`, written when flushed: an append to gs:// takes a while."""

    def __init__(self, workdir: str):
        super().__init__()
        self._path = epath.Path(workdir) / LOG
        self._text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self._text += self.format(record) + "\n"

    def flush(self) -> None:
        """Raises ConfigError if the file cannot be written."""
        text, self._text = self._text, ""
        try:
            if text:
                with self._path.open("a") as file:
                    file.write(text)
        except Exception as error:  # each file system has errors of its own
            raise ConfigError(f"cannot write {self._path}: {one_line(error)}") from error


_FORMATS = {"mllog": _Mllog, "v0.5": _V05}


def begin(config: Any, benchmark: Any, workdir: str, evaluating: bool, begun: float) -> Log:
    """The log that `config.mlperf` asks for.

    Args:
      config: the run's configuration.
      benchmark: the run's.
      workdir: the run's; one that holds a run, whole or not, is refused.
      evaluating: whether the run evaluates.
      begun: when initialisation began, in seconds since 1970.

    Raises:
      ConfigError: the run cannot be one of MLPerf's as it is configured.
    """
    for key, value, known in (
        ("format", config.mlperf.format, ("", *_FORMATS)),
        ("division", config.mlperf.division, ("closed", "open")),
        ("status", config.mlperf.status, _STATUS),
    ):
        if value not in known:
            raise ConfigError(f"config.mlperf.{key}={value!r}: use {' or '.join(map(repr, known))}")
    if not config.mlperf.format:
        return Log()
    _check(config, benchmark, evaluating)
    if jax.process_index() > 0:
        return _Silent(config)
    folder = epath.Path(workdir)
    if (folder / LOG).exists() or any(True for _ in _children(folder / "checkpoints")):
        raise ConfigError(
            f"--workdir={workdir} holds a run already, and a run of MLPerf may not be resumed: "
            "give a new folder, and report the run that was cut short"
        )
    return _FORMATS[config.mlperf.format](config, benchmark, workdir, begun)


def _check(config: Any, benchmark: Any, evaluating: bool) -> None:
    """Refuses what would only be found out hours later, or never."""
    form = f"config.mlperf.format={config.mlperf.format!r}"
    if not config.mlperf.org:
        raise ConfigError(f"config.mlperf.org='': {form} wants to know who runs this")
    if not evaluating:
        raise ConfigError(f"{form} needs evaluation, and so --mode=train_and_eval")
    if not config.stop_at_target:
        raise ConfigError(f"{form} needs --config.stop_at_target=True: there the clock stops")
    if not all(benchmark.declared_examples(split) for split in ("train", "eval")):
        unknown = [key for key in config if key.startswith("num_") and not config[key]]
        raise ConfigError(
            f"{form} needs to know beforehand what the data hold, to compile before they are "
            f"touched: give {' '.join(f'--config.{key}=N' for key in unknown)}"
        )


def _children(folder: Any) -> Any:
    return folder.iterdir() if folder.exists() else ()


def clear_caches() -> bool:
    """Writes out and drops this machine's file caches; False where that is not allowed."""
    drop = "sync && echo 3 >/proc/sys/vm/drop_caches"
    for command in (["sh", "-c", drop], ["sudo", "-n", "sh", "-c", drop]):
        with contextlib.suppress(OSError):
            if subprocess.run(command, capture_output=True).returncode == 0:
                return True
    return False


def _platform() -> str:
    return f"{jax.device_count()}x{jax.devices()[0].device_kind}".replace(" ", "-")


def _machine(chips: int) -> dict[str, Any]:
    """What the system's description needs to know of the accelerators; TPU v2 and v3 have two
    devices (cores) per chip."""
    device = jax.local_devices()[0]
    counts = {
        "number_of_nodes": jax.process_count(),
        "accelerators_per_node": chips // jax.process_count(),
        "accelerator_model_name": device.device_kind,
    }
    with contextlib.suppress(Exception):  # CPUs have no memory of their own, in several ways
        memory = device.memory_stats()["bytes_limit"] * jax.device_count() // chips
        return counts | {"accelerator_memory_bytes": memory}
    return counts
