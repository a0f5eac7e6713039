"""--mode=preflight: compiles a run's steps for TPUs that are not here, and says what they would do.

libtpu compiles for any slice without a TPU. It may die on a program, and it writes to the terminal;
so every slice has a process of its own: this file run as a program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
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
from etils import epath
from jax.experimental import topologies

from engine.aot import flops, forecast, hlo, topology
from engine.aot.forecast import Job, Outcome, Program
from engine.aot.topology import Topology
from engine.report.writers import duration
from errors import ConfigError, one_line
from evaluate import Plan, make_cadence, make_recipe

_ROWS = 8  # the TPU's memory holds rows of 8: other batches per device waste some of it
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CHILD = [sys.executable, "-m", "modes.preflight"]
_FULL = "RESOURCE_EXHAUSTED: "
# An unlimited stack makes Linux lay out memory in its old way, in which libtpu 0.0.42.1 does not
# die on train steps for v6e. Where that is not allowed, the usual way has to do.
_LAID_OUT = ["sh", "-c", 'ulimit -s unlimited 2>/dev/null; exec "$@"', "sh"]
# The last is for a machine whose TPU is at work: compiling does not touch it.
_SET = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
      tpu: slices, as `engine.aot.topology.parse` reads them.
      price: of a chip-hour; 0 if money is of no interest.
      chart: PNG file for a bar chart, local or gs://; "" for none.
      as_json: print one JSON list instead of tables.
      largest_batch: where the batch does not fit, look for the largest that does.
    """

    tpu: str
    price: float = 0.0
    chart: str = ""
    as_json: bool = False
    largest_batch: bool = False


def run(config: Any, request: Request) -> int:
    """Compiles the steps of `config` for every slice asked for, and prints what they would do.

    Returns:
      The exit code: 1 if some slice cannot run it, or that cannot be found out, else 0.

    Raises:
      ConfigError: a slice is not known.
      ConfigError: libtpu is not installed, or there is no folder for the chart.
      Preempted: a signal arrived; the compilation in progress is killed, those done are shown.
    """
    wanted = topology.parse(request.tpu)
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "--mode=preflight compiles with libtpu, which is not installed: "
            "pip install --require-hashes -r requirements-tpu.txt"
        )
    folder = os.path.dirname(request.chart)
    if folder and "://" not in folder and not epath.Path(folder).is_dir():
        raise ConfigError(f"--chart={request.chart}: there is no folder {folder}; make it first")
    outcomes: list[Outcome] = []
    try:
        for one in wanted:
            outcome = inspect(config, one)
            if request.largest_batch and outcome.fits is False and not outcome.train:
                outcome = _with_largest(config, outcome)
            outcomes.append(outcome)
    finally:  # what took minutes is shown, even if somebody does not want to wait for the rest
        if outcomes:
            _report(outcomes, request)
    return int(any(outcome.error for outcome in outcomes))


def _report(outcomes: list[Outcome], request: Request) -> None:
    """Prints and draws what was found."""
    rows = [forecast.row(outcome, request.price) for outcome in outcomes]
    jobs = [outcome.job for outcome in outcomes if outcome.job]
    unit = jobs[0].unit if jobs else "examples"
    if request.as_json:
        print(json.dumps(rows, indent=2))
    else:
        print(f"{forecast.tables(rows, unit)}\n\n{forecast.NOTE}")
        if jobs:
            job = jobs[0]
            print(
                f"No data were read: an epoch is taken as {job.examples:,} {unit}, an evaluation "
                f"as {job.eval_examples:,};\n{job.steps:,} steps and {job.evaluations:,} "
                f"evaluations of {job.eval_batch:,} at a time."
            )
    if request.chart:
        forecast.draw(rows, request.chart, unit)
        _say(f"chart: {request.chart}")


def inspect(config: Any, one: Topology, steps: tuple[str, ...] = ("train", "predict")) -> Outcome:
    """Compiles steps of `config` for one slice, in a process of its own that may die.

    Args:
      config: the run's configuration.
      one: the slice.
      steps: "train" alone or with "predict".

    Returns:
      What the compiler says of them; the outcome's `error` says what went wrong.
    """
    begun, phase = time.monotonic(), "starting"
    with tempfile.TemporaryFile() as noise, _child(noise) as (process, line):
        found = None
        with contextlib.suppress(EOFError, ConnectionError):  # that is how its death looks
            line.send((config.to_dict(), one.name, steps))
            while not isinstance(found, Outcome):
                if line.poll(1.0):
                    found = line.recv()
                    phase = found if isinstance(found, str) else phase
                    _progress(one, phase, begun, isinstance(found, str))
                else:
                    _progress(one, phase, begun, False)
        if not isinstance(found, Outcome):
            code = process.wait()
            how = f"exit code {code}" if code >= 0 else _signal(-code)
            error = f"the compiler died while {phase}: {how}{_last_words(noise)}"
            found = Outcome(one, config.train_batch_size, error=error, fits=None)
    said = found.error or "compiled"
    _say(f"{one.name}: {said} ({duration(time.monotonic() - begun)})")
    return found


def largest_batch(fits: Callable[[int], bool], unit: int, beyond: int) -> int:
    """The largest multiple of `unit` below `beyond` that fits, by bisection; 0 if none does."""
    low, high = 0, -(-beyond // unit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return low * unit


def _with_largest(config: Any, outcome: Outcome) -> Outcome:
    """The outcome with the largest batch per device that fits."""
    devices, parts = outcome.topology.devices, config.gradient_accumulation_steps
    share = outcome.batch // devices
    unit = math.lcm(_ROWS, parts) if share > math.lcm(_ROWS, parts) else parts

    def fits(batch: int) -> bool:
        _say(f"{outcome.topology.name}: trying {batch} per device")
        smaller = ml_collections.ConfigDict(config.to_dict())
        smaller.train_batch_size = batch * devices
        found = inspect(smaller, outcome.topology, ("train",))
        if found.fits is None:
            raise _Undecided(f"the search for a smaller batch ended at {batch}: {found.error}")
        return found.fits

    try:
        return dataclasses.replace(outcome, largest=largest_batch(fits, unit, share))
    except _Undecided as error:
        return dataclasses.replace(outcome, error=f"{outcome.error}; {error}")


class _Undecided(RuntimeError):
    """Whether a batch fits could not be found out."""


@contextlib.contextmanager
def _child(noise: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    """This file as a program, and the line to it; what it or libtpu prints goes to `noise`."""
    # A TPU VM's variables describe its own slice.
    others = {name: x for name, x in os.environ.items() if not name.startswith("TPU_")}
    ours, theirs = multiprocessing.Pipe()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [*_LAID_OUT, *_CHILD, str(theirs.fileno())],
                env=others | _SET,
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=noise,
                stderr=noise,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent, which kills it
            )
        try:
            yield process, ours
        finally:
            process.kill()
            process.wait()


def _signal(number: int) -> str:
    return f"signal {number} ({signal.Signals(number).name})"


def _last_words(noise: IO[bytes]) -> str:
    """The last line that is not of the signal or a stack trace, after a colon; "" if none is."""
    noise.seek(0)
    lines = noise.read().decode(errors="replace").splitlines()
    told = [" ".join(line.split()) for line in lines if line.strip()]
    told = [line for line in told if not line.startswith(("@", "***", "PC:", "=== "))]
    told = [line for line in told if " RAW: " not in line]  # written in the signal handler
    return f": {told[-1][:200]}" if told else ""


def _progress(one: Topology, phase: str, begun: float, is_new: bool) -> None:
    """One line that counts on a terminal; elsewhere one for each phase."""
    text = f"{one.name}: {phase} ..."
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text} {duration(time.monotonic() - begun)}")
        sys.stderr.flush()
    elif is_new:
        _say(text)


def _say(text: str) -> None:
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}{text}", file=sys.stderr, flush=True)


# In the child.


def _work(line: Connection) -> None:
    """Does what the parent asks for; ends when the parent does."""
    config, name, steps = line.recv()

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            line.recv()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    config = ml_collections.ConfigDict(config).lock()
    (one,) = topology.parse(name)
    line.send(compiled(config, one, steps, line.send))


def compiled(
    config: Any, one: Topology, steps: tuple[str, ...], say: Callable[[str], None]
) -> Outcome:
    """Compiles in this process, which libtpu may take with it; see `inspect`."""
    outcome, found, step = Outcome(one, config.train_batch_size), {}, ""
    try:
        slice_ = topologies.get_topology_desc(one.name, "tpu", **one.options)
        plan = Plan.of(config, "", slice_.devices)
        job = _job(plan)
        recipe = make_recipe(config, job.examples)
        state = plan.state(recipe)
        for step in steps:
            say(f"compiling the {step} step")
            train = step == "train"
            lowered = plan.lower_train(recipe, state) if train else plan.lower_predict(state)
            found[step] = _program(lowered)
        return dataclasses.replace(outcome, job=job, **found)
    except jax.errors.JaxRuntimeError as error:
        text, fits = one_line(error), None
        if text.startswith(_FULL):
            text, fits = f"the {step} step does not fit: {text.removeprefix(_FULL)}", False
        return dataclasses.replace(outcome, train=found.get("train"), error=text, fits=fits)
    except (ValueError, RuntimeError, OSError) as error:  # the config and the slice do not match
        return dataclasses.replace(outcome, error=one_line(error), fits=None)


def _program(lowered: list[Any]) -> Program:
    """Compiles a step for each shape of its batches; the one that takes longest is what counts."""
    found = []
    for _, program in lowered:
        begun = time.monotonic()
        done = program.compile()
        memory, analysis, cost = (
            done.memory_analysis(),
            done.cost_analysis(),
            hlo.cost(done.as_text()),
        )
        found.append(
            Program(
                arguments=memory.argument_size_in_bytes,
                outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
                temporaries=memory.temp_size_in_bytes,
                code=memory.generated_code_size_in_bytes,
                flops=analysis["flops"],
                traffic=analysis["bytes accessed"],
                seconds=time.monotonic() - begun,
                **dataclasses.asdict(cost),
            )
        )
    return max(found, key=lambda program: program.cycles)


def _job(plan: Plan) -> Job:
    """What the run does, as far as that is known without its data."""
    config, benchmark = plan.config, plan.benchmark
    size, examples = config.train_batch_size, benchmark.nominal_examples("train")
    steps = make_recipe(config, examples).total_steps
    every = make_cadence(config, examples)
    evaluations, due = 1, every.next_after(0)  # the last step's
    while due is not None and due < steps:
        evaluations, due = evaluations + 1, every.next_after(due)
    weights = jax.eval_shape(benchmark.init, jax.random.key(0))
    forward = [flops.count(benchmark.predict, *weights, s) for s in benchmark.batch_spec("eval", 1)]
    return Job(
        unit=benchmark.unit,
        batch=size,
        eval_batch=config.eval_batch_size,
        examples=examples,
        eval_examples=benchmark.nominal_examples("eval"),
        steps=steps,
        evaluations=evaluations,
        forward_flops=forward[-1],
    )


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        _work(connection)
