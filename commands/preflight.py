"""--mode=preflight: compiles a run's steps for TPU slices, without a TPU, and says if they fit.

libtpu compiles for any slice. Every slice has a separate process (`engine.forecast.worker`), which
runs this file as a program.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.extend
import ml_collections
from jax.experimental import topologies
from jax.sharding import AbstractMesh, PartitionSpec

from benchmarks.base import BATCH_AXES, Benchmark
from common import entry
from common.errors import ConfigError, UserError, one_line
from common.progress import hms
from engine import fit
from engine.checks import check_plan, check_settings
from engine.forecast import estimates, kernels, topology
from engine.forecast.estimates import Job, Outcome, Stage
from engine.forecast.program import Program, combine, compile_program
from engine.forecast.topology import Topology
from engine.forecast.worker import CompilerDied, ask, receive, refusal, say
from engine.plan import Plan, Programs, Settings, make_plan, read_settings

_EXAMPLES = 1009  # a prime, for `count_flops`


def run(settings: Settings, tpu: str, as_json: bool = False, price: float | None = None) -> int:
    """Compiles the steps of a run for every slice, and prints a forecast.

    `tpu` names the slices: "v5e:4x4, v3-32". With `as_json` it prints one JSON list instead of
    tables. `price` is US dollars for an hour of one chip; None is Google's list price. Returns the
    exit code: 0 if all slices can run the steps, 1 if one cannot or the compiler failed.
    """
    slices = topology.parse_slices(tpu)
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "--mode=preflight compiles with libtpu, which is not installed: "
            "bash scripts/setup.sh tpu && . .venv/bin/activate"
        )
    outcomes: list[Outcome] = []
    try:
        for one in slices:
            outcomes.append(inspect(settings, one))
    finally:  # results that took minutes are shown, even if the rest is interrupted
        rows = [estimates.row(outcome, price) for outcome in outcomes]
        job = next((outcome.job for outcome in outcomes if outcome.job), None)
        if as_json and rows:
            entry.result(json.dumps(estimates.plain(rows), indent=2) + "\n")
        elif rows:
            unit = job.unit if job else "examples"
            print(f"{estimates.tables(rows, unit)}\n\n{estimates.NOTE}")
            if job:
                print(
                    f"No data were read: an epoch counts as {job.examples:,} {unit}, an evaluation "
                    f"as {job.eval_examples:,};\n{job.steps:,} steps and {job.evaluations:,} "
                    f"evaluations of {job.eval_batch:,} at a time."
                )
    return int(any(outcome.error for outcome in outcomes))


def inspect(
    settings: Settings,
    one: Topology,
    steps: tuple[str, ...] = ("train", "predict"),
    worker: str = "commands.preflight",
) -> Outcome:
    """Compiles steps of a run for one slice in another process, because the compiler may crash.

    `steps` are ("train",) or ("train", "predict"). `worker` is the module that compiles there, as a
    program; it calls `work`. The result's `error` is the reason if the steps do not compile.
    """
    start = time.monotonic()
    try:
        outcome = ask(worker, (settings.config, one.name, steps), one.name)
    except CompilerDied as error:
        outcome = Outcome(one, settings.train_batch_size, error=str(error), fits=None)
    say(f"{one.name}: {outcome.error or 'compiled'} ({hms(time.monotonic() - start)})")
    return outcome


# In the child.


def lower_train(programs: Programs, plan: Plan) -> list[Any]:
    """The train step of a run, lowered for each shape of its batches."""
    state = programs.abstract_state(plan)
    return programs.lower_train(plan, state, programs.abstract_totals(plan, state))


def work(connection: Connection, lower: Callable[..., list[Any]] = lower_train) -> None:
    """Compiles the steps that the parent sends, with `lower`'s train step; ends with the parent."""
    recipe, name, steps = receive(connection)
    settings = read_settings(ml_collections.ConfigDict(recipe).lock())
    (one,) = topology.parse_slices(name)
    connection.send(compiled(settings, one, steps, connection.send, lower))


def compiled(
    settings: Settings,
    one: Topology,
    steps: tuple[str, ...],
    progress: Callable[[str], None],
    lower: Callable[..., list[Any]] = lower_train,
) -> Outcome:
    """Compiles the steps of a run for one slice in this process, which libtpu may crash.

    `progress` gets what it does, for the process that waits.
    """
    outcome, step = Outcome(one, settings.train_batch_size), ""
    done: dict[str, Any] = {}
    try:
        kernels.ask_for_bundles()  # before libtpu is loaded
        devices: Any = topologies.get_topology_desc(one.name, "tpu", **one.options).devices
        programs = Programs.make(settings, devices=devices)
        benchmark = programs.benchmark
        nominal = round(settings.train_fraction * benchmark.nominal_examples("train"))
        examples = nominal or benchmark.open("train")
        plan = make_plan(settings, benchmark, examples)
        if benchmark.declared_examples("train"):
            check_plan(programs, plan, programs.abstract_state(plan), True)
        else:  # of the length of the run nothing is sure
            check_settings(programs, True)
        job, state = _job(programs, plan), programs.abstract_state(plan)

        def compile_all(lower_step: Callable[..., list[Any]], *arguments: Any) -> list[Program]:
            progress(f"tracing the {step} step")
            say_when = functools.partial(_say_when, progress, step)
            lowered = lower_step(*arguments)
            return [compile_program(program, one, say_when) for _, program in lowered]

        fitting = fit.Fit(
            programs,
            state,
            trains=True,
            free=lambda: one.chip.memory * one.chips / one.devices,
            memory=lambda parts: combine(parts).memory,
            say=progress,
        )
        for step in steps:
            if step == "predict" and benchmark.no_evaluation:
                continue
            if step == "train":
                fitted, parts = fitting.train(lambda cut: compile_all(lower, cut, plan))
                outcome = dataclasses.replace(outcome, micro_batches=fitted.micro_batches)
                stages = benchmark.stages()
            else:
                size, parts = fitting.predict(
                    lambda size: compile_all(programs.lower_predict, state, size)
                )
                stages, job = (), dataclasses.replace(job, eval_batch=size)
            done[step] = combine(parts, [stage.steps for stage in stages])
            if stages:
                rows = zip(stages, parts, strict=True)
                done["stages"] = tuple(Stage(stage.name, stage.steps, p) for stage, p in rows)
        return dataclasses.replace(outcome, job=job, **done)
    except fit.DoesNotFit as error:
        train = done.get("train")
        return dataclasses.replace(outcome, train=train, error=str(error), fits=False)
    except jax.errors.JaxRuntimeError as error:
        text, fits = refusal(error, f"the {step} step")
        return dataclasses.replace(outcome, train=done.get("train"), error=text, fits=fits)
    except (UserError, ValueError, RuntimeError, OSError) as error:  # such as a batch size
        return dataclasses.replace(outcome, error=one_line(error), fits=None)


def _say_when(progress: Callable[[str], None], step: str, when: str) -> None:
    progress(f"compiling the {step} step ({when})")


def _job(programs: Programs, plan: Plan) -> Job:
    """The run's numbers according to the config, without reading data."""
    settings, benchmark = programs.settings, programs.benchmark
    held_out = 0
    if not benchmark.no_evaluation:
        held_out = benchmark.nominal_examples("eval") or benchmark.open("eval")
    return Job(
        unit=benchmark.unit,
        batch=settings.train_batch_size,
        eval_batch=settings.eval_batch_size,
        examples=plan.num_examples,
        eval_examples=held_out,
        steps=plan.total_steps,
        evaluations=plan.evaluations if held_out else 0,
        forward_flops=_forward_flops(benchmark),
        input_rates=benchmark.input_rates(),
    )


def _forward_flops(benchmark: Benchmark) -> int | None:
    """FLOPs of one training example's forward pass; the mean over the steps or batch shapes."""
    key, mesh = jax.random.key(0), AbstractMesh((1,) * len(BATCH_AXES), BATCH_AXES)
    weights, everywhere = jax.eval_shape(benchmark.init, key), PartitionSpec()
    how: Any = {"in_specs": everywhere, "out_specs": everywhere, "check_vma": False}
    loss = jax.shard_map(benchmark.loss, mesh=mesh, **how)
    specs = benchmark.batch_spec("train", _EXAMPLES)
    counts = [count_flops(loss, *weights, spec, key, examples=_EXAMPLES) for spec in specs]
    steps = [stage.steps for stage in benchmark.stages()] or [1] * len(counts)
    known = [n * count for n, count in zip(steps, counts, strict=True) if count is not None]
    return sum(known) // (sum(steps) * _EXAMPLES) if len(known) == len(counts) else None


def count_flops(function: Callable[..., Any], *arguments: Any, examples: int = 1) -> int | None:
    """Counts the FLOPs of the convolutions and matrix products in `function(*arguments)`.

    A multiplication and an addition are two; padding counts as if it were data. Returns None where
    the count depends on the data, as with a `while_loop`.

    Args:
      function: anything that jax can trace.
      arguments: trees of arrays or ShapeDtypeStructs.
      examples: the batch size. Only products whose result has rows for each example are counted,
        not those that sum over examples, such as BatchNorm's statistics by Gram matrices. A result
        has such rows if `examples` divides its size, so choose a large prime.
    """
    return _flops(jax.make_jaxpr(function)(*arguments).jaxpr, examples)


def _flops(jaxpr: Any, examples: int) -> int | None:
    total = 0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        parts = [_flops(part, examples) for part in jax.extend.core.jaxprs_in_params(parameters)]
        if name == "while" or None in parts:
            return None
        counts = [part for part in parts if part is not None]
        platforms = parameters.get("branches_platforms")
        if platforms and None in platforms:  # the definition; the others are for some hardware
            total += counts[platforms.index(None)]
        elif name == "cond":
            total += max(counts)
        else:
            total += sum(counts) * parameters.get("length", 1) if name == "scan" else sum(counts)
        out: Any = equation.outvars[0].aval if equation.outvars else None
        if name not in ("dot_general", "conv_general_dilated") or math.prod(out.shape) % examples:
            continue
        if name == "dot_general":
            (contracting, _), _ = parameters["dimension_numbers"]
            sides = equation.invars[0].aval.shape
            total += 2 * math.prod(out.shape) * math.prod(sides[i] for i in contracting)
        else:
            numbers, kernel = parameters["dimension_numbers"], equation.invars[1].aval.shape
            window = math.prod(kernel) // kernel[numbers.rhs_spec[0]]  # its input features, too
            total += 2 * math.prod(out.shape) * window
    return total


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        work(connection)
