"""--mode=preflight: compiles a run's steps for TPU slices, without a TPU, and says if they fit.

libtpu compiles for any slice. It may crash, and it writes to the terminal. Every slice therefore
has its own process, which runs this file as a program. What a step costs is what the compiler does,
at the prices of a chip.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import IO, Any

import jax
import ml_collections
from jax.experimental import topologies
from jax.sharding import AbstractMesh, PartitionSpec

from benchmarks.base import BATCH_AXES, Benchmark
from common.console import hms
from common.errors import ConfigError, UserError, one_line
from engine.aot import forecast, hlo, kernels, topology
from engine.aot.flops import count_flops
from engine.aot.forecast import Job, Outcome, Program, Stage
from engine.aot.topology import Chip, Topology
from engine.run import Plan, Programs, Settings, make_plan, read_settings

_ROWS = 8  # the TPU's memory has rows of 8; other batches per device waste memory
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CHILD = [sys.executable, "-m"]  # and a module that calls `work`
_FULL = "RESOURCE_EXHAUSTED: "
# With an unlimited stack Linux uses its legacy memory layout, in which libtpu 0.0.42.1 does not
# crash on train steps for v6e. Where the limit cannot be raised, the default layout is used.
_OLD_LAYOUT = ["sh", "-c", 'ulimit -s unlimited 2>/dev/null; exec "$@"', "sh"]
# The last variable allows compilation while another process uses this machine's TPU.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_EXAMPLES = 1009  # a prime, for `count_flops`


def run(
    settings: Settings,
    tpu: str,
    as_json: bool = False,
    search: bool = False,
    price: float | None = None,
) -> int:
    """Compiles the steps of a run for every slice, and prints a forecast.

    Args:
      settings: the settings of the run.
      tpu: slices, as `engine.aot.topology.parse_slices` reads them.
      as_json: print one JSON list instead of tables.
      search: find the largest batch that fits, where the run's batch does not.
      price: US dollars for an hour of one chip; None is Google's list price.

    Returns:
      The exit code: 0 if all slices can run the steps, 1 if one cannot or the compiler failed.

    Raises:
      ConfigError: a slice is not known, or libtpu is not installed.
      Preempted: a signal arrived. The compilation in progress is killed; finished slices are
        printed.
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
            outcome = inspect(settings, one)
            if search and outcome.fits is False and not outcome.train:
                outcome = _with_largest(settings, outcome)
            outcomes.append(outcome)
    finally:  # results that took minutes are shown, even if the rest is interrupted
        if outcomes:
            _report(outcomes, as_json, price)
    return int(any(outcome.error for outcome in outcomes))


def _report(outcomes: list[Outcome], as_json: bool, price: float | None) -> None:
    """Prints the forecasts."""
    rows = [forecast.row(outcome, price) for outcome in outcomes]
    jobs = [outcome.job for outcome in outcomes if outcome.job]
    unit = jobs[0].unit if jobs else "examples"
    if as_json:
        print(json.dumps(forecast.plain(rows), indent=2))
    else:
        print(f"{forecast.tables(rows, unit)}\n\n{forecast.NOTE}")
        if jobs:
            job = jobs[0]
            print(
                f"No data were read: an epoch counts as {job.examples:,} {unit}, an evaluation "
                f"as {job.eval_examples:,};\n{job.steps:,} steps and {job.evaluations:,} "
                f"evaluations of {job.eval_batch:,} at a time."
            )


def inspect(
    settings: Settings,
    one: Topology,
    steps: tuple[str, ...] = ("train", "predict"),
    worker: str = "commands.preflight",
) -> Outcome:
    """Compiles steps of a run for one slice in another process, because the compiler may crash.

    Args:
      settings: the settings of the run.
      one: the slice.
      steps: ("train",) or ("train", "predict").
      worker: the module that compiles there, as a program; it calls `work`.

    Returns:
      The compiler's result; its `error` is the reason if the steps do not compile.
    """
    start, phase = time.monotonic(), "starting"
    with tempfile.TemporaryFile() as noise, _child(noise, worker) as (process, connection):
        message = None
        with contextlib.suppress(EOFError, ConnectionError):  # the child has died
            connection.send((settings.config, one.name, steps))
            while not isinstance(message, Outcome):
                is_new = connection.poll(1.0)
                message = connection.recv() if is_new else phase
                phase = message if isinstance(message, str) else phase
                _progress(one, phase, start, is_new and message is phase)
        if not isinstance(message, Outcome):
            code = process.wait()
            name = signal.Signals(-code).name if code < 0 else ""
            reason = f"signal {-code} ({name})" if name else f"exit code {code}"
            error = f"the compiler died while {phase}: {reason}{_last_line(noise)}"
            message = Outcome(one, settings.train_batch_size, error=error, fits=None)
    _say(f"{one.name}: {message.error or 'compiled'} ({hms(time.monotonic() - start)})")
    return message


def _with_largest(settings: Settings, outcome: Outcome) -> Outcome:
    """The outcome with the largest batch per device that fits, found by bisection; 0 if none."""
    devices, parts = outcome.topology.devices, settings.gradient_accumulation_steps
    share = outcome.batch // devices
    unit = math.lcm(_ROWS, parts) if share > math.lcm(_ROWS, parts) else parts
    fits, too_large = 0, -(-share // unit)  # in units
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        _say(f"{outcome.topology.name}: trying {middle * unit} per device")
        smaller = ml_collections.ConfigDict(settings.config)
        smaller.train_batch_size = middle * unit * devices
        trial = inspect(read_settings(smaller), outcome.topology, ("train",))
        if trial.fits is None:  # the compiler failed otherwise
            error = f"the search for a smaller batch ended at {middle * unit}: {trial.error}"
            return dataclasses.replace(outcome, error=f"{outcome.error}; {error}")
        fits, too_large = (middle, too_large) if trial.fits else (fits, middle)
    return dataclasses.replace(outcome, largest=fits * unit)


@contextlib.contextmanager
def _child(noise: IO[bytes], worker: str) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    """Starts a module as a program; its output and libtpu's go to `noise`."""
    # The variables of a TPU VM describe its own slice.
    others = {name: x for name, x in os.environ.items() if not name.startswith("TPU_")}
    ours, theirs = multiprocessing.Pipe()
    with ours, tempfile.TemporaryDirectory() as bundles:
        with theirs:
            process = subprocess.Popen(
                [*_OLD_LAYOUT, *_CHILD, worker, str(theirs.fileno())],
                env=others | _ENVIRONMENT | {kernels.FOLDER: bundles},
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=noise,
                stderr=noise,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the parent, which kills the child
            )
        try:
            yield process, ours
        finally:
            process.kill()
            process.wait()


def _last_line(noise: IO[bytes]) -> str:
    """The last message in the output of a dead compiler, after a colon; "" if there is none.

    Lines of the signal handler and of the stack trace do not count.
    """
    noise.seek(0)
    lines = noise.read().decode(errors="replace").splitlines()
    lines = [" ".join(line.split()) for line in lines if line.strip()]
    marks = "@", "***", "PC:", "=== ", "https://symbolize"
    lines = [line for line in lines if not line.startswith(marks)]
    lines = [line for line in lines if " RAW: " not in line]  # written in the signal handler
    return f": {lines[-1][:200]}" if lines else ""


def _progress(one: Topology, phase: str, start: float, is_new: bool) -> None:
    """Prints the phase: on a terminal in one line with a clock, elsewhere a line per phase."""
    text = f"{one.name}: {phase} ..."
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text} {hms(time.monotonic() - start)}")
        sys.stderr.flush()
    elif is_new:
        _say(text)


def _say(text: str) -> None:
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}{text}", file=sys.stderr, flush=True)


# In the child.


def lower_train(programs: Programs, plan: Plan) -> list[Any]:
    """The train step of a run, lowered for each shape of its batches."""
    state = programs.abstract_state(plan.recipe)
    return programs.lower_train(plan.recipe, state, programs.abstract_totals(state))


def work(connection: Connection, lower: Callable[..., list[Any]] = lower_train) -> None:
    """Compiles the steps that the parent sends; ends when the parent ends.

    `lower` is `lower_train`, or makes another train step from the same.
    """
    recipe, name, steps = connection.recv()

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            connection.recv()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    settings = read_settings(ml_collections.ConfigDict(recipe).lock())
    (one,) = topology.parse_slices(name)
    connection.send(compiled(settings, one, steps, connection.send, lower))


def compiled(
    settings: Settings,
    one: Topology,
    steps: tuple[str, ...],
    say: Callable[[str], None],
    lower: Callable[..., list[Any]] = lower_train,
) -> Outcome:
    """Compiles in this process, which libtpu may crash; see `inspect`."""
    outcome, step = Outcome(one, settings.train_batch_size), ""
    done: dict[str, Any] = {}
    try:
        if settings.config.get("kernels") == "pallas":
            kernels.ask_for_bundles()  # before libtpu is loaded
        devices = _devices(one)
        programs = Programs.make(settings, devices=devices)
        benchmark = programs.benchmark
        examples = benchmark.nominal_examples("train") or benchmark.num_examples("train")
        plan = make_plan(settings, benchmark, examples)
        job = _job(programs, plan)
        for step in steps:
            say(f"compiling the {step} step")
            if step == "train":
                lowered, stages = lower(programs, plan), benchmark.stages()
            else:
                lowered, stages = programs.lower_predict(programs.abstract_state(plan.recipe)), ()
            parts = [_program(program, outcome.topology.chip) for _, program in lowered]
            done[step] = forecast.combine(parts, [stage.steps for stage in stages])
            if stages:
                rows = zip(stages, parts, strict=True)
                done["stages"] = tuple(Stage(stage.name, stage.steps, p) for stage, p in rows)
        return dataclasses.replace(outcome, job=job, **done)
    except jax.errors.JaxRuntimeError as error:
        text, fits = one_line(error), None
        if text.startswith(_FULL):
            text, fits = f"the {step} step does not fit: {text.removeprefix(_FULL)}", False
        return dataclasses.replace(outcome, train=done.get("train"), error=text, fits=fits)
    except (UserError, ValueError, RuntimeError, OSError) as error:  # such as a batch size
        return dataclasses.replace(outcome, error=one_line(error), fits=None)


def _devices(one: Topology) -> Any:
    """libtpu's devices of a slice.

    Raises:
      ConfigError: the installed libtpu knows no such chip or slice.
    """
    try:
        return topologies.get_topology_desc(one.name, "tpu", **one.options).devices
    except jax.errors.JaxRuntimeError as error:
        libtpu, text = f"libtpu {importlib.metadata.version('libtpu')}", one_line(error)
        if "Invalid TPU external name" in text:
            raise ConfigError(f"{libtpu} knows no chip {one.chip.name}: use a newer one") from error
        if host := re.search('chips_per_host_bounds "([0-9x]+)"', text):
            raise ConfigError(
                f"{one.name} is no whole slice for {libtpu}: its hosts have {host[1]} chips"
            ) from error
        raise


def _program(lowered: Any, chip: Chip) -> Program:
    """Compiles a step for one shape of its batches."""
    start = time.monotonic()
    step = lowered.compile()
    memory, analysis = step.memory_analysis(), step.cost_analysis()
    seconds = time.monotonic() - start
    cost = kernels.priced(hlo.cost(step.as_text()), chip, kernels.read_bundles())
    return Program(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=analysis["flops"],
        traffic=analysis["bytes accessed"],
        seconds=seconds,
        **vars(cost),
    )


def _job(programs: Programs, plan: Plan) -> Job:
    """The run's numbers according to the config, without reading data."""
    settings, benchmark = programs.settings, programs.benchmark
    return Job(
        unit=benchmark.unit,
        batch=settings.train_batch_size,
        eval_batch=settings.eval_batch_size,
        examples=plan.num_examples,
        eval_examples=benchmark.nominal_examples("eval") or benchmark.num_examples("eval"),
        steps=plan.recipe.total_steps,
        evaluations=plan.evaluations,
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


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        work(connection)
