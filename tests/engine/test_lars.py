"""LARS against MLPerf's formulas, in NumPy and float64."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import models
from tests.engine.settings import make_optimizer, make_rate

SHAPES = {
    "stem": {"kernel": (3, 3, 2, 4)},
    "block": {"conv": {"kernel": (1, 1, 4, 4)}, "norm": {"scale": (4,), "bias": (4,)}},
    "zero": {"kernel": (2, 3)},  # weights that begin at 0
    "still": {"kernel": (5,)},  # gradients that are 0
    "head": {"kernel": (4, 3), "bias": (3,)},
}


def kernels(params: Any) -> Any:
    """Which parameters are kernels."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) == "kernel", params
    )


def make_lars(rate, **changes):
    return make_optimizer(rate, optimizer="lars", **changes)


def draw(seed):
    """A tree of `SHAPES`, float64."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=shape), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def named(tree):
    """{"block/norm/scale": array, ...}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.array(v) for p, v in leaves}


class Reference:
    """The optimizer as MLPerf's rules describe it, one variable after the other, float64."""

    def __init__(self, weights, momentum, decay, trust=0.001, epsilon=0.0):
        self.weights = weights
        self.buffers = {name: np.zeros_like(w) for name, w in weights.items()}
        self.numbers = momentum, decay, trust, epsilon

    def step(self, gradients, rate):
        momentum, decay, trust, epsilon = self.numbers
        for name, w in self.weights.items():
            g, ratio = gradients[name], 1.0
            if "bias" not in name and "scale" not in name:
                w_norm, g_norm = float(np.sqrt((w**2).sum())), float(np.sqrt((g**2).sum()))
                if w_norm > 0 and g_norm > 0:
                    ratio = trust * w_norm / (g_norm + decay * w_norm + epsilon)
                g = g + decay * w
            self.buffers[name] = momentum * self.buffers[name] + rate * ratio * g
            self.weights[name] = w - self.buffers[name]


def bowl(params, centres, push):
    """Gradients that errors of the path feed back into; those of "still" are 0."""
    gradients = jax.tree.map(lambda w, c: 0.3 * (w - c) + push, params, centres)
    gradients["still"]["kernel"] = 0.0 * params["still"]["kernel"]
    return gradients


@pytest.mark.parametrize(
    ("momentum", "decay", "trust", "epsilon"),
    [(0.9, 2e-4, 0.001, 0.0), (0.95, 0.05, 0.001, 0.0), (0.9, 0.05, 0.02, 0.5)],
)
def test_lars_follows_a_numpy_loop(momentum, decay, trust, epsilon):
    steps = 300
    keys = {"base_learning_rate": 0.5, "warmup_epochs": 40.5, "schedule_epochs": steps}
    keys |= {"decay_steps": "200", "end_learning_rate": 1e-4}
    optimizer = make_lars(
        make_rate(steps, learning_rate_schedule="polynomial", **keys),
        **{"momentum": momentum, "weight_decay": decay},
        **{"lars_trust_coefficient": trust, "lars_epsilon": epsilon},
    )
    start, centres = draw(0), draw(1)
    start["zero"]["kernel"] *= 0
    pushes = np.random.default_rng(2).normal(size=steps)
    reference = Reference(named(start), momentum, decay, trust, epsilon)
    params, targets = jax.tree.map(np.float32, (start, centres))
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, push):
        changes, state = optimizer.update(bowl(params, targets, push), state, params)
        return optax.apply_updates(params, changes), state

    for t in range(steps):
        params, state = update(params, state, np.float32(pushes[t]))
        tree = jax.tree.unflatten(jax.tree.structure(start), list(reference.weights.values()))
        r = 0.5 * t / 40.5 if t <= 40.5 else 1e-4 + (0.5 - 1e-4) * max(0, 240.5 - t) ** 2 / 4e4
        reference.step(named(bowl(tree, centres, pushes[t])), r)
        if t in (0, 1, 2, 60, 250, steps - 1):
            for name, ours in named(params).items():
                theirs = reference.weights[name]
                np.testing.assert_allclose(ours, theirs, rtol=5e-5, atol=5e-6, err_msg=name)
    moved = {k: np.abs(v - named(start)[k]).max() for k, v in named(params).items()}
    assert min(moved.values()) > 0  # also of "zero", and of "still" by its decay


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
    model = models.resnet(50, num_classes=1000)
    inputs = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    init = functools.partial(model.init, train=False)
    params = jax.eval_shape(init, jax.random.key(0), inputs)["params"]
    decayed = {name: bool(kernel) for name, kernel in named(kernels(params)).items()}
    assert decayed == {name: not re.search("bias|scale", name) for name in decayed}
    assert (len(decayed), sum(decayed.values())) == (161, 54)
