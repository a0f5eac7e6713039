"""Compares our train step with a baseline's, in one table.

python -m scripts.bench.step --peer=torch --config=configs/phrases.py
                                             milliseconds on the devices of this machine
python -m scripts.bench.step --peer --config=configs/ssd.py --tpu=v3-8,v5e-8
                                             the compiler's estimates, without a TPU
python -m scripts.bench.step --set=batch_norm=plain     our step alone, with another key

A baseline (scripts/bench/peers) is a step of the same network on the same batch: --peer in flax and
optax, with the same dtypes and compiler options, --peer=torch in PyTorch (peers/on_torch.py).
The step is train.py's, on a batch of the data or, without data, on a random one.

On devices both steps run in turn, and the least of --steps rounds counts; on CPUs in float32,
unless told otherwise. Estimates need libtpu (requirements-tpu.txt) and take minutes for each step.
--json prints an object per step instead of a table.
"""

import argparse
import ast
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

import benchmarks
from benchmarks.base import HostBatch
from commands import preflight
from commands import recipe as recipes
from common import cli, entry, pools
from common.errors import ConfigError
from engine import compiler, devices, environment, pace
from engine.forecast import topology
from engine.plan import Programs, make_plan, read_settings
from scripts.bench import peers
from scripts.bench.peers import on_torch
from scripts.bench.peers import step as peer_step

Row = dict[str, Any]
_COLUMNS = {  # title, unit, decimals
    "slice": ("where", 1, 0),
    "step": ("step", 1, 0),
    "batch_per_device": ("batch per device", 1, 0),
    "ms": ("ms", 1, 1),
    "ratio": ("ratio to the baseline", 1, 3),
    "moved": ("through the HBM, GB", 1e9, 1),
    "temporaries": ("temporaries, GB", 1e9, 2),
    "compile_seconds": ("compile, s", 1, 0),
    "differs": ("the baseline", 1, 0),
    "error": ("error", 1, 0),
}
_PEERS = {"plain": "flax", "torch": "PyTorch"}
# Examples of a batch per device on this machine, at most, by benchmark; others have 16.
_TIMED = {"transformer": 32, "gnmt": 32, "ncf": 2048}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the steps, prints them, and returns the exit code."""
    environment.set_defaults()  # before TensorFlow is imported, which would talk
    flags = _flags(arguments)
    rows = estimated(flags) if flags.tpu else timed(flags)
    print("\n".join(map(json.dumps, rows)) if flags.json else table(rows))
    return int(any("error" in row for row in rows))


def estimated(flags: argparse.Namespace) -> list[Row]:
    """The compiler's estimates of the peer's step and of ours, on each slice."""
    rows: list[Row] = []
    for one in topology.parse_slices(flags.tpu):
        config = config_of(flags, one.devices)
        workers = {"ours": preflight.__name__}  # the modules that compile, in other processes
        if flags.peer:
            peers.check(config)
            workers = {_PEERS[flags.peer]: peer_step.__name__, **workers}
        steps = []
        for name, worker in workers.items():
            outcome = preflight.inspect(read_settings(config), one, ("train",), worker)
            row: Row = {"slice": one.name, "step": name, "estimate": True}
            row["batch_per_device"] = flags.batch_per_device
            if program := outcome.train:
                row["ms"] = 1e3 * program.seconds
                for key in ("moved", "temporaries", "compile_seconds"):
                    row[key] = getattr(program, key)
            else:
                row["error"] = outcome.error
            steps.append(row)
        rows += _compared(steps)
    return rows


def timed(flags: argparse.Namespace) -> list[Row]:
    """The ms of the peer's step and of our step on this machine."""
    config, steps, differs = prepare(flags)
    precision = config.get("precision", "float32")
    print(f"{precision}, {pools.cores()} CPUs, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    size = config.train_batch_size // jax.device_count()
    common = {"slice": jax.devices()[0].device_kind, "estimate": False, "batch_per_device": size}
    rows = [
        common | {"step": name, "ms": ms}
        for name, ms in zip(steps, least([*steps.values()], flags.steps), strict=True)
    ]
    if differs:
        rows[0]["differs"] = differs
    return _compared(rows)


def _compared(rows: list[Row]) -> list[Row]:
    """The rows of the peer and of ours, with the ratio of the two."""
    if len(rows) == 2 and all(row.get("ms") for row in rows):
        rows[1]["ratio"] = rows[1]["ms"] / rows[0]["ms"]
    return rows


def prepare(flags: argparse.Namespace) -> tuple[Any, Mapping[str, Callable[[], Any]], str]:
    """The config of the flags, the peer's step and ours by name, and what differs in the peer.

    The steps are compiled and run on the same batch; each call waits for the device.
    """
    config = read_config(flags)
    torch, differs = None, ""
    if flags.peer == "torch":
        torch = on_torch.load(config)
        differs = torch.DIFFERS[config.benchmark]
    elif flags.peer:
        peers.check(config)
    if devices.open_platform() == "cpu":
        is_set = any(text.startswith("precision=") for text in flags.set)
        if "precision" in config and not is_set:
            config.precision = "float32"
    compiler.use_cache(config.compilation_cache)
    count = jax.device_count()
    usual = min(config.train_batch_size // count, _TIMED.get(config.benchmark, 16))
    config.train_batch_size = count * (flags.batch_per_device or max(usual, 1))
    config.eval_batch_size = count
    programs = Programs.make(read_settings(config.lock()))
    batch, steps = first_batch(programs), {}
    examples = programs.benchmark.nominal_examples("train") or programs.benchmark.open("train")
    plan = make_plan(programs.settings, programs.benchmark, examples)
    ours = pace.make_step(programs, plan, batch)
    if torch:
        steps[_PEERS[flags.peer]] = on_torch.make_step(torch, programs, batch)
    elif flags.peer:
        steps[_PEERS[flags.peer]] = peer_step.make_step(programs, batch)
    return config, {**steps, "ours": ours}, differs


def least(steps: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """The least ms of steps, which alternate because other work disturbs all alike."""
    best = [float("inf")] * len(steps)
    for turn in range(rounds + 2):  # the first two warm up
        for i, step in enumerate(steps):
            started = time.perf_counter()
            step()
            if turn >= 2:
                best[i] = min(best[i], time.perf_counter() - started)
    return [1e3 * seconds for seconds in best]


def table(rows: list[Row]) -> str:
    """Formats rows as a Markdown table, without columns that are empty in all rows."""
    names = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
    titles = [_COLUMNS[name][0] for name in names]
    if rows[0]["estimate"] and "ms" in names:
        titles[names.index("ms")] = "ms (estimate)"
    lines = [titles, ["---"] * len(names)]
    for row in rows:
        values = {name: row.get(name, "") for name in names}
        for name, value in values.items():
            if not isinstance(value, str):
                _, unit, digits = _COLUMNS[name]
                values[name] = f"{value / unit:.{digits}f}"
        lines.append([*values.values()])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def config_of(flags: argparse.Namespace, devices: int) -> Any:
    """The locked config of --config and --set for `devices` devices."""
    config = read_config(flags)
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
    return config if flags.tpu else _without_data(config)


def _without_data(config: Any) -> Any:
    """The recipe without its folder of data, if that is not here; an unlocked config."""
    folder = config.data_dir
    if not folder or not epath.Path(folder).exists():
        config.dataset = benchmarks.FAKE
        if folder:
            print(f"NOTE {folder} does not exist: a random batch instead", file=sys.stderr)
    return config


def first_batch(programs: Programs) -> HostBatch:
    """The first global batch of training, on the host, without the time that the host took."""
    benchmark = programs.benchmark
    benchmark.open("train")
    benchmark.set_total_steps(1000)  # the sizes of images may follow from the length of the run
    batch = next(benchmark.train_batches(programs.settings.train_batch_size, 0, 1, 0))
    return {name: x for name, x in batch.items() if name != "host_seconds"}


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tpu", default="", help="estimate for these slices, named as for --mode=preflight")
    add("--peer", nargs="?", const="plain", choices=_PEERS, help="compare with a baseline")
    add(
        "--batch_per_device",
        type=int,
        help="with --tpu 128 by default; else the recipe's, at most 16 images, 32 rows or pairs "
        "of sentences, 2,048 of NCF",
    )
    add("--config", default="fake_imagenet", help="a file in configs/, with :ARGUMENT")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the config")
    add("--steps", type=int, default=20, help="rounds on devices")
    add("--json", action="store_true")
    flags = parser.parse_args(arguments)
    if flags.steps < 1:
        parser.error(f"--steps={flags.steps}: must be at least 1")
    if flags.peer == "torch" and flags.tpu:
        parser.error("--peer=torch takes the time on this machine's devices: leave out --tpu")
    if flags.tpu:
        flags.batch_per_device = flags.batch_per_device or 128
    return flags


if __name__ == "__main__":
    entry.run(main)
