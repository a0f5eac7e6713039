"""Compares forms in which only TPUs train with plain ones: Pallas kernels, BatchNorm as "gram".

Elsewhere than on TPUs, small arrays go through Pallas's interpreter. CPUs train in the plain form
of BatchNorm, so the models of the other checks do not show there what the form "gram" computes.
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

from commands.prove.checks import Case, Failed, Result
from common.layers import boundary, gram_norm

_EPSILON, _AXIS, _SHARES = 1e-5, "shares", 2  # of `check_gram`


class Kernel(NamedTuple):
    """A kernel and the plain function that computes the same.

    Attributes:
      name: for the user.
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


# Pallas kernels.


def _boundary(images: int, side: int, inner: int, interpret: bool = False) -> Kernel:
    """`common.layers.boundary` for blocks of a stage of ResNet-50."""
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


def check_kernels(case: Case) -> Result:
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


# BatchNorm as "gram".


def check_gram(case: Case) -> Result:
    """Compares outputs and gradients of one convolution and of a sum of two, in float32.

    The batch is in two shares with common statistics, as on two devices.
    """
    del case
    with jax.default_matmul_precision("highest"):
        compare(Kernel("BatchNorm of moments", _gram_norm, _plain_norm, _norm_arguments, 1e-4))
    return Result("outputs and gradients of 1x1 convolutions are those of BatchNorm's definition")


def _norm_arguments() -> tuple[Any, ...]:
    """(the branches' inputs, their weights, factors of the outputs in the loss)."""
    inputs, weights, keys = [], [], iter(jax.random.split(jax.random.key(0), 10))
    for channels in (8, 12):
        inputs.append(jax.random.normal(next(keys), (_SHARES, 4, 6, 5, channels)) + 0.5)
        shapes = (channels, 16), (16,), (16,)
        weights.append(tuple(jax.random.normal(next(keys), shape) for shape in shapes))
    factors = [jax.random.normal(next(keys), (_SHARES, 4, 6, 5, 16)) for _ in range(2)]
    return tuple(inputs), tuple(weights), tuple(factors)


def _gram_norm(inputs: Any, weights: Any, factors: Any) -> Any:
    how: dict[str, Any] = {"epsilon": _EPSILON, "axis_name": _AXIS}

    def loss(inputs: Any, weights: Any, factors: Any) -> Any:
        branches = [(x, *w) for x, w in zip(inputs, weights, strict=True)]
        outputs = (
            gram_norm.conv_norm(*branches[0], **how)[0],
            gram_norm.conv_norm_sum(branches, **how)[0],
        )
        return _sum_of_products(outputs, factors), outputs

    gradient = jax.grad(loss, (0, 1), has_aux=True)
    shares = jax.vmap(gradient, (0, None, 0), axis_name=_AXIS)
    (of_inputs, of_weights), outputs = shares(inputs, weights, factors)
    return of_inputs, jax.tree.map(lambda x: jnp.sum(x, 0), of_weights), outputs


def _plain_norm(inputs: Any, weights: Any, factors: Any) -> Any:
    def normalized(x: Any, kernel: Any, scale: Any, bias: Any) -> Any:
        y = x @ kernel
        axes = tuple(range(y.ndim - 1))
        centred = y - jnp.mean(y, axes)
        return centred / jnp.sqrt(jnp.mean(centred**2, axes) + _EPSILON) * scale + bias

    def loss(inputs: Any, weights: Any) -> Any:
        first, second = (normalized(x, *w) for x, w in zip(inputs, weights, strict=True))
        outputs = first, first + second
        return _sum_of_products(outputs, factors), outputs

    gradients, outputs = jax.grad(loss, (0, 1), has_aux=True)(inputs, weights)
    return *gradients, outputs


def _sum_of_products(outputs: Any, factors: Any) -> Any:
    return sum(jnp.sum(y * factor) for y, factor in zip(outputs, factors, strict=True))
