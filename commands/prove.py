"""--mode=prove: tests that are marked `device`, on the devices of this machine instead of CPUs.

It needs no recipe, no data and no network. docs/check.md says what each check compares.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from etils import epath

from common import pools
from common.errors import ConfigError, OutputError, one_line, parse_json, visible
from common.progress import hms
from engine import environment, locations

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIMIT = 1800.0  # seconds after which a check is stopped
_VALUES, _RUNS = "tests/device/test_values.py", "tests/device/test_runs.py"
_SPEED = "tests/device/test_speed.py"
CHECKS = {  # by name: files, of which the tests that are marked `device` run, or one test
    "devices": f"{_VALUES}::test_the_devices_of_this_machine_are_used",
    "values": f"{_VALUES}::test_values tests/engine/test_schedules.py",
    "all devices as one": f"{_VALUES}::test_all_devices_are_as_one",
    "kill -9 and resume": f"{_RUNS}::test_kill_and_resume",
    "exact evaluation": f"{_RUNS}::test_every_image_is_evaluated_once",
    "save while training": f"{_RUNS}::test_a_save_while_training_goes_on",
    "BatchNorm's form gram": "tests/common/layers/test_gram_norm.py",
    "Pallas kernels": "tests/benchmarks/resnet/test_boundary.py",
    "speed: ResNet-50": f"{_SPEED}::test_train_step[resnet50]",
    "speed: SSD": f"{_SPEED}::test_train_step[ssd]",
    "speed: Transformer": f"{_SPEED}::test_train_step[transformer]",
    "input of the host": f"{_SPEED}::test_input_of_the_host",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a test gets, by its fixture `case`: the environment variable PROVE has it as JSON."""

    folder: str  # local, with the data that this proof makes and its compiled programs
    workdir: str  # the folder, local or gs://, for the workdirs of runs
    short: bool  # whether the test should take as little time as possible
    devices: int = 1  # how many there are, for tests that leave them to other processes


def run(
    workdir: str, short: bool = False, out: str = "", checks: Mapping[str, str] = CHECKS
) -> int:
    """Runs all checks, prints how each ends and writes prove.json; exit code 1 if one failed.

    The checks' runs go to a new subfolder of `workdir`, which stays, or to a temporary folder.
    `short` is for CPUs: smaller models and shorter measurements. prove.json goes to the folder
    `out`, else to the workdir, else to the current folder.
    """
    if importlib.util.find_spec("pytest") is None or not os.path.isdir(f"{_ROOT}/tests"):
        raise ConfigError(
            "--mode=prove runs tests: use a clone of the repository, which has the folder tests, "
            "with pytest (pip install pytest)"
        )
    flag = "--workdir" if workdir and not out else "--out"
    folder = locations.check_results_folder(out or workdir or ".", flag)
    locations.check_folder(folder, flag)
    target, logs = epath.Path(folder) / "prove.json", tempfile.mkdtemp(prefix="prove_logs.")
    rows: list[dict[str, Any]] = []
    devices: dict[str, Any] = {}  # the figures of the check of this name
    with tempfile.TemporaryDirectory(prefix="prove.", ignore_cleanup_errors=True) as scratch:
        runs = f"{workdir}/prove-{uuid.uuid4().hex[:8]}" if workdir else scratch
        for number, (name, tests) in enumerate(checks.items(), 1):
            print(f"[{number}/{len(checks)}] {name}", flush=True)
            case, started = Case(scratch, runs, short, devices.get("count", 1)), time.monotonic()
            row = _run_one(tests, case, f"{logs}/{number}")
            seconds = round(time.monotonic() - started, 1)
            print(visible(f"      {row['status']}, {hms(seconds)}: {row['summary']}"), flush=True)
            rows.append({"name": name, "seconds": seconds, **row})
            devices = row["figures"] if name == "devices" else devices
    record = {
        "format": 2,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "short": short,
        "commit": environment.commit(),
        "devices": devices,
        "host": {"cores": pools.cores(), "machine": platform.machine()},
        "versions": {"python": platform.python_version(), **environment.versions()},
        "checks": rows,
    }
    try:
        target.write_text(json.dumps(record, indent=1) + "\n")
    except Exception as error:  # each file system raises its own types
        raise OutputError(f"cannot write {target}: {one_line(error)}") from error
    failed, skipped = (sum(row["status"] == s for row in rows) for s in ("FAILED", "skipped"))
    if failed:
        print(f"logs of the checks, by their numbers: {logs}")
    else:
        shutil.rmtree(logs)
    print(f"prove: {failed} of {len(rows)} checks failed, {skipped} skipped; wrote {target}")
    return int(failed > 0)


def _run_one(tests: str, case: Case, path: str) -> dict[str, Any]:
    """Runs a check in a separate process, which is stopped with all that it has started.

    Returns its "status" (ok, FAILED or skipped), its "summary" in one line, and what its tests have
    recorded: "figures" by name, and "programs", the SHA-256 of each program's StableHLO text.
    """
    words = [sys.executable, "-m", "pytest", "-m", "device", f"--junitxml={path}.xml"]
    words += ["-q", "--capture=no"]  # else a crash takes along what was printed before
    # A warning of another version of a library is no error of this machine.
    for option in ("addopts=", "filterwarnings=default", "junit_family=xunit1"):
        words += ["-o", option]
    # Without assertions, which PYTHONOPTIMIZE leaves out, nothing would fail.
    others = "PYTEST_", "PYTHONOPTIMIZE"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    variables = kept | {
        "JAX_COMPILATION_CACHE_DIR": f"{case.folder}/compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PROVE": json.dumps(dataclasses.asdict(case)),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of whatever else is installed
    }
    with open(f"{path}.log", "wb") as log:
        process = subprocess.Popen(
            [*words, "-p", "no:cacheprovider", *tests.split()],
            cwd=_ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the other
        )
        try:
            code = process.wait(_LIMIT)
            ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            reason = f"the check's process ended with {ending}"
        except subprocess.TimeoutExpired:
            reason = f"not done after {hms(_LIMIT)}"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with contextlib.suppress(OSError, ElementTree.ParseError):  # a crash leaves no report
        return _read(f"{path}.xml")
    return {"status": "FAILED", "summary": reason, "figures": {}, "programs": {}}


def _read(report: str) -> dict[str, Any]:
    """What pytest's report in JUnit's format says, as `_run_one` returns it."""
    tests = list(ElementTree.parse(report).iter("testcase"))
    failures, skips, summaries, figures, programs = [], [], [], {}, {}
    for test in tests:
        for outcome in test:
            text = (outcome.get("message", "").strip() or "failed").splitlines()[0]
            if outcome.tag in ("failure", "error"):
                failures.append(f"{test.get('name')}: {text}")
            elif outcome.tag == "skipped":
                skips.append(text)
        for answer in test.iter("property"):
            content = parse_json(answer.get("value", ""))
            summaries.append(content["summary"])
            figures |= content["figures"]
            programs |= content["programs"]
    status, summary = "ok", "; ".join(summaries) or f"{len(tests)} tests passed"
    if failures or not tests:
        status, summary = "FAILED", (failures or ["no test ran"])[0]
    elif len(skips) == len(tests):
        status, summary = "skipped", skips[0]
    return {"status": status, "summary": summary, "figures": figures, "programs": programs}
