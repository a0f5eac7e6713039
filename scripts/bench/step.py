"""Compares train steps: with batch_norm='plain' and 'gram', or this project's with a peer's.

python -m scripts.bench.step --tpu=v3-8,v5e-8,v4-16   the compiler's estimates, without a TPU
python -m scripts.bench.step                          seconds on the devices of this machine
python -m scripts.bench.step --config=configs/ssd.py --tpu=v5e-8 --peer   this step and the peer's
python -m scripts.bench.step --peer=torch --config=configs/phrases.py
                                          this step and PyTorch's, on this machine's devices

The step is train.py's, on a batch of the data or, without data, on a random one. On CPUs it is the
plain one for both kinds of BatchNorm. Estimates need libtpu (requirements-tpu.txt) and take minutes
for each step; docs/performance.md says what they leave out.

A peer (scripts/bench/peers) is a step of the same network on the same batch: --peer in plain flax
and optax, with the same dtypes and compiler options, --peer=torch in PyTorch (peers/on_torch.py).
Without --tpu both steps run in turn, and the least of --steps rounds counts. On CPUs that is in
float32, unless told otherwise. --json prints an object per step instead of a table.
"""

import argparse
import ast
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from etils import epath

from benchmarks.base import HostBatch
from commands import preflight
from common import entry
from common.errors import ConfigError
from engine import compiler, environment
from engine import mesh as meshes
from engine import recipe as recipes
from engine.aot import topology
from engine.run import Programs, make_plan, read_settings
from scripts.bench import batches, peers
from scripts.bench.peers import on_torch
from scripts.bench.peers import step as peer_step

Row = dict[str, Any]
_COLUMNS = {
    "slice": "slice",
    "step": "step",
    "batch_norm": "BatchNorm",
    "batch": "batch",
    "ms": "ms",
    "ratio": "ratio to plain",
    "ratio_to_peer": "ratio to the peer",
    "moved": "through the HBM, GB",
    "moved_ratio": "ratio",
    "temporaries": "temporaries, GB",
    "temporaries_ratio": "ratio ",
    "traffic": "bytes accessed, GB",
    "flops": "TFLOP",
    "compile_seconds": "compile, s",
    "error": "error",
}
_UNITS = {"temporaries": 1e9, "traffic": 1e9, "moved": 1e9, "flops": 1e12}
# Examples of a timed batch beside a peer, at most, by benchmark; others have 16.
_TIMED = {"transformer": 32, "gnmt": 32, "ncf": 2048}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the steps, prints them, and returns the exit code."""
    flags = _flags(arguments)
    if not flags.peer:
        rows = _compare_norms(flags)
    else:
        rows = _estimate_peer(flags) if flags.tpu else _time_peer(flags)
    print("\n".join(map(json.dumps, rows)) if flags.json else table(rows))
    return int(any("error" in row for row in rows))


def _compare_norms(flags: argparse.Namespace) -> list[Row]:
    """Our step with each kind of BatchNorm, on each slice or on this machine's devices."""
    if not flags.tpu:
        meshes.open_platform()
    slices: list[Any] = topology.parse_slices(flags.tpu) if flags.tpu else [None]
    rows, plain = [], None
    for one, kind in itertools.product(slices, flags.batch_norm.split(",")):
        config = config_of(flags, kind, one.devices if one else jax.device_count())
        figures = estimate(config, one) if one else timed(config, flags.steps)
        row = {"slice": one.name if one else jax.devices()[0].device_kind, "batch_norm": kind}
        row |= {"estimate": bool(one), "batch_per_device": flags.batch_per_device, **figures}
        plain = row if kind == "plain" else plain
        if plain and plain["slice"] == row["slice"] and plain.get("ms") and row.get("ms"):
            row["ratio"] = row["ms"] / plain["ms"]
        rows.append(row)
    return rows


def _estimate_peer(flags: argparse.Namespace) -> list[Row]:
    """The compiler's estimates of the peer's step and of our step, on each slice."""
    rows: list[Row] = []
    for one in topology.parse_slices(flags.tpu):
        config = config_of(flags, "", one.devices)
        peers.check(config)
        found = {"peer": estimate(config, one, peer_step.__name__), "ours": estimate(config, one)}
        for name, figures in found.items():
            row = {"slice": one.name, "step": name, "estimate": True, **figures}
            rows.append(row | {"batch_per_device": flags.batch_per_device})
        peer, ours = rows[-2:]
        if "error" not in peer | ours:
            for key in ("moved", "temporaries"):
                ours[f"{key}_ratio"] = ours[key] / peer[key]
            ours["ratio_to_peer"] = ours["ms"] / peer["ms"]
    return rows


def _time_peer(flags: argparse.Namespace) -> list[Row]:
    """The ms of the peer's step and of our step on this machine."""
    config, ours, theirs = pair(flags)
    our_ms, their_ms = least(ours, theirs, flags.steps)
    precision = config.get("precision", "float32")
    print(f"{precision}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    common = {"slice": jax.devices()[0].device_kind, "estimate": False}
    common["batch"] = config.train_batch_size
    return [
        common | {"step": {"plain": "flax", "torch": "PyTorch"}[flags.peer], "ms": their_ms},
        common | {"step": "ours", "ms": our_ms, "ratio_to_peer": our_ms / their_ms},
    ]


def pair(flags: argparse.Namespace) -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    """The config of the flags, and our train step and the peer's on the same batch.

    Both are compiled, and each call waits for the device.
    """
    config = read_config(flags)
    torch = None
    if flags.peer == "torch":
        torch = on_torch.load(config)
    else:
        peers.check(config)
    if meshes.open_platform() == "cpu":
        environment.keep_freed_memory()  # a run on CPUs does so too; both use malloc
        is_set = any(text.startswith("precision=") for text in flags.set)
        if "precision" in config and not is_set:
            config.precision = "float32"
    compiler.use_cache(config.compilation_cache)
    devices = jax.device_count()
    usual = min(config.train_batch_size // devices, _TIMED.get(config.benchmark, 16))
    config.train_batch_size = devices * (flags.batch_per_device or max(usual, 1))
    config.eval_batch_size = devices
    programs = Programs.make(read_settings(config.lock()))
    batch = batches.first(programs)
    *_, ours = make_step(programs, batch)
    if torch is None:
        theirs = peer_step.make_step(programs, batch)
    else:
        theirs = on_torch.make_step(torch, programs, batch)
    ours()
    theirs()
    return config, ours, theirs


def least(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The least ms of two steps, which alternate because other work disturbs both alike."""
    best = [float("inf"), float("inf")]
    for turn in range(rounds + 2):  # the first two warm up
        for i, step in enumerate((ours, theirs)):
            started = time.perf_counter()
            step()
            if turn >= 2:
                best[i] = min(best[i], time.perf_counter() - started)
    return best[0] * 1e3, best[1] * 1e3


def estimate(config: Any, one: topology.Topology, worker: str = "commands.preflight") -> Row:
    """Returns the compiler's estimate of the train step, in ms, bytes and FLOPs, or its "error".

    `worker` is the module that compiles the step, in another process.
    """
    outcome = preflight.inspect(read_settings(config), one, ("train",), worker)
    if outcome.train is None:
        return {"error": outcome.error}
    program = outcome.train
    return {
        "cycles": program.cycles,
        "ms": program.cycles / one.chip.clock * 1e3,
        "moved": program.moved,
        "temporaries": program.temporaries,
        "traffic": program.traffic,
        "flops": program.flops,
        "compile_seconds": program.seconds,
    }


def timed(config: Any, count: int) -> Row:
    """Measures the train step on this machine's devices: the median in ms, and XLA's analysis."""
    programs = Programs.make(read_settings(config))
    compiled, compile_seconds, step = make_step(programs, batches.first(programs))
    seconds = []
    for _ in range(count + 2):  # the first two warm up
        started = time.monotonic()
        step()
        seconds.append(time.monotonic() - started)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return {
        "ms": statistics.median(seconds[2:]) * 1e3,
        "temporaries": memory.temp_size_in_bytes,
        "traffic": cost.get("bytes accessed"),
        "flops": cost.get("flops"),
        "compile_seconds": compile_seconds,
    }


def make_step(programs: Programs, batch: HostBatch) -> tuple[Any, float, Callable[[], None]]:
    """The compiled train step, the seconds that took, and a function that takes a step."""
    benchmark, mesh = programs.benchmark, programs.mesh
    examples = benchmark.nominal_examples("train") or benchmark.num_examples("train")
    recipe = make_plan(programs.settings, benchmark, examples).recipe
    abstract = programs.abstract_state(recipe)
    abstract_totals = programs.abstract_totals(abstract)
    lowered = programs.lower_train(recipe, abstract, abstract_totals)
    started = time.monotonic()
    compiled = batches.fitting(lowered, batch).compile()
    compile_seconds = time.monotonic() - started
    seed = programs.seed(recipe)
    state, totals = programs.initial_state(recipe), programs.zeros(abstract_totals)()
    arrays = jax.device_put(batch, meshes.batch_sharding(mesh))

    def step() -> None:
        nonlocal state, totals
        state, totals, loss = compiled(seed, state, totals, arrays)
        loss.block_until_ready()

    return compiled, compile_seconds, step


def table(rows: list[Row]) -> str:
    """Formats rows as a Markdown table, without columns that are empty in all rows."""
    names = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
    titles = [_COLUMNS[name] for name in names]
    if rows[0]["estimate"] and "ms" in names:
        titles[names.index("ms")] = "ms (estimate)"
    lines = [titles, ["---"] * len(names)]
    lines += [[_cell(name, row.get(name)) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    digits = {"ms": 1, "compile_seconds": 0, "batch": 0, "traffic": 1, "moved": 1}.get(name, 2)
    digits = 3 if name.endswith(("_ratio", "_to_peer")) else digits
    return f"{value / _UNITS.get(name, 1):.{digits}f}"


def config_of(flags: argparse.Namespace, kind: str, devices: int) -> Any:
    """The locked config of --config and --set for `devices` devices, with this BatchNorm."""
    config = read_config(flags)
    if kind:
        config.batch_norm = kind
    config.train_batch_size = flags.batch_per_device * devices
    config.eval_batch_size = devices
    return config.lock()


def read_config(flags: argparse.Namespace) -> Any:
    """The config of --config with the values of --set."""
    file, _, name = flags.config.partition(":")
    path = f"configs/{file.removeprefix('configs/').removesuffix('.py')}.py"
    if not epath.Path(path).exists():
        raise ConfigError(f"--config={flags.config}: there is no {path}")
    config = recipes.load(f"{path}:{name}" if name else path)
    for text in flags.set:
        key, _, value = text.partition("=")
        if key not in config:
            raise ConfigError(f"--set {text}: the config has no key {key!r}")
        type_of = type(config[key])
        try:
            parsed = value if type_of is str else ast.literal_eval(value)
            config[key] = float(parsed) if type_of is float else parsed
        except (ValueError, SyntaxError, TypeError) as error:
            raise ConfigError(
                f"--set {text}: the value must have the type of {config[key]!r}"
            ) from error
        if key == "data_dir" and value and not epath.Path(value).exists():
            raise ConfigError(f"--set {text}: there is no such folder")
    return config if flags.tpu else batches.without_data(config)


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tpu", default="", help="estimate for these slices, named as for --mode=preflight")
    add("--batch_norm", default="plain,gram", help="the kinds of BatchNorm to compare")
    add("--peer", nargs="?", const="plain", choices=("plain", "torch"), help="compare with a peer")
    add(
        "--batch_per_device",
        type=int,
        help="128 by default; with a timed peer the recipe's, at most 16 images, 32 rows or "
        "pairs of sentences, 2,048 of NCF",
    )
    add("--config", default="fake_imagenet", help="a file in configs/, with :ARGUMENT")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the config")
    add("--steps", type=int, default=20, help="steps to time on devices")
    add("--json", action="store_true")
    flags = parser.parse_args(arguments)
    if flags.steps < 1:
        parser.error(f"--steps={flags.steps}: must be at least 1")
    if flags.peer == "torch" and flags.tpu:
        parser.error("--peer=torch takes the time on this machine's devices: leave out --tpu")
    if flags.tpu or not flags.peer:
        flags.batch_per_device = flags.batch_per_device or 128
    return flags


if __name__ == "__main__":
    entry.run(main)
