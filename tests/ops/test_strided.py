"""Convolutions with a stride against XLA's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ops.layers import strided

NUMBERS = ("NHWC", "HWIO", "NHWC")
PADDINGS = ["SAME", "VALID", ((1, 1), (1, 1)), ((0, 1), (2, 0))]


@pytest.mark.parametrize("kind", ["TPU v3", "TPU v5 lite", ""])
@pytest.mark.parametrize("window", [(3, 3), (1, 1), (2, 4)])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("size", [(8, 10), (9, 7)])
def test_the_same_function_and_gradients(kind, window, padding, size, monkeypatch):
    monkeypatch.setattr(strided, "_device_kind", lambda: kind)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, *size, 3)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(*window, 3, 4)), jnp.float32)

    def value_and_slopes(conv):
        y, pull = jax.vjp(
            lambda x, kernel: conv(x, kernel, (2, 2), padding, dimension_numbers=NUMBERS), x, kernel
        )
        return y, *pull(jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    found = value_and_slopes(strided.conv_general_dilated)
    expected = value_and_slopes(lax.conv_general_dilated)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def lowered(batch: int, kind: str, monkeypatch) -> str:
    monkeypatch.setattr(strided, "_device_kind", lambda: kind)
    x, kernel = jnp.zeros((batch, 8, 8, 2)), jnp.zeros((3, 3, 2, 2))

    def total(x):
        y = strided.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=NUMBERS)
        return jnp.sum(y)

    return jax.jit(jax.grad(total)).lower(x).as_text()


@pytest.mark.parametrize(
    ("batch", "kind", "writes_zeros"),
    [(4, "TPU v2", True), (16, "TPU v3", True), (17, "TPU v3", False), (4, "TPU v4", False)],
)
def test_zeros_are_written_for_few_images_on_old_tpus(batch, kind, writes_zeros, monkeypatch):
    assert ("lhs_dilate = [2, 2]" in lowered(batch, kind, monkeypatch)) != writes_zeros


def test_the_kind_of_device_is_that_of_the_mesh():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def f(x):
        seen.append(strided._device_kind())
        return x

    specs = jax.sharding.PartitionSpec("d")
    jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs))(jnp.zeros(1))
    assert seen == [jax.devices()[0].device_kind] and strided._device_kind() == ""
