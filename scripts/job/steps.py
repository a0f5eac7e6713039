"""Prepares a Gradient job and finishes it; scripts/job/run.py starts both as processes.

    python -m scripts.job.steps begin MODEL_DIR [--stage_from=DIR] [--keep_input] [-- FLAGS]
    python -m scripts.job.steps finish MODEL_DIR [--keep_input] [-- FLAGS]

`finish` writes the flags of the run, and the files that the input had when the job began, to
output_data/job.json before it deletes the input. A later `begin` with the same flags then only
completes the deletion of these files.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import runpy
import signal
import sys
from typing import Any

from absl import logging as absl_logging

from common import entry
from common.errors import CheckpointError, UserError, is_of_files, one_line
from engine import environment
from scripts.job import staging
from scripts.job.folder import BucketFolder, Item, LocalFolder, open_folder
from scripts.job.run import ALREADY_FINISHED

RECORD = "job.json"
STAGED = "job_input.json"  # the files of the input at the beginning
METADATA = "gradient-model-metadata.json"


class Job:
    """A model folder with the job's input_data and output_data."""

    def __init__(self, model_dir: str, flags: list[str], keep_input: bool):
        """`flags` are the user's flags of main.py.

        Raises:
          UserError: `model_dir` is neither a local path nor gs://.
        """
        self.folder = open_folder(model_dir)
        self.input: LocalFolder | BucketFolder = self.folder.sub("input_data")
        self.output: LocalFolder | BucketFolder = self.folder.sub("output_data")
        self.flags, self.keep_input = flags, keep_input

    def begin(self, stage_from: str) -> int:
        """Stages the input and returns 0.

        If the job has been finished, it deletes the input and returns ALREADY_FINISHED.

        Raises:
          UserError: a folder cannot be used.
        """
        record = self.output.read(RECORD)
        trained = any("/manifest/" in name for name in self.output.sub("checkpoints").files())
        if isinstance(record, dict) and record.get("flags") == self.flags and trained:
            _say(f"already finished: the run in {self.output.path} was trained with these flags")
            self._clear_input({k: Item(*v) for k, v in record["input"].items()})
            return ALREADY_FINISHED
        if isinstance(record, dict):
            flags = " ".join(record.get("flags", []))
            _say(f"NOTE the run in {self.output.path} was finished with other flags: {flags}")
        if stage_from:
            from benchmarks import mlperf  # imports jax, which `_quiet` must precede

            groups = mlperf.entry(_benchmark(self.flags)).files
            staging.stage(open_folder(stage_from), self.input, groups)
        items = {k: [item.size, item.version] for k, item in self.input.files().items()}
        self.output.write(STAGED, items)
        return 0

    def finish(self) -> None:
        """Writes the metadata and the record, then deletes the input.

        Raises:
          UserError: something cannot be read, written or deleted.
        """
        self.output.write(METADATA, metadata(self.output.path))
        _say(f"wrote {self.output.path}/{METADATA}")
        staged = self.output.read(STAGED) or {}
        self.output.write(RECORD, {"flags": self.flags, "input": staged})
        self._clear_input({k: Item(*v) for k, v in staged.items()})

    def _clear_input(self, known: dict[str, Item]) -> None:
        """Deletes the input unless it has files that came after the job began."""
        path = self.input.path
        if self.keep_input:
            _say(f"{path} stays, because of KEEP_INPUT=1; the platform may upload it with the rest")
            return
        if reason := self.input.why_foreign():
            _say(f"{path} is not deleted: {reason}")
            return
        items = self.input.files()
        if new := sorted(name for name, item in items.items() if known.get(name) != item):
            _say(
                f"{path} is not deleted: {len(new)} files there, such as {new[0]!r}, came after "
                "the job began; another run wants another TPU_MODEL_DIR"
            )
            return
        if changed := self.input.delete(items):
            raise UserError(f"{path}: {changed[0]!r} has changed meanwhile and is not deleted")
        if items:
            size = f"{sum(item.size for item in items.values()) / 1e6:,.1f} MB"
            _say(f"deleted the staged input {path}: {len(items):,} files, {size}")


def _benchmark(flags: list[str]) -> str:
    """The benchmark of the recipe in main.py's flags."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    names = [word.lstrip("-") for word in words]
    path, _, argument = words[names.index("config") + 1].partition(":")
    try:
        make = runpy.run_path(path)["get_config"]
        return (make(argument) if argument else make()).benchmark
    except Exception as error:  # the recipe is a program
        raise UserError(f"--config={path} is no recipe: {one_line(error)}") from error


def metadata(workdir: str) -> dict[str, Any]:
    """Returns the scores of the best and of the last evaluation of a run, as Gradient shows them.

    Raises:
      CheckpointError: the run has no complete checkpoint, or the newest cannot be read.
    """
    from engine.checkpoint import Checkpointer  # imports jax, which `_quiet` must precede
    from engine.report.history import History

    checkpoints = Checkpointer(f"{workdir}/checkpoints", keep=1, best=None)
    with contextlib.closing(checkpoints):
        if not (steps := checkpoints.steps()):
            raise CheckpointError(f"no complete checkpoint in {checkpoints.directory}")
        manifest = checkpoints.manifest(steps[-1])
    history = History(workdir, writes=False)
    history.restore(manifest.get("evaluations", []))
    scores = history.scores()
    best = history.best(manifest.get("target_metric", ""))
    rows = [] if best is None else [("", best)]
    rows += [("last_", max(scores))] if scores else []
    metrics = []
    for prefix, step in rows:
        for name, value in {**scores[step], "step": step}.items():
            if math.isfinite(value):  # JSON has no nan
                metrics.append({"name": prefix + name, "numberValue": value})
    return {"metrics": metrics}


def _say(text: str) -> None:
    print(f"job: {text}", flush=True)


def _quiet() -> None:
    """Keeps jax off the TPU, and Orbax and TensorFlow silent; call before they are imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    environment.set_defaults()
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def main(argv: list[str] | None = None) -> int:
    """Runs a step; returns the exit code."""
    entry.output_only_shows()
    parser = argparse.ArgumentParser(prog="scripts.job.steps", allow_abbrev=False)
    parser.add_argument("step", choices=["begin", "finish"])
    parser.add_argument("model_dir")
    parser.add_argument("--stage_from", default="")
    parser.add_argument("--keep_input", action="store_true")
    words = sys.argv[1:] if argv is None else argv
    end = words.index("--") if "--" in words else len(words)
    arguments, flags = parser.parse_args(words[:end]), words[end + 1 :]
    _quiet()
    try:
        job = Job(arguments.model_dir, flags, arguments.keep_input)
        if arguments.step == "begin":
            return job.begin(arguments.stage_from)
        job.finish()
    except Exception as error:
        if not (isinstance(error, UserError) or is_of_files(error)):
            raise
        print(f"ERROR: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no stack trace: a later start can continue
    entry.run(main)
