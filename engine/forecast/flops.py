"""Counts the FLOPs of a function from its jaxpr: by its definition, on any hardware."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend


def count_flops(function: Callable[..., Any], *arguments: Any, examples: int = 1) -> int | None:
    """Counts the FLOPs of the convolutions and matrix products in `function(*arguments)`.

    A multiplication and an addition are two; padding counts as if it were data. Returns None where
    the count depends on the data, as with a `while_loop`.

    Args:
      function: anything that jax can trace.
      arguments: trees of arrays or ShapeDtypeStructs.
      examples: the batch size. Only products whose result has rows for each example are counted,
        not those that sum over examples, such as BatchNorm's statistics by Gram matrices. A result
        has such rows if `examples` divides its size, so choose a large prime.
    """
    return _flops(jax.make_jaxpr(function)(*arguments).jaxpr, examples)


def _flops(jaxpr: Any, examples: int) -> int | None:
    total = 0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        parts = [_flops(part, examples) for part in jax.extend.core.jaxprs_in_params(parameters)]
        if name == "while" or None in parts:
            return None
        counts = [part for part in parts if part is not None]
        platforms = parameters.get("branches_platforms")
        if platforms and None in platforms:  # the definition; the others are for some hardware
            total += counts[platforms.index(None)]
        elif name == "cond":
            total += max(counts)
        else:
            total += sum(counts) * parameters.get("length", 1) if name == "scan" else sum(counts)
        out: Any = equation.outvars[0].aval if equation.outvars else None
        if name not in ("dot_general", "conv_general_dilated") or math.prod(out.shape) % examples:
            continue
        if name == "dot_general":
            (contracting, _), _ = parameters["dimension_numbers"]
            sides = equation.invars[0].aval.shape
            total += 2 * math.prod(out.shape) * math.prod(sides[i] for i in contracting)
        else:
            numbers, kernel = parameters["dimension_numbers"], equation.invars[1].aval.shape
            window = math.prod(kernel) // kernel[numbers.rhs_spec[0]]  # its input features, too
            total += 2 * math.prod(out.shape) * window
    return total
