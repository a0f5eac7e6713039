"""Collects what the runs of run_and_time.sh leave behind: logs, the system, a summary."""

import contextlib
import glob
import json
import os
import platform
import re
import time
from collections.abc import Iterator
from typing import Any

from etils import epath

from common.errors import UserError, one_line
from engine.devices import installed_version
from engine.mlperf import LOG
from scripts.mlperf import logs

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
    run, log = logs.load(folder / LOG), (folder / LOG).read_text().rstrip("\n")
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
    runs = {path.name: logs.load(path) for path in find(root)}
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
    means = {key: logs.olympic(runs.values(), key) for key in ("epochs", "minutes")}
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
    return (folder / LOG).exists() and logs.load(folder / LOG).complete


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
