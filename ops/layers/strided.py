"""Convolutions in other forms: with a stride, for few images on a device, and for CPUs.

The gradient of such a convolution in its input is a convolution of a gradient with zeros between
its values. XLA leaves out the zeros, but for TPU v2 and v3 it lays this out for 128 images: with 4
images of 104x168x256 the gradient of a 3x3 convolution takes 10.7 ms on v3 by the compiler's
estimate, with the zeros written out 1.4 ms. On later TPUs the zeros cost more than they gain.
A 1x1 convolution is faster on all of them if the values that its stride leaves out are cut away
before. CPUs have forms of their own, `products`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ops.layers import products

_FEW = 16  # images; with 32, XLA's own way is as fast on v3, and needs less memory
_WRITES_ZEROS = ("TPU v2", "TPU v3")
_native = partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv_general_dilated(
    x: jax.Array,
    kernel: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **others: Any,
) -> jax.Array:
    """`lax.conv_general_dilated` for flax's `nn.Conv` of [b, h, w, c]: the same function."""
    strides, window = tuple(window_strides), kernel.shape[:2]
    on_cpu = device_kind() == "cpu"
    if (on_cpu or max(strides) > 1 and _is_small(x)) and _is_plain(**others):
        if isinstance(padding, str):
            padding = lax.padtype_to_pads(x.shape[1:3], window, strides, padding)
        sides = tuple((low, high) for low, high in padding)
        if on_cpu:
            return products.conv(x, kernel, strides, sides)
        if window == (1, 1) and not any(map(any, sides)):
            x, strides = x[:, :: strides[0], :: strides[1]], (1, 1)
        elif device_kind() in _WRITES_ZEROS:
            return _conv(strides, sides, x, kernel)
    return lax.conv_general_dilated(x, kernel, strides, padding, **others)


def _is_small(x: jax.Array) -> bool:
    """Whether x has few images; an exported program does not know how many."""
    return isinstance(x.shape[0], int) and x.shape[0] <= _FEW


def _is_plain(
    lhs_dilation: Any = None,
    rhs_dilation: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    **others: Any,
) -> bool:
    """Whether the other arguments, besides strides and padding, are those that `_conv` has."""
    dilations = *(lhs_dilation or ()), *(rhs_dilation or ())
    known = set(others) <= {"dimension_numbers"}
    return known and set(dilations) <= {1} and feature_group_count == 1 and precision is None


def device_kind() -> str:
    """The kind of device that the program is traced for, as "cpu"; "" outside of a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device else ""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conv(strides: Any, padding: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _native(x, kernel, strides, padding)


def _forward(strides: Any, padding: Any, x: jax.Array, kernel: jax.Array) -> Any:
    return _native(x, kernel, strides, padding), (x, kernel)


def _backward(strides: Any, padding: Any, saved: Any, gradient: jax.Array) -> tuple[Any, Any]:
    x, kernel = saved
    (of_kernel,) = jax.vjp(lambda kernel: _native(x, kernel, strides, padding), kernel)[1](gradient)
    around = [(0, 0, 0)]
    for axis, (stride, (low, _)) in enumerate(zip(strides, padding, strict=True)):
        before = kernel.shape[axis] - 1 - low
        spread = stride * (gradient.shape[1 + axis] - 1) + 1
        after = x.shape[1 + axis] + kernel.shape[axis] - 1 - spread - before
        around.append((before, after, stride - 1))
    zero = jnp.zeros((), gradient.dtype)
    with_zeros = lax.pad(gradient, zero, [*around, (0, 0, 0)])
    turned = kernel[::-1, ::-1].swapaxes(2, 3)
    return _native(with_zeros, turned, (1, 1), "VALID"), of_kernel


_conv.defvjp(_forward, _backward)
