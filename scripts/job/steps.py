"""What scripts/job/run.py does before and after training, each in a process of its own.

    python -m scripts.job.steps begin MODEL_DIR [--stage_from=DIR] [--keep_input] [-- FLAGS]
    python -m scripts.job.steps finish MODEL_DIR [--keep_input] [-- FLAGS]

`finish` writes output_data/job.json when all but the deletion of the input is done: the flags of
the run, and every file of the input as it was when the job began. A later `begin` with the same
flags knows by it that nothing remains but that deletion, and which files it may delete.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from typing import Any

from errors import one_line
from scripts.job import prune, staging
from scripts.job.folder import BucketFolder, FolderError, Item, LocalFolder, open_folder

ALREADY_FINISHED = 3  # exit code of `begin`
RECORD = "job.json"
STAGED = "job_input.json"  # what begin found in the input
METADATA = "gradient-model-metadata.json"


class Job:
    """A model folder with the job's input_data and output_data."""

    def __init__(self, model_dir: str, flags: list[str], keep_input: bool):
        """flags: main.py's, without those that the job sets itself.

        Raises:
          FolderError: `model_dir` is no place.
        """
        self.folder = open_folder(model_dir)
        self.input: LocalFolder | BucketFolder = self.folder.sub("input_data")
        self.output: LocalFolder | BucketFolder = self.folder.sub("output_data")
        self.flags, self.keep_input = flags, keep_input

    def begin(self, stage_from: str) -> int:
        """Stages the input; returns ALREADY_FINISHED, input cleared, where this job has ended well.

        Raises:
          FolderError: a folder cannot be used.
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
            staging.stage(open_folder(stage_from), self.input)
        found = {k: [item.size, item.version] for k, item in self.input.files().items()}
        self.output.write(STAGED, found)
        return 0

    def finish(self) -> None:
        """Prunes, writes the metadata and the record, then deletes the input.

        Raises:
          CheckpointError, LockError, FolderError: something cannot be read, written or deleted.
        """
        found = prune.prune(self.output.path)
        self.output.write(METADATA, metadata(self.output.path, found.metric))
        _say(f"wrote {self.output.path}/{METADATA}")
        staged = self.output.read(STAGED) or {}
        self.output.write(RECORD, {"flags": self.flags, "input": staged})
        self._clear_input({k: Item(*v) for k, v in staged.items()})

    def _clear_input(self, known: dict[str, Item]) -> None:
        """Deletes the input if all of it was there when the job began."""
        path = self.input.path
        if self.keep_input:
            _say(f"{path} stays, because of KEEP_INPUT=1; the platform may upload it with the rest")
            return
        if reason := self.input.not_ours():
            _say(f"{path} is not deleted: {reason}")
            return
        items = self.input.files()
        if new := sorted(name for name, item in items.items() if known.get(name) != item):
            _say(
                f"{path} is not deleted: {len(new)} files there, such as {new[0]!r}, came after "
                "the job began; another run wants another TPU_MODEL_DIR"
            )
            return
        done = self.input.delete(items)
        if done.left:
            raise FolderError(f"{path}: {done.left[0]!r} was changed meanwhile and is left there")
        if done.files:
            size = f"{done.bytes / 1e6:,.1f} MB"
            _say(f"deleted the staged input {path}: {done.files:,} files, {size}")


def metadata(workdir: str, metric: str) -> dict[str, Any]:
    """What Gradient shows of a model: the scores of the best evaluation, and of the last one.

    Args:
      workdir: a run's.
      metric: by which the best one is chosen.
    """
    from engine.report.history import History

    history = History(workdir, writes=False)
    scores = history.scores()
    best = history.best(metric)
    rows = [] if best is None else [("", best)]
    rows += [("last_", max(scores))] if scores else []
    metrics = []
    for prefix, step in rows:
        for name, value in {**scores[step], "step": step}.items():
            if math.isfinite(value):  # JSON has no word for it
                metrics.append({"name": prefix + name, "numberValue": value})
    return {"metrics": metrics}


def _say(text: str) -> None:
    print(f"job: {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs a step; returns the exit code."""
    parser = argparse.ArgumentParser(prog="job_steps", allow_abbrev=False)
    parser.add_argument("step", choices=["begin", "finish"])
    parser.add_argument("model_dir")
    parser.add_argument("--stage_from", default="")
    parser.add_argument("--keep_input", action="store_true")
    words = sys.argv[1:] if argv is None else argv
    end = words.index("--") if "--" in words else len(words)
    given, flags = parser.parse_args(words[:end]), words[end + 1 :]
    prune.quiet()
    try:
        job = Job(given.model_dir, flags, given.keep_input)
        if given.step == "begin":
            return job.begin(given.stage_from)
        job.finish()
    except (RuntimeError, ValueError, OSError) as error:
        print(f"ERROR: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no stack trace; killed anywhere, it can go on
    code = main()
    sys.stdout.flush()
    os._exit(code) if code else sys.exit(0)
