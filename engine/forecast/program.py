"""Compiles a step for a slice, and says what one run of it costs a device."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from common.errors import count
from engine.forecast import cache, calibration, operations
from engine.forecast.operations import Operation
from engine.forecast.topology import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What one run of a program costs one device; sizes are bytes of HBM."""

    topology: Topology
    arguments: int  # with the outputs that replace them
    outputs: int  # further results
    temporaries: int
    code: int
    largest: tuple[tuple[str, int], ...]  # (what, bytes): arrays but arguments, when most is in use
    operations: tuple[Operation, ...]
    collectives: dict[str, tuple[float, float]]  # kind: (how many, bytes that a device sends)
    unknown_loops: int  # how many loops have an unknown number of trips; each counts once
    branches: int  # how many conditionals; each branch counts as equally likely
    compile_seconds: float
    parameters: tuple[int, ...] = ()  # the size of each argument that it uses, with its padding

    @property
    def memory(self) -> int:
        """All the HBM that a run of it takes, in bytes."""
        return self.arguments + self.outputs + self.temporaries + self.code

    @property
    def flops(self) -> float:
        """FLOPs of the convolutions and matrix products."""
        return sum(operation.times * operation.flops for operation in self.operations)

    @property
    def moved(self) -> float:
        """Bytes to and from the HBM."""
        return sum(operation.times * operation.moved for operation in self.operations)

    @functools.cached_property
    def seconds(self) -> float:
        """The forecast of its time; copies and collectives beside other work are hidden by it."""
        work = sum(operation.times * operation.seconds for operation in self.operations)
        return max(work, *self.limits.values())

    @functools.cached_property
    def limits(self) -> dict[str, float]:
        """The seconds that its FLOPs, its bytes and its collectives need at the published rates."""
        flops = sum(operation.times * operation.bf16_flops for operation in self.operations)
        compute, memory = self.topology.chip.limits(flops, self.moved)
        links = sum(x.times * x.link_seconds for x in self.operations)
        return {"compute": compute, "HBM": memory, "links": links}

    @property
    def bound(self) -> str:
        """Which of `limits` takes longest."""
        return max(self.limits, key=lambda name: self.limits[name])

    @property
    def error(self) -> calibration.Error:
        """How far its time may be off; no run is faster than `limits`."""
        found = calibration.error(self.topology.chip)
        if not self.seconds:
            return found
        fastest = max(self.limits.values()) / self.seconds
        slower = sum(
            max(0.0, most - found.most) * self._seconds_of(kind) / self.seconds
            for kind, most in calibration.SLOWEST.items()
        )
        return dataclasses.replace(found, least=max(found.least, fastest), most=found.most + slower)

    def _seconds_of(self, kind: str) -> float:
        return sum(x.times * x.seconds for x in self.operations if x.kind == kind)

    @property
    def notes(self) -> list[str]:
        """What is not known of its time, as sentences."""
        lines = []
        priced = [operation for operation in self.operations if operation.kind]
        counts = []
        for kind in sorted({operation.kind for operation in priced}):
            runs = round(sum(x.times for x in priced if x.kind == kind))
            low, factor = 1e3 * self._seconds_of(kind), calibration.SLOWEST.get(kind, 1.0)
            most = f" to {factor * low:.2f}" if factor > 1 else ""
            counts.append(f"{count(runs, kind)} ({low:.2f}{most} ms)")
        if counts:
            lines.append(
                f"the compiler has no estimate of {', '.join(counts)}: each counts as the longer "
                "of bytes / bandwidth and bundles / clock, and the interval includes what measured "
                "sorts and gathers took; FLOPs and repeated fetches of kernels are not known"
            )
        unknown = [
            x.name for x in priced if not x.bundles or (x.kind == "kernel" and x.unknown_loops)
        ]
        if unknown:
            lines.append(
                f"too short: of {len(unknown)} of these, libtpu does not say how many bundles they "
                f"issue, or how often a loop runs ({', '.join(unknown[:3])})"
            )
        if self.branches:
            lines.append(
                f"{count(self.branches, 'conditional')}: each of its branches counts as equally "
                "likely"
            )
        if not self.seconds:
            lines.append("it computes nothing: does the function return its results?")
        if self.unknown_loops:
            lines.append(
                f"too short: {count(self.unknown_loops, 'loop')} of unknown length, which may "
                "depend on the data; each counts once"
            )
        return lines


def compile_program(lowered: Any, topology: Topology, say: Callable[[str], None]) -> Program:
    """Compiles a step, which jax has lowered for one shape of its batches, for a slice.

    `say` gets how long it will take, for the person who waits. A program that was compiled before
    comes from `cache`.
    """
    facts = cache.compiled_facts(lowered, topology, say)
    coordinates = [tuple(at) for at in facts.coordinates] if facts.coordinates else None
    found = operations.read(facts.text, topology, facts.bundles, coordinates)
    return Program(
        topology=topology,
        arguments=facts.arguments,
        outputs=facts.outputs,
        temporaries=facts.temporaries,
        code=facts.code,
        largest=tuple((what, size) for what, size in facts.largest),
        operations=found.all,
        collectives=found.collectives,
        unknown_loops=found.unknown_loops,
        branches=found.branches,
        compile_seconds=facts.seconds,
        parameters=tuple(facts.parameters),
    )


def combine(programs: Sequence[Program], steps: Sequence[int] = ()) -> Program:
    """One step, compiled for each shape of its batches, as one program.

    Memory and collectives come from the shape that takes the most memory. Time, FLOPs and traffic
    are the mean over the shapes: each counts as often as it has `steps`; () counts all equally.
    """
    counts = steps or [1] * len(programs)
    operations = [
        dataclasses.replace(operation, times=operation.times * count / sum(counts))
        for count, program in zip(counts, programs, strict=True)
        for operation in program.operations
    ]
    return dataclasses.replace(
        max(programs, key=lambda program: program.memory),
        operations=tuple(operations),
        unknown_loops=max(program.unknown_loops for program in programs),
        branches=max(program.branches for program in programs),
        compile_seconds=sum(program.compile_seconds for program in programs),
    )
