"""Runs a job under Gradient's contract (docs/run.md); scripts/gradient_job.sh starts it.

Each step is a process: main.py, and this program itself with `begin` or `finish` before the flags.
The first process starts them in order and passes signals on. The same command completes a job that
was killed.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent import futures
from types import FrameType
from typing import Any

from absl import logging as absl_logging
from etils import epath

from commands import recipe
from common import entry
from common.data import data_manifest, storage
from common.errors import UserError, count, is_of_files, one_line, parse_json, some
from common.progress import ProgressBar
from engine import environment, locations
from engine.cluster import preemption

ALREADY_FINISHED = 3  # exit code of the step `begin`
RECORD = "job.json"  # the flags of the run that ended
COPIES = "copied_by_job.json"  # among the copies: their names, each with its STAGE_FROM
METADATA = "gradient-model-metadata.json"
SWITCHES = ("KEEP_INPUT", "DELETE_INPUT", "EXPORT_MODEL")
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN_FLAGS = ("workdir", "mode", "coordinator", "config.data_dir", "config.keep_checkpoints")
_KEEP = "--config.keep_checkpoints=1"  # the newest; the best one stays as well


@dataclasses.dataclass(frozen=True)
class Request:
    """The job that the environment and the command line ask for."""

    input: epath.Path  # the user's own data
    staged: epath.Path  # the job's copies of the files in STAGE_FROM
    output: epath.Path
    flags: list[str]  # of main.py
    stage_from: str
    switches: set[str]  # those of SWITCHES that are 1


def parse_request(flags: Sequence[str], env: Mapping[str, str]) -> Request:
    """Reads and checks the environment and the flags of main.py, of which the job sets some."""
    root, source = (env.get(name, "").strip() for name in ("TPU_MODEL_DIR", "STAGE_FROM"))
    if not root:
        raise UserError(
            "TPU_MODEL_DIR is not set: give the job's folder, gs://BUCKET/FOLDER or /FOLDER; the "
            "records are in its input_data"
        )
    for name, path in (("TPU_MODEL_DIR", root), ("STAGE_FROM", source)):
        is_local = path and "://" not in locations.check_path(path, name)
        if is_local and (not os.path.isabs(path) or os.path.isfile(path)):
            raise UserError(f"{name}={path}: give gs://BUCKET/FOLDER or a folder's absolute path")
    names = [re.sub(r"^--?", "", flag.partition("=")[0]) for flag in flags]
    if own := [name for name in names if name in _OWN_FLAGS]:
        raise UserError(f"--{own[0]} cannot be given to a job, which sets it itself")
    if others := env.get("TPU_WORKER_HOSTNAMES", "").strip(",").count(","):
        raise UserError(
            f"this TPU slice has {others + 1} hosts and the job drives one: run main.py on each of "
            f"them, with {_KEEP}"
        )
    for name in SWITCHES:
        if (value := env.get(name, "")) not in ("", "0", "1"):
            raise UserError(f"{name}={value}: must be 0 or 1")
    return Request(
        input=epath.Path(root) / "input_data",
        staged=epath.Path(root) / "staged_data",
        output=epath.Path(root) / "output_data",
        flags=[*(() if "config" in names else ["--config=configs/resnet50.py"]), *flags],
        stage_from=source,
        switches={name for name in SWITCHES if env.get(name) == "1"},
    )


class Children:
    """Runs one child at a time and passes signals on to it."""

    def __init__(self):
        self.stop_signal = 0  # the first signal that arrived, as SIGINT or SIGTERM
        self._child: subprocess.Popen[bytes] | None = None

    def listen(self) -> None:
        """Listens to the signals that ask to stop."""
        for signum in preemption.stop_signals():
            signal.signal(signum, self._note)

    def run(self, command: list[str], env: Mapping[str, str]) -> int:
        """Runs a command; returns its exit code.

        The code is 128 + signal if a signal killed the child or came before its start.
        """
        if self.stop_signal:
            return 128 + self.stop_signal
        # Without a new process group the child would get Ctrl-C from the terminal as well.
        self._child = subprocess.Popen(
            command, cwd=_ROOT, env=env, stdin=subprocess.DEVNULL, process_group=0
        )
        if self.stop_signal:  # while it was being started
            self._child.send_signal(self.stop_signal)
        code = self._child.wait()
        self._child = None
        return code if code >= 0 else 128 - code

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.stop_signal = self.stop_signal or preemption.Preempted(signum).code - 128
        if self._child is not None:
            self._child.send_signal(self.stop_signal)


def run(request: Request, children: Children) -> int:
    """Runs the job; returns the exit code of the step that failed, or 0."""
    workdir, flags = f"--workdir={request.output}", request.flags
    this, main_py = [sys.executable, "-m", "scripts.gradient"], [sys.executable, "main.py"]
    data = request.staged if request.stage_from else request.input
    train = [*main_py, *flags, workdir, f"--config.data_dir={data}", _KEEP]
    steps = {
        "preparing": [*this, "begin", *flags],
        "the doctor": [*train, "--mode=doctor"],
        "training": [*train, "--mode=train_and_eval"],
        "exporting": [*main_py, "--mode=export", "--format=savedmodel", "--overwrite", workdir],
        "finishing": [*this, "finish", *flags],
    }
    if "EXPORT_MODEL" not in request.switches:
        del steps["exporting"]
    for step, command in steps.items():
        code = children.run(command, os.environ)
        if step == "preparing" and code == ALREADY_FINISHED:
            return 0
        if code:
            kept = "" if step == "finishing" else ": nothing was deleted"
            text = f"job: {step} ended with exit code {code}{kept}. The same command continues here"
            print(text, file=sys.stderr, flush=True)
            return code
    _say(f"finished; everything is in {request.output}")
    return 0


def begin(request: Request) -> int:
    """Stages the input and returns 0; ALREADY_FINISHED if the job has finished before."""
    trained = any((request.output / "checkpoints").glob("*/manifest"))
    if trained and _read(request.output / RECORD).get("flags") == request.flags:
        _say(f"already finished: the run in {request.output} was trained with these flags")
        clear_input(request)
        return ALREADY_FINISHED
    if request.stage_from:
        from benchmarks import mlperf  # imports jax, which `main` precedes

        words = [*(word for flag in request.flags for word in flag.split("=", 1)), ""]
        file = words[[word.lstrip("-") for word in words].index("config") + 1]
        if not os.path.exists(file.partition(":")[0]):
            raise UserError(f"--config={file}: there is no such file")
        stage(request, mlperf.entry(recipe.load(file).benchmark).files)
    return 0


def finish(request: Request) -> int:
    """Writes the metadata and the record, then deletes what the job copied; returns 0."""
    _write(request.output / METADATA, metadata(str(request.output)))
    _say(f"wrote {request.output / METADATA}")
    _write(request.output / RECORD, {"flags": request.flags})
    clear_input(request)
    return 0


def metadata(workdir: str) -> dict[str, Any]:
    """The scores of the best and of the last evaluation of a run, in Gradient's format."""
    from engine.checkpoint.checkpointer import Checkpointer  # imports jax, which `main` precedes
    from engine.report.history import History

    checkpoints = Checkpointer(f"{workdir}/checkpoints", keep=1, best=None)
    with contextlib.closing(checkpoints):
        manifest = checkpoints.manifest(checkpoints.choose("latest"))
    history = History(workdir, writes=False)
    scores, values = history.scores(), {}
    best = history.best(manifest.get("target_metric", ""))
    for prefix, step in (("", best), ("last_", max(scores, default=None))):
        if step is not None:
            values |= {prefix + k: v for k, v in {**scores[step], "step": step}.items()}
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return {"metrics": [{"name": k, "numberValue": v} for k, v in finite.items()]}


def stage(request: Request, groups: Sequence[Sequence[str]]) -> None:
    """Copies the files of the benchmark that are missing in the job's folder of copies.

    `groups` are the patterns of `benchmarks.mlperf.Entry.files`; a file must match the first group.
    The folder has a list of its copies; no file that is not in it is overwritten or deleted.
    """
    source, target = epath.Path(request.stage_from), request.staged
    patterns = [pattern for group in (*groups, [data_manifest.FILE_NAME]) for pattern in group]
    matches = {p: storage.matching_paths(f"{source}/{p}", str(source)) for p in patterns}
    if not any(matches[pattern] for pattern in groups[0]):
        raise UserError(f"STAGE_FROM={source} holds no files {' or '.join(groups[0])}")
    if os.path.realpath(source) == os.path.realpath(target):
        raise UserError(f"STAGE_FROM={source} is the job's own folder of copies: give another one")
    names = {path.removeprefix(f"{source}/") for paths in matches.values() for path in paths}
    copies = _copies(request)
    new = sorted(names - copies.keys()) if target.exists() else ()
    if foreign := [target / name for name in new if (target / name).exists()]:
        raise UserError(f"{foreign[0]} is no copy of this job: move it away")
    for name, origin in copies.items():
        if name not in names or origin != str(source):
            (target / name).unlink(missing_ok=True)
    _write(target / COPIES, dict.fromkeys(sorted(names), str(source)))
    _say(f"staging {count(len(names), 'file')} from {source} into {target}")
    progress = ProgressBar("staging", len(names), "files")

    def copy(name: str) -> None:
        original, path = source / name, target / name
        try:
            status = original.stat()
            if status.is_directory or (path.exists() and path.stat().length == status.length):
                progress.add(1)
                return
            if "://" not in str(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            original.copy(path, overwrite=True)
            if (arrived := path.stat().length) != status.length:
                raise OSError(f"{arrived} bytes arrived, not {status.length}; did it change?")
        except Exception as error:  # errors of the disk, or TensorFlow's classes
            raise UserError(f"cannot stage {original}: {one_line(error)}") from error
        progress.add(1, status.length)

    with futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(copy, names))
    progress.close()


def clear_input(request: Request) -> None:
    """Deletes the files that the job copied; with DELETE_INPUT=1 all of its input."""
    if "KEEP_INPUT" in request.switches:
        _say("the input stays, because of KEEP_INPUT=1; the platform may upload it with the rest")
        return
    if copies := _copies(request):
        for name in (*copies, COPIES):  # the list last: another start needs it
            (request.staged / name).unlink(missing_ok=True)
        for folder, _, _ in os.walk(request.staged, topdown=False):  # gs:// has no folders
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(folder)
        _say(f"deleted {count(len(copies), 'file')} that the job had copied into {request.staged}")
    for folder in (request.staged, request.input):
        hint = "" if os.path.islink(folder) else "; DELETE_INPUT=1 deletes all of it"
        if "DELETE_INPUT" in request.switches and folder.is_dir():
            try:
                folder.rmtree()
                _say(f"deleted {folder}, because of DELETE_INPUT=1")
            except OSError as error:  # a symbolic link or a mount point, among others
                hint = f" and cannot delete: {one_line(error)}"
        if left := sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []:
            _say(f"{folder} keeps {some(left, 1)}, which the job did not copy{hint}")


def _copies(request: Request) -> dict[str, Any]:
    """The files that the job has copied, or was about to: {name: STAGE_FROM}."""
    listed = _read(request.staged / COPIES)
    return {k: v for k, v in listed.items() if k[:1] != "/" and ".." not in k.split("/")}


def _read(path: epath.Path) -> dict[str, Any]:
    """A JSON object; {} if it is missing or damaged."""
    try:
        content = parse_json(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: epath.Path, content: dict[str, Any]) -> None:
    storage.write(str(path), [json.dumps(content, indent=2).encode(), b"\n"])


def _say(text: str) -> None:
    print(f"job: {text}", flush=True)


def main() -> int:
    """Runs the job that the environment and the command line describe, or a step of it."""
    words = sys.argv[1:]
    if words[:1] not in (["begin"], ["finish"]):
        children = Children()
        children.listen()
        return run(parse_request(words, os.environ), children)
    os.environ["JAX_PLATFORMS"] = "cpu"  # off the TPU; before jax and TensorFlow are imported
    environment.set_defaults()
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no stack trace: a later start can continue
    request = parse_request(words[1:], os.environ)
    try:
        return begin(request) if words[0] == "begin" else finish(request)
    except Exception as error:
        if not is_of_files(error):
            raise
        raise UserError(one_line(error)) from error


if __name__ == "__main__":
    entry.run(main)
