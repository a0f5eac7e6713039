"""Runs a job under Gradient's contract (docs/run.md); scripts/gradient_job.sh starts it.

Each step is a process: main.py, and this program itself with `begin` or `finish` before the flags.
The first process reads the environment, starts the steps in order and passes the signals that ask
to stop on to them. If it is killed, the same command completes the job.

`finish` writes the flags of the run, and the files that the input had when the job began, to
output_data/job.json before it deletes the input. A later `begin` with the same flags then only
completes the deletion of these files.
"""

import contextlib
import dataclasses
import fnmatch
import json
import logging
import math
import os
import pathlib
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

from common import console, entry
from common.data.files import MANIFEST, write
from common.data.shards import tensorflow
from common.errors import CheckpointError, UserError, is_of_files, one_line, parse_json
from engine import environment, locations, recipe
from engine.cluster import preemption

ALREADY_FINISHED = 3  # exit code of the step `begin`
RECORD = "job.json"
STAGED = "job_input.json"  # the files of the input at the beginning
METADATA = "gradient-model-metadata.json"
THREADS = 8  # for copies, and for requests to gs://
_MOUNTS, _BLANK = "/proc/self/mounts", r"\040"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWNED = {
    "workdir": "results go to $TPU_MODEL_DIR/output_data",
    "mode": "it trains and evaluates",
    "coordinator": "it drives one host",
    "config.data_dir": "it reads $TPU_MODEL_DIR/input_data",
    "config.keep_checkpoints": "the newest and the best checkpoint stay",
}
_RECIPE = "--config=configs/resnet50.py"
_KEEP = "--config.keep_checkpoints=1"  # the newest; the best one stays as well


@dataclasses.dataclass(frozen=True)
class Request:
    """The job that the environment and the command line ask for; `flags` are main.py's."""

    input: epath.Path
    output: epath.Path
    flags: list[str]
    keep_input: bool = False
    stage_from: str = ""
    exports: bool = False


def parse_request(flags: Sequence[str], env: Mapping[str, str]) -> Request:
    """Reads and checks the environment and the flags of main.py, of which the job sets some."""
    model_dir, source = env.get("TPU_MODEL_DIR", "").strip(), env.get("STAGE_FROM", "").strip()
    if not model_dir:
        raise UserError(
            "TPU_MODEL_DIR is not set: give the job's folder, gs://BUCKET/FOLDER or /FOLDER; the "
            "records are in its input_data"
        )
    for name, path in (("TPU_MODEL_DIR", model_dir), ("STAGE_FROM", source)):
        is_local = path and "://" not in locations.check_path(path, name)
        if is_local and (not os.path.isabs(path) or os.path.isfile(path)):
            raise UserError(f"{name}={path}: give gs://BUCKET/FOLDER or a folder's absolute path")
    for flag in flags:
        name = re.sub(r"^--?", "", flag.partition("=")[0])
        if name in _OWNED:
            raise UserError(f"--{name} cannot be given to a job: {_OWNED[name]}")
    hosts = [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if len(hosts) > 1:
        raise UserError(
            f"this TPU slice has {len(hosts)} hosts and the job drives one: run main.py on each of "
            f"them, with {_KEEP}"
        )
    if not any(re.match(r"--?config(=|$)", flag) for flag in flags):
        flags = [_RECIPE, *flags]
    for name in ("KEEP_INPUT", "EXPORT_MODEL"):
        if (value := env.get(name, "")) not in ("", "0", "1"):
            raise UserError(f"{name}={value}: must be 0 or 1")
    root = epath.Path(model_dir)
    return Request(
        input=root / "input_data",
        output=root / "output_data",
        flags=[*flags],
        keep_input=env.get("KEEP_INPUT") == "1",
        stage_from=source,
        exports=env.get("EXPORT_MODEL") == "1",
    )


class Children:
    """Runs one child at a time and passes signals on to it."""

    def __init__(self):
        self.stop_signal = 0  # the first signal that arrived
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
            self._forward()
        code = self._child.wait()
        self._child = None
        return code if code >= 0 else 128 - code

    def _note(self, signum: int, frame: FrameType | None) -> None:
        meaning = preemption.Preempted(signum).code - 128  # SIGINT or SIGTERM
        self.stop_signal = self.stop_signal or meaning
        self._forward()

    def _forward(self) -> None:
        if self._child is not None:
            self._child.send_signal(self.stop_signal)


def run(request: Request, children: Children) -> int:
    """Runs the job; returns the exit code of the step that failed, or 0."""
    workdir = f"--workdir={request.output}"
    this = [sys.executable, "-m", "scripts.gradient"]
    main_py = [sys.executable, "main.py"]
    train = [*main_py, *request.flags, workdir, f"--config.data_dir={request.input}", _KEEP]
    export = [*main_py, "--mode=export", "--format=savedmodel", workdir]
    misplaced = f"nothing was deleted; records belong in {request.input}"
    complete = f"the trained run is complete, in {request.output}"
    steps = [
        ("preparing", [*this, "begin", *request.flags], "nothing was trained or deleted"),
        ("the doctor", [*train, "--mode=doctor"], misplaced),
        ("training", [*train, "--mode=train_and_eval"], "nothing was deleted"),
    ]
    if request.exports:
        steps.append(("exporting", export, f"nothing was deleted; {complete}"))
    steps.append(("finishing", [*this, "finish", *request.flags], complete))
    for step, command, state in steps:
        code = children.run(command, os.environ)
        if step == "preparing" and code == ALREADY_FINISHED:
            return 0
        if code:
            text = f"{step} ended with exit code {code}: {state}. The same command continues here"
            print(f"job: {text}", file=sys.stderr, flush=True)
            return code
    _say(f"finished; everything is in {request.output}")
    return 0


def begin(request: Request) -> int:
    """Stages the input and returns 0; if the job has finished, deletes it: ALREADY_FINISHED."""
    record = _read(request.output / RECORD)
    trained = any((request.output / "checkpoints").glob("*/manifest"))
    if record.get("flags") == request.flags and trained:
        _say(f"already finished: the run in {request.output} was trained with these flags")
        _clear_input(request, record["input"])
        return ALREADY_FINISHED
    if record:
        flags = " ".join(record.get("flags", []))
        _say(f"NOTE the run in {request.output} was finished with other flags: {flags}")
    if request.stage_from:
        from benchmarks import mlperf  # imports jax, which `_step` precedes

        words = [word for flag in request.flags for word in flag.split("=", 1)]
        file = words[[word.lstrip("-") for word in words].index("config") + 1]
        if not os.path.exists(file.partition(":")[0]):
            raise UserError(f"--config={file}: there is no such file")
        groups = mlperf.entry(recipe.load(file).benchmark).files
        stage(epath.Path(request.stage_from), request.input, groups)
    _write(request.output / STAGED, files(request.input))
    return 0


def finish(request: Request) -> int:
    """Writes the metadata and the record, then deletes the input; returns 0."""
    _write(request.output / METADATA, metadata(str(request.output)))
    _say(f"wrote {request.output / METADATA}")
    staged = _read(request.output / STAGED)
    _write(request.output / RECORD, {"flags": request.flags, "input": staged})
    _clear_input(request, staged)
    return 0


def _clear_input(request: Request, known: dict[str, Any]) -> None:
    """Deletes the input unless it has files that came after the job began."""
    folder = request.input
    if request.keep_input:
        _say(f"{folder} stays, because of KEEP_INPUT=1; the platform may upload it with the rest")
        return
    if reason := _why_foreign(folder):
        _say(f"{folder} is not deleted: {reason}")
        return
    items = files(folder)
    if new := sorted(name for name, item in items.items() if known.get(name) != item):
        _say(
            f"{folder} is not deleted: {len(new)} files there, such as {new[0]!r}, came after "
            "the job began; another run wants another TPU_MODEL_DIR"
        )
        return
    with futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda name: (folder / name).unlink(missing_ok=True), items))
    for path, _, _ in os.walk(folder, topdown=False):  # nothing on gs://
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(path)
    with contextlib.suppress(OSError, ValueError):  # the object of a folder on gs://
        folder.rmdir()
    if items:
        size = f"{sum(size for size, _ in items.values()) / 1e6:,.1f} MB"
        _say(f"deleted the staged input {folder}: {len(items):,} files, {size}")


def metadata(workdir: str) -> dict[str, Any]:
    """The scores of the best and of the last evaluation of a run, in Gradient's format."""
    from engine.checkpoint import Checkpointer  # imports jax, which `_step` precedes
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
    metrics = []
    for prefix, step in (("", best), ("last_", max(scores, default=None))):
        values = {} if step is None else {**scores[step], "step": step}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        metrics += [{"name": prefix + name, "numberValue": finite[name]} for name in finite]
    return {"metrics": metrics}


def stage(source: epath.Path, target: epath.Path, groups: Sequence[Sequence[str]]) -> None:
    """Copies the benchmark's files, unless the target has a file of the same name and size.

    `groups` are the patterns of `benchmarks.mlperf.Entry.files`; a file must match the first group.
    """
    real = [str(p) if _is_remote(p) else os.path.realpath(p) for p in (source, target)]
    if f"{real[0]}/".startswith(f"{real[1]}/"):
        raise UserError(f"STAGE_FROM={source} is the input folder itself, or a folder in it")
    if reason := _why_foreign(target):
        raise UserError(f"cannot stage: {reason}")
    sizes, existing = ({k: v[0] for k, v in files(folder).items()} for folder in (source, target))
    patterns = [pattern for group in groups for pattern in group]
    needed = [name for name in sizes if name == MANIFEST or _matches(name, patterns)]
    if not any(_matches(name, groups[0]) for name in needed):
        raise UserError(f"STAGE_FROM={source} holds no files {' or '.join(groups[0])}")
    missing = [name for name in needed if existing.get(name) != sizes[name]]
    others = len(sizes) - len(needed)
    _say(
        f"staging {len(missing)} of {len(needed)} files from {source} into {target}"
        + (f"; {others} other files there are not the benchmark's data" if others else "")
    )
    total = sum(sizes[name] for name in missing)
    progress = console.ProgressBar("staging", len(missing), "files", total)

    def copy(name: str) -> None:
        path = target / name
        part = path.parent / f".staging.{path.name}"  # does not match the readers' train-*
        try:
            if not _is_remote(target):
                part.parent.mkdir(parents=True, exist_ok=True)
            (source / name).copy(part, overwrite=True)
            if (arrived := part.stat().length) != sizes[name]:
                raise OSError(f"{arrived} bytes arrived, not {sizes[name]}: did the file change?")
            part.replace(path)
        except Exception as error:  # errors of the disk, or TensorFlow's classes
            raise UserError(f"cannot stage {source / name}: {one_line(error)}") from error
        progress.add(1, sizes[name])

    with futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(copy, [name for name in missing if name != MANIFEST]))
    if MANIFEST in missing:  # the last: it describes complete files
        copy(MANIFEST)
    if missing:
        progress.close()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a path matches a pattern, whose asterisks match no slash."""
    folder, file = os.path.split(name)
    parts = map(os.path.split, patterns)
    return any(folder == p and fnmatch.fnmatchcase(file, pattern) for p, pattern in parts)


def files(folder: epath.Path) -> dict[str, list[Any]]:
    """All files below a folder, by their paths relative to it; {} if there is no folder.

    The values are the size in bytes, and a text that changes with every write. Links are not
    followed.
    """
    if _is_remote(folder):
        tf, names, tops = tensorflow(), list[str](), [""]
        for top in tops:  # one request for each folder; gfile.walk makes one for each file
            with contextlib.suppress(tf.errors.NotFoundError):
                for name in tf.io.gfile.listdir(f"{folder}/{top}"):
                    if not name.startswith("/"):  # epath would take it for a local file
                        (tops if name.endswith("/") else names).append(top + name)
        with futures.ThreadPoolExecutor(THREADS) as pool:
            statuses = pool.map(lambda name: (folder / name).stat(), names)
            return {k: [v.length, str(v.mtime)] for k, v in zip(names, statuses, strict=True)}
    items: dict[str, list[Any]] = {}
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_symlink() or not path.is_dir():
            status = path.lstat()
            version = f"{status.st_ino}-{status.st_mtime_ns}"
            items[str(path.relative_to(folder))] = [status.st_size, version]
    return items


def _why_foreign(folder: epath.Path) -> str:
    """The reason why a job must not write or delete in a folder; "" if it may."""
    if _is_remote(folder):
        return ""
    if os.path.islink(folder):
        return f"{folder} is a symbolic link"
    real = f"{os.path.realpath(folder)}/"
    with contextlib.suppress(FileNotFoundError), open(_MOUNTS, errors="replace") as table:
        for line in table:
            if f"{(point := line.split()[1].replace(_BLANK, ' '))}/".startswith(real):
                return f"{point} is a mounted file system"
    return ""


def _is_remote(path: epath.Path) -> bool:
    return str(path).startswith("gs://")


def _read(path: epath.Path) -> dict[str, Any]:
    """A JSON document; {} if it is missing or damaged."""
    try:
        return parse_json(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def _write(path: epath.Path, content: dict[str, Any]) -> None:
    write(str(path), [json.dumps(content, indent=2).encode(), b"\n"])


def _say(text: str) -> None:
    print(f"job: {text}", flush=True)


def _step(step: str, request: Request) -> int:
    """Prepares or finishes a job; every failure of a file is one line."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # off the TPU; before jax and TensorFlow are imported
    environment.set_defaults()
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no stack trace: a later start can continue
    try:
        return begin(request) if step == "begin" else finish(request)
    except Exception as error:
        if not (isinstance(error, UserError) or is_of_files(error)):
            raise
        raise UserError(one_line(error)) from error


def main() -> int:
    """Runs the job that the environment and the command line describe, or a step of it."""
    words = sys.argv[1:]
    if words[:1] in (["begin"], ["finish"]):
        return _step(words[0], parse_request(words[1:], os.environ))
    request = parse_request(words, os.environ)
    children = Children()
    children.listen()
    return run(request, children)


if __name__ == "__main__":
    entry.run(main)
