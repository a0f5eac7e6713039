"""STAND-IN for engine.forecast.program until the model of the chip is merged. To be deleted."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from engine.forecast import cache, hlo, kernels
from engine.forecast.topology import Topology

CALIBRATED = "2026-11-29"


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    opcode: str
    scopes: str
    place: str
    times: float
    seconds: float
    flops: float
    moved: float
    cycles: float


@dataclasses.dataclass(frozen=True)
class Program:
    arguments: int
    outputs: int
    temporaries: int
    code: int
    flops: float
    moved: float
    seconds: float
    collective_seconds: float
    bound: str
    operations: tuple[Operation, ...]
    largest: tuple[tuple[str, int], ...]
    collectives: dict[str, tuple[int, int]]
    unknown_loops: int
    compile_seconds: float

    @property
    def memory(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.code


def error_of(chip: Any) -> tuple[float, float]:
    return 0.8, 1.05


def error_source(chip: Any) -> str:
    return "no public run of this generation"


def compile_program(lowered: Any, topology: Topology, say: Callable[[str], None]) -> Program:
    facts = cache.compiled_facts(lowered, topology, say)
    chip = topology.chip
    cost = kernels.priced(hlo.cost(facts.text), chip, facts.bundles)
    computations, entry = hlo.parse_computations(facts.text)
    lines = {}
    operations = []
    for i in computations[entry or ""].values():
        if m := re.search(r'"estimated_cycles":"(\d+)"', i.line):
            c = int(m[1])
            operations.append(
                Operation(
                    i.name,
                    i.opcode,
                    i.scopes,
                    lines.get(i.name, "model.py:12"),
                    1,
                    c / chip.clock,
                    0,
                    0,
                    c,
                )
            )
    moved = sum(size for _, size in cost.collectives.values())
    return Program(
        arguments=facts.arguments,
        outputs=facts.outputs,
        temporaries=facts.temporaries,
        code=facts.code,
        flops=facts.flops,
        moved=cost.moved,
        seconds=chip.seconds(cost.cycles) + moved / 4e10,
        collective_seconds=moved / 4e10,
        bound="HBM",
        operations=tuple(operations),
        largest=(("fusion.1", 123 << 20),),
        collectives=cost.collectives,
        unknown_loops=cost.unknown_loops,
        compile_seconds=facts.seconds,
    )
