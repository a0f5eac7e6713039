"""BatchNorm against flax's own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from common.layers import batch_norm


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
    ours, flax = (outcome(kind, dtype, axis) for kind in (batch_norm.BatchNorm, nn.BatchNorm))
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
    monkeypatch.setattr(batch_norm, "device_kind", lambda: device)
    pair = (outcome(kind, "float32", **settings) for kind in (batch_norm.BatchNorm, nn.BatchNorm))
    jax.tree.map(np.testing.assert_array_equal, *pair)
