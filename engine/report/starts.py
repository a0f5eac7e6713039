"""Records each start of a run, and says what the run took.

A start is recorded in starts.json and in the manifests of the run's checkpoints. They, and the rows
of metrics.jsonl, tell the run's time, its chip hours and dollars, and how much of the time trained
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import psutil
from etils import epath
from jax.sharding import Mesh

from common.console import hms
from common.errors import parse_json
from engine import mesh as meshes
from engine.aot import topology
from engine.cluster import hostlog, watchdog

_DISK, _BUCKET = 5.0, 30.0  # seconds between two notes
_ROOT = pathlib.Path(__file__).parents[2]
Row = Mapping[str, Any]


class StartRecord:
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
            watchdog.within(self._write, hostlog.PATIENCE)

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


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run took, over all its starts.

    Attributes:
      starts: number of starts.
      seconds: from the beginning of each process to its end, added up.
      chip_hours: the chips of each start times its hours.
      lost_steps: that a start had done and not saved.
      kept: seconds of the training steps that stayed.
      dollars: at the list price of the chips; nan where it is not known, as for CPUs.
    """

    starts: int
    seconds: float
    chip_hours: float
    lost_steps: int
    kept: float
    dollars: float

    @property
    def goodput(self) -> float:
        """The share of the time that trained steps that stayed."""
        return min(self.kept / self.seconds, 1.0) if self.seconds else 0.0

    def rows(self) -> list[tuple[str, str]]:
        """The figures as (name, text)."""
        again = "1 restart" if self.starts == 2 else f"{self.starts - 1} restarts"
        lost = f", {again}: {self.lost_steps:,} steps lost" if self.starts > 1 else ""
        rows = [
            ("time of the program", hms(self.seconds) + lost),
            ("goodput", f"{100 * self.goodput:.0f} % of that time trained steps that stayed"),
            ("chip hours", f"{self.chip_hours:,.2f}"),
        ]
        price = f"about {self.dollars:,.2f} US dollars at the list price"
        return rows if math.isnan(self.dollars) else [*rows, ("cost", price)]


def cost_summary(starts: Sequence[Row], rows: Sequence[Row]) -> str:
    """The cost of a run up to now, in one line; arguments as of `cost_of`."""
    cost = cost_of(ended(starts, time.time()), rows)
    if cost is None:
        return "goodput: not known, because an older program began the run"
    return "; ".join(f"{name}: {text}" for name, text in cost.rows())


def cost_of(starts: Sequence[Row], rows: Sequence[Row]) -> Cost | None:
    """The cost of a run; None if a start does not say how long it took.

    Args:
      starts: with "chips", "device", "seconds" and "lost_steps".
      rows: of metrics.jsonl.
    """
    if not starts or not all(start.get("seconds", 0) > 0 for start in starts):
        return None
    hours = [start["chips"] * start["seconds"] / 3600 for start in starts]
    prices = [_price(start["device"]) for start in starts]
    return Cost(
        starts=len(starts),
        seconds=sum(start["seconds"] for start in starts),
        chip_hours=sum(hours),
        lost_steps=sum(start.get("lost_steps", 0) for start in starts),
        kept=sum(training_seconds(rows, [start["step"] for start in starts])),
        dollars=sum(map(math.prod, zip(hours, prices, strict=True))),
    )


def training_seconds(rows: Sequence[Row], begins: Sequence[int]) -> list[float]:
    """The seconds of each training row with a "step_seconds".

    A row covers the steps since the one before it, or since the last of `begins`, at which steps
    the run was started.
    """
    begin, seconds = 0, []
    for row in rows:
        if row["split"] == "train" and math.isfinite(row.get("step_seconds", math.nan)):
            begin = max([begin, *(step for step in begins if step < row["step"])])
            seconds.append(row["step_seconds"] * (row["step"] - begin))
            begin = row["step"]
    return seconds


def past_starts(workdir: str, manifest: Row, rows: Sequence[Row] = ()) -> list[dict[str, Any]]:
    """The starts of a run up to now, each with its "seconds" and "lost_steps" where they are known.

    starts.json counts, if it goes on from the manifest: it also has the starts that saved nothing.

    Args:
      workdir: of the run, local or gs://.
      manifest: of the newest checkpoint; {} without one.
      rows: of metrics.jsonl; those after the checkpoint are of steps that are lost.
    """
    listed, newest = manifest.get("starts", []), manifest.get("step", 0)
    listed = ended(listed if isinstance(listed, list) else [], manifest.get("saved"), newest, rows)
    noted = _noted_starts(workdir)
    if [x.get("begun") for x in listed] != [x["begun"] for x in noted[: len(listed)]]:
        return listed
    if noted and "compile_seconds" in noted[-1]:  # else the lost rows are of the start before it
        noted[-1]["lost_steps"] = max([0, *(row["step"] - newest for row in rows)])
    return noted


def _noted_starts(workdir: str) -> list[dict[str, Any]]:
    """What starts.json has; [] where it is missing, damaged, or cannot be read."""
    path = epath.Path(workdir) / "starts.json"
    try:
        with watchdog.during(f"reading {path}"):
            starts = parse_json(path.read_bytes())
    except Exception:  # gs:// raises TensorFlow's own classes
        return []
    return starts if isinstance(starts, list) and all(map(_is_start, starts)) else []


def _is_start(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(type(value.get(name)) is int for name in ("step", "chips"))
        and isinstance(value.get("device"), str)
        and _is_time(value.get("begun"))
        and _is_time(value.get("seconds"))
    )


def ended(
    starts: Sequence[Any], until: Any, newest: int = 0, rows: Sequence[Row] = ()
) -> list[dict[str, Any]]:
    """The starts of a manifest; the last one gets its "seconds" and "lost_steps".

    Args:
      starts: from the manifest; what is no start is left out.
      until: seconds since 1970, when the last start saved for the last time, or now.
      newest: the step that it saved then.
      rows: of metrics.jsonl; those after `newest` are of steps that are lost.
    """
    known = [dict(row) for row in starts if isinstance(row, Mapping)]
    if known and _is_time(until) and _is_time(begun := known[-1].get("begun")):
        lost = [row for row in rows if row["step"] > newest]
        seconds = sum(training_seconds(lost, [newest]))
        seconds += sum(row.get("seconds", 0.0) for row in lost if row["split"] == "eval")
        known[-1]["seconds"] = round(max(until - begun + seconds, 0.0), 1)
        known[-1]["lost_steps"] = max((row["step"] for row in lost), default=newest) - newest
    return known


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e11


def _price(kind: str) -> float:
    """US dollars per hour of a chip that jax calls `kind`; nan if no price is known."""
    chip = topology.of_kind(kind)
    return chip.price if chip else math.nan
