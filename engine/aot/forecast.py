"""Forecasts memory, speed and time of a run on a slice from what the compiler says of its steps.

All numbers are estimates. The time of a step is the compiler's count of cycles at the chip's clock.
The forecast also says whether the hosts of the slice prepare examples as fast as its chips train on
them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from common.console import hms
from engine.aot import hlo, kernels
from engine.aot.topology import Topology, machines

NOTE = """\
Times are estimates, not measurements: the compiler's count of cycles at the chip's clock. They
leave out the input, the hosts, the collectives over the links between chips, checkpoints, start-up
and compilation: a real run is slower. Memory is the compiler's count for the train step; up to two
more batches wait beside it. Prices are Google's, on demand, as of 2025 and not verified; give yours
as --chip_hour_price. TFLOP: what the devices execute, by XLA's cost analysis; model TFLOP:
three times the convolutions and matrix products of the forward pass, counted analytically."""
_GIB = 2.0**30
# Seconds of CPU time, as the rates have been measured, that a vCPU gives to the input per second.
# A vCPU is one of a core's two threads. The rates come from a machine whose CPUs were all busy; the
# rest is for slower hosts, reading over the network and copying to the chips. An assumption.
_INPUT_SHARE = 0.75
# Examples per second of CPU time, by the setting that has this rate.
InputRates = Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program(hlo.Cost):
    """What the compiler says of one step, for one run on one device.

    Attributes:
      arguments, temporaries, code: bytes of HBM; outputs that replace arguments are in arguments.
      outputs: bytes of HBM of further results.
      flops, traffic: XLA's cost analysis: operations, and bytes read and written.
      seconds: that compiling took.
    """

    arguments: int
    outputs: int
    temporaries: int
    code: int
    flops: float
    traffic: float
    seconds: float

    @property
    def memory(self) -> int:
        """All the HBM that a run of it takes, in bytes."""
        return self.arguments + self.outputs + self.temporaries + self.code


def combine(programs: Sequence[Program], steps: Sequence[int] = ()) -> Program:
    """One step, compiled for each shape of its batches, as one program.

    Its memory and collectives are those of the shape that takes the most memory. Its time, FLOPs
    and traffic are the mean over the shapes. Each counts as often as it has `steps`; () counts all
    equally.
    """
    counts = steps or [1] * len(programs)

    def mean(name: str) -> float:
        values = (getattr(program, name) for program in programs)
        return sum(n * value for n, value in zip(counts, values, strict=True)) / sum(counts)

    names: dict[str, tuple[int, int]] = {}
    for count, program in zip(counts, programs, strict=True):
        for name, cycles in program.names.items():
            before = names.get(name, (0, 0))
            all_, products = (
                a + round(count * b / sum(counts)) for a, b in zip(before, cycles, strict=True)
            )
            names[name] = all_, products
    return dataclasses.replace(
        max(programs, key=lambda program: program.memory),
        names=names,
        **{"cycles": round(mean("cycles")), "moved": round(mean("moved"))},
        **{"flops": mean("flops"), "traffic": mean("traffic")},
        loops=max(program.loops for program in programs),
        unknown_loops=max(program.unknown_loops for program in programs),
        seconds=sum(program.seconds for program in programs),
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """What a run does, on any slice.

    Attributes:
      unit: what an example is called, "images".
      batch, eval_batch: examples per step over all devices.
      examples, eval_examples: in one epoch and in one evaluation.
      steps, evaluations: of the whole run.
      forward_flops: of one example's loss, by `engine.aot.hlo.count_flops`; None if not known.
      input_rates: as in `benchmarks.base`.
    """

    unit: str
    batch: int
    eval_batch: int
    examples: int
    eval_examples: int
    steps: int
    evaluations: int
    forward_flops: int | None
    input_rates: tuple[InputRates, ...] = ()


@dataclasses.dataclass(frozen=True)
class Stage:
    """The steps of a run that have one shape of batches, such as a size of the images."""

    name: str
    steps: int
    program: Program


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result for one slice: the job and its two programs, or an `error` in one line.

    Attributes:
      batch: over all devices.
      stages: what `train` was combined from, where the number of steps of each shape is known.
      fits: False if the memory does not suffice; None if that is not known.
      largest: largest batch per device that fits; None if nobody searched for it.
    """

    topology: Topology
    batch: int
    job: Job | None = None
    train: Program | None = None
    predict: Program | None = None
    error: str = ""
    fits: bool | None = True
    largest: int | None = None
    stages: tuple[Stage, ...] = ()


def row(outcome: Outcome, price: float | None = None) -> dict[str, Any]:
    """All numbers of one slice, in seconds, bytes, FLOPs and US dollars; nan is not known.

    `price` is that of an hour of one chip; by default Google's list price.
    """
    topology, chip = outcome.topology, outcome.topology.chip
    if price is not None:
        chip = dataclasses.replace(chip, price=price)
    devices = topology.devices or math.nan  # not known where libtpu was not asked
    numbers = {
        **{"slice": topology.name, "accelerator_type": topology.accelerator},
        **{"chips": topology.chips, "devices": devices, "batch": outcome.batch},
        "batch_per_device": outcome.batch // devices,
        "memory_available": chip.memory * topology.chips / devices,
        "missing": chip.missing,
        **{"fits": outcome.fits, "error": outcome.error},
    }
    if outcome.largest is not None:
        numbers["largest_batch_per_device"] = outcome.largest
    job, train, predict = outcome.job, outcome.train, outcome.predict
    if job is None or train is None or predict is None:
        return numbers
    numbers |= {
        **{"memory": train.memory, "memory_arguments": train.arguments},
        **{"memory_temporaries": train.temporaries, "memory_program": train.code},
        "memory_of_evaluation": predict.memory,
        "collectives": {k: {"count": n, "bytes": b} for k, (n, b) in train.collectives.items()},
        "unknown_loops": train.unknown_loops + predict.unknown_loops,
        "kernel_notes": kernels.notes(train.kernels, chip.clock),
        "compile_seconds": train.seconds + predict.seconds,
    }
    numbers |= _speed(topology, job, train)
    step = numbers["step_seconds"]
    evaluation = math.ceil(job.eval_examples / job.eval_batch) * predict.cycles / chip.clock
    run = job.steps * step + job.evaluations * evaluation
    numbers |= {
        "epoch_seconds": job.examples / job.batch * step,
        "evaluation_seconds": evaluation,
        "run_seconds": run,
        "chip_hours": topology.chips * run / 3600,
        "price": chip.price,
    }
    if outcome.stages:
        numbers["stages"] = [_stage(stage, job, topology) for stage in outcome.stages]
    for part in (numbers, *numbers.get("stages", ())):
        part["dollars"] = part["chip_hours"] * numbers["price"]
    if job.input_rates and chip.sizes:  # else its hosts are not known
        stages = numbers.get("stages", [numbers | {"name": ""}])
        numbers["input"] = _input(topology, stages, job.input_rates)
    return numbers


def _stage(stage: Stage, job: Job, topology: Topology) -> dict[str, Any]:
    seconds = stage.program.cycles / topology.chip.clock
    total = stage.steps * seconds
    return {
        **{"name": stage.name, "steps": stage.steps, "memory": stage.program.memory},
        **{"step_seconds": seconds, "examples_per_second": job.batch / seconds},
        **{"seconds": total, "chip_hours": topology.chips * total / 3600},
    }


def _speed(topology: Topology, job: Job, train: Program) -> dict[str, Any]:
    chip = topology.chip
    seconds = train.cycles / chip.clock
    peak, bandwidth = chip.peak / chip.devices, chip.bandwidth / chip.devices
    # Backward costs twice what forward does: a gradient by the input and one by the weights.
    model = None if job.forward_flops is None else 3 * job.forward_flops * job.batch
    numbers = {
        **{"step_seconds": seconds, "examples_per_second": job.batch / seconds},
        "examples_per_second_per_chip": job.batch / seconds / topology.chips,
        "model_flops_per_step": model,
        "share_of_peak": model and model / topology.devices / seconds / peak,
    }
    if train.loops:  # XLA's cost analysis counts their bodies once
        return numbers | dict.fromkeys(("flops_per_device", "bytes_per_device", "bound"))
    # XLA's "bytes accessed" has those of the vector memory too: no lower bound of the time.
    moved = train.moved or train.traffic
    numbers |= {"flops_per_device": train.flops, "bytes_per_device": moved}
    bounds = {"compute": train.flops / peak, "HBM": moved / bandwidth}
    bound = max(bounds, key=lambda name: bounds[name])
    if math.isnan(sum(bounds.values())):
        return numbers | {"bound": "?", "bound_seconds": math.nan}
    return numbers | {"bound": bound, "bound_seconds": bounds[bound]}


def _input(
    topology: Topology, stages: Sequence[dict[str, Any]], rates: Sequence[InputRates]
) -> dict[str, Any]:
    """What the hosts prepare for each stage, in examples per second of the slice."""
    hosts, cpus = machines(topology)
    seconds = hosts * cpus * _INPUT_SHARE
    supply = [
        {
            "name": stage["name"],
            "needed": stage["examples_per_second"],
            "prepared": {setting: rate * seconds for setting, rate in one.items()},
        }
        for stage, one in zip(stages, rates, strict=True)
    ]
    return {"hosts": hosts, "cpus_per_host": cpus, "stages": supply}


def plain(value: Any) -> Any:
    """The value for JSON, which has no nan: None in its place."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def tables(rows: Sequence[dict[str, Any]], unit: str) -> str:
    """Rows of `row` as tables of memory, speed and time; `unit` is what an example is called."""
    done = [r for r in rows if "step_seconds" in r]
    fed = f"{unit}/s that the hosts prepare, by setting: do they feed the chips?"
    grids = {
        "memory per device, GiB": _memory_table(rows),
        "one train step": _speed_table(done, unit),
        "the stages of the run": _stage_table(done, unit),
        fed: _input_table([r for r in done if "input" in r], unit),
        "the run": _time_table(done),
    }
    parts = [_grid(title, lines) for title, lines in grids.items() if len(lines) > 1]
    parts += [
        f"{r['slice']}: not known of its chips: {', '.join(r['missing'])}. What needs "
        f"{'it' if len(r['missing']) == 1 else 'them'} shows ?"
        + ("; give --chip_hour_price" if "price" in r["missing"] else "")
        for r in rows
        if r["missing"]
    ]
    parts += [f"{r['slice']}: {note}" for r in done for note in r["kernel_notes"]]
    parts += [
        f"{r['slice']}: too short: the compiler does not say how often {r['unknown_loops']} of "
        "its loops run; each counts once"
        for r in done
        if r["unknown_loops"]
    ]
    return "\n\n".join(parts)


def _text(value: float | None, form: str, unit: float = 1) -> str:
    """A number of units in this form; "?" if it is not known."""
    return "?" if value is None or math.isnan(value) else format(value / unit, form)


def _memory_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    head = ["slice", "type", "chips", "devices", "batch", "arguments", "temporaries", "program"]
    lines = [[*head, "total", "of", "fits"]]
    for r in rows:
        line = [r["slice"], r["accelerator_type"], str(r["chips"])]
        line += [_text(r[name], ".0f") for name in ("devices", "batch_per_device")]
        if r["error"]:
            lines.append([*line, r["error"] + _largest(r)])
            continue
        names = ("memory_arguments", "memory_temporaries", "memory_program", "memory")
        sizes = [_text(r[name], ".2f", _GIB) for name in (*names, "memory_available")]
        lines.append([*line, *sizes, "yes"])
    return lines


def _largest(r: dict[str, Any]) -> str:
    if (largest := r.get("largest_batch_per_device")) is None:
        return ""
    what = f"{largest} per device fit, {largest * r['devices']} in all" if largest else "none fits"
    return f" [largest batch: {what}]"


def _speed_table(rows: Sequence[dict[str, Any]], unit: str) -> list[list[str]]:
    head = ["slice", "ms", f"{unit}/s", "per chip", "TFLOP", "model TFLOP", "of peak"]
    lines = [[*head, "GB moved", "bound by", "ms at least", "collectives"]]
    for r in rows:
        per_device = r["flops_per_device"], r["bytes_per_device"]
        flops, moved = (value and value * r["devices"] for value in per_device)
        least = r.get("bound_seconds")
        together = ", ".join(
            f"{c['count']} {kind} {c['bytes'] / 1e6:.1f} MB" for kind, c in r["collectives"].items()
        )
        lines.append(
            [
                *(r["slice"], _text(1e3 * r["step_seconds"], ".1f")),
                _text(r["examples_per_second"], ",.0f"),
                _text(r["examples_per_second_per_chip"], ",.0f"),
                *(_text(x, ".1f", 1e12) for x in (flops, r["model_flops_per_step"])),
                _text(r["share_of_peak"], ".0%"),
                _text(moved, ".0f", 1e9),
                *(r["bound"] or "?", _text(least and 1e3 * least, ".1f")),
                together or "none",
            ]
        )
    return lines


def _stage_table(rows: Sequence[dict[str, Any]], unit: str) -> list[list[str]]:
    lines = [["slice", "stage", "steps", "ms", f"{unit}/s", "GiB per device", "time", "USD"]]
    for r in rows:
        for stage in r.get("stages", ()):
            line = [r["slice"], stage["name"], f"{stage['steps']:,}"]
            line += [_text(1e3 * stage["step_seconds"], ".1f")]
            line += [_text(stage["examples_per_second"], ",.0f")]
            line += [_text(stage["memory"], ".2f", _GIB), hms(stage["seconds"])]
            lines.append([*line, _text(stage["dollars"], ",.2f")])
    return lines


def _input_table(rows: Sequence[dict[str, Any]], unit: str) -> list[list[str]]:
    """Lines for those results of `row` that have an "input"."""
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


def _time_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    head = ["slice", "epoch", "one evaluation", "whole run", "chip-hours", "USD per chip-hour"]
    lines = [[*head, "USD", "compiled in"]]
    for r in rows:
        times = [hms(r[f"{name}_seconds"]) for name in ("epoch", "evaluation", "run")]
        money = _text(r["chip_hours"], ",.1f"), _text(r["price"], "g"), _text(r["dollars"], ",.2f")
        lines.append([r["slice"], *times, *money, hms(r["compile_seconds"])])
    return lines


def _grid(title: str, lines: list[list[str]]) -> str:
    """Lays lines out in aligned columns; the last cell of a short line may run on."""
    count = len(lines[0])
    widths = [
        max(len(line[i]) for line in lines if len(line) == count or i < len(line) - 1)
        for i in range(count)
    ]
    texts = [title]
    for line in lines:
        cells = [
            cell.ljust(width) if i in (0, len(line) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)
