"""Forecasts a JAX program on TPU slices that you do not have: memory, time, price, what is dear.

    python -m scripts.forecast my_module:make --tpu=v5e-8,v4:2x2x1 --examples=1024

`make` is a function of yours: make(devices) returns (function, arguments). The function is jitted
or not. The arguments are a tuple of arrays, or of jax.ShapeDtypeStruct, or of trees of them, with
shardings over these devices or without. If their number of examples depends on the devices, return
it as a third value. Instead, give path/to/file.py:make, or a StableHLO file.

Needs jax and libtpu, in the Python environment of your program, and no TPU. From any folder this
works, too: python path/to/this/repository/scripts/forecast.py my_module:make
"""

import os
import sys

# A folder of the user's, where the program starts, may have the name of a package here.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import importlib.util
import json
import math
from collections.abc import Iterable, Sequence

if importlib.util.find_spec("jax") is None:
    sys.exit(f'jax is not installed for {sys.executable}: pip install "jax[tpu]"')

from common import cli, entry
from common.errors import INVALID, ConfigError, UserError, count
from common.text import aligned
from engine.forecast.figure import draw
from engine.forecast.forecasts import Forecast, forecasts

NOTE = """\
Estimates of libtpu's compiler and a model of the chip. They leave out the host: the input, copies
to the devices, checkpoints, the start. Prices are Google's, on demand, as of 2025 and not verified;
give yours as --chip_hour_price."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the forecast of each slice; returns 0 if the program fits all of them, else 1."""
    flags = _flags(argv)
    if flags.figure and not os.path.isdir(os.path.dirname(flags.figure) or "."):
        raise UserError(f"--figure={flags.figure}: there is no such folder", INVALID)
    all_: list[Forecast] = []
    try:
        for one in forecasts(flags.program, flags.tpu, flags.examples, flags.chip_hour_price):
            all_.append(one)
            if not flags.json:
                print(f"{text(one)}\n", flush=True)
    except ConfigError as error:
        raise UserError(str(error), INVALID) from error
    finally:  # results that took minutes are shown, even if the rest is interrupted
        if flags.json and all_:
            entry.result(json.dumps([one.numbers() for one in all_], indent=2) + "\n")
        elif any(one.program for one in all_):
            print(NOTE)
        if flags.figure and any(one.program for one in all_):
            _write(flags.figure, draw(all_))
    return int(any(one.error for one in all_))


def _write(path: str, content: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"--figure={path}: {error.strerror}", INVALID) from error


def text(one: Forecast) -> str:
    """The forecast of a slice, as lines for people."""
    topology, program = one.topology, one.program
    title = f"{one.slice} ({topology.accelerator}): {count(topology.chips, 'chip')}"
    if one.used and one.used < topology.devices:
        title += f", on {one.used} of the {topology.devices} devices"
    else:
        title += f", {count(topology.devices, 'device')}"
    lines = [title]
    if one.error:
        lines.append(f"  {one.error}")
        if one.fits is False and one.arguments:
            lines.append(f"  largest arguments: {_sizes(one.arguments)}")
    if program is None:
        return "\n".join(lines)
    available = one.memory_available
    parts = {"arguments": program.arguments, "results": program.outputs}
    parts |= {"temporaries": program.temporaries, "program": program.code}
    shown = ", ".join(f"{name} {_size(size)}" for name, size in parts.items())
    lines += [
        f"  fits: {_size(program.memory)} of {_size(available)} on each device, "
        f"{program.memory / available:.0%} ({shown})",
    ]
    if one.arguments:
        lines.append(f"    largest arguments: {_sizes(one.arguments)}")
    if program.largest:
        lines.append(f"    largest results and temporaries: {_sizes(program.largest, 3)}")
    lines += [
        f"  time: {_number(1e3 * one.seconds)} ms a call "
        f"({_interval(one.seconds_interval, 1e3)}: {one.error_of_times.source})",
        f"  bound by {program.bound}: {_number(program.flops / 1e12)} TFLOP and "
        f"{_number(program.moved / 1e9)} GB of HBM traffic on each device",
    ]
    if program.collectives:
        sent = ", ".join(
            f"{number:g} {name} ({_size(size)})"
            for name, (number, size) in program.collectives.items()
        )
        links = _number(1e3 * program.limits["links"])
        lines.append(
            f"  collectives: {links} ms on the links, some beside other work; sent: {sent}"
        )
    lines.append(f"  price: {_price(one)}")
    lines += [f"  {note}" for note in program.notes]
    if one.callbacks:
        lines.append(
            f"  too short: {count(one.callbacks, 'callback')} to the host, such as "
            "jax.debug.print, for which the device may wait"
        )
    return "\n".join([*lines, *_operations(one)])


def _sizes(buffers: Iterable[tuple[str, int]], most: int = 4) -> str:
    """The largest buffers by name."""
    first = [pair for pair in buffers if pair[1]][:most]
    return ", ".join(f"{name} {_size(size)}" for name, size in first) or "none"


def _size(size: float) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 0.1 * 1024**power:
            return f"{_number(size / 1024**power)} {unit}"
    return f"{size:.0f} bytes"


def _interval(interval: tuple[float, float], unit: float = 1) -> str:
    return " to ".join(_number(value * unit) for value in interval)


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _price(one: Forecast) -> str:
    if math.isnan(one.price):
        return "not known for this chip; give --chip_hour_price"
    price = f"{one.price:,.2f} USD an hour"
    if not one.examples:
        return price
    rate, dollars = one.examples_per_second, one.dollars_per_million
    return (
        f"{price}; at {one.examples:,} examples a call {_number(rate)} examples/s "
        f"({_interval(one.rate_interval)}) and {_number(dollars)} USD for a million "
        f"({_interval(one.interval_of(dollars))})"
    )


def _operations(one: Forecast) -> list[str]:
    """A table of the dearest operations."""
    assert one.program
    rows = [("share", "ms", "times", "operation", "line", "name in jax")]
    for each in one.dearest():
        share = f"{each.seconds / one.seconds:.1%}"
        numbers = share, _number(1e3 * each.seconds), f"{each.times:g}"
        name = each.scopes if len(each.scopes) <= 56 else f"...{each.scopes[-53:]}"
        rows.append((*numbers, each.name, _short(each.place), name))
    return [f"  {line}" for line in aligned(rows, range(3))]


def _short(place: str) -> str:
    """A place in a file: from the folder where the program starts, or the end of its path."""
    here = f"{os.getcwd()}/"
    return place.removeprefix(here) if place.startswith(here) else "/".join(place.split("/")[-2:])


def _price_of_chip(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise argparse.ArgumentTypeError(f"must be US dollars of 0 or more, got '{text}'")
    return price


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(
        prog="python -m scripts.forecast",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("program", help="module:make, path/to/file.py:make, or a StableHLO file")
    add(
        "--tpu",
        default="v5e-8",
        help="slices such as v5e-8 (the default), v4:2x2x1, v3-32, with commas; or all",
    )
    add("--examples", type=cli.integer(1), metavar="N", help="that one call works on")
    add("--chip_hour_price", type=_price_of_chip, metavar="USD", help="Google's list price if none")
    add("--figure", metavar="FILE.svg", help="draw the time by operation")
    add("--json", action="store_true", help="print all numbers, as a list of a JSON object a slice")
    return parser.parse_args(argv)


if __name__ == "__main__":
    entry.run(main)
