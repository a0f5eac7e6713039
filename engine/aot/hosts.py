"""Says whether the hosts of a slice prepare examples as fast as its chips train on them.

vCPUs by machine: Google's pages "Plan TPUs in GKE" and "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x"
of Cloud TPU's documentation; those of v2, v3 and v4 are not verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.aot.topology import Topology

# vCPUs of a machine by its number of chips. A slice of another number has machines of 4 chips.
_MACHINES = {
    **{"v2": {4: 96}, "v3": {4: 96}, "v4": {4: 240}, "v5e": {1: 24, 4: 112, 8: 224}},
    **{"v5p": {4: 208}, "v6e": {1: 44, 4: 180, 8: 180}, "tpu7x": {4: 224}},
}
# Seconds of CPU time, as the rates have been measured, that a vCPU gives to the input per second.
# A vCPU is one of a core's two threads. The rates come from a machine whose CPUs were all busy; the
# rest is for slower hosts, reading over the network and copying to the chips. An assumption.
SHARE = 0.75
Rates = Mapping[str, float]  # examples per second of CPU time, by the setting that has this rate


def machines(topology: Topology) -> tuple[int, int]:
    """The number of hosts of a slice and of the vCPUs of each."""
    sizes = _MACHINES[topology.chip.name]
    chips = topology.chips if topology.chips in sizes else 4
    return -(-topology.chips // chips), sizes[chips]


def supply(
    topology: Topology, needs: Sequence[tuple[str, float]], rates: Sequence[Rates]
) -> dict[str, Any]:
    """What the hosts prepare, ready for JSON; all numbers are examples per second of the slice.

    Args:
      topology: the slice.
      needs: (name, what the chips take) of each stage of the run; the only one has no name.
      rates: of each stage.
    """
    hosts, cpus = machines(topology)
    seconds = hosts * cpus * SHARE
    stages = [
        {"name": name, "needed": need, "prepared": {k: v * seconds for k, v in one.items()}}
        for (name, need), one in zip(needs, rates, strict=True)
    ]
    return {"hosts": hosts, "cpus_per_host": cpus, "stages": stages}


def table(rows: Sequence[dict[str, Any]], unit: str) -> list[list[str]]:
    """Lines for the rows of `forecast.row` that have an "input"."""
    stages = [stage for r in rows for stage in r["input"]["stages"]]
    settings = list(dict.fromkeys(name for stage in stages for name in stage["prepared"]))
    lines = [["slice", "stage", "hosts", "vCPUs each", f"{unit}/s needed", *settings]]
    for r in rows:
        machine = str(r["input"]["hosts"]), str(r["input"]["cpus_per_host"])
        for stage in r["input"]["stages"]:
            need = stage["needed"]
            cells = [
                f"{rate:,.0f} {'yes' if rate >= need else 'no'}"
                for rate in (stage["prepared"][name] for name in settings)
            ]
            lines.append([r["slice"], stage["name"] or "all", *machine, f"{need:,.0f}", *cells])
    return lines
