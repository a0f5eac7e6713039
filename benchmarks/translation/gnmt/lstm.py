"""LSTM layers over complete sequences, with a backward pass of their own.

The inputs' products do not depend on the state: they are one product over all steps, before the
loop. A step adds the product of the state alone. The backward loop emits the gradients of the
gates, and the kernel's gradient is one product after it. Derived by jax, it would be added up in
memory in every step.

Letters in shapes: T steps, D directions or layers that run side by side, b rows, H width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def lstm(gates: jax.Array, kernel: jax.Array, alive: jax.Array | None = None) -> jax.Array:
    """Runs LSTMs whose states start at zero.

    Products and outputs are in the dtype of `gates`; cells and sums are in float32, or in float64
    if `gates` are.

    Args:
      gates: [T, D, b, 4H], the products of the inputs plus the biases, in the order of `cell`.
      kernel: float32[D, H, 4H], what the state before is multiplied by.
      alive: bool[T, D, b] or None. Where it is False, state and output are 0. So a sentence that
        is read from its end starts with zeros at its last token, whatever follows it.

    Returns:
      The outputs [T, D, b, H].

    Source: Hochreiter and Schmidhuber 1997; Gers et al. 2000 for the forget gate.
    """
    return _lstm(gates, kernel, alive)


def cell(gates: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step: c' = sigmoid(f) c + sigmoid(i) tanh(g), and the output sigmoid(o) tanh(c').

    Args:
      gates: [..., 4H], the products of input and state plus the biases: i, f, g, o in this order.
      c: [..., H], the cells before, float32 or wider.

    Returns:
      (output, cells), [..., H] in the dtype of `c`.
    """
    output, c, _ = _step(gates, c)
    return output, c


def _step(gates: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """`cell`, and the activated gates."""
    i, f, g, o = jnp.split(gates.astype(c.dtype), 4, -1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    c = f * c + i * g
    return o * jnp.tanh(c), c, (i, f, g, o)


@jax.custom_vjp
def _lstm(gates: jax.Array, kernel: jax.Array, alive: Any) -> jax.Array:
    return _run(gates, kernel, alive, save=False)[0]


def _forward(gates: jax.Array, kernel: jax.Array, alive: Any) -> Any:
    outputs, activated, before = _run(gates, kernel, alive, save=True)
    return outputs, (outputs, activated, before, kernel, alive)


def _run(gates: jax.Array, kernel: jax.Array, alive: Any, save: bool) -> Any:
    """(outputs,), and to save also the activated gates and the cells before each step."""
    dtype, narrow = gates.dtype, kernel.astype(gates.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)

    def advance(carry: Any, step: Any) -> Any:
        (h, before), (inputs, is_alive) = carry, step
        h, c, activated = _step(inputs + _product(h, narrow), before)
        h, c = (_only(is_alive, x) for x in (h, c))
        h = h.astype(dtype)
        saved = (jnp.concatenate(activated, -1).astype(dtype), before.astype(dtype))
        return (h, c), (h, *saved) if save else (h,)

    shape = *gates.shape[1:-1], kernel.shape[1]
    start = jnp.zeros(shape, dtype), jnp.zeros(shape, wide)
    return jax.lax.scan(advance, start, (gates, alive))[1]


def _backward(saved: Any, slopes: jax.Array) -> Any:
    """Gradients of the gates, from the last step to the first; the kernel's from all of them."""
    outputs, activated, before, kernel, alive = saved
    dtype, narrow = outputs.dtype, kernel.astype(outputs.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)

    def retreat(carry: Any, step: Any) -> Any:
        (dh, dc), (slope, gates, c, is_alive) = carry, step
        i, f, g, o = jnp.split(gates.astype(wide), 4, -1)
        c = c.astype(wide)
        dh, dc = (_only(is_alive, x) for x in (dh + slope, dc))
        reached = jnp.tanh(f * c + i * g)
        dc = dc + dh * o * (1 - reached**2)
        of_i, of_f = dc * g * i * (1 - i), dc * c * f * (1 - f)
        of_g, of_o = dc * i * (1 - g**2), dh * reached * o * (1 - o)
        of_gates = jnp.concatenate([of_i, of_f, of_g, of_o], -1).astype(dtype)
        return (_product(of_gates, narrow, turned=True), dc * f), of_gates

    zeros = jnp.zeros(outputs.shape[1:], wide)
    steps = slopes, activated, before, alive
    _, of_gates = jax.lax.scan(retreat, (zeros, zeros), steps, reverse=True)
    of_kernel = jnp.einsum(  # the state before the first step is 0
        "tdbh,tdbg->dhg", outputs[:-1], of_gates[1:], preferred_element_type=wide
    )
    return of_gates, of_kernel.astype(kernel.dtype), None


_lstm.defvjp(_forward, _backward)


def _product(x: jax.Array, kernel: jax.Array, turned: bool = False) -> jax.Array:
    """[D, b, m] of x [D, b, n] and a kernel [D, n, m], or [D, m, n] if it is to be turned."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if len(kernel) == 1:  # a plain product is faster than a batch of one
        matrix = kernel[0].T if turned else kernel[0]
        return jnp.dot(x[0], matrix, preferred_element_type=wide)[None]
    how = "dbn,dmn->dbm" if turned else "dbn,dnm->dbm"
    return jnp.einsum(how, x, kernel, preferred_element_type=wide)


def _only(alive: Any, x: jax.Array) -> jax.Array:
    """`x` [D, b, H] with zeros where `alive` bool[D, b] is False."""
    return x if alive is None else jnp.where(alive[..., None], x, 0)
