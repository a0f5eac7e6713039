"""Convolutions in other forms against XLA's own, and against sums and those of one pixel."""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from common.layers import convolutions
from common.layers.convolutions import Pairs, device_kind
from tests.common.layers.test_gram_norm import jitted
from tests.common.layers.test_gram_resnet import compare

NUMBERS = ("NHWC", "HWIO", "NHWC")
RNG = np.random.default_rng(5)


# --- As products of matrices, for CPUs.

FORMS = [
    # (sides of the image, of the kernel, strides, padding), and whether XLA convolves
    ((5, 8), (1, 1), (1, 1), ((0, 0), (0, 0)), False),
    ((5, 8), (1, 1), (2, 2), ((0, 0), (0, 0)), False),
    ((6, 7), (1, 1), (3, 2), ((0, 0), (0, 0)), False),
    ((5, 8), (1, 1), (1, 1), ((1, 0), (0, 2)), True),
    ((1, 1), (3, 3), (1, 1), ((1, 1), (1, 1)), False),  # one tap of the kernel meets the image
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
    """The convolution in float64, and its gradients if those of the result are sines."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    padded = np.pad(x, ((0, 0), *padding, (0, 0)))
    sides = [
        (n - window) // s + 1
        for n, window, s in zip(padded.shape[1:3], kernel.shape[:2], strides, strict=True)
    ]
    y = np.zeros((len(x), *sides, kernel.shape[-1]))
    of_result = np.sin(np.arange(y.size)).reshape(y.shape)
    of_padded, of_kernel = np.zeros_like(padded), np.zeros_like(kernel)
    for i, j in itertools.product(*map(range, kernel.shape[:2])):
        seen = np.s_[
            :,
            i : i + strides[0] * (sides[0] - 1) + 1 : strides[0],
            j : j + strides[1] * (sides[1] - 1) + 1 : strides[1],
        ]
        y += padded[seen] @ kernel[i, j]
        of_padded[seen] += of_result @ kernel[i, j].T
        of_kernel[i, j] = np.einsum("bhwc,bhwd->cd", padded[seen], of_result)
    (top, _), (left, _) = padding
    return y, of_padded[:, top : top + x.shape[1], left : left + x.shape[2]], of_kernel, of_result


def drawn(sides, window, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, *sides, 4)), dtype)
    return x, jnp.asarray(rng.normal(size=(*window, 4, 5)), dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.1)])
@pytest.mark.parametrize(("sides", "window", "strides", "padding", "convolves"), FORMS)
def test_values_and_gradients(sides, window, strides, padding, convolves, dtype, tolerance):
    x, kernel = drawn(sides, window, dtype)
    *wanted, of_result = by_hand(x, kernel, strides, padding)

    def conv(x, kernel):
        return convolutions.conv_by_products(x, kernel, strides, padding)

    @jax.jit
    def found(x, kernel):
        y, pull = jax.vjp(conv, x, kernel)
        return y, *pull(jnp.asarray(of_result, dtype))

    for one, other in zip(found(x, kernel), wanted, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(np.asarray(one, np.float64), other, atol=tolerance)
    text = jax.jit(conv).lower(x, kernel).as_text()
    assert ("stablehlo.convolution" in text) == convolves


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
    own = {"conv_general_dilated_cls": lambda: convolutions.conv_general_dilated}
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
    monkeypatch.setattr(convolutions, "device_kind", lambda: kind)
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
@pytest.mark.parametrize(("kind", "strides"), [("cpu", 1), ("TPU v3", 2)])
def test_other_arguments_are_left_to_xla(kind, strides, others, monkeypatch):
    monkeypatch.setattr(convolutions, "device_kind", lambda: kind)
    monkeypatch.setattr(convolutions, "_conv_with_zeros", None)
    if strides == 1 or "input_dilation" not in others:
        text = lowered(layer(1, 1, strides=strides, **others), X)
        assert "dot_general" not in text and text.count("stablehlo.convolution") == 1


# --- With strides.

PADDINGS = ["SAME", "VALID", ((1, 1), (1, 1)), ((0, 1), (2, 0))]
WINDOWS = [((3, 3), (2, 2)), ((1, 1), (2, 2)), ((2, 4), (2, 1))]


@pytest.mark.parametrize("kind", ["TPU v3", "TPU v5 lite"])
@pytest.mark.parametrize(("window", "strides"), WINDOWS)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("size", [(8, 10), (9, 7)])
def test_the_same_function_and_gradients(kind, window, strides, padding, size, monkeypatch):
    monkeypatch.setattr(convolutions, "device_kind", lambda: kind)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, *size, 3)), jnp.float32)
    plain = nn.Conv(4, window, strides, padding)
    mine = nn.Conv(
        *(4, window, strides, padding),
        conv_general_dilated_cls=lambda: convolutions.conv_general_dilated,
    )
    variables = plain.init(jax.random.key(1), x)

    def value_and_gradients(layer):
        y, pull = jax.vjp(layer.apply, variables, x)
        return y, *pull(jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    found, expected = (jax.tree.leaves(value_and_gradients(layer)) for layer in (mine, plain))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_batch_of_unknown_size():
    """As --mode=export has it."""
    (b,) = jax.export.symbolic_shape("b")
    layer = nn.Conv(
        *(2, (3, 3), 2), conv_general_dilated_cls=lambda: convolutions.conv_general_dilated
    )
    variables = layer.init(jax.random.key(0), jnp.zeros((1, 8, 8, 2)))
    x = jax.ShapeDtypeStruct((b, 8, 8, 2), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: layer.apply(variables, x)))(x)
    assert exported.call(jnp.zeros((3, 8, 8, 2))).shape == (3, 4, 4, 2)


def lowered_gradient(batch: int, kind: str, monkeypatch, **others) -> str:
    monkeypatch.setattr(convolutions, "device_kind", lambda: kind)
    x, kernel = jnp.zeros((batch, 8, 8, 2)), jnp.zeros((3, 3, 2, 2))

    def total(x):
        how = {"dimension_numbers": NUMBERS, **others}
        return jnp.sum(convolutions.conv_general_dilated(x, kernel, (2, 2), "SAME", **how))

    return jax.jit(jax.grad(total)).lower(x).as_text()


@pytest.mark.parametrize(
    ("batch", "kind", "writes_zeros"),
    [(4, "TPU v2", True), (16, "TPU v3", True), (17, "TPU v3", False), (4, "TPU v4", False)],
)
def test_zeros_are_written_for_few_images_on_old_tpus(batch, kind, writes_zeros, monkeypatch):
    usual = {"lhs_dilation": (1, 1), "rhs_dilation": (1, 1), "feature_group_count": 1}
    for others in ({}, usual | {"precision": None}):  # the latter are those of flax
        text = lowered_gradient(batch, kind, monkeypatch, **others)
        assert ("lhs_dilate = [2, 2]" in text) != writes_zeros


def test_the_kind_of_device_is_that_of_the_mesh():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def f(x):
        seen.append(device_kind())
        return x

    specs = jax.sharding.PartitionSpec("d")
    jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs))(jnp.zeros(1))
    assert seen == [jax.devices()[0].device_kind] and device_kind() == ""


# --- In pairs of pixels.


def conv(x: Any, kernel: Any, stride: int) -> jax.Array:
    sides = ((1, 1), (1, 1))
    return lax.conv_general_dilated(x, kernel, (stride,) * 2, sides, dimension_numbers=NUMBERS)


@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_two_convolutions_shift_the_cells_and_shift_them_back(width):
    """Between them a normalisation, which clears the pixels outside of the image."""
    x = RNG.normal(size=(2, 4, width, 3))
    kernels = RNG.normal(size=(3, 3, 3, 5)), RNG.normal(size=(3, 3, 5, 3))
    mean, factor, bias = RNG.normal(size=(3, 5))

    def in_pairs(x, first, second, *values):
        packed = Pairs.pack(x)
        pairs = packed.conv(first)
        cells = pairs.normalize(*values)
        back = Pairs(cells, width, shifted=True).conv(second)
        assert pairs.shifted and not back.shifted and pairs.inside.sum() == 5 * width
        outside = cells[:, :, ~pairs.inside]
        return packed.unpack(), pairs.unpack(), pairs.moments(), outside, back.unpack()

    def plainly(x, first, second):
        y = conv(x, first, 1)
        moments = jnp.mean(y, (0, 1, 2)), jnp.mean(y**2, (0, 1, 2))
        return y, moments, conv((y - mean) * factor + bias, second, 1)

    with jax.enable_x64(True):
        same, once, found, outside, twice = jitted(in_pairs, x, *kernels, mean, factor, bias)
        expected, moments, expected_twice = jitted(plainly, x, *kernels)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_allclose(once, expected, atol=1e-12)
    np.testing.assert_allclose(found, moments, atol=1e-12)
    assert not np.asarray(outside).any()
    np.testing.assert_allclose(twice, expected_twice, atol=1e-11)


@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_stride_two(width):
    x, kernel = RNG.normal(size=(2, 5, width, 3)), RNG.normal(size=(3, 3, 3, 7))
    with jax.enable_x64(True):
        beside = np.pad(x, [(0, 0), (0, 0), (1, 1 - width % 2), (0, 0)])
        shifted = Pairs(jnp.asarray(beside).reshape(2, 5, -1, 6), width, shifted=True)
        for pairs in (Pairs.pack(jnp.asarray(x)), shifted):
            np.testing.assert_array_equal(pairs.unpack(), x)
            y, sampled = pairs.halve(jnp.asarray(kernel))
            np.testing.assert_allclose(y, conv(x, kernel, 2), atol=1e-12)
            np.testing.assert_array_equal(sampled, x[:, ::2, ::2])


@pytest.mark.long
@pytest.mark.parametrize(
    ("side", "kwargs"),
    [
        (16, {"num_filters": 64, "stage_sizes": (2, 1), "strides": (1, 2)}),
        # rows of 5 pixels, with a new one on the right or on the left
        (20, {"num_filters": 64, "stage_sizes": (1, 1), "padding": ((1, 1), (1, 1))}),
        (20, {"num_filters": 64, "stage_sizes": (1, 1), "strides": (1, 2)}),
        (20, {"num_filters": 64, "stage_sizes": (1,), "strides": (2,)}),
        (24, {"num_filters": 64, "stage_sizes": (1, 1), "strides": (1, 1)}),  # unpacked
        (24, {"num_filters": 32, "stage_sizes": (1, 2), "strides": (1, 2)}),  # packed
    ],
)
def test_models_agree_in_float64(side, kwargs):
    """Where blocks of 64 channels begin, go on and end: gradients and running statistics."""
    images, labels = RNG.normal(size=(3, side, side, 3)), np.eye(5)[[0, 3, 1]]
    compare(18, images, labels, **kwargs)
