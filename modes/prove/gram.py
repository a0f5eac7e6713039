"""Compares BatchNorm in the form "gram", with which TPUs train ResNets, with its definition.

CPUs train in the plain form, so the models of the other checks do not show there what it computes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from modes.prove import kernels
from modes.prove.case import Case, Result
from ops.layers import gram_norm

_EPSILON, _AXIS, _SHARES = 1e-5, "shares", 2


def check(case: Case) -> Result:
    """Compares outputs and gradients of one convolution and of a sum of two, in float32.

    The batch is in two shares with common statistics, as on two devices.
    """
    del case
    with jax.default_matmul_precision("highest"):
        kernels.compare(kernels.Kernel("BatchNorm of moments", _gram, _plain, _arguments, 1e-4))
    return Result("outputs and gradients of 1x1 convolutions are those of BatchNorm's definition")


def _arguments() -> tuple[Any, ...]:
    """(the branches' inputs, their weights, factors of the outputs in the loss)."""
    inputs, weights, keys = [], [], iter(jax.random.split(jax.random.key(0), 10))
    for channels in (8, 12):
        inputs.append(jax.random.normal(next(keys), (_SHARES, 4, 6, 5, channels)) + 0.5)
        shapes = (channels, 16), (16,), (16,)
        weights.append(tuple(jax.random.normal(next(keys), shape) for shape in shapes))
    factors = [jax.random.normal(next(keys), (_SHARES, 4, 6, 5, 16)) for _ in range(2)]
    return tuple(inputs), tuple(weights), tuple(factors)


def _gram(inputs: Any, weights: Any, factors: Any) -> Any:
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


def _plain(inputs: Any, weights: Any, factors: Any) -> Any:
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
