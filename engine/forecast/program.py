"""From a lowered step to its cycles, by `hlo` and `kernels`; `Chip.seconds` makes time of them."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from engine.forecast import hlo, kernels
from engine.forecast.topology import Chip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program(hlo.Cost):
    """What the compiler says of one step, for one run on one device; sizes are bytes of HBM."""

    arguments: int  # with the outputs that replace them
    outputs: int  # further results
    temporaries: int
    code: int
    flops: float  # by XLA's cost analysis
    traffic: float  # bytes read and written, by XLA's cost analysis
    compile_seconds: float

    @property
    def memory(self) -> int:
        """All the HBM that a run of it takes, in bytes."""
        return self.arguments + self.outputs + self.temporaries + self.code


def compile_program(lowered: Any, chip: Chip) -> Program:
    """Compiles a step, which jax has lowered for one shape of its batches, for a chip."""
    start = time.monotonic()
    step = lowered.compile()
    memory, analysis = step.memory_analysis(), step.cost_analysis()
    seconds = time.monotonic() - start
    cost = kernels.priced(hlo.cost(step.as_text()), chip, kernels.read_bundles())
    return Program(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=analysis["flops"],
        traffic=analysis["bytes accessed"],
        compile_seconds=seconds,
        **vars(cost),
    )


def combine(programs: Sequence[Program], steps: Sequence[int] = ()) -> Program:
    """One step, compiled for each shape of its batches, as one program.

    Memory and collectives come from the shape that takes the most memory. Time, FLOPs and traffic
    are the mean over the shapes: each counts as often as it has `steps`; () counts all equally.
    """
    counts = steps or [1] * len(programs)
    shares = [count / sum(counts) for count in counts]

    def mean(name: str) -> float:
        values = (getattr(program, name) for program in programs)
        return sum(share * value for share, value in zip(shares, values, strict=True))

    names: dict[str, tuple[int, int]] = {}
    for share, program in zip(shares, programs, strict=True):
        for name, (cycles, products) in program.names.items():
            before = names.get(name, (0, 0))
            names[name] = before[0] + round(share * cycles), before[1] + round(share * products)
    return dataclasses.replace(
        max(programs, key=lambda program: program.memory),
        names=names,
        cycles=round(mean("cycles")),
        moved=round(mean("moved")),
        flops=mean("flops"),
        traffic=mean("traffic"),
        loops=max(program.loops for program in programs),
        unknown_loops=max(program.unknown_loops for program in programs),
        compile_seconds=sum(program.compile_seconds for program in programs),
    )
