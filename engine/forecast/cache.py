"""Keeps what the compiler said of a program, so that no program is compiled twice.

What is kept are the compiler's facts, not times: a better model of the chip needs no compilation.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from common.progress import duration
from engine.forecast import buffers, kernels
from engine.forecast.buffers import Memory
from engine.forecast.topology import Topology

FOLDER = "~/.cache/tpu_suite/forecasts"
_READER = 2  # another number where `_compile` takes other facts from the compiler
_HISTORY = "compilations.jsonl"  # a line for each compilation on this machine
# Seconds of compilation per byte of a lowered program on two cores, mostly busy: the least and the
# most that were seen for networks of 0.1 to 1.3 MB; for v2 and v3, and for later chips.
_RATES = {True: (3e-5, 1.5e-4), False: (1e-4, 1e-3)}
_LEAST = 0.3, 2.0  # seconds of the smallest program
_ALIKE = 4  # a program of up to so many times the size is of a like kind


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program on one device; sizes are bytes of HBM."""

    text: str  # the optimised HLO
    arguments: int  # with the outputs that replace them
    outputs: int  # further results
    temporaries: int
    code: int
    parameters: list[int]  # the size of each argument, with its padding; [] if not known
    largest: list[tuple[str, int]]  # (what, bytes) of arrays that are no arguments
    coordinates: list[list[int]] | None  # of its devices, for `collectives.read`
    seconds: float  # that it took to compile
    bundles: Mapping[str, Sequence[int]]  # as `kernels.read_bundles` gives them


def compiled_facts(lowered: Any, topology: Topology, say: Callable[[str], None]) -> Compiled:
    """Compiles a program that jax has lowered for a slice, or takes the facts from the folder.

    `say` gets what a user waits for: "probably 20 s to 2 min", "compiled before: ...".
    """
    folder = os.path.expanduser(FOLDER)
    path = os.path.join(folder, f"{_key(lowered, topology)}.json.gz")
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError, RecursionError):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            facts = Compiled(**json.load(file))
        say("compiled before: what the compiler said is kept")
        return facts
    size = len(lowered.as_text())
    low, high, why = expected_seconds(size, topology.chip.name, _past(folder))
    say(f"probably {_span(low, high)}, {why}")
    facts = _compile(lowered)
    with contextlib.suppress(OSError):  # a full disk is no reason to fail
        os.makedirs(folder, exist_ok=True)
        _write(path, facts)
        row = {"chip": topology.chip.name, "size": size, "seconds": round(facts.seconds, 2)}
        with open(os.path.join(folder, _HISTORY), "a") as file:
            file.write(f"{json.dumps(row)}\n")
    return facts


def _compile(lowered: Any) -> Compiled:
    """Compiles a program; a note of an error says which arrays are the largest, where known."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            step = lowered.compile(compiler_options=buffers.options(pathlib.Path(folder)))
        except jax.errors.JaxRuntimeError as error:
            if largest := _largest(buffers.read(pathlib.Path(folder))):
                error.add_note(
                    f"the largest: {', '.join(f'{x / 2**30:.2f} GiB {n}' for n, x in largest)}"
                )
            raise
        seconds, filled = time.monotonic() - start, buffers.read(pathlib.Path(folder))
    memory, sizes = step.memory_analysis(), filled.parameters if filled else {}
    return Compiled(
        text=step.as_text(),
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        parameters=[sizes.get(i, 0) for i in range(max(sizes, default=-1) + 1)],
        largest=_largest(filled),
        coordinates=_coordinates(lowered),
        seconds=seconds,
        bundles=kernels.read_bundles(),
    )


def _largest(memory: Memory | None) -> list[tuple[str, int]]:
    """The largest arrays at the peak of the use of HBM: type without layout, and what makes it."""
    return [
        (f"{re.sub(r'{[^}]*}', '', found.shape)} {found.scopes or found.name}", found.size)
        for found in (memory.largest if memory else ())
    ]


def placement(lowered: Any) -> list[Any]:
    """The devices that a lowered program is for."""
    return list(getattr(lowered._lowering, "_device_list", None) or ())


def _coordinates(lowered: Any) -> list[list[int]] | None:
    """The coordinates of the chips and cores of a program, in the order that its text counts in."""
    try:
        return [[*device.coords, device.core_on_chip] for device in placement(lowered)] or None
    except AttributeError:  # of CPUs
        return None


def _key(lowered: Any, topology: Topology) -> str:
    """A name for all that the compiler's answer depends on."""
    program = lowered._lowering
    folder = os.environ.get(kernels.FOLDER) or "?"  # another one in each process
    settings: Any = jax.config
    parts = [
        lowered.as_text(debug_info=True),  # with the lines of the user's code
        [device.id for device in placement(lowered)],
        sorted(getattr(program, "_compiler_options_kvs", ())),
        [topology.name, topology.options],
        os.environ.get("LIBTPU_INIT_ARGS", "").replace(folder, ""),
        os.environ.get("XLA_FLAGS", ""),
        sorted((name, str(x)) for name, x in settings.values.items() if "cache" not in name),
        [versions(), _READER],
    ]
    key = hashlib.sha256()
    for part in parts:
        key.update(f"{part}\0".encode())
    return key.hexdigest()[:40]


def versions() -> dict[str, str]:
    """The versions of what compiles."""
    found = {"jax": jax.__version__}
    for name in ("jaxlib", "libtpu", "libtpu-nightly"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _write(path: str, facts: Compiled) -> None:
    """Writes a file that no other process sees half-written."""
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as part:
        try:
            with gzip.open(part, "wt", encoding="utf-8", compresslevel=6) as file:
                json.dump(dataclasses.asdict(facts), file)
            part.flush()
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise


def _past(folder: str) -> list[dict[str, Any]]:
    """The latest compilations on this machine: chip, size in bytes, seconds."""
    rows = []
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, _HISTORY)) as file:
        for line in file.read().splitlines()[-200:]:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # half of a line
                row = json.loads(line)
                rows.append({name: row[name] for name in ("chip", "size", "seconds")})
    return rows


def expected_seconds(
    size: int, chip: str, past: Sequence[dict[str, Any]]
) -> tuple[float, float, str]:
    """(least, most, why): how long a program whose text has `size` bytes takes to compile."""
    alike = [
        row["seconds"] / row["size"]
        for row in past
        if row["chip"] == chip and row["size"] / _ALIKE <= size <= row["size"] * _ALIKE
    ]
    if alike:  # other work on the machine, and other operations, change the time by as much
        low, high = 0.5 * min(alike) * size, 2 * max(alike) * size
        return low, high, "as earlier compilations here"
    low, high = _RATES[chip in ("v2", "v3")]
    return _LEAST[0] + low * size, _LEAST[1] + high * size, "by its size"


def _span(low: float, high: float) -> str:
    return f"{duration(max(low, 1))} to {duration(max(high, 2))}"
