"""Arrays that the backward pass computes anew instead of reading them from memory.

XLA merges equal computations, so that of the backward pass must begin with something else: an
`optimization_barrier`. `jax.checkpoint` puts one around all inputs and the incoming gradients. XLA
then cannot add a gradient up in the fusion that makes it, and reads it once more: half of what
computing ResNet-50's stem again costs on TPU v3. Here the barrier is around as little as will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax


class Twice(NamedTuple):
    """One array by two computations, of the same shape, dtype and values.

    A layer that takes it computes its output from `now` and its gradients from `again`, so that
    `now` need not outlive the forward pass. Gradients flow to `again` only.
    """

    now: jax.Array
    again: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.now.shape


def twice(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> Twice:
    """`function(x)` once for each pass: for a cheap function of an x that is kept anyway."""
    return Twice(lax.stop_gradient(function(lax.optimization_barrier(x))), function(x))


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(x, weights, ...)`, of which only the arguments are kept for the backward pass.

    What depends on the weights is computed again there, as far as the gradients need it. x itself
    is not held back, as a barrier around a large array can cost a copy of it in another layout.

    Args:
        function: of arrays, two at least, by position; it closes over no traced value.

    Returns:
        The function, with the same values and gradients.

    Raises:
        TypeError: when called with one argument.
    """

    @jax.custom_vjp
    def again(x: Any, weights: Any, *others: Any) -> Any:
        return function(x, weights, *others)

    def forward(*arguments: Any) -> Any:
        return function(*arguments), arguments

    def backward(arguments: Any, gradients: Any) -> Any:
        x, *weights = arguments
        return jax.vjp(function, x, *lax.optimization_barrier(weights))[1](gradients)

    again.defvjp(forward, backward)
    return again
