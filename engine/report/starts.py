"""Describes each start of a run, for the manifests of its checkpoints and so for its report."""

from __future__ import annotations

import pathlib
import subprocess
import time
from typing import Any

import psutil
from jax.sharding import Mesh

from engine import mesh as meshes

_ROOT = pathlib.Path(__file__).parents[2]


def describe(step: int, compile_seconds: float, mesh: Mesh) -> dict[str, Any]:
    """JSON about a start at `step`: when, on which devices, with which commit of the program."""
    return {
        "step": step,
        "begun": round(psutil.Process().create_time(), 1),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "compile_seconds": round(compile_seconds, 1),
        "device": mesh.devices.flat[0].device_kind,
        "chips": meshes.num_chips(mesh),
        "commit": commit(),
    }


def commit() -> str:
    """The commit of this program, with "-dirty" if files were changed; "" where git knows none."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
