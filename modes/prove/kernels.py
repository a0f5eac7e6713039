"""Compares each Pallas kernel with its plain form, and times both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from modes.prove.case import Case, Failed, Result


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


KERNELS: tuple[Kernel, ...] = ()  # a kernel that the repository gains is named here


def check(case: Case) -> Result:
    """Compares and times every kernel."""
    del case
    if not KERNELS:
        return Result("this version has no Pallas kernel", status="skipped")
    figures: dict[str, Any] = {}
    for one in KERNELS:
        figures |= _compare(one)
    return Result(f"{len(KERNELS)} kernels compute what their plain forms do", figures)


def _compare(one: Kernel) -> dict[str, float]:
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
