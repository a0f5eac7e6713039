"""Reads the instructions of an optimised HLO text, as `jax.stages.Compiled.as_text()` gives it.

Of a conditional, one branch runs. The text does not say how often each of them does, so all count
as equally likely. A scope says it for `jax.lax.cond`: in `jax.named_scope("one_step_in_10")`, the
true branch runs in one step of ten.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
# The shape may be a tuple with layouts, {3,2,1,0:T(8,128)}; the opcode alone follows a blank.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_SCOPES = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"\b(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_EITHER = re.compile(r"\b(?:true|false)_computation=%?([\w.\-]+)")
_RARELY = re.compile(r"\bone_step_in_(\d+)/cond$")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r"= [su]\d+\[\]\S* constant\((-?\d+)\)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_LOOP_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_INDEX = re.compile(r"\bget-tuple-element\(.*\bindex=(\d+)")
# Places in the source: tables of the text's head, or the instruction's own words.
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_LIBRARIES = ("/site-packages/", "/dist-packages/")
# Sizes.
_ARRAY_AND_LAYOUT = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter",
    "all-to-all", "collective-permute", "collective-broadcast",
)  # fmt: skip
_TILE = re.compile(r"T\(([\d,]+)\)")
_MEMORY = re.compile(r"S\(\d+\)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO."""

    name: str
    opcode: str
    shape: str  # the type of the result with its layout
    line: str  # all of it
    operands: tuple[str, ...]  # the names of what it reads
    is_root: bool  # whether it is the result of its computation

    @property
    def scopes(self) -> str:
        """The path of scopes that jax gave to it, or ""."""
        match = _SCOPES.search(self.line)
        return match[1] if match else ""

    @property
    def target(self) -> str:
        """The name of the library's function that a custom call runs; "" of other operations."""
        match = _TARGET.search(self.line) if self.opcode == "custom-call" else None
        return match[1] if match else ""

    @property
    def branches(self) -> list[str]:
        """The computations of which a conditional runs one."""
        names = ",".join(_BRANCHES.findall(self.line)).split(",")
        either = _EITHER.findall(self.line)[
            ::-1
        ]  # (true, false), as if an index chose: false, true
        return [name.strip(" %") for name in names if name] or either

    @property
    def called(self) -> list[str]:
        """The computations that it names."""
        return _CALLED.findall(self.line) + self.branches

    @property
    def is_weighed(self) -> bool:
        """Whether a scope says how often the true branch of a conditional runs."""
        return bool(_RARELY.search(self.scopes))

    @property
    def chances(self) -> list[float]:
        """The probability with which each of `called` runs."""
        count, rarely = len(self.branches), _RARELY.search(self.scopes)
        each = [1 / count] * count if count else []
        if count == 2 and rarely:
            each = [1 - 1 / int(rarely[1]), 1 / int(rarely[1])]
        return [1.0] * (len(self.called) - count) + each


Computation = Mapping[str, Instruction]  # by name, in the order of the text
Computations = Mapping[str, Computation]


def parse_computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """All computations by name, and the name of the entry; ValueError if the text is no HLO."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, shape, opcode, tail = match.groups()
            operands = tuple(_OPERAND.findall(_until_closed(tail)))
            current[name] = Instruction(name, opcode, shape, line, operands, bool(root))
    if not entry:
        raise ValueError("this is no HLO text: it has no ENTRY computation")
    return computations, entry


def _until_closed(text: str) -> str:
    """The text up to the parenthesis that closes the one just before it."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[:i]
    return text


def with_fused(instruction: Instruction, computations: Computations) -> Iterator[Instruction]:
    """An instruction, and those that it fuses."""
    yield instruction
    if instruction.opcode == "fusion":
        for called in instruction.called:
            for inner in computations.get(called, {}).values():
                yield from with_fused(inner, computations)


def trips(loop: Instruction, inside: Computation, computations: Computations) -> int | None:
    """How often the body of a loop of the computation `inside` runs; None if it is not known.

    It is known of loops that count up by a constant from a constant to a constant, as jax's scans.
    """
    if match := _TRIPS.search(loop.line):
        return int(match[1])
    names = _CONDITION.search(loop.line), _LOOP_BODY.search(loop.line)
    condition, body = (computations.get(match[1], {}) if match else {} for match in names)
    test, state = _root(condition), inside.get(loop.operands[0]) if loop.operands else None
    if test is None or test.opcode != "compare" or "direction=LT" not in test.line:
        return None
    counter, limit = (condition.get(name) for name in test.operands)
    index = _INDEX.search(counter.line) if counter else None
    updated = _root(body)
    if index is None or state is None or updated is None:
        return None
    start, update = _element(state, index[1], inside), _element(updated, index[1], body)
    if update is None or update.opcode != "add":
        return None
    steps = [_constant(body.get(name), body) for name in update.operands]
    numbers = _constant(start, inside), _constant(limit, condition), steps[-1]
    if None in numbers or steps[0] is not None:
        return None
    first, last, step = (number or 0 for number in numbers)
    return max(0, -(-(last - first) // step)) if step > 0 else None


def _root(computation: Computation) -> Instruction | None:
    return next((inner for inner in computation.values() if inner.is_root), None)


def _element(state: Instruction, index: str, inside: Computation) -> Instruction | None:
    """The instruction that gives an element of a tuple."""
    is_there = state.opcode == "tuple" and int(index) < len(state.operands)
    return inside.get(state.operands[int(index)]) if is_there else None


def _constant(instruction: Instruction | None, inside: Computation) -> int | None:
    """The value of a constant, also of a copy of it."""
    while instruction and instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = inside.get(instruction.operands[0])
    match = _CONSTANT.search(instruction.line) if instruction else None
    return int(match[1]) if match else None


class Places:
    """Where in the source the instructions of a text come from.

    A place is "FILE:LINE" of the innermost call outside of installed libraries, or of the
    innermost call if there is none; "" where the text does not say.
    """

    def __init__(self, text: str):
        tables: dict[str, dict[int, str]] = {"": {}}
        current = tables[""]
        for line in text.splitlines():
            if _HEADER.match(line):
                break
            if match := _ROW.match(line):
                current[int(match[1])] = match[2] or match[3] or ""
            elif line:
                current = tables.setdefault(line, {})
        files = tables.get("FileNames", {})
        self._places = {
            number: f"{files.get(_field(row, 'file_name_id'), '')}:{_field(row, 'line')}"
            for number, row in tables.get("FileLocations", {}).items()
        }
        self._frames = {
            number: (_field(row, "file_location_id"), _field(row, "parent_frame_id"))
            for number, row in tables.get("StackFrames", {}).items()
        }
        # XLA writes the number of the parent plus one, so that the first frame is its own.
        self._shift = int(self._frames.get(1, (0, 0))[1] == 1)

    def of(self, instruction: Instruction) -> str:
        """The place of an instruction."""
        if match := _SOURCE.search(instruction.line):
            return f"{match[1]}:{match[2]}"
        match = _FRAME.search(instruction.line)
        frame = first = int(match[1]) if match else 0
        while frame in self._frames:
            location, parent = self._frames[frame]
            place = self._places.get(location, "")
            if not any(library in place for library in _LIBRARIES):
                return place
            frame = parent - self._shift
        return self._places.get(self._frames.get(first, (0, 0))[0], "")


def _field(row: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", row)
    return int(match[1]) if match else 0


# Sizes of arrays.


def size(shape: str) -> int:
    """The bytes of a shape in the HBM."""
    return sum(array_sizes(shape))


def size_anywhere(shape: str) -> int:
    """The bytes of a shape in any memory: inside of a fusion memories have no meaning."""
    return size(_MEMORY.sub("", shape))


def result_bytes(collective: Instruction) -> int:
    """The bytes of the values that a collective gives to this device, without tiles' padding."""
    arrays = _ARRAY_AND_LAYOUT.findall(collective.shape)
    sizes = [_array_size(*array[:2], "") for array in arrays]
    if collective.opcode == "collective-permute-start":  # (operand, result, two contexts)
        sizes = sizes[1:2]
    elif collective.opcode.endswith("-start") and collective.opcode != "all-reduce-start":
        sizes = sizes[len(sizes) // 2 :]  # (operands, results)
    return sum(sizes)


def array_sizes(shape: str) -> list[int]:
    """The bytes in the HBM of each array of a shape; 0 for one in another memory."""
    return [_array_size(*array) for array in _ARRAY_AND_LAYOUT.findall(shape)]


def arrays(shape: str) -> list[str]:
    """The arrays of a shape, each as text."""
    return [match[0] for match in _ARRAY_AND_LAYOUT.finditer(shape)]


def sides(shape: str) -> list[int]:
    """The sides of the first array of a shape."""
    match = _ARRAY_AND_LAYOUT.search(shape)
    return [int(side) for side in match[2].split(",") if side] if match else []


@functools.lru_cache(100_000)
def _array_size(dtype: str, numbers: str, layout: str) -> int:
    order, _, tiling = layout.partition(":")
    if "S(" in tiling and "S(0)" not in tiling:
        return 0
    lengths = [int(side) for side in numbers.split(",") if side]
    minor_first = [lengths[int(i)] for i in order.split(",") if i] or lengths[::-1]
    tile = _TILE.search(tiling)
    for i, side in enumerate(reversed(tile[1].split(",")) if tile else ()):
        if i < len(minor_first):
            minor_first[i] = -(-minor_first[i] // int(side)) * int(side)
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return bits * math.prod(minor_first) // 8
