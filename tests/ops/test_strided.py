"""Convolutions with a stride against XLA's own."""

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ops.layers import strided

NUMBERS = ("NHWC", "HWIO", "NHWC")
PADDINGS = ["SAME", "VALID", ((1, 1), (1, 1)), ((0, 1), (2, 0))]


WINDOWS = [((3, 3), (2, 2)), ((1, 1), (2, 2)), ((2, 4), (2, 1))]


@pytest.mark.parametrize("kind", ["TPU v3", "TPU v5 lite"])
@pytest.mark.parametrize(("window", "strides"), WINDOWS)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("size", [(8, 10), (9, 7)])
def test_the_same_function_and_gradients(kind, window, strides, padding, size, monkeypatch):
    monkeypatch.setattr(strided, "device_kind", lambda: kind)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, *size, 3)), jnp.float32)
    plain = nn.Conv(4, window, strides, padding)
    mine = nn.Conv(
        *(4, window, strides, padding),
        conv_general_dilated_cls=lambda: strided.conv_general_dilated,
    )
    variables = plain.init(jax.random.key(1), x)

    def value_and_slopes(layer):
        y, pull = jax.vjp(layer.apply, variables, x)
        return y, *pull(jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    found, expected = (jax.tree.leaves(value_and_slopes(layer)) for layer in (mine, plain))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    "others", [{"rhs_dilation": (2, 2)}, {"lhs_dilation": (1, 2)}, {"precision": "highest"}]
)
@pytest.mark.parametrize("window", [(1, 1), (3, 3)])
def test_other_arguments_are_left_to_xla(others, window, monkeypatch):
    monkeypatch.setattr(strided, "_conv", None)
    monkeypatch.setattr(strided, "device_kind", lambda: "TPU v3")
    x, kernel = jnp.ones((2, 9, 9, 2)), jnp.ones((*window, 2, 3))
    arguments = x, kernel, (2, 2), ((0, 0), (0, 0))
    found, expected = (
        conv(*arguments, dimension_numbers=NUMBERS, **others)
        for conv in (strided.conv_general_dilated, lax.conv_general_dilated)
    )
    np.testing.assert_array_equal(found, expected)


def test_a_batch_of_unknown_size():
    """As --mode=export has it."""
    (b,) = jax.export.symbolic_shape("b")
    layer = nn.Conv(*(2, (3, 3), 2), conv_general_dilated_cls=lambda: strided.conv_general_dilated)
    variables = layer.init(jax.random.key(0), jnp.zeros((1, 8, 8, 2)))
    x = jax.ShapeDtypeStruct((b, 8, 8, 2), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: layer.apply(variables, x)))(x)
    assert exported.call(jnp.zeros((3, 8, 8, 2))).shape == (3, 4, 4, 2)


def lowered(batch: int, kind: str, monkeypatch, **others) -> str:
    monkeypatch.setattr(strided, "device_kind", lambda: kind)
    x, kernel = jnp.zeros((batch, 8, 8, 2)), jnp.zeros((3, 3, 2, 2))

    def total(x):
        how = {"dimension_numbers": NUMBERS, **others}
        return jnp.sum(strided.conv_general_dilated(x, kernel, (2, 2), "SAME", **how))

    return jax.jit(jax.grad(total)).lower(x).as_text()


@pytest.mark.parametrize(
    ("batch", "kind", "writes_zeros"),
    [(4, "TPU v2", True), (16, "TPU v3", True), (17, "TPU v3", False), (4, "TPU v4", False)],
)
def test_zeros_are_written_for_few_images_on_old_tpus(batch, kind, writes_zeros, monkeypatch):
    usual = {"lhs_dilation": (1, 1), "rhs_dilation": (1, 1), "feature_group_count": 1}
    for others in ({}, usual | {"precision": None}):  # the latter are those of flax
        text = lowered(batch, kind, monkeypatch, **others)
        assert ("lhs_dilate = [2, 2]" in text) != writes_zeros


def test_the_kind_of_device_is_that_of_the_mesh():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def f(x):
        seen.append(strided.device_kind())
        return x

    specs = jax.sharding.PartitionSpec("d")
    jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs))(jnp.zeros(1))
    assert seen == [jax.devices()[0].device_kind] and strided.device_kind() == ""
