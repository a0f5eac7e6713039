"""Steps of LARS by hand; `test_optim` follows a NumPy loop over many steps."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import benchmarks
from configs import resnet50
from ops.trees import by_name
from tests.engine.settings import make_optimizer


def make_lars(rate, **changes):
    return make_optimizer(rate, optimizer="lars", **changes)


def once(weights, gradient, rate=2.0, decay=0.1, **numbers):
    """What one step adds to a kernel."""
    optimizer = make_lars(rate, weight_decay=decay, **numbers)
    params = {"kernel": jnp.asarray(weights, jnp.float32)}
    gradients = {"kernel": jnp.asarray(gradient, jnp.float32)}
    changes: Any = optimizer.update(gradients, optimizer.init(params), params)[0]
    return np.asarray(changes["kernel"])


def test_one_step_by_hand():
    """|w| = 5, |g| = 13: r = 0.001 * 5 / (13 + 0.1 * 5) and u = g + 0.1 w = (5.3, 12.4)."""
    change = once([3.0, 4.0], [5.0, 12.0])
    np.testing.assert_allclose(change, -2 * 0.005 / 13.5 * np.array([5.3, 12.4]), rtol=1e-6)
    change = once([3.0, 4.0], [5.0, 12.0], lars_epsilon=6.5, lars_trust_coefficient=0.4)
    np.testing.assert_allclose(change, -2 * 2.0 / 20 * np.array([5.3, 12.4]), rtol=1e-6)


def test_where_a_norm_is_zero_the_ratio_is_one():
    np.testing.assert_allclose(once([0.0, 0.0], [5.0, 12.0]), [-10.0, -24.0])
    np.testing.assert_allclose(once([3.0, 4.0], [0.0, 0.0]), [-0.6, -0.8], rtol=1e-6)
    np.testing.assert_array_equal(once([0.0, 0.0], [0.0, 0.0]), 0.0)
    np.testing.assert_array_equal(once([0.0, 0.0], [0.0, 0.0], decay=0.0), 0.0)


def test_the_rate_is_inside_of_the_momentum():
    """A rate that falls to 0 stops the new gradients, not the old momentum: m, then 0.9 m."""
    rates = jnp.array([2.0, 0.0])
    optimizer = make_lars(lambda t: rates[t])
    params = {"kernel": jnp.array([3.0, 4.0]), "bias": jnp.ones(1)}
    gradients = {"kernel": jnp.array([5.0, 12.0]), "bias": jnp.full(1, 7.0)}
    first: Any
    second: Any
    first, state = optimizer.update(gradients, optimizer.init(params), params)
    second, _ = optimizer.update(gradients, state, params)
    np.testing.assert_allclose(first["bias"], -14.0)  # the full rate, no ratio
    for name in params:
        np.testing.assert_allclose(second[name], 0.9 * first[name], rtol=1e-6)


def test_norms_are_float32_whatever_comes_in():
    """Only float32 adds up the squares of 4096 times 300."""
    optimizer = make_lars(1.0, momentum=0.0)
    params = {"kernel": jnp.full(4096, 300.0, jnp.bfloat16)}
    gradients = {"kernel": jnp.full(4096, 1.0, jnp.bfloat16)}
    changes: Any = optimizer.update(gradients, optimizer.init(params), params)[0]
    assert changes["kernel"].dtype == jnp.float32
    np.testing.assert_allclose(changes["kernel"], -0.3, rtol=1e-5)


def test_it_is_not_the_lars_of_optax():
    """optax divides by |g + decay * w|: the same without decay, another function with it."""
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}
    gradients = {"kernel": 2e-4 * jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}

    def moved(optimizer):
        weights: Any = params
        state = optimizer.init(weights)
        for _ in range(20):
            changes, state = optimizer.update(gradients, state, weights)
            weights = optax.apply_updates(weights, changes)
        return np.linalg.norm(weights["kernel"] - params["kernel"])

    for decay, same in ((0.0, True), (2e-4, False)):
        ours = moved(make_lars(10.0, weight_decay=decay))
        theirs = moved(optax.lars(10.0, decay, momentum=0.9, trust_coefficient=0.001))
        assert (abs(ours / theirs - 1) < 1e-4) == same
        assert same or abs(ours / theirs - 1) > 0.1


def test_what_is_excluded_of_a_resnet50():
    """Weight decay excludes every name with "bias" or "scale" in it: 54 of 161 are left."""
    benchmark = benchmarks.load(resnet50.get_config().lock(), "")
    params, _ = jax.eval_shape(benchmark.init, jax.random.key(0))
    labels = {name: benchmark.label(name) for name in by_name(params)}
    decayed = {name: benchmark.groups[label].decayed for name, label in labels.items()}
    assert decayed == {name: not re.search("bias|scale", name) for name in decayed}
    assert (len(decayed), sum(decayed.values())) == (161, 54)
