"""Trains to MLPerf's targets several times (docs/mlperf.md); run_and_time.sh starts it.

Each run is a process of main.py with a separate folder and seed. This program starts the runs in
order, one benchmark after the other, passes the signals that ask to stop on to them, and collects
their logs. If the program is killed, the same command continues; it first collects a run that has
ended in the meantime.
"""

import contextlib
import getpass
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from common import entry
from common.errors import UserError, one_line
from engine import environment
from engine.mlperf import LOG
from scripts.gradient import Children
from scripts.mlperf import logs, system
from scripts.mlperf.request import (
    Request,
    command_line,
    complete_request,
    parse_requests,
    write_file,
)

TIMING = "timing.txt"  # in the folder of a run: its STARTING line
_TIME = "%Y-%m-%d %I:%M:%S %p"


def run_all(requests: Sequence[Request], children: Children) -> int:
    """Runs one benchmark after the other; returns the exit code of the first that failed, or 0.

    The doctor checks all of them before the first begins; benchmarks that pass run.
    """
    codes: dict[str, int] = {}
    for request in requests:
        if not (codes and children.stop_signal) and (code := examine(request, children)):
            codes[request.benchmark] = code
    for request in requests:
        if request.benchmark in codes or (codes and children.stop_signal):
            continue
        if request.is_first:
            _say(f"{request.benchmark}: --seed={request.seed}")
        try:
            codes[request.benchmark] = run(request, children)
        except UserError as error:
            print(f"ERROR: {error}", file=sys.stderr, flush=True)
            codes[request.benchmark] = 1
    failed = [code for request in requests if (code := codes.get(request.benchmark))]
    if len(requests) > 1:
        for request in requests:
            code = codes.get(request.benchmark)
            state = "not begun" if code is None else f"failed, exit code {code}" if code else "done"
            _say(f"{request.benchmark}: {state}, in {request.model_dir}")
        if failed:
            _say("the same command continues with what is missing")
    return failed[0] if failed else 0


def examine(request: Request, children: Children) -> int:
    """Asks the doctor whether the first run can start; returns its exit code.

    It is not asked if all runs have ended.
    """
    root = epath.Path(request.model_dir)
    with contextlib.suppress(UserError), _files(root):  # `run` says what is wrong
        results = _results(root, request.entry.name)
        ended = [_is_complete(root / f"run_{index}") for index in range(request.runs)]
        if all(end or f"result_{index}.txt" in results for index, end in enumerate(ended)):
            return 0
    command = [*command_line(request, 0, request.seeds()[0]), "--mode=doctor"]
    code = children.run(command, os.environ)
    if code and not children.stop_signal:
        entry, begins = request.entry, request.init_from
        _say(
            f"{request.benchmark} does not start: the doctor says why above; {entry.variable} is "
            f"{request.data_dir}" + (f", {entry.init_variable} is {begins}" if begins else "")
        )
    return code


def run(request: Request, children: Children) -> int:
    """Starts the missing runs; returns the exit code of the run that failed, or 0.

    Where a file cannot be written (UserError), the next start collects the runs that ended.
    """
    root = epath.Path(request.model_dir)
    for index, seed in enumerate(request.seeds()):
        folder = root / f"run_{index}"
        with _files(folder):
            if f"result_{index}.txt" in _results(root, request.entry.name):
                _say(f"run {index} of {request.runs} has its result already")
                continue
            if _is_complete(folder):
                _say(f"run {index} of {request.runs} has ended already")
                _collect(request, index, None)
                continue
        _say(f"run {index} of {request.runs}: seed {seed}, in {folder}")
        with _files(folder):
            counted, target = root / "run_0" / "data_index", folder / "data_index"
            if request.is_first and index and counted.exists() and not target.exists():
                target.mkdir(parents=True)
                for path in counted.iterdir():  # so that no run counts the data again
                    path.copy(target / path.name)
            _note_start(request, folder)
        started = time.monotonic()
        code = children.run(command_line(request, index, seed), os.environ)
        seconds = time.monotonic() - started
        if code:
            _say(f"run {index} ended with exit code {code}{_fix(folder)}")
            summarize(request)
            return code
        with _files(folder):
            _collect(request, index, seconds)
    summarize(request)
    return 0


@contextlib.contextmanager
def _files(folder: Any) -> Iterator[None]:
    """Turns an error of a file into one line with a fix."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{folder / LOG}: {error}") from error
    except Exception as error:  # file systems raise different errors
        raise UserError(
            f"{folder}: {one_line(error)}; remove the cause, and type the same command, "
            "which continues. It collects this run if the run has ended"
        ) from error


def _is_complete(folder: Any) -> bool:
    """Whether the log of a run is complete."""
    return (folder / LOG).exists() and logs.load(folder / LOG).complete


def _fix(folder: Any) -> str:
    """The fix for a run that has failed."""
    with _files(folder):
        if _is_complete(folder):
            return " after its clock had stopped: the same command collects it, and continues"
        if (folder / LOG).exists():
            return (
                " and has no result; a run may not be resumed: remove the cause, delete "
                f"{folder}, and the same command continues with it"
            )
    return " before it began; remove the cause, and the same command continues with it"


def _note_start(request: Request, folder: Any) -> None:
    """Prints the time of the start, and keeps it for a later process."""
    if request.is_first:
        line = f"STARTING TIMING RUN AT {_clock(time.time())}"
        if not (folder / LOG).exists():  # main.py refuses a folder with a log; keep its time
            write_file(folder / TIMING, f"{line}\n")
        print(line, flush=True)


def _collect(request: Request, index: int, seconds: float | None) -> None:
    """Copies the log of a run to results/, and describes the system.

    `seconds` is how long the run's process took, which has just ended. It is None if an earlier
    process of this program started the run; then the time when the run's clock stopped counts.
    """
    if not request.is_first:
        return
    root = epath.Path(request.model_dir)
    folder = root / f"run_{index}"
    result, name = logs.load(folder / LOG), request.entry.name
    ended = time.time() if seconds is not None else result.ended or 0.0
    begun = f"STARTING TIMING RUN AT {_clock(result.started or ended)}"
    if (folder / TIMING).exists():
        begun = (folder / TIMING).read_text().strip()
    start = begun.partition(" AT ")[2]
    if seconds is None:
        seconds = max(ended - time.mktime(time.strptime(start, _TIME)), 0.0)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    last = [
        f"ENDING TIMING RUN AT {_clock(ended)}",
        f"RESULT,{name},0,{seconds:.0f},{user},{start}",
    ]
    platform = re.sub(r"[^\w.-]", "-", str(result.values.get("submission_platform", "tpu")))
    description = root / "systems" / f"{platform}.json"
    if result.form != "v0.5" and not description.exists():  # a user may have completed it
        text = json.dumps(system.describe(platform, result.values), indent=2)
        write_file(description, f"{text}\n")
    # The result is written last, because a run with a result counts as collected.
    path = root / "results" / platform / name / f"result_{index}.txt"
    log = (folder / LOG).read_text().rstrip("\n")
    write_file(path, "\n".join([begun, log, *last, ""]))
    print("\n".join(last), flush=True)
    _say(f"wrote {path}")


def _results(root: Any, name: str) -> dict[str, Any]:
    """{"result_0.txt": path, ...} of all systems."""
    folder = root / "results"
    systems = sorted(p for p in folder.iterdir() if p.is_dir()) if folder.exists() else []
    paths = [path for platform in systems for path in (platform / name).glob("result_*.txt")]
    return {path.name: path for path in sorted(paths)}


def summarize(request: Request) -> None:
    """Writes summary.json of all results, and prints the results."""
    if not request.is_first:
        return
    root = epath.Path(request.model_dir)
    rows: dict[str, Any] = {}
    with _files(root):
        for file, path in _results(root, request.entry.name).items():
            log = logs.load(path)
            _say(f"{file}: {log}")
            rows[file] = {
                "seed": log.values.get("seed"),
                "success": log.success,
                "epochs": log.epochs,
                "minutes": log.minutes,
                "accuracy": log.evals[-1][1] if log.evals else None,
            }
        if not rows:
            return
        means = {
            key: logs.olympic([r[key] if r["success"] else None for r in rows.values()])
            for key in ("epochs", "minutes")
        }
        summary = {"benchmark": request.entry.name, "runs": rows, "olympic_mean": means}
        write_file(root / "summary.json", json.dumps(summary, indent=2) + "\n")
    if means["minutes"] is not None:
        _say(f"mean without best and worst: {means['minutes']:.2f} minutes")
    _say(f"wrote {root / 'summary.json'}; check: python -m scripts.mlperf.check {root}")


def _clock(seconds: float) -> str:
    return time.strftime(_TIME, time.localtime(seconds))


def _say(text: str) -> None:
    print(f"mlperf: {text}", flush=True)


def main() -> int:
    """Starts the runs that the environment and the command line ask for."""
    requests = [complete_request(request) for request in parse_requests(sys.argv[1:], os.environ)]
    if len(requests) > 1 and requests[0].is_first:
        _say(f"{len(requests)} benchmarks, one after the other:")
        for one in requests:
            begins = f", begins with {one.init_from}" if one.init_from else ""
            what = f"{one.benchmark}: {one.runs} runs of {one.flags[0]} on {one.data_dir}"
            _say(f"  {what}, in {one.model_dir}{begins}")
    children = Children()
    children.listen()
    return run_all(requests, children)


if __name__ == "__main__":
    environment.set_defaults()  # TensorFlow's lines of greeting stay away
    entry.run(main)
