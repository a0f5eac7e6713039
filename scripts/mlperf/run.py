"""Trains to MLPerf's target several times; started by run_and_time.sh. See docs/mlperf.md.

Each run is a process of main.py in a folder of its own, with a seed of its own. This one starts
them in order, passes SIGTERM and Ctrl-C on, and collects their logs. Killed at any time, the same
command goes on: a run that has ended is collected then.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from etils import epath

from engine.mlperf import LOG
from errors import one_line
from scripts.job.run import Children
from scripts.mlperf import logs as mlperf_logs
from scripts.mlperf import system as mlperf_system
from scripts.mlperf.request import Request, UsageError, command, notes, parse, settle, write

TIMING = "timing.txt"  # in the folder of a run: the line that says when it was started
_TIME = "%Y-%m-%d %I:%M:%S %p"


class StoreError(RuntimeError):
    """A file of the runs cannot be read or written; the message is one line."""


def run(request: Request, children: Children) -> int:
    """Makes the runs that are missing; returns the exit code of the one that failed, or 0.

    Raises:
      StoreError: a file cannot be read or written; whatever has run is collected at the next start.
    """
    root = epath.Path(request.model_dir)
    for index, seed in enumerate(request.seeds()):
        folder = root / f"run_{index}"
        with _files(folder):
            if f"result_{index}.txt" in _results(root, request.name):
                _say(f"run {index} of {request.runs} has its result already")
                continue
            if _complete(folder):
                _say(f"run {index} of {request.runs} has ended already")
                _collect(request, index, None)
                continue
        _say(f"run {index} of {request.runs}: seed {seed}, in {folder}")
        with _files(folder):
            _begin(request, folder)
        code = children.run(command(request, index, seed), os.environ)
        ended = time.time()
        if code:
            _say(f"run {index} ended with exit code {code}{_remedy(folder)}")
            summarize(request)
            return code
        with _files(folder):
            _collect(request, index, ended)
    summarize(request)
    return 0


@contextlib.contextmanager
def _files(folder: Any) -> Iterator[None]:
    """Says in one line what is wrong with files; each file system has errors of its own."""
    try:
        yield
    except mlperf_logs.LogError as error:
        raise StoreError(f"{folder / LOG}: {error}") from error
    except Exception as error:  # each file system has errors of its own
        raise StoreError(
            f"{folder}: {one_line(error)}; mend it, and the same command goes on, and "
            "collects this run if it has ended"
        ) from error


def _complete(folder: Any) -> bool:
    """Whether the log of a run has its end."""
    return (folder / LOG).exists() and mlperf_logs.load(folder / LOG).complete


def _remedy(folder: Any) -> str:
    """What to do about a run that has failed."""
    with _files(folder):
        if _complete(folder):
            return " after its clock had stopped: the same command collects it, and goes on"
        if (folder / LOG).exists():
            return (
                " and has no result; a run may not be resumed: mend the cause, delete "
                f"{folder}, and the same command goes on with it"
            )
    return " before it began; mend the cause, and the same command goes on with it"


def _begin(request: Request, folder: Any) -> None:
    """Notes the time, where the next start finds it."""
    if request.first:
        line = f"STARTING TIMING RUN AT {_clock(time.time())}"
        if not (folder / LOG).exists():  # main.py refuses to run there, and that log has its time
            write(folder / TIMING, f"{line}\n")
        print(line, flush=True)


def _collect(request: Request, index: int, ended: float | None) -> None:
    """Puts the log of a run where the checkers look for it, with the system's description.

    `ended` is when its process did; None, for a run of an earlier start: when its clock stopped.
    """
    if not request.first:
        return
    root = epath.Path(request.model_dir)
    folder = root / f"run_{index}"
    found = mlperf_logs.load(folder / LOG)
    log = (folder / LOG).read_text().rstrip("\n")
    first, *last = _lines(request.name, folder, found, ended)
    system = re.sub(r"[^\w.-]", "-", str(found.values.get("submission_platform", "tpu")))
    described = root / "systems" / f"{system}.json"
    if not found.is_v05 and not described.exists():  # or what a person has added would go
        text = json.dumps(mlperf_system.describe(system, found.values), indent=2)
        write(described, f"{text}\n")
    # The result comes last: where it is, the run is not looked at again.
    path = root / "results" / system / request.name / f"result_{index}.txt"
    write(path, "\n".join([first, log, *last, ""]))
    print("\n".join(last), flush=True)
    _say(f"wrote {path}")


def _lines(name: str, folder: Any, found: mlperf_logs.Run, ended: float | None) -> list[str]:
    """The lines around the log: STARTING, ENDING, RESULT."""
    ended = ended or found.ended or 0.0
    begun, first = found.begun or ended, ""
    if (folder / TIMING).exists():
        first = (folder / TIMING).read_text().strip()
        begun = time.mktime(time.strptime(first.partition(" AT ")[2], _TIME))
    return [
        first or f"STARTING TIMING RUN AT {_clock(begun)}",
        f"ENDING TIMING RUN AT {_clock(ended)}",
        f"RESULT,{name},0,{ended - begun:.0f},{_user()},{_clock(begun)}",
    ]


def _results(root: Any, name: str) -> dict[str, Any]:
    """{"result_0.txt": its path, ...} of the one system that has any."""
    folder = root / "results"
    systems = sorted(p for p in folder.iterdir() if p.is_dir()) if folder.exists() else []
    return {f.name: f for system in systems for f in sorted((system / name).glob("result_*.txt"))}


def summarize(request: Request) -> None:
    """Writes summary.json of the results that there are, and says it.

    Raises:
      StoreError: a file cannot be read or written.
    """
    if not request.first:
        return
    root = epath.Path(request.model_dir)
    rows: dict[str, Any] = {}
    with _files(root):
        for file, path in _results(root, request.name).items():
            rows[file] = _row(file, mlperf_logs.load(path))
        if not rows:
            return
        means = {
            key: mlperf_logs.olympic([r[key] if r["success"] else None for r in rows.values()])
            for key in ("epochs", "minutes")
        }
        facts = {"benchmark": request.name, "runs": rows, "olympic_mean": means}
        write(root / "summary.json", json.dumps(facts, indent=2) + "\n")
    if means["minutes"] is not None:
        _say(f"mean without best and worst: {means['minutes']:.2f} minutes")
    _say(f"wrote {root / 'summary.json'}; check: python -m scripts.mlperf.check {root}")


def _row(file: str, run: mlperf_logs.Run) -> dict[str, Any]:
    """What the summary has of a run, which is also said."""
    minutes = "?" if run.minutes is None else f"{run.minutes:.2f}"
    reached = f"epoch {run.epochs:g}" if run.epochs is not None else "target NOT reached"
    _say(f"{file}: {minutes} minutes, {reached}")
    facts = {"seed": run.values.get("seed"), "success": run.success}
    accuracy = run.evals[-1][1] if run.evals else None
    return facts | {"epochs": run.epochs, "minutes": run.minutes, "accuracy": accuracy}


def _clock(seconds: float) -> str:
    return time.strftime(_TIME, time.localtime(seconds))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _say(text: str) -> None:
    print(f"mlperf: {text}", flush=True)


def main() -> int:
    """Makes the runs that the environment and the command line describe."""
    try:
        request = settle(parse(sys.argv[1:], os.environ))
        if request.first:
            print("\n".join([*notes(request), f"mlperf: --seed={request.seed}"]), flush=True)
        children = Children()
        children.listen()
        return run(request, children)
    except (UsageError, StoreError) as error:
        for line in str(error).splitlines():
            print(f"ERROR: {line}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
