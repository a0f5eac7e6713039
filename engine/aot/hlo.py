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
from typing import NamedTuple

from engine.aot import traffic
from engine.aot.text import Computation, Instruction, computations

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r"= [su]\d+\[\]\S* constant\((\d+)\)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter"),
    *("all-to-all", "collective-permute", "collective-broadcast"),
)
_RUNS = {"while", "call", "conditional", "async-start"}  # their callees have cycles of their own
_KERNEL = "tpu_custom_call"  # what a Pallas kernel becomes
_RANDOM = "rng-bit-generator"
_BODY = re.compile(r'"body":\s*"([^"]*)"')


class Kernel(NamedTuple):
    """A Pallas kernel, or random bits of the chip's generator: they get no cycles.

    Attributes:
      name: of the instruction that runs it.
      scopes: its path of scopes.
      times: how often a run of the program runs it.
      moved: bytes that it moves to and from the HBM in one run.
      body: its code; equal ones have the same.
      cycles: of one run, which `engine.aot.kernels` computes.
      bundles: how many instructions a core issues in one run; None if that is not known.
    """

    name: str
    scopes: str
    times: float
    moved: int
    body: str
    cycles: int = 0
    bundles: int | None = None


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
      moved: bytes to and from the HBM, see `engine.aot.traffic`.
      kernels: those that `cycles` leaves out.
    """

    cycles: int
    collectives: dict[str, tuple[int, int]]
    loops: int
    unknown_loops: int
    names: dict[str, tuple[int, int]]
    moved: int = 0
    kernels: tuple[Kernel, ...] = ()


def cost(text: str) -> Cost:
    """Reads `jax.stages.Compiled.as_text()` of a program.

    Raises:
      ValueError: the text has no entry computation.
    """
    found, entry = computations(text)
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
        inside = found.get(name, {})
        for instruction in inside.values():
            if on_its_own:
                size, runs = traffic.moved(instruction, inside, found), chance * times
                moved += runs * size
                if body := _kernel(instruction, found):
                    kernels.append(Kernel(instruction.name, instruction.scopes, runs, size, body))
                elif match := _CYCLES.search(instruction.line):
                    spent, scopes = runs * int(match[1]), instruction.scopes
                    cycles += spent
                    before = names.get(scopes, (0.0, 0.0))
                    product = spent * _multiplies(instruction, found)
                    names[scopes] = before[0] + spent, before[1] + product
            kind = instruction.opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                count, size = collectives.get(kind, (0, 0))
                collectives[kind] = count + times, size + times * _result_bytes(instruction)
            trips: int | None = 1
            if instruction.opcode == "while":
                trips = _trips(instruction, found)
                loops, unknown = loops + 1, unknown + (trips is None)
            runs_others = on_its_own and instruction.opcode in _RUNS
            called = zip(instruction.called, instruction.chances, strict=True)
            waiting += [(one, times * (trips or 1), chance * of, runs_others) for one, of in called]
    whole = {name: (round(all_), round(products)) for name, (all_, products) in names.items()}
    return Cost(*(round(cycles), collectives, loops, unknown, whole), round(moved), tuple(kernels))


def _kernel(instruction: Instruction, found: dict[str, dict[str, Instruction]]) -> str:
    """What an instruction runs that gets no cycles, alone or in a fusion: its code; else ""."""
    if instruction.opcode == _RANDOM:
        return f"{_RANDOM} {instruction.shape}"
    if instruction.target == _KERNEL:
        match = _BODY.search(instruction.line)
        return match[1] if match else instruction.name
    if instruction.opcode == "fusion":
        inner = [x for name in instruction.called for x in found.get(name, {}).values()]
        return next((body for x in inner if (body := _kernel(x, found))), "")
    return ""


def _multiplies(instruction: Instruction, found: dict[str, dict[str, Instruction]]) -> bool:
    """Whether an instruction, or what it fuses, has a convolution or matrix product."""
    if instruction.opcode in ("convolution", "dot"):
        return True
    return instruction.opcode == "fusion" and any(
        _multiplies(inner, found)
        for called in instruction.called
        for inner in found.get(called, {}).values()
    )


def _trips(loop: Instruction, found: dict[str, dict[str, Instruction]]) -> int | None:
    """How often the body of a loop runs; None if the text does not say."""
    if match := _TRIPS.search(loop.line):
        return int(match[1])
    # jax's scans count from 0 to the only constant of their condition.
    condition = _CONDITION.search(loop.line)
    lines: Computation = found.get(condition[1], {}) if condition else {}
    limits = [int(match[1]) for i in lines.values() if (match := _CONSTANT.search(i.line))]
    return limits[0] if len(limits) == 1 else None


def _result_bytes(instruction: Instruction) -> int:
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
