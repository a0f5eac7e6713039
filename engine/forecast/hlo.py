"""Reads from the optimised HLO text of a compiled program what it costs.

The TPU's compiler writes its own estimate, `"estimated_cycles":"N"`, into the backend config of
each instruction that runs on the cores; collectives have none. Instructions inside fusions have
none either: the fusion has it.

Of a conditional, one branch runs. The text does not say how often each of them does, so all count
as equally likely. A scope says it for `jax.lax.cond`: in `jax.named_scope("one_step_in_10")`, the
true branch runs in one step of ten.

Bytes are what an instruction reads from and writes to the HBM. Arrays count at the size that
they have there, which tiles of the layout fill up. Those in other memories, `S(1)` and so on in the
layout, do not count, nor what stays in a fusion. Of an operand that is only sliced, or updated in
place, the slice counts. The compiler may keep an array on the chip without saying so, or read one
twice: the count is what a program cannot do without.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Cycles, loops and collectives.
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r"= [su]\d+\[\]\S* constant\((\d+)\)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter",
    "all-to-all", "collective-permute", "collective-broadcast",
)  # fmt: skip
_RUNS = {"while", "call", "conditional", "async-start"}  # their callees have cycles of their own
_KERNEL = "tpu_custom_call"  # what a Pallas kernel becomes
_RANDOM = "rng-bit-generator"
_BODY = re.compile(r'"body":\s*"([^"]*)"')

# Instructions.
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
# The shape may be a tuple with layouts, {3,2,1,0:T(8,128)}; the opcode alone follows a blank.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_SCOPES = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"\b(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_RARELY = re.compile(r"\bone_step_in_(\d+)/cond$")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')

# Bytes.
_ARRAY_AND_LAYOUT = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_MEMORY = re.compile(r"S\(\d+\)")
_WITHOUT_TRAFFIC = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "partition-id", "replica-id", "while", "call", "conditional", "optimization-barrier",
}  # fmt: skip
_UNWRITTEN = ("AllocateBuffer", "ConcatBitcast")  # custom calls that move nothing
_SLICES = ("slice", "dynamic-slice", "gather")
_SAME_ARRAY = ("bitcast", "reshape", "get-tuple-element", "copy", "convert")  # of the same array


# The instructions of a text.


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
        return [name.strip(" %") for name in names if name]

    @property
    def called(self) -> list[str]:
        """The computations that it names."""
        return _CALLED.findall(self.line) + self.branches

    @property
    def chances(self) -> list[float]:
        """The probability with which each of `called` runs."""
        count, rarely = len(self.branches), _RARELY.search(self.scopes)
        each = [1 / count] * count if count else []
        if count == 2 and rarely:
            each = [1 - 1 / int(rarely[1]), 1 / int(rarely[1])]
        return [1.0] * (len(self.called) - count) + each


Computation = Mapping[str, Instruction]  # by name, in the order of the text


def parse_computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str | None]:
    """All computations by name, and the name of the entry."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = None, {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, shape, opcode, tail = match.groups()
            operands = tuple(_OPERAND.findall(_until_closed(tail)))
            current[name] = Instruction(name, opcode, shape, line, operands, bool(root))
    return computations, entry


def _until_closed(text: str) -> str:
    """The text up to the parenthesis that closes the one just before it."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[:i]
    return text


# What a program costs.


class Kernel(NamedTuple):
    """A Pallas kernel, or random bits of the chip: the compiler gives them no cycles."""

    name: str  # of the instruction that runs it
    scopes: str  # its path of scopes
    times: float  # how often a run of the program runs it
    moved: int  # bytes that it moves to and from the HBM in one run
    body: str  # its code; equal kernels have the same
    cycles: int = 0  # of one run, which `engine.forecast.kernels` computes
    bundles: int | None = None  # of instructions that a core issues in one run; None: not known


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one device does in one run of a program."""

    cycles: int  # sum of the compiler's estimates, loops multiplied by their trips
    collectives: dict[str, tuple[int, int]]  # opcode: (how many, bytes of results) in all branches
    loops: int  # how many there are; XLA's own cost analysis counts the body of each once
    unknown_loops: int  # how many of them have an unknown number of trips; each counts once
    # By the name that jax gave to the operation, its path of scopes: (all cycles, the cycles of
    # instructions with a convolution or matrix product).
    names: dict[str, tuple[int, int]]
    moved: int = 0  # bytes to and from the HBM, as `bytes_moved` counts them
    kernels: tuple[Kernel, ...] = ()  # those that `cycles` leaves out


def cost(text: str) -> Cost:
    """Reads `jax.stages.Compiled.as_text()` of a program."""
    computations, entry = parse_computations(text)
    if entry is None:
        raise ValueError("this is no HLO text: it has no ENTRY computation")
    loops = unknown = 0
    cycles = moved = 0.0
    collectives: dict[str, tuple[int, int]] = {}
    names: dict[str, tuple[float, float]] = {}
    kernels: list[Kernel] = []
    waiting = [(entry, 1, 1.0, True)]
    while waiting:
        name, times, chance, on_its_own = waiting.pop()
        inside = computations.get(name, {})
        for instruction in inside.values():
            if on_its_own:
                size, runs = bytes_moved(instruction, inside, computations), chance * times
                moved += runs * size
                fused = [*_with_fused(instruction, computations)]
                if body := next(filter(None, map(_kernel, fused)), ""):
                    kernels.append(Kernel(instruction.name, instruction.scopes, runs, size, body))
                elif match := _CYCLES.search(instruction.line):
                    spent, scopes = runs * int(match[1]), instruction.scopes
                    cycles += spent
                    before = names.get(scopes, (0.0, 0.0))
                    product = spent * any(x.opcode in ("convolution", "dot") for x in fused)
                    names[scopes] = before[0] + spent, before[1] + product
            opcode = instruction.opcode.removesuffix("-start")
            if opcode in COLLECTIVES:
                count, size = collectives.get(opcode, (0, 0))
                collectives[opcode] = count + times, size + times * result_bytes(instruction)
            trips: int | None = 1
            if instruction.opcode == "while":
                trips = _trips(instruction, computations)
                loops, unknown = loops + 1, unknown + (trips is None)
            runs_others = on_its_own and instruction.opcode in _RUNS
            called = zip(instruction.called, instruction.chances, strict=True)
            waiting += [(one, times * (trips or 1), chance * of, runs_others) for one, of in called]
    return Cost(
        cycles=round(cycles),
        collectives=collectives,
        loops=loops,
        unknown_loops=unknown,
        names={name: (round(all_), round(product)) for name, (all_, product) in names.items()},
        moved=round(moved),
        kernels=tuple(kernels),
    )


def _with_fused(
    instruction: Instruction, computations: dict[str, dict[str, Instruction]]
) -> Iterator[Instruction]:
    """An instruction, and those that it fuses."""
    yield instruction
    if instruction.opcode == "fusion":
        for called in instruction.called:
            for inner in computations.get(called, {}).values():
                yield from _with_fused(inner, computations)


def _kernel(instruction: Instruction) -> str:
    """The code of an instruction that gets no cycles; "" for others."""
    if instruction.opcode == _RANDOM:
        return f"{_RANDOM} {instruction.shape}"
    match = _BODY.search(instruction.line)
    is_kernel = instruction.target == _KERNEL
    return (match[1] if match else instruction.name) if is_kernel else ""


def _trips(loop: Instruction, computations: dict[str, dict[str, Instruction]]) -> int | None:
    """How often the body of a loop runs; None if the text does not say."""
    if match := _TRIPS.search(loop.line):
        return int(match[1])
    # jax's scans count from 0 to the only constant of their condition.
    condition = _CONDITION.search(loop.line)
    lines: Computation = computations.get(condition[1], {}) if condition else {}
    limits = [int(match[1]) for i in lines.values() if (match := _CONSTANT.search(i.line))]
    return limits[0] if len(limits) == 1 else None


def result_bytes(instruction: Instruction) -> int:
    """Size of what a collective gives to this device."""
    arrays = _ARRAY_AND_LAYOUT.findall(instruction.shape)
    sizes = [_array_size(*array[:2], "") for array in arrays]  # without padding to tiles
    if instruction.opcode == "collective-permute-start":  # (operand, result, two contexts)
        sizes = sizes[1:2]
    elif instruction.opcode in ("all-gather-start", "all-to-all-start"):  # (operands, results)
        sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


# Bytes to and from the HBM.


def bytes_moved(
    instruction: Instruction, inside: Computation, computations: Mapping[str, Computation]
) -> int:
    """Bytes that an instruction of the computation `inside` moves to and from the HBM in one run.

    Operations that run others, such as loops, count as 0: what they run counts by itself.
    """
    opcode = instruction.opcode
    if opcode in _WITHOUT_TRAFFIC or opcode.endswith("-done") or instruction.target in _UNWRITTEN:
        return 0
    body = computations.get(instruction.called[0], {}) if instruction.called else {}
    if opcode == "fusion":
        return _moved_by_fusion(instruction, inside, body)
    if opcode == "async-start":
        return sum(bytes_moved(inner, body, computations) for inner in body.values())
    if opcode in ("copy-start", "collective-permute-start"):  # (result, operand, context)
        return sum(_array_sizes(instruction.shape)[:2])
    results = _size(instruction.shape)
    operands = [_size(inside[x].shape) if x in inside else 0 for x in instruction.operands]
    if opcode in _SLICES:  # reads as many bytes as its result has, if they are in the HBM
        return results + (_size_anywhere(instruction.shape) if operands[0] else 0)
    if opcode == "dynamic-update-slice":
        return 2 * sum(operands[1:2])
    if opcode == "scatter":  # in place: reads the updates; reads and writes what they change
        return sum(operands[1:]) + 2 * sum(operands[2:])
    if opcode.endswith("slice-start"):  # ((operand), result, context)
        *_, result, _ = _ARRAY_AND_LAYOUT.findall(instruction.shape)
        return _array_size(*result) + _array_size(*result[:2], _MEMORY.sub("", result[2]))
    if opcode.endswith("-start"):  # a collective: (operands, results)
        return results
    return results + sum(operands)


def _size(shape: str) -> int:
    """The bytes of a shape in the HBM."""
    return sum(_array_sizes(shape))


def _size_anywhere(shape: str) -> int:
    """The bytes of a shape in any memory: inside of a fusion memories have no meaning."""
    return _size(_MEMORY.sub("", shape))


def _array_sizes(shape: str) -> list[int]:
    """The bytes in the HBM of each array of a shape; 0 for one in another memory."""
    return [_array_size(*array) for array in _ARRAY_AND_LAYOUT.findall(shape)]


@functools.lru_cache(100_000)
def _array_size(dtype: str, sides: str, layout: str) -> int:
    order, _, tiling = layout.partition(":")
    if "S(" in tiling and "S(0)" not in tiling:
        return 0
    numbers = [int(side) for side in sides.split(",") if side]
    minor_first = [numbers[int(i)] for i in order.split(",") if i] or numbers[::-1]
    tile = _TILE.search(tiling)
    for i, side in enumerate(reversed(tile[1].split(",")) if tile else ()):
        if i < len(minor_first):
            minor_first[i] = -(-minor_first[i] // int(side)) * int(side)
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return bits * math.prod(minor_first) // 8


def _moved_by_fusion(fusion: Instruction, inside: Computation, body: Computation) -> int:
    users: dict[str, list[Instruction]] = {}
    for inner in body.values():
        for name in inner.operands:
            users.setdefault(name, []).append(inner)
    total = 0
    for name, inner in body.items():
        if inner.opcode == "parameter":
            number = int(inner.line.split(" parameter(", 1)[1].split(")", 1)[0])
            outer = inside.get(fusion.operands[number]) if number < len(fusion.operands) else None
            if outer and (size := _size(outer.shape)):
                total += min(size, _bytes_read(name, users, body))
    updates = _updated_sizes(body)
    results = enumerate(_array_sizes(fusion.shape))
    return total + sum(min(size, updates.get(i, size)) for i, size in results)


def _bytes_read(name: str, users: Mapping[str, list[Instruction]], body: Computation) -> int:
    """The bytes that a fusion reads of a parameter: all, or the slices that it takes."""
    total = 0
    for user in users.get(name, []):
        if user.opcode in _SLICES and user.operands[0] == name:
            total += _size_anywhere(user.shape)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue  # in place: what it does not write, it does not read
        elif user.opcode in _SAME_ARRAY and not user.is_root:
            total += _bytes_read(user.name, users, body)
        else:
            return _size_anywhere(body[name].shape)
    return total


def _updated_sizes(body: Computation) -> dict[int, int]:
    """The bytes that are written of those results of a fusion that are updated in place."""
    root = next((inner for inner in body.values() if inner.is_root), None)
    if root is None:
        return {}
    outputs = root.operands if root.opcode == "tuple" else (root.name,)
    found = {}
    for i, name in enumerate(outputs):
        inner = body.get(name)
        while inner and inner.opcode in _SAME_ARRAY and inner.operands:
            inner = body.get(inner.operands[0])
        if inner and inner.opcode == "dynamic-update-slice":
            update = body.get(inner.operands[1])
            found[i] = _size_anywhere(update.shape) if update else 0
    return found
