"""Reads which arrays fill the HBM, also of a program that does not fit.

`compiled.memory_analysis()` has the sums alone, a program that does not fit has no `compiled`, and
the compiler's message about it names no array (jax 0.10.2 and 0.12, libtpu 0.0.42 and 0.0.50). But
the compiler writes where and when each array lies, before it gives up, as text into a folder:

    lowered.compile(compiler_options=buffers.options(folder))
    memory = buffers.read(folder)

Parameters and lasting arrays have the compiler's sizes; if a program does not fit, their sum with
the temporaries is what the message says that it needs. Of programs that fit, `temp_size_in_bytes`
had more than the temporaries here: 0.6 % of 4.9 GB in one train step, 130 MB in 15 small
sharded programs at most. What was alive at the peak filled 0.88 to 1.0 of them: the rest is lost
between arrays.
"""

import collections
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.forecast import hlo

_ENDING = ".after_optimizations"
_ALLOCATION = re.compile(r" \d+: size (\d+)(.*)")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)
_RANGE = re.compile(r"    (\S+\{[\d,]*\}):(\d+)-(\d+)")


class Buffer(NamedTuple):
    """An array in the HBM."""

    name: str  # of the HLO instruction that makes it
    shape: str  # its type with its layout
    size: int  # bytes, with the padding to tiles
    scopes: str  # the path of scopes that jax gave to it, or ""
    is_lasting: bool  # whether it is there during the whole run: a result or a constant


class Memory(NamedTuple):
    """The HBM of one device during a run of a program; sizes are bytes."""

    parameters: dict[int, int]  # size of each by its number, with the results that replace them
    lasting: int  # further results, and constants
    temporaries: int  # the place that the compiler gave to what comes and goes
    largest: tuple[Buffer, ...]  # when most is in use, largest first; none is a parameter


class _Value(NamedTuple):
    name: str
    joins: bool  # what enters a loop or comes out of it, not made by an instruction
    size: int
    offset: int
    shape: str
    first: int  # places in the schedule, both included
    last: int


def options(folder: Path) -> dict[str, str | bool]:
    """The compiler's options with which `read` finds what it needs in a folder."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def program_text(folder: Path) -> str:
    """The optimised HLO of the program, as `as_text()` has it; "" if the compiler wrote none."""
    return _written(folder, ".txt")


def read(folder: Path, count: int = 5) -> Memory | None:
    """Reads what the compiler wrote about one program, with the largest `count` arrays.

    None if there is nothing: the compiler failed earlier, or the program came from a cache.
    """
    ranges = {
        name: (int(first), int(last))
        for name, first, last in _RANGE.findall(_written(folder, "-live-range.txt"))
    }
    parameters: dict[int, int] = {}
    lasting = temporaries = 0
    arrays: list[tuple[_Value, bool, list[_Value]]] = []  # (what, is_lasting, all in its place)
    temporary: list[_Value] = []
    for size, kinds, values in _allocations(_written(folder, "-buffer-assignment.txt"), ranges):
        if "parameter" in kinds:
            number = int(kinds["parameter"])
            parameters[number] = parameters.get(number, 0) + size
        elif "preallocated-temp" in kinds:
            temporaries += size
            temporary += values
        elif "constant" in kinds or "maybe-live-out" in kinds:
            lasting += size
            arrays.append((max(values, key=lambda x: x.size), True, values))
    if not ranges:
        return None
    places = collections.defaultdict(list)
    for value in temporary:
        places[value.offset].append(value)
    arrays += [(value, False, places[value.offset]) for value in _at_peak(temporary)]
    computations, _ = hlo.parse_computations(program_text(folder))
    largest = []
    for value, is_lasting, place in sorted(arrays, key=lambda x: -x[0].size)[:count]:
        made = [x for x in place if x.shape == value.shape and not x.joins] or [value]
        scopes = {x.name: _scopes(x.name, computations) for x in made}
        # Of a loop's array, the instruction that writes it says more than the loop.
        named = [x for x in made if scopes[x.name]] if value.joins or is_lasting else [value]
        near = min(named or made, key=lambda x: abs(x.first - value.first))
        scope = scopes[near.name]
        largest.append(Buffer(near.name, value.shape, value.size, scope, is_lasting))
    return Memory(parameters, lasting, temporaries, tuple(largest))


def _written(folder: Path, ending: str) -> str:
    """The newest text that the compiler wrote under a name with this ending, or ""."""
    paths = sorted(folder.glob(f"*{_ENDING}{ending}"), key=lambda path: path.stat().st_mtime)
    return paths[-1].read_text() if paths else ""


def _allocations(
    text: str, ranges: dict[str, tuple[int, int]]
) -> Iterable[tuple[int, dict[str, str], list[_Value]]]:
    """Of each allocation in the HBM, its size, its properties and what lies in it."""
    for part in text.split("\nallocation")[1:]:
        head, *lines = part.splitlines()
        match = _ALLOCATION.match(head)
        if match is None:
            continue
        # ", color 1, preallocated-temp" or ", parameter 0, shape |f32[8]| at ShapeIndex {}".
        kinds = dict(re.findall(r", ([a-z\-]+) ?(\d*)", re.sub(r"\|.*\|", "", match[2])))
        if "color" in kinds or "thread-local" in kinds:  # another memory
            continue
        values = []
        for found in filter(None, map(_VALUE.match, lines)):
            name, index, joins, size, offset, shape = found.groups()
            live = ranges.get(name + (index or "{}"), (0, 0))
            values.append(_Value(name, bool(joins), int(size), int(offset), shape, *live))
        yield int(match[1]), kinds, values


def _at_peak(values: Collection[_Value]) -> list[_Value]:
    """What is there when most is; of what shares a place, such as an array and its update, one."""
    changes = [(value.first, True, value) for value in values]
    changes += [(value.last + 1, False, value) for value in values]
    there: dict[int, list[_Value]] = collections.defaultdict(list)  # by offset
    now = most = peak = 0
    for time, comes, value in sorted(changes, key=lambda change: change[:2]):  # leaving goes first
        slot = there[value.offset]
        now -= max((x.size for x in slot), default=0)
        slot.append(value) if comes else slot.remove(value)
        now += max((x.size for x in slot), default=0)
        if now > most:
            most, peak = now, time
    found: dict[int, _Value] = {}
    for value in sorted(values, key=lambda value: value.size):
        if value.first <= peak <= value.last:
            found[value.offset] = value
    return list(found.values())


def _scopes(name: str, computations: Mapping[str, hlo.Computation]) -> str:
    """The scopes of an instruction; of a copy without, those of what it copies."""
    inside: hlo.Computation = next((x for x in computations.values() if name in x), {})
    instruction = inside.get(name)
    while instruction and not instruction.scopes and "copy" in instruction.opcode:
        instruction = inside.get(instruction.operands[0])
    return instruction.scopes if instruction else ""
