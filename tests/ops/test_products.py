"""The CPU's forms of convolutions, against sums over places in float64."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ops.layers import products, strided

FORMS = [
    # (sides of the image, of the kernel, strides, padding), and whether XLA convolves
    ((5, 8), (1, 1), (1, 1), ((0, 0), (0, 0)), False),
    ((5, 8), (1, 1), (2, 2), ((0, 0), (0, 0)), False),
    ((6, 7), (1, 1), (3, 2), ((0, 0), (0, 0)), False),
    ((5, 8), (1, 1), (1, 1), ((1, 0), (0, 2)), True),
    ((1, 1), (3, 3), (1, 1), ((1, 1), (1, 1)), False),  # one place of the kernel meets the image
    ((2, 2), (3, 3), (1, 1), ((1, 1), (1, 1)), False),
    ((2, 1), (3, 3), (2, 2), ((0, 1), (1, 1)), False),
    ((4, 3), (3, 3), (2, 2), ((1, 1), (1, 1)), False),
    ((1, 2), (1, 3), (2, 2), ((2, 1), (0, 1)), False),  # every second pixel is padding
    ((5, 6), (4, 5), (1, 1), ((0, 0), (0, 0)), False),
    ((2, 2), (3, 3), (2, 1), ((1, 1), (1, 1)), False),
    ((1, 2), (5, 5), (1, 1), ((2, 2), (2, 1)), False),
    ((2, 2), (4, 4), (3, 2), ((3, 2), (2, 3)), False),
    ((2, 3), (4, 5), (1, 1), ((1, 1), (2, 1)), False),
    ((5, 5), (3, 3), (2, 2), ((1, 1), (1, 1)), True),
    ((2, 5), (3, 1), (1, 1), ((1, 1), (0, 0)), True),
]


def by_hand(x, kernel, strides, padding):
    """The convolution in float64, and its gradients for slopes that are sines."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    padded = np.pad(x, ((0, 0), *padding, (0, 0)))
    sides = [
        (n - window) // s + 1
        for n, window, s in zip(padded.shape[1:3], kernel.shape[:2], strides, strict=True)
    ]
    y = np.zeros((len(x), *sides, kernel.shape[-1]))
    slopes = np.sin(np.arange(y.size)).reshape(y.shape)
    of_padded, of_kernel = np.zeros_like(padded), np.zeros_like(kernel)
    for i, j in itertools.product(*map(range, kernel.shape[:2])):
        seen = np.s_[
            :,
            i : i + strides[0] * (sides[0] - 1) + 1 : strides[0],
            j : j + strides[1] * (sides[1] - 1) + 1 : strides[1],
        ]
        y += padded[seen] @ kernel[i, j]
        of_padded[seen] += slopes @ kernel[i, j].T
        of_kernel[i, j] = np.einsum("bhwc,bhwd->cd", padded[seen], slopes)
    (top, _), (left, _) = padding
    return y, of_padded[:, top : top + x.shape[1], left : left + x.shape[2]], of_kernel, slopes


def drawn(sides, window, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, *sides, 4)), dtype)
    return x, jnp.asarray(rng.normal(size=(*window, 4, 5)), dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.1)])
@pytest.mark.parametrize(("sides", "window", "strides", "padding", "convolves"), FORMS)
def test_values_and_gradients(sides, window, strides, padding, convolves, dtype, tolerance):
    x, kernel = drawn(sides, window, dtype)
    *wanted, slopes = by_hand(x, kernel, strides, padding)

    def conv(x, kernel):
        return products.conv(x, kernel, strides, padding)

    @jax.jit
    def found(x, kernel):
        y, pull = jax.vjp(conv, x, kernel)
        return y, *pull(jnp.asarray(slopes, dtype))

    for one, other in zip(found(x, kernel), wanted, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(np.asarray(one, np.float64), other, atol=tolerance)
    text = jax.jit(conv).lower(x, kernel).as_text()
    assert ("stablehlo.convolution" in text) == convolves


def test_a_batch_of_batches():
    x, kernel = drawn((2, 2), (3, 3), jnp.float32)

    def conv(x):
        return products.conv(x, kernel, (1, 1), ((1, 1), (1, 1)))

    found = jax.vmap(lambda x: conv(x[None])[0])(x)
    np.testing.assert_allclose(found, conv(x), rtol=1e-5, atol=1e-5)


def lowered(layer: nn.Conv, x: jax.Array, in_mesh: bool = True) -> str:
    """The program of a layer, for the devices of a mesh or without one."""
    variables = layer.init(jax.random.key(0), x)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("d")
    compute = functools.partial(layer.apply, variables)
    if in_mesh:
        compute = jax.shard_map(compute, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(compute).lower(x).as_text()


def layer(*window, **others) -> nn.Conv:
    own = {"conv_general_dilated_cls": lambda: strided.conv_general_dilated}
    return nn.Conv(4, window, **own, **others)


X = jnp.ones((2, 6, 6, 4))


@pytest.mark.parametrize("padding", ["SAME", "VALID", 0])
def test_cpus_multiply_inside_a_mesh(padding):
    """Outside of one, as in an export, the program is for any platform."""
    text = lowered(layer(1, 1, padding=padding, strides=2), X)
    assert "dot_general" in text and "stablehlo.convolution" not in text
    text = lowered(layer(1, 1, padding=padding), X, in_mesh=False)
    assert "dot_general" not in text and "stablehlo.convolution" in text


@pytest.mark.parametrize("kind", ["TPU v3", "TPU v5 lite", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("side", [1, 3])
def test_other_devices_convolve(kind, side, monkeypatch):
    monkeypatch.setattr(strided, "device_kind", lambda: kind)
    text = lowered(layer(side, side), X[:, :2, :2])
    assert "dot_general" not in text and text.count("stablehlo.convolution") == 1


@pytest.mark.parametrize(
    "others",
    [
        {"kernel_dilation": 2},
        {"input_dilation": 2, "padding": 0},
        {"feature_group_count": 2},
        {"precision": "highest"},
    ],
)
def test_other_arguments_are_left_to_xla(others):
    text = lowered(layer(1, 1, **others), X)
    assert "dot_general" not in text and text.count("stablehlo.convolution") == 1
