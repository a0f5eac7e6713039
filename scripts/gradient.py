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
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from types import FrameType
from typing import Any

from absl import logging as absl_logging
from etils import epath

from common import console, entry
from common.data.files import MANIFEST, matching_paths, write
from common.errors import CheckpointError, UserError, count, is_of_files, one_line, parse_json, some
from engine import environment, locations, recipe
from engine.cluster import preemption

ALREADY_FINISHED = 3  # exit code of the step `begin`
RECORD = "job.json"  # the flags of the run that ended
STAGED = "job_staged.json"  # the files that the job copied into its input
METADATA = "gradient-model-metadata.json"
SWITCHES = ("KEEP_INPUT", "DELETE_INPUT", "EXPORT_MODEL")
THREADS = 8  # for copies, and for requests to gs://
BATCH = 64  # files that are copied between two writes of STAGED
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN_FLAGS = ("workdir", "mode", "coordinator", "config.data_dir", "config.keep_checkpoints")
_KEEP = "--config.keep_checkpoints=1"  # the newest; the best one stays as well


@dataclasses.dataclass(frozen=True)
class Request:
    """The job that the environment and the command line ask for."""

    input: epath.Path
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
        output=epath.Path(root) / "output_data",
        flags=[*(() if "config" in names else ["--config=configs/resnet50.py"]), *flags],
        stage_from=source,
        switches={name for name in SWITCHES if env.get(name) == "1"},
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
            self._child.send_signal(self.stop_signal)
        code = self._child.wait()
        self._child = None
        return code if code >= 0 else 128 - code

    def _note(self, signum: int, frame: FrameType | None) -> None:
        meaning = preemption.Preempted(signum).code - 128  # SIGINT or SIGTERM
        self.stop_signal = self.stop_signal or meaning
        if self._child is not None:
            self._child.send_signal(self.stop_signal)


def run(request: Request, children: Children) -> int:
    """Runs the job; returns the exit code of the step that failed, or 0."""
    workdir, flags = f"--workdir={request.output}", request.flags
    this, main_py = [sys.executable, "-m", "scripts.gradient"], [sys.executable, "main.py"]
    train = [*main_py, *flags, workdir, f"--config.data_dir={request.input}", _KEEP]
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
            state = "" if step == "finishing" else ": nothing was deleted"
            text = (
                f"job: {step} ended with exit code {code}{state}. The same command continues here"
            )
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

        words = [word for flag in request.flags for word in flag.split("=", 1)]
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
    from engine.checkpoint import Checkpointer  # imports jax, which `main` precedes
    from engine.report.history import History

    checkpoints = Checkpointer(f"{workdir}/checkpoints", keep=1, best=None)
    with contextlib.closing(checkpoints):
        if not (steps := checkpoints.steps()):
            raise CheckpointError(f"no complete checkpoint in {checkpoints.directory}")
        manifest = checkpoints.manifest(steps[-1])
    history = History(workdir, writes=False)
    history.restore(manifest.get("evaluations", []))
    scores, values = history.scores(), {}
    best = history.best(manifest.get("target_metric", ""))
    for prefix, step in (("", best), ("last_", max(scores, default=None))):
        if step is not None:
            values |= {prefix + k: v for k, v in {**scores[step], "step": step}.items()}
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return {"metrics": [{"name": k, "numberValue": v} for k, v in finite.items()]}


def stage(request: Request, groups: Sequence[Sequence[str]]) -> None:
    """Copies the benchmark's files, unless the input has a file of the same name and size.

    `groups` are the patterns of `benchmarks.mlperf.Entry.files`; a file must match the first group.
    STAGED lists what is copied, so that no other file is ever overwritten or deleted: before the
    copy with null, after it with its version.
    """
    source, target, record = epath.Path(request.stage_from), request.input, request.output / STAGED
    patterns = [pattern for group in (*groups, [MANIFEST]) for pattern in group]
    found = {p: matching_paths(f"{source}/{p}", str(source)) for p in patterns}
    if not any(found[pattern] for pattern in groups[0]):
        raise UserError(f"STAGE_FROM={source} holds no files {' or '.join(groups[0])}")
    names = [path.removeprefix(f"{source}/") for paths in found.values() for path in paths]
    wanted, listed = _versions(source, names), _staged(request)
    present = _versions(target, {**listed, **wanted})
    staged = {name: version for name, version in present.items() if listed.get(name) == version}
    for name in [name for name in listed if listed[name] is None]:  # killed before it was noted
        _part(target / name).unlink(missing_ok=True)
        if name in present and name in wanted and _equal(source / name, target / name):
            staged[name] = present[name]
    missing = [name for name in wanted if present.get(name, [-1])[0] != wanted[name][0]]
    if foreign := [name for name in missing if name in present and name not in staged]:
        raise UserError(
            f"{target / foreign[0]} has another size than in STAGE_FROM={source}, and this job did "
            "not copy it: move it away, or unset STAGE_FROM to train on the input as it is"
        )
    _say(f"staging {len(missing)} of {len(wanted)} files from {source} into {target}")
    total = sum(wanted[name][0] for name in missing)
    progress = console.ProgressBar("staging", len(missing), "files", total)

    def copy(name: str) -> None:
        path, part = target / name, _part(target / name)
        try:
            if not _is_remote(target):
                part.parent.mkdir(parents=True, exist_ok=True)
            (source / name).copy(part, overwrite=True)
            if (arrived := part.stat().length) != wanted[name][0]:
                raise OSError(f"{arrived} bytes arrived, not {wanted[name][0]}; did it change?")
            part.replace(path)
        except Exception as error:  # errors of the disk, or TensorFlow's classes
            raise UserError(f"cannot stage {source / name}: {one_line(error)}") from error
        progress.add(1, wanted[name][0])

    for start in range(0, len(missing), BATCH):
        batch = missing[start : start + BATCH]
        _write(record, staged | dict.fromkeys(batch))
        with futures.ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(copy, batch))
        staged |= _versions(target, batch)
    _write(record, staged)
    if missing:
        progress.close()


def clear_input(request: Request) -> None:
    """Deletes the files that the job copied and nobody changed; with DELETE_INPUT=1 everything."""
    folder, listed = request.input, _staged(request)
    if "KEEP_INPUT" in request.switches:
        _say(f"{folder} stays, because of KEEP_INPUT=1; the platform may upload it with the rest")
        return
    copies = [name for name, found in _versions(folder, listed).items() if found == listed[name]]
    with futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda name: (folder / name).unlink(missing_ok=True), copies))
    for parent in sorted({p for name in copies for p in pathlib.PurePath(name).parents})[::-1]:
        with contextlib.suppress(OSError):  # not empty; gs:// has no folders
            os.rmdir(folder / parent)
    if copies:
        _say(f"deleted {count(len(copies), 'file')} that the job had copied into {folder}")
    deletes = "DELETE_INPUT" in request.switches and folder.is_dir()
    if deletes:
        with contextlib.suppress(OSError):  # a symbolic link or a mount point, among others
            folder.rmtree()
    if left := sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []:
        hint = "" if deletes or os.path.islink(folder) else "; DELETE_INPUT=1 makes it delete all"
        does = "could not delete" if deletes else "did not copy"
        _say(f"{folder} keeps {some(left, 1)}, which the job {does}{hint}")
    elif deletes:
        _say(f"deleted {folder}, because of DELETE_INPUT=1")


def _versions(folder: epath.Path, names: Iterable[str]) -> dict[str, list[int]]:
    """The files that exist, with their sizes in bytes and the times of their last change."""

    def version(name: str) -> list[int]:
        path = folder / name
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = path.stat()
            mtime = status.mtime if _is_remote(path) else os.stat(path).st_mtime_ns
            return [] if status.is_directory else [status.length, mtime]
        return []

    names = [*names]
    with futures.ThreadPoolExecutor(THREADS) as pool:
        return {k: v for k, v in zip(names, pool.map(version, names), strict=True) if v}


def _part(path: epath.Path) -> epath.Path:
    """Where a copy is while it is not complete; the readers' train-* does not match it."""
    return path.parent / f".staging.{path.name}"


def _equal(one: epath.Path, other: epath.Path) -> bool:
    """Whether two files have the same bytes."""
    with one.open("rb") as first, other.open("rb") as second:
        while (block := first.read(1 << 22)) == second.read(1 << 22):
            if not block:
                return True
    return False


def _is_remote(path: epath.Path) -> bool:
    return str(path).startswith("gs://")


def _read(path: epath.Path) -> dict[str, Any]:
    """A JSON object; {} if it is missing or damaged."""
    try:
        content = parse_json(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _staged(request: Request) -> dict[str, Any]:
    """The files that the job has copied into its input, as STAGED lists them."""
    listed = _read(request.output / STAGED)
    return {k: v for k, v in listed.items() if k[:1] != "/" and ".." not in k.split("/")}


def _write(path: epath.Path, content: dict[str, Any]) -> None:
    write(str(path), [json.dumps(content, indent=2).encode(), b"\n"])


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
