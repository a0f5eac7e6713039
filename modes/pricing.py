"""What preflight says of a program: what the compiler does, at the prices of a chip."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from benchmarks.base import BATCH_AXES, Benchmark
from engine.aot import flops, forecast, hlo, kernels
from engine.aot.forecast import Program
from engine.aot.topology import Chip

_EXAMPLES = 1009  # a prime, for the count of FLOPs per example


def program(lowered: list[Any], chip: Chip) -> Program:
    """Compiles a step for each shape of its batches."""
    programs = []
    for _, program in lowered:
        start = time.monotonic()
        compiled_step = program.compile()
        memory, analysis = compiled_step.memory_analysis(), compiled_step.cost_analysis()
        programs.append(
            Program(
                arguments=memory.argument_size_in_bytes,
                outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
                temporaries=memory.temp_size_in_bytes,
                code=memory.generated_code_size_in_bytes,
                flops=analysis["flops"],
                traffic=analysis["bytes accessed"],
                seconds=time.monotonic() - start,
                **vars(kernels.priced(hlo.cost(compiled_step.as_text()), chip, kernels.read())),
            )
        )
    return forecast.combine(programs)


def uses_kernels(benchmark: Benchmark) -> bool:
    """Whether the loss or its gradient runs a Pallas kernel, on any device."""
    return any(kernels.are_in(_gradient(loss), *traced) for loss, *traced in _losses(benchmark))


def _gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the sum of all that a loss returns, by its first argument."""

    def total(*arguments: Any) -> Any:
        leaves = jax.tree.leaves(loss(*arguments))
        return sum(jnp.sum(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))

    return jax.grad(total)


def forward_flops(benchmark: Benchmark) -> int | None:
    """FLOPs of one training example's forward pass; the mean over the steps or batch shapes."""
    counts = [flops.count(*traced, examples=_EXAMPLES) for traced in _losses(benchmark)]
    steps = [stage.steps for stage in benchmark.stages()] or [1] * len(counts)
    known = [n * count for n, count in zip(steps, counts, strict=True) if count is not None]
    return sum(known) // (sum(steps) * _EXAMPLES) if len(known) == len(counts) else None


def _losses(benchmark: Benchmark) -> Iterator[tuple[Any, ...]]:
    """The loss of a device and its arguments, for each kind of batch, of `_EXAMPLES` examples."""
    key, mesh = jax.random.key(0), AbstractMesh((1,) * len(BATCH_AXES), BATCH_AXES)
    weights = jax.eval_shape(benchmark.init, key)
    everywhere = PartitionSpec()
    how: Any = {"in_specs": everywhere, "out_specs": everywhere, "check_vma": False}
    loss = jax.shard_map(benchmark.loss, mesh=mesh, **how)
    for spec in benchmark.batch_spec("train", _EXAMPLES):
        yield loss, *weights, spec, key
