"""--mode=preflight: compiles a run's steps for TPU slices, without a TPU, and says if they fit.

libtpu compiles for any slice. It may crash, and it writes to the terminal. Every slice therefore
has a separate process, which runs this file as a program.
"""

import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import os
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
from common import entry
from common.errors import ConfigError, UserError, one_line
from common.progress import hms
from engine.checks import check_plan, check_settings
from engine.forecast import estimates, kernels, topology
from engine.forecast.estimates import Job, Outcome, Stage
from engine.forecast.flops import count_flops
from engine.forecast.program import combine, compile_program
from engine.forecast.topology import Topology
from engine.plan import Plan, Programs, Settings, make_plan, read_settings

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
    start, phase = time.monotonic(), "starting"
    with tempfile.TemporaryFile() as noise, _child(noise, worker) as (process, connection):
        message = None
        with contextlib.suppress(EOFError, ConnectionError):  # the child has died
            connection.send((settings.config, one.name, steps))
            while not isinstance(message, Outcome):
                if isinstance(message, str):
                    phase = message
                    _say(f"{one.name}: {phase} ...")
                message = connection.recv()
        if not isinstance(message, Outcome):
            code = process.wait()
            name = signal.Signals(-code).name if code < 0 else ""
            reason = f"signal {-code} ({name})" if name else f"exit code {code}"
            error = f"the compiler died while {phase}: {reason}{_last_line(noise)}"
            message = Outcome(one, settings.train_batch_size, error=error, fits=None)
    _say(f"{one.name}: {message.error or 'compiled'} ({hms(time.monotonic() - start)})")
    return message


@contextlib.contextmanager
def _child(noise: IO[bytes], worker: str) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    """Starts a module as a program; its output and libtpu's go to `noise`."""
    # The variables of a TPU VM describe the slice that it is a part of.
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
    """The last message in the output of a dead compiler, after a colon; "" without any.

    Lines of the signal handler (RAW) and of the stack trace do not count.
    """
    noise.seek(0)
    lines = noise.read().decode(errors="replace").splitlines()
    lines = [" ".join(line.split()) for line in lines if line.strip() and " RAW: " not in line]
    marks = "@", "***", "PC:", "=== ", "https://symbolize"
    lines = [line for line in lines if not line.startswith(marks)]
    return f": {lines[-1][:200]}" if lines else ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# In the child.


def lower_train(programs: Programs, plan: Plan) -> list[Any]:
    """The train step of a run, lowered for each shape of its batches."""
    state = programs.abstract_state(plan)
    return programs.lower_train(plan, state, programs.abstract_totals(state))


def work(connection: Connection, lower: Callable[..., list[Any]] = lower_train) -> None:
    """Compiles the steps that the parent sends, with `lower`'s train step; ends with the parent."""
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
    progress: Callable[[str], None],
    lower: Callable[..., list[Any]] = lower_train,
) -> Outcome:
    """Compiles the steps of a run for one slice in this process, which libtpu may crash.

    `progress` gets what it does, for the process that waits.
    """
    outcome, step = Outcome(one, settings.train_batch_size), ""
    done: dict[str, Any] = {}
    try:
        if settings.config.get("kernels") == "pallas":
            kernels.ask_for_bundles()  # before libtpu is loaded
        devices: Any = topologies.get_topology_desc(one.name, "tpu", **one.options).devices
        programs = Programs.make(settings, devices=devices)
        benchmark = programs.benchmark
        examples = benchmark.nominal_examples("train") or benchmark.open("train")
        plan = make_plan(settings, benchmark, examples)
        if benchmark.declared_examples("train"):
            check_plan(programs, plan, programs.abstract_state(plan), True)
        else:  # of the length of the run nothing is sure
            check_settings(programs, True)
        job = _job(programs, plan)
        for step in steps:
            progress(f"compiling the {step} step")
            if step == "train":
                lowered, stages = lower(programs, plan), benchmark.stages()
            else:
                lowered, stages = programs.lower_predict(programs.abstract_state(plan)), ()
            parts = [compile_program(program, one, progress) for _, program in lowered]
            done[step] = combine(parts, [stage.steps for stage in stages])
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


def _job(programs: Programs, plan: Plan) -> Job:
    """The run's numbers according to the config, without reading data."""
    settings, benchmark = programs.settings, programs.benchmark
    return Job(
        unit=benchmark.unit,
        batch=settings.train_batch_size,
        eval_batch=settings.eval_batch_size,
        examples=plan.num_examples,
        eval_examples=benchmark.nominal_examples("eval") or benchmark.open("eval"),
        steps=plan.total_steps,
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
