"""Collects what the runs of run_and_time.sh leave: logs, the system, a summary; reads the logs."""

import contextlib
import dataclasses
import glob
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Collection, Iterator
from typing import Any

from etils import epath

from common.errors import UserError, one_line, parse_json
from engine.devices import installed_version
from engine.mlperf import LOG

REQUEST_FILE = "request.json"  # in the folder of all runs: what they have in common
TIMING = "timing.txt"  # in the folder of a run: when it was started, in seconds since 1970
# The fields of a system that MLPerf's checkers require. Those that no program can tell are
# "unknown": a user completes them.
_FIELDS = """submitter division status system_name number_of_nodes host_processors_per_node
host_processor_model_name host_processor_core_count host_processor_vcpu_count
host_processor_frequency host_processor_caches host_processor_interconnect host_memory_capacity
host_storage_type host_storage_capacity host_networking host_networking_topology
host_memory_configuration accelerators_per_node accelerator_model_name
accelerator_host_interconnect accelerator_frequency accelerator_on-chip_memories
accelerator_memory_configuration accelerator_memory_capacity accelerator_interconnect
accelerator_interconnect_topology cooling hw_notes framework other_software_stack operating_system
sw_notes"""
_STATUS = {  # by the value of submission_status in the log
    "cloud": "Available cloud",
    "onprem": "Available on-premise",
    "preview": "Preview",
    "research": "Research, Development, or Internal (RDI)",
}


def describe(name: str, values: dict[str, Any]) -> dict[str, str]:
    """Describes the system `name` for MLPerf; `values` has the first value of each key in a log."""
    memory = values.get("accelerator_memory_bytes")
    fields = values | {
        "submitter": values.get("submission_org"),
        "division": values.get("submission_division"),
        "status": _STATUS.get(values.get("submission_status", "")),
        "system_name": name,
        "host_processor_vcpu_count": os.cpu_count(),
        "accelerator_memory_capacity": memory and f"{memory / 2**30:.0f} GiB",
        "framework": f"JAX {installed_version('jax')}",
        "operating_system": platform.platform(),
        "sw_notes": "not a submission to MLCommons",
    }
    return {key: str(fields.get(key) or "unknown") for key in _FIELDS.split()}


def begin(root: Any, index: int) -> None:
    """Prints the time at which run `index` starts, and keeps it; spares the run a second count."""
    folder, now = root / f"run_{index}", time.time()
    counted, target = root / "run_0" / "data_index", folder / "data_index"
    if index and counted.exists() and not target.exists():
        target.mkdir(parents=True)
        for path in counted.iterdir():
            path.copy(target / path.name)
    if not (folder / LOG).exists():  # main.py refuses a folder with a log; keep its time
        write_file(folder / TIMING, f"{now}\n")
    print(f"STARTING TIMING RUN AT {_clock(now)}", flush=True)


def collect(root: Any, name: str, index: int) -> None:
    """Copies the log of run `index` to results/ if it is not there, and describes the system.

    `root` is the folder of all runs, `name` MLPerf's name of the benchmark.
    """
    if find(root, f"results/*/{name}/result_{index}.txt"):
        return
    folder = root / f"run_{index}"
    run, log = load(folder / LOG), (folder / LOG).read_text().rstrip("\n")
    has_start = (folder / TIMING).exists()
    begun = float((folder / TIMING).read_text()) if has_start else run.started or time.time()
    ended = max(run.ended or begun, begun)
    user = os.environ.get("USER", os.getuid())
    last = [
        f"ENDING TIMING RUN AT {_clock(ended)}",
        f"RESULT,{name},0,{ended - begun:.0f},{user},{_clock(begun)}",
    ]
    system = re.sub(r"[^\w.-]", "-", str(run.values.get("submission_platform", "tpu")))
    description = root / "systems" / f"{system}.json"
    if run.form != "v0.5" and not description.exists():  # a user may have completed it
        write_file(description, json.dumps(describe(system, run.values), indent=2) + "\n")
    # The result is written last, because a run with a result counts as collected.
    path = root / "results" / system / name / f"result_{index}.txt"
    write_file(path, "\n".join([f"STARTING TIMING RUN AT {_clock(begun)}", log, *last, ""]))
    print("\n".join(last), flush=True)
    say(f"wrote {path}")


def summarize(root: Any, name: str) -> None:
    """Writes summary.json of all results, and prints the results."""
    runs = {path.name: load(path) for path in find(root)}
    if not runs:
        return
    for file, run in runs.items():
        say(f"{file}: {run}")
    rows = {
        file: {
            "seed": run.values.get("seed"),
            "success": run.success,
            "epochs": run.epochs,
            "minutes": run.minutes,
            "accuracy": run.evals[-1][1] if run.evals else None,
        }
        for file, run in runs.items()
    }
    means = {key: olympic(runs.values(), key) for key in ("epochs", "minutes")}
    summary = {"benchmark": name, "runs": rows, "olympic_mean": means}
    write_file(root / "summary.json", json.dumps(summary, indent=2) + "\n")
    if means["minutes"] is not None:
        say(f"mean without best and worst: {means['minutes']:.2f} minutes")
    say(f"wrote {root / 'summary.json'}; check: python -m scripts.mlperf.check {root}")


def find(root: Any, pattern: str = "results/*/*/result_*.txt") -> list[Any]:
    """The sorted files that match in a folder, whose own name may look like a pattern."""
    return sorted(epath.Path(glob.escape(str(root))).glob(pattern))


def is_complete(folder: Any) -> bool:
    """Whether the log of a run is complete."""
    return (folder / LOG).exists() and load(folder / LOG).complete


@contextlib.contextmanager
def file_errors(folder: Any) -> Iterator[None]:
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


def write_file(path: Any, text: str) -> None:
    """Writes a file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f".{path.name}.tmp"
    draft.write_text(text)
    draft.replace(path)


def _clock(seconds: float) -> str:
    """The local time, such as 2018-10-29 01:30:00 PM."""
    return time.strftime("%Y-%m-%d %I:%M:%S %p", time.localtime(seconds))


def say(text: str) -> None:
    """Prints a line of this program."""
    print(f"mlperf: {text}", flush=True)


_V05 = re.compile(r":::MLPv0\.5\.0 (\S+) ([\d.]+) \(\S+\) (\w+)(?:: (.*))?$")
_V06 = re.compile(r":::MLL ([\d.]+) (\w+): (.*)$")


@dataclasses.dataclass
class Run:
    """The content of one run's log."""

    form: str = ""  # "mllog", "v0.6" or "v0.5"; "" if no line is MLPerf's
    values: dict[str, Any] = dataclasses.field(default_factory=dict)  # the first of each key
    # (epochs, score) of every evaluation before the clock stopped; a score is a number, or several
    # by name or in a list.
    evals: list[tuple[float, Any]] = dataclasses.field(default_factory=list)
    started: float | None = None  # the clock's start, in seconds since 1970, if the log has it
    ended: float | None = None  # the clock's stop
    success: bool = False  # whether the run reached its target, according to the log
    complete: bool = False  # whether the run ended by itself, after an evaluation

    @property
    def minutes(self) -> float | None:
        """The time between the start and the stop of the clock; None if one is missing."""
        if self.started is None or self.ended is None:
            return None
        return (self.ended - self.started) / 60

    @property
    def epochs(self) -> float | None:
        """Epochs to the target; None if the run did not reach it."""
        return self.evals[-1][0] if self.success and self.evals else None

    def __str__(self) -> str:
        minutes = "?" if self.minutes is None else f"{self.minutes:.2f}"
        reached = "target NOT reached" if self.epochs is None else f"epoch {self.epochs:g}"
        return f"{minutes} minutes, {reached}"


def load(path: Any) -> Run:
    """Reads the log in a file; other lines are skipped, a damaged line is a UserError."""
    run, before, first_epoch, started_evals = Run(), "", 1, list[float]()
    text = path.read_bytes().decode(errors="replace")
    for key, value, metadata, seconds in _lines(run, text):
        run.values.setdefault(key, value)
        if key == "block_start":
            first_epoch = min(first_epoch, metadata.get("first_epoch_num", 1))
        elif key == "eval_start" and "epoch_num" in metadata:
            started_evals.append(metadata["epoch_num"])
        elif key == "eval_accuracy" and run.ended is None:  # Google's SSD of v0.6 has one later
            # Google's Transformer of v0.6 has the right epoch only where an evaluation starts, and
            # NVIDIA's Mask R-CNN counts from 0.
            epoch = started_evals.pop(0) if started_evals else metadata["epoch_num"]
            run.evals.append((epoch + 1 - first_epoch, value))
        elif key == "run_start":
            run.started = seconds
        elif key == "run_stop":
            run.ended, run.success = seconds, metadata["status"] == "success"
            run.complete = before == "eval_stop"
        before = key
    return run


def _lines(run: Run, text: str) -> Iterator[tuple[str, Any, dict[str, Any], float]]:
    """Yields (key, value, metadata, seconds since 1970), and notes the form of the lines."""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if ":::MLLOG " in line:
                run.form = "mllog"
                row = parse_json(line.split(":::MLLOG ", 1)[1])
                yield row["key"], row["value"], row["metadata"], row["time_ms"] / 1e3
            elif match := _V06.search(line):
                run.form, row = "v0.6", parse_json(match[3])
                yield match[2], row["value"], row["metadata"], float(match[1])
            elif match := _V05.search(line):
                run.form = "v0.5"
                benchmark, seconds, key, value = match.groups()
                run.values.setdefault("submission_benchmark", benchmark)
                value = None if value is None else parse_json(value)
                yield *_v05(key, value), float(seconds)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"line {number} is damaged: {line[:80]!r} ({error!r})") from error


def _v05(key: str, value: Any) -> tuple[str, Any, dict[str, Any]]:
    """Key, value and metadata of v0.5 as later logs have them; its epochs count from 0."""
    if key == "run_set_random_seed":
        return "seed", value, {}
    if key == "run_stop":
        return key, None, {"status": "success" if value["success"] in ("true", True) else "aborted"}
    if key == "eval_accuracy":
        scores = {name: number for name, number in value.items() if name != "epoch"}
        return key, scores.get("value", scores), {"epoch_num": value["epoch"] + 1}
    return key, value, {}


def olympic(runs: Collection[Run], key: str) -> float | None:
    """Returns the mean "epochs" or "minutes" to the target, without the best and the worst run.

    A run that did not converge is the worst. The mean is None for fewer than three runs, or if more
    than one did not converge.
    """
    values = (getattr(run, key) for run in runs if run.success)
    finite = sorted(value for value in values if value is not None)
    if len(runs) < 3 or len(finite) < len(runs) - 1:
        return None
    return statistics.fmean(finite[1 : len(runs) - 1])
