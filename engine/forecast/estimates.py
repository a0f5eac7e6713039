"""Forecasts memory, speed and time of a run on a slice from its compiled steps.

All numbers are estimates. Times have an interval, which says how far measured runs were from such
forecasts. The forecast also says whether the hosts of the slice prepare examples as fast as its
chips train on them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.progress import hms
from engine.forecast import cache, calibration
from engine.forecast.program import Program
from engine.forecast.topology import Topology, machines

NOTE = """\
Times are estimates, not measurements; docs/check.md has the measured runs that they were compared
with. They leave out the input, the hosts, checkpoints, start-up and compilation. Memory is the
compiler's count for the train step; up to two more batches wait beside it. Prices are Google's, on
demand, as of 2025 and not verified; give yours as --chip_hour_price. TFLOP: the convolutions and
matrix products that the devices execute; model TFLOP: three times those of the forward pass."""
_GIB = 2.0**30
# The share of its time that a vCPU, one of a core's two threads, gives to the input. The rates come
# from a machine whose CPUs were all busy; the rest is for slower hosts, reading over the network
# and copying to the chips. An assumption.
_INPUT_SHARE = 0.75
# Examples per second of CPU time, by the setting that has this rate.
InputRates = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Job:
    """What a run does, on any slice."""

    unit: str  # what an example is called, "images"
    batch: int  # examples per step over all devices
    eval_batch: int
    examples: int  # in one epoch
    eval_examples: int  # in one evaluation
    steps: int  # of the complete run
    evaluations: int  # of the complete run
    forward_flops: int | None  # of one example's loss, by `flops`; None if not known
    input_rates: tuple[InputRates, ...] = ()  # how fast a CPU prepares examples, by setting


@dataclasses.dataclass(frozen=True)
class Stage:
    """The steps of a run that have one shape of batches, such as a size of the images."""

    name: str
    steps: int
    program: Program


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result for one slice: the job and its programs, or an `error` in one line."""

    topology: Topology
    batch: int  # over all devices
    job: Job | None = None
    train: Program | None = None
    predict: Program | None = None  # None for a job without evaluations, too
    error: str = ""
    fits: bool | None = True  # False if the compiler refused it for lack of HBM; None if not known
    micro_batches: int = 1  # of a step
    stages: tuple[Stage, ...] = ()  # of `train`, where the number of steps of each shape is known


def row(outcome: Outcome, price: float | None = None) -> dict[str, Any]:
    """All numbers of one slice, in seconds, bytes, FLOPs and US dollars; nan is not known.

    `price` is for one chip and an hour; by default it is Google's list price.
    """
    topology, chip = outcome.topology, outcome.topology.chip
    if price is not None:
        chip = dataclasses.replace(chip, price=price)
    devices = topology.devices
    numbers = {
        "slice": topology.name,
        "accelerator_type": topology.accelerator,
        "chips": topology.chips,
        "devices": devices,
        "batch": outcome.batch,
        "batch_per_device": outcome.batch // devices,
        "gradient_accumulation_steps": outcome.micro_batches,
        "memory_available": chip.memory * topology.chips / devices,
        "missing": ["price"] if math.isnan(chip.price) else [],
        "fits": outcome.fits,
        "error": outcome.error,
    }
    job, train, predict = outcome.job, outcome.train, outcome.predict
    if job is None or train is None or (predict is None and job.evaluations):
        return numbers
    programs = [train, predict] if predict else [train]
    numbers |= {
        "memory": train.memory,
        "memory_arguments": train.arguments,
        "memory_temporaries": train.temporaries,
        "memory_program": train.code,
        "memory_of_evaluation": predict.memory if predict else 0,
        "collectives": {k: {"count": n, "bytes": b} for k, (n, b) in train.collectives.items()},
        "notes": list(dict.fromkeys(note for program in programs for note in program.notes)),
        "compile_seconds": sum(program.compile_seconds for program in programs),
    }
    numbers |= _speed(topology, job, train)
    step = train.seconds
    evaluation = math.ceil(job.eval_examples / job.eval_batch) * (predict.seconds if predict else 0)
    run = job.steps * step + job.evaluations * evaluation
    hours = topology.chips * run / 3600
    numbers |= {
        "epoch_seconds": job.examples / job.batch * step,
        "evaluation_seconds": evaluation,
        "run_seconds": run,
        "chip_hours": hours,
        "price": chip.price,
        "dollars": hours * chip.price,
    }
    error = train.error
    numbers |= _intervals(numbers, error)
    numbers |= {"calibration": error.described(), "versions": cache.versions()}
    if outcome.stages:
        numbers["stages"] = [_stage(stage, job, topology, chip.price) for stage in outcome.stages]
    if job.input_rates:
        stages = numbers.get("stages", [numbers | {"name": ""}])
        numbers["input"] = _input(topology, stages, job.input_rates)
    return numbers


def _stage(stage: Stage, job: Job, topology: Topology, price: float) -> dict[str, Any]:
    seconds = stage.program.seconds
    hours = topology.chips * stage.steps * seconds / 3600
    numbers = {
        "name": stage.name,
        "steps": stage.steps,
        "memory": stage.program.memory,
        "step_seconds": seconds,
        "examples_per_second": job.batch / seconds,
        "run_seconds": stage.steps * seconds,
        "chip_hours": hours,
        "dollars": hours * price,
    }
    return numbers | _intervals(numbers, stage.program.error)


def _intervals(numbers: Mapping[str, Any], error: calibration.Error) -> dict[str, list[float]]:
    """The interval of each number that is a time, a price or a rate, as NAME_interval."""
    times = ("step_seconds", "epoch_seconds", "evaluation_seconds", "run_seconds")
    found = {
        name: [*error.of_time(numbers[name])]
        for name in (*times, "chip_hours", "dollars")
        if name in numbers
    }
    found["examples_per_second"] = [*error.of_rate(numbers["examples_per_second"])]
    return {f"{name}_interval": interval for name, interval in found.items()}


def _speed(topology: Topology, job: Job, train: Program) -> dict[str, Any]:
    """The time of a step, its FLOPs and bytes, and which resource needs longest at its peak."""
    seconds = train.seconds
    # Backward costs twice what forward does: a gradient by the input and one by the weights.
    model = None if job.forward_flops is None else 3 * job.forward_flops * job.batch
    peak = topology.chip.peak * topology.chips
    return {
        "step_seconds": seconds,
        "examples_per_second": job.batch / seconds,
        "examples_per_second_per_chip": job.batch / seconds / topology.chips,
        "model_flops_per_step": model,
        "share_of_peak": model and model / seconds / peak,
        "flops_per_device": train.flops,
        "bytes_per_device": train.moved,
        "collective_seconds": train.limits["links"],
        "bound": train.bound,
        "bound_seconds": train.limits[train.bound],
    }


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
    """The value with None for nan, which JSON lacks."""
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
        "memory per device, GiB": [_memory_cells(r) for r in rows],
        "one train step": [_speed_cells(r, unit) for r in done],
        "the work of a train step": [_work_cells(r) for r in done],
        "the stages of the run": [
            _stage_cells(r, stage, unit) for r in done for stage in r.get("stages", ())
        ],
        fed: [
            _input_cells(r, stage, unit)
            for r in done
            if "input" in r
            for stage in r["input"]["stages"]
        ],
        "the run": [_time_cells(r) for r in done],
    }
    parts = [_grid(title, lines) for title, lines in grids.items() if lines]
    parts += [
        f"{r['slice']}: the price of its chips is not known; give --chip_hour_price"
        for r in done
        if r["missing"]
    ]
    parts += [f"{r['slice']}: {note}" for r in done for note in r["notes"]]
    errors = {r["slice"].partition(":")[0]: r["calibration"]["source"] for r in done}
    parts += [f"In brackets, {name}: {source}." for name, source in errors.items()]
    return "\n\n".join(parts)


def _text(value: float | None, form: str, unit: float = 1) -> str:
    """A number of units in this form; "?" if it is not known."""
    return "?" if value is None or math.isnan(value) else format(value / unit, form)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _with_interval(r: dict[str, Any], name: str, show: Callable[[float], str]) -> str:
    """A number of a row and its interval, in brackets."""
    if math.isnan(r[name]):
        return "?"
    least, most = map(show, r[f"{name}_interval"])
    return f"{show(r[name])} ({least} to {most})"


def _memory_cells(r: dict[str, Any]) -> dict[str, str]:
    cells = {
        "slice": r["slice"],
        "type": r["accelerator_type"],
        "chips": str(r["chips"]),
        "devices": str(r["devices"]),
        "batch": str(r["batch_per_device"]),
        "micro-batches": str(r["gradient_accumulation_steps"]),
    }
    if r["error"]:
        return cells | {"fits": r["error"]}
    return cells | {
        "arguments": _text(r["memory_arguments"], ".2f", _GIB),
        "temporaries": _text(r["memory_temporaries"], ".2f", _GIB),
        "program": _text(r["memory_program"], ".2f", _GIB),
        "total": _text(r["memory"], ".2f", _GIB),
        "of": _text(r["memory_available"], ".2f", _GIB),
        "fits": "yes",
    }


def _speed_cells(r: dict[str, Any], unit: str) -> dict[str, str]:
    return {
        "slice": r["slice"],
        "ms": _with_interval(r, "step_seconds", _milliseconds),
        f"{unit}/s": _with_interval(r, "examples_per_second", "{:,.0f}".format),
        "per chip": _text(r["examples_per_second_per_chip"], ",.0f"),
        "of peak": _text(r["share_of_peak"], ".0%"),
    }


def _work_cells(r: dict[str, Any]) -> dict[str, str]:
    collectives = [
        f"{c['count']:g} {name} {c['bytes'] / 1e6:.1f} MB" for name, c in r["collectives"].items()
    ]
    links = f"{', '.join(collectives)}: {1e3 * r['collective_seconds']:.1f} ms"
    return {
        "slice": r["slice"],
        "TFLOP": _text(r["flops_per_device"] * r["devices"], ".1f", 1e12),
        "model TFLOP": _text(r["model_flops_per_step"], ".1f", 1e12),
        "GB moved": _text(r["bytes_per_device"] * r["devices"], ".0f", 1e9),
        "bound by": r["bound"],
        "ms at least": _text(r["bound_seconds"], ".1f", 1e-3),
        "collectives": links if collectives else "none",
    }


def _stage_cells(r: dict[str, Any], stage: dict[str, Any], unit: str) -> dict[str, str]:
    return {
        "slice": r["slice"],
        "stage": stage["name"],
        "steps": f"{stage['steps']:,}",
        "ms": _with_interval(stage, "step_seconds", _milliseconds),
        f"{unit}/s": _with_interval(stage, "examples_per_second", "{:,.0f}".format),
        "GiB per device": _text(stage["memory"], ".2f", _GIB),
        "time": _with_interval(stage, "run_seconds", hms),
        "USD": _with_interval(stage, "dollars", "{:,.2f}".format),
    }


def _input_cells(r: dict[str, Any], stage: dict[str, Any], unit: str) -> dict[str, str]:
    need = stage["needed"]
    cells = {
        "slice": r["slice"],
        "stage": stage["name"] or "all",
        "hosts": str(r["input"]["hosts"]),
        "vCPUs each": str(r["input"]["cpus_per_host"]),
        f"{unit}/s needed": f"{need:,.0f}",
    }
    for setting, rate in stage["prepared"].items():
        cells[setting] = f"{rate:,.0f} {'yes' if rate >= need else 'no'}"
    return cells


def _time_cells(r: dict[str, Any]) -> dict[str, str]:
    return {
        "slice": r["slice"],
        "epoch": hms(r["epoch_seconds"]),
        "one evaluation": hms(r["evaluation_seconds"]),
        "complete run": _with_interval(r, "run_seconds", hms),
        "chip-hours": _text(r["chip_hours"], ",.1f"),
        "USD per chip-hour": _text(r["price"], "g"),
        "USD": _with_interval(r, "dollars", "{:,.2f}".format),
    }


def _grid(title: str, lines: list[dict[str, str]]) -> str:
    """Aligns the cells of lines below the names of their columns.

    A line with fewer cells than another has an error as its last one, which runs on.
    """
    head = max(lines, key=len)
    texts = [[*head]] + [[*line.values()] for line in lines]
    widths = [
        max(len(text[i]) for text in texts if len(text) == len(head) or i < len(text) - 1)
        for i in range(len(head))
    ]
    shown = [title]
    for text in texts:
        cells = [
            cell.ljust(width) if i in (0, len(text) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(text, widths, strict=False))
        ]
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)
