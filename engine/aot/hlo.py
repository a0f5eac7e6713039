"""Reads from the optimised HLO text of a compiled program what it costs.

The TPU's compiler writes its own estimate, `"estimated_cycles":"N"`, into the backend config of
each instruction that runs on the cores; collectives have none. Instructions inside fusions have
none either: the fusion has it.

Of a conditional, one branch runs. The text does not say how often each of them does, so all count
as equally likely. A scope says it for `jax.lax.cond`: in `jax.named_scope("one_step_in_10")`, the
true branch runs in one step of ten.
"""

from __future__ import annotations

import dataclasses
import math
import re

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
# The shape may be a tuple with layouts, {3,2,1,0:T(8,128)}; the opcode alone follows a blank.
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r"= [su]\d+\[\]\S* constant\((\d+)\)")
_CALLED = re.compile(r"\b(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_RARELY = re.compile(r"\bone_step_in_(\d+)/cond$")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter"),
    *("all-to-all", "collective-permute", "collective-broadcast"),
)
_RUNS = {"while", "call", "conditional", "async-start"}  # their callees have cycles of their own


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one device does in one run of a program.

    Attributes:
      cycles: sum of the compiler's estimates, loops multiplied by their trips.
      collectives: {kind: (how many, bytes of their results)}; those of all branches.
      loops: how many there are; XLA's own cost analysis counts the body of each once.
      unknown_loops: how many of them have an unknown number of trips; each counts once.
      names: the cycles by the name that jax gave to the operation, its path of scopes:
        (all, those of instructions with a convolution or matrix product).
    """

    cycles: int
    collectives: dict[str, tuple[int, int]]
    loops: int
    unknown_loops: int
    names: dict[str, tuple[int, int]]


@dataclasses.dataclass
class _Instruction:
    opcode: str
    shape: str
    line: str

    @property
    def name(self) -> str:
        """The path of scopes that jax gave to it, or ""."""
        match = _NAME.search(self.line)
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
        count, rarely = len(self.branches), _RARELY.search(self.name)
        each = [1 / count] * count if count else []
        if count == 2 and rarely:
            each = [1 - 1 / int(rarely[1]), 1 / int(rarely[1])]
        return [1.0] * (len(self.called) - count) + each


def cost(text: str) -> Cost:
    """Reads `jax.stages.Compiled.as_text()` of a program.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations, entry = _computations(text)
    if entry is None:
        raise ValueError("this is no HLO text: it has no ENTRY computation")
    loops = unknown = 0
    cycles = 0.0
    collectives: dict[str, tuple[int, int]] = {}
    names: dict[str, tuple[float, float]] = {}
    waiting = [(entry, 1, 1.0, True)]
    while waiting:
        computation, times, chance, on_its_own = waiting.pop()
        for instruction in computations.get(computation, []):
            match = _CYCLES.search(instruction.line) if on_its_own else None
            if match:
                spent, name = chance * times * int(match[1]), instruction.name
                cycles += spent
                before = names.get(name, (0.0, 0.0))
                product = spent * _multiplies(instruction, computations)
                names[name] = before[0] + spent, before[1] + product
            kind = instruction.opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                count, size = collectives.get(kind, (0, 0))
                collectives[kind] = count + times, size + times * _result_bytes(instruction)
            trips: int | None = 1
            if instruction.opcode == "while":
                trips = _trips(instruction, computations)
                loops, unknown = loops + 1, unknown + (trips is None)
            runs = on_its_own and instruction.opcode in _RUNS
            called = zip(instruction.called, instruction.chances, strict=True)
            waiting += [(one, times * (trips or 1), chance * of, runs) for one, of in called]
    whole = {name: (round(all_), round(products)) for name, (all_, products) in names.items()}
    return Cost(round(cycles), collectives, loops, unknown, whole)


def _multiplies(instruction: _Instruction, computations: dict[str, list[_Instruction]]) -> bool:
    """Whether an instruction, or what it fuses, has a convolution or matrix product."""
    if instruction.opcode in ("convolution", "dot"):
        return True
    return instruction.opcode == "fusion" and any(
        _multiplies(inner, computations)
        for called in instruction.called
        for inner in computations.get(called, [])
    )


def _trips(loop: _Instruction, computations: dict[str, list[_Instruction]]) -> int | None:
    """How often the body of a loop runs; None if the text does not say."""
    if match := _TRIPS.search(loop.line):
        return int(match[1])
    # jax's scans count from 0 to the only constant of their condition.
    condition = _CONDITION.search(loop.line)
    lines = computations.get(condition[1], []) if condition else []
    limits = [int(match[1]) for i in lines if (match := _CONSTANT.search(i.line))]
    return limits[0] if len(limits) == 1 else None


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str | None]:
    """All computations by name, and the name of the entry."""
    computations: dict[str, list[_Instruction]] = {}
    entry, current = None, []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            current.append(_Instruction(match[2], match[1], line))
    return computations, entry


def _result_bytes(instruction: _Instruction) -> int:
    """Size of what a collective gives to this device."""
    arrays = [
        (8 if kind == "pred" else int(re.findall(r"\d+", kind)[0]), filter(None, sides.split(",")))
        for kind, sides in _ARRAY.findall(instruction.shape)
    ]
    sizes = [bits * math.prod(map(int, sides)) // 8 for bits, sides in arrays]
    if instruction.opcode == "collective-permute-start":  # (operand, result, two contexts)
        sizes = sizes[1:2]
    elif instruction.opcode in ("all-gather-start", "all-to-all-start"):  # (operands, results)
        sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)
