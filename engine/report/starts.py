"""Describes each start of a run, and says what the run took.

The manifests of the run's checkpoints list its starts. With the rows of metrics.jsonl they tell the
run's time, its chip hours and dollars, and how much of the time trained it.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from common import entry
from common.progress import hms
from engine import environment, sharding
from engine.forecast import topology

Row = Mapping[str, Any]


def describe_start(step: int, mesh: Mesh) -> dict[str, Any]:
    """This start of a run at `step`: when, on which devices, with which commit."""
    return {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": mesh.devices.flat[0].device_kind,
        "chips": sharding.num_chips(mesh),
        "commit": environment.commit(),
    }


def starts_now(starts: Sequence[Row]) -> list[dict[str, Any]]:
    """The starts of a run, the last with its "seconds" up to now."""
    seconds = {"seconds": round(time.monotonic() - entry.BEGUN, 1)}
    return [dict(start) for start in starts[:-1]] + [{**start, **seconds} for start in starts[-1:]]


def past_starts(manifest: Row, rows: Sequence[Row] = ()) -> list[dict[str, Any]]:
    """The starts of a run up to its newest checkpoint, each with its "seconds".

    A start that ended before its first save is in no manifest. The last start also gets its
    "lost_steps", and lasted until its last save and for the lost steps. `manifest` is the newest
    checkpoint's, or {}. The `rows` of metrics.jsonl after that checkpoint are the lost steps.
    """
    starts, newest = [dict(start) for start in manifest.get("starts", [])], manifest.get("step", 0)
    if starts and "seconds" in starts[-1]:
        lost = [row for row in rows if row["step"] > newest]
        seconds = starts[-1]["seconds"] + sum(training_seconds(lost, [newest]))
        seconds += sum(row.get("seconds", 0.0) for row in lost if row["split"] == "eval")
        starts[-1]["seconds"] = round(seconds, 1)
        starts[-1]["lost_steps"] = max((row["step"] for row in lost), default=newest) - newest
    return starts


def cost_summary(starts: Sequence[Row], rows: Sequence[Row]) -> str:
    """What a run has cost up to now, in one line; "" if that is not known."""
    cost = cost_rows(starts_now(starts), rows)
    return "; ".join(f"{name}: {text}" for name, text in cost.items())


def cost_rows(starts: Sequence[Row], rows: Sequence[Row]) -> dict[str, str]:
    """What a run took over all its starts, in words; {} if one does not say how long it lasted.

    Goodput is the share of the time that trained steps that stayed. The dollars are what the chips
    cost at their list price, where it is known. `starts` have "chips", "device", "seconds" and
    "lost_steps"; `rows` are the rows of metrics.jsonl.
    """
    if not starts or not all(start.get("seconds", 0) > 0 for start in starts):
        return {}
    seconds = sum(start["seconds"] for start in starts)
    kept = sum(training_seconds(rows, [start["step"] for start in starts]))
    hours = [start["chips"] * start["seconds"] / 3600 for start in starts]
    chips = [topology.of_kind(start["device"]) for start in starts]
    prices = [chip.price if chip else math.nan for chip in chips]
    dollars = sum(map(math.prod, zip(hours, prices, strict=True)))
    again = ""
    if len(starts) > 1:
        restarts = "1 restart" if len(starts) == 2 else f"{len(starts) - 1} restarts"
        lost = sum(start.get("lost_steps", 0) for start in starts)
        again = f", {restarts}: {lost:,} steps lost"
    shown = {
        "time of the program": hms(seconds) + again,
        "goodput": f"{100 * min(kept / seconds, 1.0):.0f} % of that time trained steps that stayed",
        "chip hours": f"{sum(hours):,.2f}",
    }
    if not math.isnan(dollars):
        shown["cost"] = f"about {dollars:,.2f} US dollars at the list price"
    return shown


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
