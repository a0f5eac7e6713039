"""Compares each Pallas kernel with its plain form, and times both.

Elsewhere than on TPUs, small arrays go through Pallas's interpreter.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from modes.prove.case import Case, Failed, Result
from ops.layers import boundary


class Kernel(NamedTuple):
    """A kernel and the plain function that computes the same.

    Attributes:
      name: for people.
      kernel: a function of arrays that returns a tree of arrays.
      plain: the same without Pallas.
      arguments: makes the arrays.
      tolerance: the relative error that is allowed.
    """

    name: str
    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    tolerance: float


def _boundary(images: int, side: int, inner: int, interpret: bool = False) -> Kernel:
    """`ops.layers.boundary` for blocks of a stage of ResNet-50."""
    fused = functools.partial(boundary.fused, interpret=interpret)
    outer = 4 * inner
    narrow, wide = (images, side, side, inner), (images, side, side, outer)
    shapes = [narrow, narrow, wide, wide, narrow, (5, inner), (3, inner)]
    shapes += [(outer, inner), (inner, outer)]

    @jax.jit
    def arguments() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        drawn = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
        drawn[3] = jnp.maximum(drawn[3], 0)
        return tuple(x if i in (5, 6) else x.astype(jnp.bfloat16) for i, x in enumerate(drawn))

    def form(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: function(boundary.Arguments(*arrays))

    name = f"block boundary, {images} x {side} x {side} x {outer}"
    return Kernel(name, form(fused), form(boundary.plain), arguments, 5e-3)


# The first two stages of ResNet-50, and a batch that does not fill the kernel's windows.
KERNELS = (_boundary(128, 56, 64), _boundary(128, 28, 128), _boundary(100, 28, 128))
_SMALL = (_boundary(3, 4, 64, interpret=True), _boundary(130, 2, 128, interpret=True))


def check(case: Case) -> Result:
    """Compares every kernel, and times it on TPUs."""
    del case
    figures: dict[str, Any] = {}
    if jax.default_backend() != "tpu":
        for one in _SMALL:
            compare(one)
        return Result(f"{len(_SMALL)} kernels compute what their plain forms do, in an interpreter")
    for one in KERNELS:
        figures |= compare(one)
    return Result(f"{len(KERNELS)} kernels compute what their plain forms do", figures)


def compare(one: Kernel) -> dict[str, float]:
    """The ms of both; raises Failed if an array differs by more than the tolerance."""
    arguments = one.arguments()
    fast, fast_seconds = _timed(one.kernel, arguments)
    plain, plain_seconds = _timed(one.plain, arguments)
    for a, b in zip(jax.tree.leaves(fast), jax.tree.leaves(plain), strict=True):
        norm = np.linalg.norm(np.asarray(b, float))
        error = float(np.linalg.norm(np.asarray(a, float) - np.asarray(b, float)) / (norm or 1.0))
        if not error <= one.tolerance:
            raise Failed(f"{one.name} differs from its plain form by {error:.2g}")
    return {f"{one.name} ms": 1e3 * fast_seconds, f"{one.name} plain ms": 1e3 * plain_seconds}


def _timed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, float]:
    """The result, and the median seconds of ten calls after the compilation."""
    compiled = jax.jit(function)
    result, seconds = jax.block_until_ready(compiled(*arguments)), []
    for _ in range(10):
        started = time.monotonic()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.monotonic() - started)
    return result, statistics.median(seconds)
