"""--mode=prove: checks on the devices of this machine what the tests check on CPUs.

It needs no recipe, no data and no network. docs/prove.md says what each check compares. prove.json
has the results, without names of people or hosts, paths and tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from commands.prove.checks import CHECKS, ROOT, Case, Check
from common.console import hms
from common.errors import OutputError, one_line, parse_json, visible
from engine import locations, manifest

_SEND = (
    "Send prove.json as docs/verified/NAME.json in a pull request to "
    "https://github.com/<OWNER>/<REPO>, or attach it to an issue there"
)
_LABELS = {"ok": "ok", "failed": "FAILED", "skipped": "-"}
_PATH = re.compile(r"\w+://\S+|(?<![\w.])~?(?:/[^\s/:,;'\"()]+)+/?|[A-Za-z]:\\\S+")
_SECRET = re.compile(r"\S*@\S+|\b(?=\w*\d)(?=\w*[A-Za-z])[\w-]{24,}\b|\b\d{1,3}(?:\.\d{1,3}){3}\b")


class Row(NamedTuple):
    """The outcome of one check.

    Attributes:
      status: ok, failed or skipped.
      summary: one line for the user.
      look: what to look at where the check failed, else "".
      figures: {name: number, text or bool}.
      programs: {name: SHA-256 of the program's StableHLO text}.
    """

    name: str
    status: str
    summary: str
    look: str
    seconds: float
    figures: dict[str, Any]
    programs: dict[str, str]


def run(workdir: str, short: bool = False, out: str = "", checks: Sequence[Check] = CHECKS) -> int:
    """Runs all checks, prints a table and writes prove.json.

    Args:
      workdir: folder, local or gs://, for the checks' runs and logs, in a new subfolder that stays;
        "" is a temporary folder, of which only the logs of failed checks stay.
      short: smaller models and shorter measurements, for CPUs.
      out: folder, local or gs://, for prove.json; "" is the workdir, or else the current folder.
      checks: what to run.

    Returns:
      The exit code: 1 if a check failed, else 0.

    Raises:
      ConfigError: the folder of prove.json is none for results.
      OutputError: prove.json cannot be written.
    """
    target = _target(out or workdir or ".", "--workdir" if workdir and not out else "--out")
    with tempfile.TemporaryDirectory(prefix="prove.", ignore_cleanup_errors=True) as folder:
        runs = f"{workdir}/prove-{uuid.uuid4().hex[:8]}" if workdir else folder
        rows = _run_all(Case(folder, runs, short), checks)
        _keep_logs(folder, rows)
    content = make_record(rows, short)
    print(f"\n{table(rows)}\n")
    try:
        target.write_text(json.dumps(content, indent=1) + "\n")
    except Exception as error:  # each file system raises its own types
        raise OutputError(f"cannot write {target}: {one_line(error)}") from error
    failed = sum(row.status == "failed" for row in rows)
    skipped = sum(row.status == "skipped" for row in rows)
    print(f"prove: {failed} of {len(rows)} checks failed, {skipped} skipped; wrote {target}")
    print(_SEND)
    return int(failed > 0)


def _target(folder: str, flag: str) -> Any:
    """The path of prove.json in a folder, which is made; `flag` names it.

    Raises:
      ConfigError: it is no folder for results.
      OutputError: it cannot be made or written to.
    """
    path = epath.Path(locations.check_results_folder(folder, flag)) / "prove.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.parent / f".write_test.{uuid.uuid4().hex}"
        probe.write_text("")
        probe.unlink()
    except Exception as error:  # each file system raises its own types
        raise OutputError(f"cannot write to {flag}={folder}: {one_line(error)}") from error
    return path


def _run_all(case: Case, checks: Sequence[Check]) -> list[Row]:
    rows: list[Row] = []
    planned = [check.seconds[0 if case.short else 1] for check in checks]
    for number, check in enumerate(checks):
        spent, done = sum(row.seconds for row in rows), sum(planned[:number])
        # This machine may be faster or slower than the one that the plan is from.
        factor = min(max(spent / done, 0.2), 5.0) if done > 10 else 1.0
        left = hms(factor * sum(planned[number:]))
        print(f"[{number + 1}/{len(checks)}] {check.name} (all done in about {left})", flush=True)
        row = _run_one(check, case)
        if check.name == "devices":
            case = dataclasses.replace(case, devices=row.figures.get("count", 1))
        print(visible(f"      {_LABELS[row.status]}: {row.summary}"), flush=True)
        rows.append(row)
    return rows


def _run_one(check: Check, case: Case) -> Row:
    """Runs a check in a process of its own, which is stopped with all that it has started."""
    started, answer = time.monotonic(), f"{case.folder}/answer.json"
    request = {"check": list(check), "case": dataclasses.asdict(case), "answer": answer}
    with contextlib.suppress(FileNotFoundError):
        os.remove(answer)
    with open(_log(case.folder, check.name), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "commands.prove.child"],
            cwd=ROOT,
            env=_environment(case.folder),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the other
        )
        try:
            process.communicate(json.dumps(request).encode(), timeout=check.limit)
            reason = f"the check's process ended with {_ending(process.returncode)}"
        except subprocess.TimeoutExpired:
            reason = f"not done after {hms(check.limit)}"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result: dict[str, Any] = {"status": "failed", "summary": reason}
    with contextlib.suppress(OSError, ValueError), open(answer, "rb") as file:
        result = parse_json(file.read())
    look = check.look if result["status"] == "failed" else ""
    figures, programs = result.get("figures", {}), result.get("programs", {})
    seconds = time.monotonic() - started
    return Row(check.name, result["status"], result["summary"], look, seconds, figures, programs)


def _environment(folder: str) -> dict[str, str]:
    """The environment of a check: one cache of compiled programs for all of them."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return os.environ | cache


def _ending(code: int) -> str:
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


def _log(folder: str, name: str) -> str:
    words = "".join(letter if letter.isalnum() else "_" for letter in name)
    return f"{folder}/{words}.log"


def _keep_logs(folder: str, rows: Sequence[Row]) -> None:
    """Copies the logs of failed checks out of the temporary folder, and says where they are."""
    failed = [row.name for row in rows if row.status == "failed"]
    if failed:
        kept = tempfile.mkdtemp(prefix="prove_logs.")
        for name in failed:
            with contextlib.suppress(OSError):
                os.replace(_log(folder, name), _log(kept, name))
        print(f"\nlogs of the failed checks: {kept}")


def table(rows: Sequence[Row]) -> str:
    """The rows in aligned columns; a failed one is followed by what to look at."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'check':{width}}  result      time  figures"]
    for row in rows:
        head = f"{row.name:{width}}  {_LABELS[row.status]:7}  {hms(row.seconds):>7}"
        lines.append(f"{head}  {row.summary}")
        lines += [f"{'':{width}}  -> look at: {row.look}"] if row.look else []
    return visible("\n".join(lines))


# prove.json.


def make_record(rows: list[Row], short: bool) -> dict[str, Any]:
    """The content of prove.json: no names of people or hosts, no paths, no tokens."""
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
        "commit": _commit(),
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


def _commit() -> str:
    """The commit of this repository, with "+" if files differ from it; "" without git."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if commit and _git("status", "--porcelain", "-uno") else "")
    return ""


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", ROOT, *words], capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
