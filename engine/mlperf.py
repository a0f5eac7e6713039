"""Writes the log of an MLPerf run to `workdir/mlperf.log` and to process 0's terminal.

There are two formats: 'mllog', the `:::MLLOG` lines of MLPerf Training 0.7 to 4.0, and 'v0.5', the
`:::MLPv0.5.0` lines of 2018. Most runs have neither: their `Log` writes nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from benchmarks import mlperf as rules
from benchmarks.base import Benchmark
from common.errors import ConfigError, one_line
from engine import sharding
from engine.cluster import processes
from engine.plan import Plan, Programs, Settings, make_plan, read_settings
from engine.run import Run

LOG = "mlperf.log"  # in the workdir
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Log:
    """The log of a run without MLPerf: its methods write nothing."""

    def describe(self, plan: Plan, params: Any, mesh: Mesh) -> None:
        """Logs the run's settings before anything is compiled; `params` may be their shapes."""

    def run_starts(self) -> None:
        """Starts the clock after the compilation, before data are read; all processes call it."""

    def eval_starts(self, step: int) -> None:
        """Logs that the evaluation of `step` begins."""

    def eval_ends(self, step: int, scores: Mapping[str, float]) -> None:
        """Logs the scores of `step`; stops the clock if all targets are reached."""

    def close(self) -> None:
        """Logs the end of the run, however it ended."""


def declare_examples(settings: Settings, evaluating: bool) -> Settings:
    """Counts the data before the clock of a run starts; the numbers are in the returned settings.

    Nothing of the data stays in memory: the run opens them again when its clock runs.
    """
    with Run.at_work(settings) as (run, _):
        check_run(run.programs, evaluating)
        log = Follower(run.programs)
        if all(log.examples.values()):  # forbidden values are found before it reads the data
            plan = make_plan(settings, run.benchmark, log.examples["train"])
            log.facts(plan, run.programs.abstract_state(plan).params)
        run.open_data("train", "eval")
        return declared(settings, run.benchmark)


def declared(settings: Settings, benchmark: Benchmark) -> Settings:
    """The settings with the numbers of the opened data in the config."""
    config, sizes = ConfigDict(settings.config), benchmark.data_sizes()
    config.update({key: n for key, n in sizes.items() if not config[key]})
    return read_settings(config.lock(), settings.workdir, settings.origin)


def check_run(programs: Programs, evaluating: bool) -> None:
    """ConfigError if a run with this config cannot be MLPerf's, or the workdir has an older run."""
    keys, folder = programs.settings.mlperf, epath.Path(programs.settings.workdir)
    entry = rules.entry(programs.settings.benchmark, keys.format)
    form = f"config.mlperf.format={keys.format!r}"
    if not keys.org:
        raise ConfigError(f"config.mlperf.org='': {form} needs the name of who runs this")
    if not evaluating:
        raise ConfigError(f"{form} needs evaluation, and so --mode=train_and_eval")
    if why := programs.benchmark.no_evaluation:
        raise ConfigError(f"{why} leaves no evaluation, which {form} needs: leave one of them out")
    if not programs.settings.stop_at_target:
        raise ConfigError(f"{form} needs --config.stop_at_target=True: there the clock stops")
    own = {target.metric: target.value for target in programs.benchmark.targets}
    for metric, required in entry.targets[keys.format].items():
        if own[metric] < required and keys.division == "closed":
            key = f"{metric.partition('_')[0]}_target"  # of Mask R-CNN's second target
            key = key if key in programs.settings.config else "target"
            raise ConfigError(
                f"config.{key}={own[metric]:g}: the {metric} of MLPerf's {entry.name} is "
                f"{required:g}; give --config.{key}={required:g}, or "
                "--config.mlperf.division=open"
            )
    if jax.process_index() > 0:  # the first process may have begun
        return
    checkpoints = folder / "checkpoints"
    if (folder / LOG).exists() or (checkpoints.exists() and any(checkpoints.iterdir())):
        raise ConfigError(
            f"--workdir={programs.settings.workdir} holds a run already, and a run of MLPerf may "
            "not be resumed: give a new folder, and report the run that was cut short"
        )


def begin_log(programs: Programs, started: float) -> Log:
    """Makes the log of a run, whose initialisation began `started` seconds after 1970."""
    if not programs.settings.mlperf.format:
        return Log()
    if jax.process_index() > 0:
        return Follower(programs)
    return {"mllog": _Mllog, "v0.5": _V05}[programs.settings.mlperf.format](programs, started)


class Follower(Log):
    """The log in processes other than 0: it takes part in what all of them must do."""

    def __init__(self, programs: Programs):
        self._programs, self._settings = programs, programs.settings
        self._keys = programs.settings.mlperf
        self._entry = rules.entry(self._settings.benchmark, self._keys.format)
        # As declared; 0 where the data decide.
        count = programs.benchmark.declared_examples
        self.examples = {split: count(split) for split in ("train", "eval")}
        self._cleared = False

    def facts(self, plan: Plan, params: Any) -> rules.Facts:
        """What the log says about the benchmark; raises ConfigError if the rules forbid a value."""
        described = rules.Run(
            form=self._keys.format,
            recipe=self._settings.config,
            examples=self.examples,
            steps=plan.total_steps,
            learning_rate=plan.learning_rate,
            norm_examples=self._programs.norm_examples,
            params=params,
        )
        facts = rules.facts(self._settings.benchmark, described)
        if self._keys.format == "mllog":
            _check_values(self._entry, self._keys.division, self._settings.train_batch_size, facts)
        return facts

    def describe(self, plan: Plan, params: Any, mesh: Mesh) -> None:
        if self._keys.clear_caches:
            failed = not clear_caches()
            processes.barrier("waiting for the other hosts to drop their file caches")
            self._cleared = not sharding.any_process(failed)

    def run_starts(self) -> None:
        processes.barrier("waiting for the other hosts to compile")  # no data before the clock runs


def _check_values(entry: rules.Entry, division: str, batch_size: int, facts: rules.Facts) -> None:
    """Raises ConfigError if mlperf-logging's rules refuse hyperparameters, before hours of work."""
    from mlperf_logging.compliance_checker import mlp_compliance
    from mlperf_logging.compliance_checker.mlp_parser.ruleset_400 import LogLine

    logged = {"submission_benchmark": entry.name, "submission_division": division}
    lines = []
    for key, value in {**logged, "global_batch_size": batch_size, **facts.values}.items():
        content: Any = {"value": value, "metadata": facts.metadata.get(key, {})}
        lines.append(LogLine(f"{key}={value}", 0, key, content, 0))
    checker = mlp_compliance.make_checker("training", entry.ruleset, True, False)
    with contextlib.suppress(OSError):  # an optimizer without rules, whose name is an error
        checker.check_loglines(lines, f"training_{entry.ruleset}/common.yaml")
    errors = [
        " ".join(re.sub(r" in line 0:|\ncurrent context(.|\n)*", ":", text).split())
        for key, text in checker.overwritable.items()
        if key in facts.values or "opt_" in key
    ]
    if errors:
        raise ConfigError(
            f"rules {entry.ruleset} of mlperf-logging: {'; '.join(errors)}; change "
            "them, or give --config.mlperf.division=open"
        )


class _Writer(Follower):
    """The file, the terminal, the epochs and the end of the run, which both formats share."""

    def __init__(self, programs: Programs, started: float):
        super().__init__(programs)
        self._started, self._is_running = started, False
        self._lines = io.StringIO()  # until `_flush`: an append to gs:// takes a while
        self._logger = logging.Logger("tpu_suite.mlperf", logging.INFO)
        self._logger.parent = logging.getLogger("tpu_suite")  # the terminal, the host's log
        self._logger.addHandler(logging.StreamHandler(self._lines))
        processes.on_failure(self.close)

    def describe(self, plan: Plan, params: Any, mesh: Mesh) -> None:
        super().describe(plan, params, mesh)
        if self._keys.clear_caches and not self._cleared:
            logging.getLogger("tpu_suite").warning(
                "WARNING the file caches were not dropped on every host: that needs root or sudo "
                "-n. The log will say so"
            )
        self._chips, self._steps = sharding.num_chips(mesh), plan.total_steps
        self._next_eval = plan.eval_every.next_after
        facts, batch_size = self.facts(plan, params), self._settings.train_batch_size
        self._epoch = facts.steps_per_epoch or self.examples["train"] / batch_size
        self._header(facts)
        self._flush()

    def run_starts(self) -> None:
        super().run_starts()
        self._start()
        self._flush()

    def eval_ends(self, step: int, scores: Mapping[str, float]) -> None:
        targets = self._programs.benchmark.targets
        reached = all(scores[target.metric] >= target.value for target in targets)
        # JSON has no nan; -1 is what COCO's own score says where no object counts.
        logged = {t.metric: -1.0 if math.isnan(s := scores[t.metric]) else s for t in targets}
        self._after_eval(step, self._entry.evaluation(logged, self._keys.format))
        if reached or step >= self._steps:
            self._is_running = False
            self._stop(reached)
        else:
            self._train(step)
        self._flush()

    def close(self) -> None:
        processes.on_failure(None)
        if self._is_running:
            self._is_running = False
            self._stop(False)
            with contextlib.suppress(ConfigError):  # what ended the run is more important
                self._flush()

    def _flush(self) -> None:
        """Appends the lines to the file; raises ConfigError if it cannot be written."""
        path, text = epath.Path(self._settings.workdir) / LOG, self._lines.getvalue()
        self._lines.seek(0)
        self._lines.truncate()
        try:
            with path.open("a") as file:
                file.write(text)
        except Exception as error:  # each file system has errors of its own
            raise ConfigError(f"cannot write {path}: {one_line(error)}") from error

    def _epochs(self, step: int) -> int | float:
        """How many epochs `step` steps are, to three decimals.

        Epochs seldom end with a step: the step nearest to the end of an epoch counts as its end.
        """
        nearest = round(step / self._epoch)
        if abs(step - nearest * self._epoch) <= 0.5:
            return nearest
        return round(step / self._epoch, 3)

    # What a format writes.
    def _header(self, facts: rules.Facts) -> None: ...
    def _start(self) -> None: ...
    def _train(self, step: int) -> None: ...
    def _after_eval(self, step: int, value: Any) -> None: ...
    def _stop(self, success: bool) -> None: ...


class _Mllog(_Writer):
    """MLPerf Training 0.7 to 4.0; compilation, before init_stop, is not timed."""

    def __init__(self, programs: Programs, started: float):
        from mlperf_logging.mllog.mllog import MLLogger

        super().__init__(programs, started)
        self._write = MLLogger(logger=self._logger, root_dir=re.escape(_ROOT))

    def _header(self, facts: rules.Facts) -> None:
        settings, keys, write = self._settings, self._keys, self._write
        write.start("init_start", time_ms=int(1e3 * self._started))
        for key, value in {
            "cache_clear": self._cleared,
            "submission_benchmark": self._entry.name,
            "submission_org": keys.org,
            "submission_platform": keys.platform
            or f"{jax.device_count()}x{jax.devices()[0].device_kind}".replace(" ", "-"),
            "submission_division": keys.division,
            "submission_status": keys.status,
            **_machine(self._chips),
            "global_batch_size": settings.train_batch_size,
            "gradient_accumulation_steps": settings.gradient_accumulation_steps,
            "train_samples": self.examples["train"],
            "eval_samples": self.examples["eval"],
            "seed": settings.seed,
        }.items():
            write.event(key, value)
        for key, value in facts.values.items():
            write.event(key, value, metadata=dict(facts.metadata.get(key, {})))
        for name in facts.tensors:
            write.event("weights_initialization", metadata={"tensor": name})

    def _start(self) -> None:
        self._write.end("init_stop")
        self._write.start("run_start")
        self._is_running = True
        self._train(0)

    def _train(self, step: int) -> None:
        following = self._next_eval(step)
        until = self._steps if following is None else min(following, self._steps)
        done = self._epochs(step)
        count = round(self._epochs(until) - done, 3)
        self._block = {"first_epoch_num": done + 1, "epoch_count": count}
        self._write.start("block_start", metadata=self._block)

    def eval_starts(self, step: int) -> None:
        self._write.end("block_stop", metadata=self._block)
        self._write.start("eval_start", metadata={"epoch_num": self._epochs(step)})

    def _after_eval(self, step: int, value: Any) -> None:
        epoch = {"epoch_num": self._epochs(step)}
        self._write.event("eval_accuracy", value, metadata=epoch)
        self._write.end("eval_stop", metadata=epoch)

    def _stop(self, success: bool) -> None:
        self._write.end("run_stop", metadata={"status": "success" if success else "aborted"})


class _V05(_Writer):
    """MLPerf Training 0.5: epochs count from 0, and the clock also runs during compilation."""

    def _header(self, facts: rules.Facts) -> None:
        if self._cleared:
            self._write("run_clear_caches")
        self._write("run_start")
        self._is_running = True
        values = dict(facts.values)
        if "eval_offset" in values:  # of the first evaluation, from a multiple of the period
            first = self._next_eval(0) or self._steps
            period = (self._next_eval(first) or 2 * first) - first
            values["eval_offset"] = self._epochs(first % period)
        for key, value in values.items():
            self._write(key, value)

    def _start(self) -> None:
        self._write("train_loop")
        self._train(0)

    def _train(self, step: int) -> None:
        self._write("train_epoch", self._epochs(step))

    def eval_starts(self, step: int) -> None:
        self._write("eval_start", self._epochs(step) - 1)

    def _after_eval(self, step: int, value: Any) -> None:
        epoch = self._epochs(step) - 1
        scores = value if isinstance(value, Mapping) else {"value": value}
        self._write("eval_accuracy", {"epoch": epoch, **scores})
        if self._entry.logs_eval_size:
            self._write("eval_size", self.examples["eval"])
        self._write("eval_stop", epoch)

    def _stop(self, success: bool) -> None:
        is_bool = self._entry.success_is_bool
        self._write("run_stop", {"success": success if is_bool else str(success).lower()})
        self._write("run_final")

    def _write(self, key: str, value: Any = None) -> None:
        """`:::MLPv0.5.0 BENCHMARK SECONDS (FILE:LINE) KEY: JSON`."""
        caller, name = sys._getframe(1), self._entry.name
        file = caller.f_code.co_filename.removeprefix(f"{_ROOT}/")
        text = key if value is None else f"{key}: {json.dumps(value)}"
        source = f"{file}:{caller.f_lineno}"
        self._logger.info(":::MLPv0.5.0 %s %.9f (%s) %s", name, time.time(), source, text)


def clear_caches() -> bool:
    """Writes out and drops this machine's file caches; False where that is not allowed."""
    drop = "sync && echo 3 >/proc/sys/vm/drop_caches"
    command = ["sh", "-c", f"({drop}) || sudo -n sh -c '{drop}'"]
    return subprocess.run(command, capture_output=True).returncode == 0


def _machine(chips: int) -> dict[str, Any]:
    """The accelerators, for the description of the system; a TPU v2 or v3 chip has two devices."""
    device = jax.local_devices()[0]
    facts = {
        "number_of_nodes": jax.process_count(),
        "accelerators_per_node": chips // jax.process_count(),
        "accelerator_model_name": device.device_kind,
    }
    with contextlib.suppress(Exception):  # CPUs have no memory of their own, in several ways
        memory = device.memory_stats()["bytes_limit"] * jax.device_count() // chips
        facts["accelerator_memory_bytes"] = memory
    return facts
