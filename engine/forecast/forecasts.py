"""Forecasts a JAX program on TPU slices that are not there: memory, time, price, what is dear.

from engine.forecast import forecast

for one in forecast("train_step.py:make", "v5e-8, v4-8", examples=1024):
    print(one.slice, one.fits, one.seconds, one.dollars_per_million)
"""

import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from common.errors import INVALID, ConfigError
from engine.forecast import cache, calibration, kernels, worker
from engine.forecast.operations import Operation
from engine.forecast.program import Program
from engine.forecast.topology import Topology, parse_slices

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_WORKER = "engine.forecast"  # its __main__.py
Interval = tuple[float, float]  # (least, most)


class Request(NamedTuple):
    """What `engine.forecast.user_program` should compile, in another process."""

    target: tuple[str, str]  # (module or path of a .py file, name in it) or (path of a file, "")
    topology: str  # the slice's name
    path: list[str]  # the user's sys.path
    folder: str  # the user's working directory


class Answer(NamedTuple):
    """What it found out."""

    program: Program | None = None
    used: int = 0  # devices of the slice that the program runs on
    arguments: tuple[tuple[str, int], ...] = ()  # (name, bytes on a device), the largest first
    callbacks: int = 0  # calls of Python on the host
    examples: int | None = None  # in one call, if the program says it
    error: str = ""
    fits: bool | None = None


class Group(NamedTuple):
    """Operations that come from the same line of code; sums of one call."""

    name: str  # of the dearest of them
    scopes: str  # what jax calls them
    place: str  # "FILE:LINE", or ""
    kind: str  # "products", "other work" or "collectives"
    times: float  # how often they run
    seconds: float
    flops: float
    moved: float  # bytes of HBM


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What is to be expected of a program on a slice; numbers are nan where nothing is known.

    All times are those of one call of the function. Sizes are bytes, and FLOP and bytes are those
    of one device.
    """

    topology: Topology
    price: float  # US dollars for an hour of the slice
    examples: int | None  # in one call
    used: int  # devices of the slice on which the program runs
    fits: bool | None  # None if the compiler refused it for another reason than its memory
    error: str  # why there is no program, in one line; else ""
    arguments: tuple[tuple[str, int], ...]  # (name, bytes on a device), the largest first
    callbacks: int  # calls of Python on the host, whose time is not known
    program: Program | None  # memory, FLOP, bytes, operations and collectives

    @property
    def slice(self) -> str:
        """The slice as libtpu calls it, "v5e:2x4"."""
        return self.topology.name

    @property
    def memory(self) -> int | None:
        """Bytes of HBM that the program takes on a device."""
        return self.program.memory if self.program else None

    @property
    def memory_available(self) -> float:
        """Bytes of HBM that a device has; the system reserves some of them."""
        return self.topology.chip.memory / self.topology.chip.devices

    @property
    def seconds(self) -> float:
        """One call of the function."""
        return self.program.seconds if self.program else math.nan

    @property
    def error_of_times(self) -> calibration.Error:
        """How far measured runs were from such forecasts."""
        return self.program.error if self.program else calibration.error(self.topology.chip)

    @property
    def seconds_interval(self) -> Interval:
        """Between which times measured runs were for such a forecast."""
        return self.interval_of(self.seconds)

    @property
    def examples_per_second(self) -> float:
        """By the program, on all devices that it uses."""
        return (self.examples or math.nan) / self.seconds

    @property
    def rate_interval(self) -> Interval:
        """The interval of the examples per second."""
        return self.error_of_times.of_rate(self.examples_per_second)

    @property
    def dollars_per_million(self) -> float:
        """US dollars for a million examples."""
        return 1e6 * self.price / 3600 / self.examples_per_second

    def interval_of(self, value: float) -> Interval:
        """The interval of a number that grows with the time, such as the dollars."""
        return self.error_of_times.of_time(value)

    def numbers(self) -> dict[str, Any]:
        """All of it for JSON, which has no nan: None is not known."""
        topology, program = self.topology, self.program
        found: dict[str, Any] = {
            "slice": topology.name,
            "accelerator_type": topology.accelerator,
            "chips": topology.chips,
            "devices": topology.devices,
            "devices_used": self.used,
            "fits": self.fits,
            "error": self.error,
            "memory_available": self.memory_available,
            "largest_arguments": [{"name": n, "bytes": size} for n, size in self.arguments[:10]],
            "dollars_per_hour": self.price,
        }
        if program:
            rate, dollars = self.examples_per_second, self.dollars_per_million
            rates, prices = self.rate_interval, self.interval_of(dollars)
            least, most = self.seconds_interval
            found |= {
                "memory": program.memory,
                "memory_arguments": program.arguments,
                "memory_outputs": program.outputs,
                "memory_temporaries": program.temporaries,
                "memory_program": program.code,
                "largest_buffers": [{"name": n, "bytes": size} for n, size in program.largest[:10]],
                "seconds": program.seconds,
                "seconds_least": least,
                "seconds_most": most,
                "flops_per_device": program.flops,
                "bytes_per_device": program.moved,
                "bound": program.bound,
                "operations": [one._asdict() for one in self.dearest(count=None)],
                "collectives": {
                    name: {"count": count, "bytes": size}
                    for name, (count, size) in program.collectives.items()
                },
                "collective_seconds": program.limits["links"],
                "host_callbacks": self.callbacks,
                "notes": program.notes,
                "examples": self.examples,
                "examples_per_second": rate,
                "examples_per_second_least": rates[0],
                "examples_per_second_most": rates[1],
                "dollars_per_million": dollars,
                "dollars_per_million_least": prices[0],
                "dollars_per_million_most": prices[1],
                "compile_seconds": program.compile_seconds,
            }
        found |= {"versions": cache.versions(), "calibration": self.error_of_times.described()}
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in found.items()
        }

    def dearest(self, count: int | None = 10) -> list[Group]:
        """The operations that take the most time in one call; those of one line of code as one.

        None is all of them.
        """
        groups: dict[Any, list[Operation]] = {}
        for one in self.program.operations if self.program else ():
            if one.times * one.seconds:
                where = (one.place, one.scopes) if one.place or one.scopes else one.name
                groups.setdefault((where, _kind(one)), []).append(one)
        found = [_group(operations) for operations in groups.values()]
        return sorted(found, key=lambda group: -group.seconds)[:count]


def _kind(operation: Operation) -> str:
    if operation.link_seconds:
        return "collectives"
    return "products" if operation.flops else "other work"


def _group(operations: list[Operation]) -> Group:
    first = max(operations, key=lambda one: one.times * one.seconds)
    return Group(
        name=first.name,
        scopes=first.scopes,
        place=first.place,
        kind=_kind(first),
        times=sum(one.times for one in operations),
        seconds=sum(one.times * one.seconds for one in operations),
        flops=sum(one.times * one.flops for one in operations),
        moved=sum(one.times * one.moved for one in operations),
    )


def forecast(
    program: str | Callable[..., Any],
    tpu: str = "v5e-8",
    *,
    examples: int | None = None,
    chip_hour_price: float | None = None,
) -> list[Forecast]:
    """Compiles a JAX program for TPU slices, and says what to expect of it there.

    It needs libtpu, and no TPU. Each slice is compiled in another process, which imports the
    program; a program that was compiled before comes from a folder in the home directory.

    Args:
      program: a function `make`, or where it is: "module:make" or "path/to/file.py:make". Called
        with the list of the slice's devices, it returns (function, arguments): a function, jitted
        or not, and the tuple of its arguments, trees of arrays or of `jax.ShapeDtypeStruct`, with
        shardings over these devices or without. A third value may be the number of examples. Or
        the path of a StableHLO file: `lowered.as_text()`, its bytecode, or what jax.export writes.
      tpu: the slices, such as "v5e-8, v4:2x2x1".
      examples: how many examples one call of the function works on, on each slice.
      chip_hour_price: US dollars for an hour of one chip; None is Google's list price.

    Returns:
      A forecast for each slice. Where the program does not compile, it has an `error`.

    Raises:
      ConfigError: an argument is wrong, or libtpu is not installed.
    """
    return list(forecasts(program, tpu, examples, chip_hour_price))


def forecasts(
    program: str | Callable[..., Any],
    tpu: str,
    examples: int | None = None,
    chip_hour_price: float | None = None,
) -> Iterator[Forecast]:
    """The forecasts of `forecast`, one after the other as they come."""
    slices = parse_slices(tpu)
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"libtpu is not installed for {sys.executable}: "
            f'pip install "jax[tpu]=={jax.__version__}"'
        )
    if kernels.FOLDER in os.environ:
        raise ConfigError(
            "forecast() runs while the file of its program is imported: call it below "
            "if __name__ == '__main__':"
        )
    target = _target(program)
    for one in slices:
        yield _one(target, one, examples, chip_hour_price)


def _one(
    target: tuple[str, str], topology: Topology, examples: int | None, chip_price: float | None
) -> Forecast:
    here = os.getcwd()
    # Without this repository, whose packages would hide folders of the same names.
    path = [one for one in sys.path if one not in ("", here, _ROOT, os.path.join(_ROOT, "scripts"))]
    request = Request(target, topology.name, [here, *path], here)
    try:
        answer = worker.ask(_WORKER, request, topology.name)
    except worker.CompilerDied as error:
        answer = Answer(error=str(error))
    if isinstance(answer, ConfigError):
        raise answer
    price = topology.chip.price if chip_price is None else chip_price
    return Forecast(
        topology=topology,
        price=price * topology.chips,
        examples=examples or answer.examples,
        used=answer.used,
        fits=answer.fits,
        error=answer.error,
        arguments=answer.arguments,
        callbacks=answer.callbacks,
        program=answer.program,
    )


def _target(program: str | Callable[..., Any]) -> tuple[str, str]:
    """(module or file, name of the function), which another process can find; or (file, "")."""
    if isinstance(program, str):
        return _named(program)
    module, name = getattr(program, "__module__", None), getattr(program, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if found is not program or (module == "__main__" and not file):
        what = name or type(program).__name__
        raise ConfigError(
            f"{what} cannot be imported by another process, which compiles: write it to a file, "
            f"as a function outside of others, and give 'file.py:{what.split('.')[-1]}'"
        )
    return (os.path.abspath(file), name) if module == "__main__" and file else (str(module), name)


def _named(program: str) -> tuple[str, str]:
    where, colon, name = program.rpartition(":")
    if not colon:
        if program.endswith(".py"):
            message = f"{program}: which function of it? Write {program}:make"
        elif os.path.isfile(program):
            return os.path.abspath(program), ""
        else:
            message = (
                f"{program}: there is no such file; write module:make, path/to/file.py:make, or "
                "the path of a StableHLO file"
            )
        raise ConfigError(message, INVALID)
    is_file = where.endswith(".py") or "/" in where
    if is_file and not os.path.isfile(where):
        raise ConfigError(f"{program}: there is no file {where}", INVALID)
    if is_file and not where.endswith(".py"):
        raise ConfigError(f"{program}: {where} is no file of Python code (.py)", INVALID)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{program}: {name!r} is no name of a function", INVALID)
    return (os.path.abspath(where) if is_file else where), name
