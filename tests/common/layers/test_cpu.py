"""Layers for CPUs, against flax's own and XLA's gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from common.layers import cpu


def outcome(kind, dtype, axis=None, running=False, **settings):
    """The output, the new statistics and the gradients in x, scale and bias of a BatchNorm."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(3, 2, (4, 5, 6, 7)), dtype)
    weights = rng.normal(size=x.shape)
    layer = kind(running, momentum=0.8, epsilon=1e-3, dtype=dtype, axis_name=axis, **settings)
    variables = layer.init(jax.random.key(0), x)
    variables = jax.tree.map(lambda v: v + rng.uniform(0, 1, v.shape), variables)

    def loss(params, x, weights):
        both = {"params": params, "batch_stats": variables["batch_stats"]}
        y, new = layer.apply(both, x, mutable=["batch_stats"])
        return jnp.sum(y * weights), (y, new["batch_stats"])

    def gradients(params, x, weights):
        results = jax.grad(loss, (0, 1), has_aux=True)(params, x, weights)
        return jax.tree.map(lambda v: v[None], results)

    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    share = PartitionSpec("d")
    step = jax.shard_map(
        gradients, mesh=mesh, in_specs=(PartitionSpec(), share, share), out_specs=share
    )
    return jax.jit(step)(variables["params"], x, weights)


@pytest.mark.parametrize("axis", [None, "d"])
@pytest.mark.parametrize(("dtype", "within"), [("float32", 2e-5), ("bfloat16", 3e-2)])
def test_batch_norm_is_flaxs(dtype, within, axis):
    ours, flax = (outcome(kind, dtype, axis) for kind in (cpu.BatchNorm, nn.BatchNorm))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(flax), strict=True):
        assert one.dtype == other.dtype
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        np.testing.assert_allclose(one, other, within, within * np.abs(other).max())


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        ("TPU v3", {}),
        ("cpu", {"running": True}),
        ("cpu", {"use_bias": False}),
        ("cpu", {"use_scale": False}),
    ],
)
def test_elsewhere_it_runs_flaxs_own(device, settings, monkeypatch):
    monkeypatch.setattr(cpu, "device_kind", lambda: device)
    pair = (outcome(kind, "float32", **settings) for kind in (cpu.BatchNorm, nn.BatchNorm))
    jax.tree.map(np.testing.assert_array_equal, *pair)


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 1), (1, 1)), ((0, 1), (1, 3))])
@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (3, 7, 10, 2)])
def test_max_pool_is_flaxs_with_ties(shape, padding):
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.integers(-2, 3, shape), jnp.float32)  # many equal values
    whole = draw.integers(-50, 50, shape).astype(np.float32)  # sums are exact

    @jax.jit
    def both(x, cotangents):
        want, gradient_of = jax.vjp(lambda x: nn.max_pool(x, (3, 3), (2, 2), padding), x)
        got, gradient_by_us = jax.vjp(lambda x: cpu.max_pool(x, padding), x)
        y = cotangents[:, : want.shape[1], : want.shape[2]]
        return want, got, *gradient_of(y), *gradient_by_us(y)

    want, got, gradient, ours = both(x, whole)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(ours, gradient)


def test_tpus_keep_xlas_gradient_of_max_pool():
    """The platform is known when the program is made; the CPU's branch is not in it."""
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(cpu.max_pool(x, "SAME"))))
    shape = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    for platform, is_scattered in (("tpu", True), ("cpu", False)):
        program = jax.jit(gradient).trace(shape).lower(lowering_platforms=(platform,)).as_text()
        assert ("select_and_scatter" in program) == is_scattered
        assert ("stablehlo.select " in program) != is_scattered
