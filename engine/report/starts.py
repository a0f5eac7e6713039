"""Records each start of a run, in starts.json and in the manifests of its checkpoints."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import threading
import time
from typing import Any

import jax
import psutil
from etils import epath
from jax.sharding import Mesh

from engine import mesh as meshes
from engine.cluster import hostlog, stalls

_DISK, _BUCKET = 5.0, 30.0  # seconds between two notes
_ROOT = pathlib.Path(__file__).parents[2]


class Record:
    """The newest start of a run; a thread notes in starts.json how long it lasts.

    A start that ends before its first save is in no manifest.
    """

    def __init__(self, workdir: str, starts: list[dict[str, Any]], step: int, mesh: Mesh):
        """Adds a start at `step` to `starts`: when, on which devices, with which commit."""
        self._own = {
            "step": step,
            "begun": round(psutil.Process().create_time(), 1),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": mesh.devices.flat[0].device_kind,
            "chips": meshes.num_chips(mesh),
            "commit": commit(),
        }
        starts.append(self._own)
        self._starts, self._path = starts, epath.Path(workdir) / "starts.json"
        self._closed, self._writing = threading.Event(), threading.Lock()
        self.note()
        period = (_BUCKET if "://" in workdir else _DISK,)
        threading.Thread(target=self._follow, args=period, daemon=True, name="starts").start()

    def note(self, **facts: Any) -> None:
        """Adds facts about the start; process 0 writes them, or gives up after 10 s."""
        self._own |= {**facts, "seconds": round(time.time() - self._own["begun"], 1)}
        if jax.process_index() == 0:
            stalls.within(self._write, hostlog.PATIENCE)

    def close(self) -> None:
        """Notes the end of the start."""
        self._closed.set()
        self.note()

    def _follow(self, period: float) -> None:
        while not self._closed.wait(period):
            self.note()

    def _write(self) -> str:
        part = self._path.parent / "starts.json.part"
        with self._writing:
            part.write_text(json.dumps(self._starts, indent=1) + "\n")
            part.replace(self._path)
        return ""


def commit() -> str:
    """The commit of this program, with "-dirty" if files were changed; "" where git knows none."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    return ""
