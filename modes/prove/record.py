"""The form of prove.json: what it has, and what it must not have."""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import platform
import re
import socket
import subprocess
import time
from typing import Any, NamedTuple

from engine import manifest
from errors import visible
from modes.prove.case import ROOT

_PATH = re.compile(r"\w+://\S+|(?<![\w.])~?(?:/[^\s/:,;'\"()]+)+/?|[A-Za-z]:\\\S+")
_SECRET = re.compile(r"\S*@\S+|\b(?=\w*\d)(?=\w*[A-Za-z])[\w-]{24,}\b|\b\d{1,3}(?:\.\d{1,3}){3}\b")


class Row(NamedTuple):
    """The outcome of one check.

    Attributes:
      status: ok, failed or skipped.
      summary: one line for people.
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


def make(rows: list[Row], short: bool) -> dict[str, Any]:
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
