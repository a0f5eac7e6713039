"""--mode=prove: tests that are marked `device`, on the devices of this machine instead of CPUs.

It needs no recipe, no data and no network. docs/check.md says what each check compares. prove.json
has the results, without names of users or hosts, paths and tokens.
"""

import contextlib
import dataclasses
import getpass
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from etils import epath

from common.console import hms
from common.errors import ConfigError, OutputError, one_line, parse_json, visible
from engine import locations, manifest

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SEND = (
    "Send prove.json as docs/verified/NAME.json in a pull request to "
    "https://github.com/<OWNER>/<REPO>, or attach it to an issue there"
)
_LABELS = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}
_KIND = re.compile(r"^AssertionError: |^(\w+\.)+(?=\w+: )")  # or the module of an exception
_PATH = re.compile(r"\w+://\S+|(?<![\w.])~?(?:/[^\s/:,;'\"()]+)+/?|[A-Za-z]:\\\S+")
_SECRET = re.compile(r"\S*@\S+|\b(?=\w*\d)(?=\w*[A-Za-z])[\w-]{24,}\b|\b\d{1,3}(?:\.\d{1,3}){3}\b")


class Check(NamedTuple):
    """Tests that are one row of the table; they run in a separate process."""

    name: str  # for the table and for prove.json
    tests: str  # files, of which the tests that are marked `device` run, or one test
    look: str  # what to look at where it fails
    limit: float = 1800.0  # seconds after which it is stopped


_SPEED = "the batch per device and the memory, docs/check.md"
_STEP = "tests/device/test_speed.py::test_train_step"
CHECKS = (
    Check(
        "devices",
        "tests/device/test_values.py::test_the_devices_of_this_machine_are_used",
        "python main.py --mode=doctor with a recipe; does another process use the devices?",
    ),
    Check(
        "values",
        "tests/device/test_values.py::test_values tests/engine/test_schedules.py",
        "the versions of jax and of the driver; then the layers of the named model or the schedule",
    ),
    Check(
        "all devices as one",
        "tests/device/test_values.py::test_all_devices_are_as_one",
        "the links between the devices, and engine/step.py",
    ),
    Check(
        "kill -9 and resume",
        "tests/device/test_runs.py::test_kill_and_resume",
        "the check's log; engine/checkpoint.py, the disk or the bucket; on a GPU set "
        "XLA_FLAGS=--xla_gpu_deterministic_ops=true",
    ),
    Check(
        "exact evaluation",
        "tests/device/test_runs.py::test_every_image_is_evaluated_once",
        "engine/evaluate.py, and eval_batches of the benchmark",
    ),
    Check(
        "save while training",
        "tests/device/test_runs.py::test_a_save_while_training_goes_on",
        "engine/checkpoint.py, the disk or the bucket",
    ),
    Check(
        "BatchNorm's form gram",
        "tests/common/layers/test_gram_norm.py",
        "common/layers/gram_norm.py",
    ),
    Check(
        "Pallas kernels",
        "tests/common/layers/test_boundary.py",
        "the named kernel and its plain form",
    ),
    Check("speed: ResNet-50", f"{_STEP}[resnet50]", _SPEED),
    Check("speed: SSD", f"{_STEP}[ssd]", _SPEED),
    Check("speed: Transformer", f"{_STEP}[transformer]", _SPEED),
    Check(
        "input of the host",
        "tests/device/test_speed.py::test_input_of_the_host",
        "TensorFlow, the disk and the number of CPU cores",
    ),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What a test gets, by its fixture `case`: the environment variable PROVE has it as JSON."""

    folder: str  # local, with the data that this proof makes and its compiled programs
    workdir: str  # the folder, local or gs://, for the workdirs of runs
    short: bool  # whether the test should take as little time as possible
    devices: int = 1  # how many there are, for tests that leave them to other processes


class Row(NamedTuple):
    """The outcome of one check."""

    name: str
    status: str  # ok, failed or skipped
    summary: str  # one line for the user
    look: str  # what to look at where the check failed, else ""
    seconds: float
    figures: dict[str, Any]  # numbers, texts and bools by name
    programs: dict[str, str]  # the SHA-256 of each program's StableHLO text


def run(workdir: str, short: bool = False, out: str = "", checks: Sequence[Check] = CHECKS) -> int:
    """Runs all checks, prints a table and writes prove.json; the exit code is 1 if one failed.

    The checks' runs go to a new subfolder of `workdir`, which stays, or to a temporary folder.
    `short` is for CPUs: smaller models and shorter measurements. prove.json goes to the folder
    `out`, else to the workdir, else to the current folder.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError(
            "--mode=prove runs tests, and pytest is not installed: bash scripts/setup.sh tpu "
            "(or cuda, or dev), or pip install pytest"
        )
    if not os.path.isdir(f"{_ROOT}/tests"):
        raise ConfigError(
            "--mode=prove runs tests, and this copy of the program has no folder tests: "
            "use a clone of the repository"
        )
    flag = "--workdir" if workdir and not out else "--out"
    folder = locations.check_results_folder(out or workdir or ".", flag)
    locations.check_folder(folder, flag)
    target, logs = epath.Path(folder) / "prove.json", tempfile.mkdtemp(prefix="prove_logs.")
    with tempfile.TemporaryDirectory(prefix="prove.", ignore_cleanup_errors=True) as scratch:
        runs = f"{workdir}/prove-{uuid.uuid4().hex[:8]}" if workdir else scratch
        rows = _run_all(Case(scratch, runs, short), checks, logs)
    print(f"\n{table(rows)}\n")
    try:
        target.write_text(json.dumps(make_record(rows, short), indent=1) + "\n")
    except Exception as error:  # each file system raises its own types
        raise OutputError(f"cannot write {target}: {one_line(error)}") from error
    failed = sum(row.status == "failed" for row in rows)
    skipped = sum(row.status == "skipped" for row in rows)
    if failed:
        print(f"logs of the checks: {logs}")
    else:
        shutil.rmtree(logs)
    print(f"prove: {failed} of {len(rows)} checks failed, {skipped} skipped; wrote {target}")
    print(_SEND)
    return int(failed > 0)


def _run_all(case: Case, checks: Sequence[Check], logs: str) -> list[Row]:
    rows: list[Row] = []
    for number, check in enumerate(checks, 1):
        print(f"[{number}/{len(checks)}] {check.name}", flush=True)
        row = _run_one(check, case, logs)
        if check.name == "devices":
            case = dataclasses.replace(case, devices=row.figures.get("count", 1))
        print(visible(f"      {_LABELS[row.status]}: {row.summary}"), flush=True)
        rows.append(row)
    return rows


def _run_one(check: Check, case: Case, logs: str) -> Row:
    """Runs a check in a separate process, which is stopped with all that it has started."""
    started, path = time.monotonic(), f"{logs}/{re.sub('[^A-Za-z0-9]', '_', check.name)}"
    words = [sys.executable, "-m", "pytest", "-m", "device", f"--junitxml={path}.xml"]
    words += ["-q", "--capture=no"]  # else a crash takes along what was printed before
    # A warning of another version of a library is no error of this machine.
    for option in ("addopts=", "filterwarnings=default", "junit_family=xunit1"):
        words += ["-o", option]
    with open(f"{path}.log", "wb") as log:
        process = subprocess.Popen(
            [*words, "-p", "no:cacheprovider", *check.tests.split()],
            cwd=_ROOT,
            env=_environment(case),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the other
        )
        try:
            code = process.wait(check.limit)
            ending = f"exit code {code}"
            if code < 0:
                ending = f"signal {-code} ({signal.Signals(-code).name})"
            reason = f"the check's process ended with {ending}"
        except subprocess.TimeoutExpired:
            reason = f"not done after {hms(check.limit)}"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    status, summary, figures, programs = "failed", reason, {}, {}
    with contextlib.suppress(OSError, ElementTree.ParseError):  # a crash leaves no report
        status, summary, figures, programs = _read(f"{path}.xml")
    look = check.look if status == "failed" else ""
    seconds = time.monotonic() - started
    return Row(check.name, status, summary, look, seconds, figures, programs)


def _environment(case: Case) -> dict[str, str]:
    """The environment of a check; all checks share one cache of compiled programs."""
    # Without assertions, which PYTHONOPTIMIZE leaves out, nothing would fail.
    others = "PYTEST_", "PYTHONOPTIMIZE"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return kept | {
        "JAX_COMPILATION_CACHE_DIR": f"{case.folder}/compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PROVE": json.dumps(dataclasses.asdict(case)),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of whatever else is installed
    }


def _read(report: str) -> tuple[str, str, dict[str, Any], dict[str, str]]:
    """(status, summary, figures, programs) of the tests in pytest's report in JUnit's format."""
    failures, skips, summaries, figures, programs = [], [], [], {}, {}
    tests = list(ElementTree.parse(report).iter("testcase"))
    for test in tests:
        name = f"{test.get('name')}: " if len(tests) > 1 else ""
        for outcome in test:
            message = outcome.get("message", "")
            if message == "collection failure":  # the text ends with the exception
                message = (outcome.text or "").strip().rpartition("\n")[2].removeprefix("E").strip()
            message = _KIND.sub("", message)
            if outcome.tag in ("failure", "error"):
                failures.append(name + (message.strip() or "failed").splitlines()[0][:1000])
            elif outcome.tag == "skipped":
                skips.append(message)
        for answer in test.iter("property"):
            content = parse_json(answer.get("value", ""))
            summaries.append(content["summary"])
            figures |= content["figures"]
            programs |= content["programs"]
    if failures or not tests:
        return "failed", (failures or ["no test ran"])[0], figures, programs
    if len(skips) == len(tests):
        return "skipped", skips[0], figures, programs
    return "ok", "; ".join(summaries) or f"{len(tests)} tests passed", figures, programs


def table(rows: Sequence[Row]) -> str:
    """The rows in aligned columns; below a failed check is what to look at."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'check':{width}}  result      time  figures"]
    for row in rows:
        head = f"{row.name:{width}}  {_LABELS[row.status]:7}  {hms(row.seconds):>7}"
        lines.append(f"{head}  {row.summary}")
        lines += [f"{'':{width}}  -> look at: {row.look}"] if row.look else []
    return visible("\n".join(lines))


# prove.json.


def make_record(rows: list[Row], short: bool) -> dict[str, Any]:
    """The content of prove.json: no names of users or hosts, no paths, no tokens."""
    devices = next((row.figures for row in rows if row.name == "devices"), {})
    checks = []
    for row in rows:
        check = {"name": row.name, "status": row.status, "summary": anonymous(row.summary)}
        check |= {"look": row.look} if row.look else {}
        check |= {"seconds": round(row.seconds, 1), "figures": _rounded(row.figures)}
        checks.append(check)
    return {
        "format": 1,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "short": short,
        "commit": manifest.commit(),
        "devices": _rounded(devices),
        "host": {"cores": os.cpu_count(), "machine": platform.machine()},
        "versions": {"python": platform.python_version(), **manifest.versions()},
        "checks": checks,
        "programs": {name: text for row in rows for name, text in row.programs.items()},
    }


def anonymous(text: str) -> str:
    """One line without paths, addresses, names of this user and host, and what may be a token."""
    text = _PATH.sub("PATH", visible(" ".join(text.split())))
    names = []
    for ask in (getpass.getuser, socket.gethostname):
        with contextlib.suppress(OSError, KeyError):  # a container's user may have no name
            names.append(ask())
    for name in names:
        if len(name) > 2 and name != "root":
            text = re.sub(rf"\b{re.escape(name)}\b", "NAME", text)
    return _SECRET.sub("REMOVED", text)[:500]


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Figures that JSON can hold, floats with five digits."""

    def one(value: Any) -> Any:
        if isinstance(value, bool | int) or value is None:
            return value
        if isinstance(value, float):
            return float(f"{value:.5g}") if math.isfinite(value) else str(value)
        return anonymous(str(value))

    return {name: one(value) for name, value in values.items()}
