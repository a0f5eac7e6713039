"""LSTM layers over complete sequences, with a custom backward pass.

The inputs' products do not depend on the state: they are one product over all steps, before the
loop. A step adds the product of the state alone. The backward loop writes the gradients of the
gates, and the gradients of kernel and bias are products after it. Derived by jax, they would be
added up in memory in every step.

XLA fills an array that a loop stacks with zeros first. So both loops write into an array that they
have read: the forward loop overwrites the inputs' products with the complete gates, the backward
loop overwrites the gates with their gradients. On CPUs such a loop would copy the array in each
step, so there it stacks the steps as usual.

Letters in shapes: T steps, b rows, H width.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.translation import reductions
from common.layers.convolutions import device_kind


def lstm(
    gates: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    mask: jax.Array | None = None,
    reverse: bool = False,
) -> jax.Array:
    """Runs an LSTM whose state starts at zero.

    Products and outputs are in the dtype of `gates`; cells and sums are in float32, or in float64
    if `gates` are.

    Args:
      gates: [T, b, 4H], the products of the inputs, in the order of `cell`.
      kernel: float32[H, 4H], what the state before is multiplied by.
      bias: float32[4H] of the gates.
      mask: bool[T, b] or None. Where it is False, state and output are 0. So a sentence that is
        read from its end starts with zeros at its last token, whatever follows it.
      reverse: whether the last step is the first one.

    Returns:
      The outputs [T, b, H].

    Source: Hochreiter and Schmidhuber 1997; Gers et al. 2000 for the forget gate.
    """
    return _lstm(reverse, gates, kernel, bias, mask)


def cell(gates: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step: c' = sigmoid(f) c + sigmoid(i) tanh(g), and the output sigmoid(o) tanh(c').

    `gates` [..., 4H] are the products of input and state plus the biases: i, f, g, o in this order;
    `c` [..., H] are the cells before, float32 or wider. Returns (output, cells) like `c`.
    """
    i, f, g, o = _activated(gates.astype(c.dtype))
    c = f * c + i * g
    return o * jnp.tanh(c), c


def _activated(gates: jax.Array) -> tuple[jax.Array, ...]:
    i, f, g, o = jnp.split(gates, 4, -1)
    return jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lstm(reverse: bool, gates: jax.Array, kernel: Any, bias: Any, mask: Any) -> jax.Array:
    return _forward(reverse, gates, kernel, bias, mask)[0]


def _forward(reverse: bool, gates: jax.Array, kernel: Any, bias: Any, mask: Any) -> Any:
    """The outputs; and for the backward pass the gates, and the cells before each step."""
    dtype, weights, acc_dtype = gates.dtype, kernel.astype(gates.dtype), _acc_dtype(gates)

    def advance(carry: Any, step: Any) -> Any:
        (h, before, gates), (t, x, is_token) = carry, step
        inputs, gates = _read(gates, t, x)
        product = jnp.dot(h, weights, preferred_element_type=acc_dtype)
        z = inputs + (product + bias.astype(acc_dtype))
        h, c = (_masked(is_token, y) for y in cell(z, before))
        h = h.astype(dtype)
        gates, x = _written(gates, t, dtype, z)
        return (h, c, gates), (h, before.astype(dtype), x)

    shape = gates.shape[1], kernel.shape[0]
    stack, xs = _split(gates)
    start = jnp.zeros(shape, dtype), jnp.zeros(shape, acc_dtype), stack
    steps = jnp.arange(len(gates)), xs, mask
    (_, _, stack), (outputs, before, xs) = jax.lax.scan(advance, start, steps, reverse=reverse)
    gates = xs if stack is None else stack
    return outputs, (outputs, gates, before, kernel, bias, mask)


def _backward(reverse: bool, saved: Any, gradients: jax.Array) -> Any:
    """The gradients of the gates, from the last step to the first, then of kernel and bias."""
    outputs, gates, before, kernel, bias, mask = saved
    dtype, weights, acc_dtype = outputs.dtype, kernel.astype(outputs.dtype), _acc_dtype(outputs)

    def retreat(carry: Any, step: Any) -> Any:
        (dh, dc, gates), (t, x, gradient, c, is_token) = carry, step
        z, gates = _read(gates, t, x)
        i, f, g, o = _activated(z)
        c = c.astype(acc_dtype)
        dh, dc = (_masked(is_token, x) for x in (dh + gradient, dc))
        reached = jnp.tanh(f * c + i * g)
        dc = dc + dh * o * (1 - reached**2)
        of_i, of_f = dc * g * i * (1 - i), dc * c * f * (1 - f)
        of_g, of_o = dc * i * (1 - g**2), dh * reached * o * (1 - o)
        parts = [x.astype(dtype) for x in (of_i, of_f, of_g, of_o)]
        back = jnp.dot(jnp.concatenate(parts, -1), weights.T, preferred_element_type=acc_dtype)
        gates, x = _written(gates, t, dtype, *parts)
        return (back, dc * f, gates), x

    zeros = jnp.zeros(outputs.shape[1:], acc_dtype)
    stack, xs = _split(gates)
    start, steps = (zeros, zeros, stack), (jnp.arange(len(outputs)), xs, gradients, before, mask)
    (_, _, stack), xs = jax.lax.scan(retreat, start, steps, reverse=not reverse)
    of_gates = xs if stack is None else stack
    # The state before the first step is 0.
    states, later = (outputs[1:], of_gates[:-1]) if reverse else (outputs[:-1], of_gates[1:])
    if device_kind() == "cpu":  # more axes than two would be copied transposed
        states, later = (x.reshape(-1, x.shape[-1]) for x in (states, later))
    # In this order of the axes TPUs compile the product as they did the einsum "tbh,tbg->hg".
    axes = ([*reversed(range(states.ndim - 1))],) * 2
    of_kernel = jnp.tensordot(states, later, axes, preferred_element_type=acc_dtype)
    of_bias = reductions.sum_first_axes(of_gates, acc_dtype)
    return of_gates, of_kernel.astype(kernel.dtype), of_bias.astype(bias.dtype), None


_lstm.defvjp(_forward, _backward)


def _acc_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _split(stack: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """(The stack, None) for the loop to write into; on CPUs (None, its steps to read)."""
    return (None, stack) if device_kind() == "cpu" else (stack, None)


def _read(stack: jax.Array | None, t: jax.Array, x: Any) -> tuple[jax.Array, jax.Array | None]:
    """Step `t` of [T, b, n], or `x` [b, n], in float32, and the stack to write into after that.

    The barrier ends the reading first. Without it XLA computes twice what is written.
    """
    if stack is None:
        return x.astype(_acc_dtype(x)), None
    return jax.lax.optimization_barrier((stack[t].astype(_acc_dtype(stack)), stack))


def _written(stack: jax.Array | None, t: jax.Array, dtype: Any, *parts: jax.Array) -> Any:
    """The stack [T, b, n] with `parts`, which lie side by side, as its step `t`; or this step.

    Each part is written separately: XLA would first copy a concatenation.
    """
    if stack is None:
        return None, jnp.concatenate(parts, -1).astype(dtype)
    for k, x in enumerate(parts):
        x = x[None].astype(dtype)
        stack = jax.lax.dynamic_update_slice(stack, x, (t, 0, k * x.shape[-1]))
    return stack, None


def _masked(mask: Any, x: jax.Array) -> jax.Array:
    """`x` [b, H] with zeros where `mask` bool[b] is False."""
    return x if mask is None else jnp.where(mask[:, None], x, 0)
