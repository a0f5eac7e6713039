"""LARS and its schedule against MLPerf's formulas, in NumPy and float64."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import models
from engine import optim, schedules
from errors import ConfigError

SHAPES = {
    "stem": {"kernel": (3, 3, 2, 4)},
    "block": {"conv": {"kernel": (1, 1, 4, 4)}, "norm": {"scale": (4,), "bias": (4,)}},
    "zero": {"kernel": (2, 3)},  # weights that begin at 0
    "still": {"kernel": (5,)},  # gradients that are 0
    "head": {"kernel": (4, 3), "bias": (3,)},
}
MLPERF = {"lars_trust_coefficient": 0.001, "lars_epsilon": 0.0}


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
    rate = schedules.polynomial_schedule(0.5, 40.5, 200, 1e-4, 2.0)
    optimizer = optim.make_optimizer(
        *("lars", rate),
        **{"momentum": momentum, "weight_decay": decay},
        **{"lars_trust_coefficient": trust, "lars_epsilon": epsilon},
    )
    start, centres = draw(0), draw(1)
    start["zero"]["kernel"] *= 0
    pushes = np.random.default_rng(2).normal(size=steps)
    wanted = Reference(named(start), momentum, decay, trust, epsilon)
    params, targets = jax.tree.map(np.float32, (start, centres))
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, push):
        changes, state = optimizer.update(bowl(params, targets, push), state, params)
        return optax.apply_updates(params, changes), state

    for t in range(steps):
        params, state = update(params, state, np.float32(pushes[t]))
        tree = jax.tree.unflatten(jax.tree.structure(start), list(wanted.weights.values()))
        r = 0.5 * t / 40.5 if t <= 40.5 else 1e-4 + (0.5 - 1e-4) * max(0, 240.5 - t) ** 2 / 4e4
        wanted.step(named(bowl(tree, centres, pushes[t])), r)
        if t in (0, 1, 2, 60, 250, steps - 1):
            for name, ours in named(params).items():
                theirs = wanted.weights[name]
                np.testing.assert_allclose(ours, theirs, rtol=5e-5, atol=5e-6, err_msg=name)
    moved = {k: np.abs(v - named(start)[k]).max() for k, v in named(params).items()}
    assert min(moved.values()) > 0  # also of "zero", and of "still" by its decay


def once(weights, gradient, rate=2.0, decay=0.1, **numbers):
    """What one step adds to a kernel."""
    optimizer = optim.lars(rate, 0.9, decay, **{**MLPERF, **numbers})
    params = {"kernel": jnp.asarray(weights, jnp.float32)}
    given = {"kernel": jnp.asarray(gradient, jnp.float32)}
    changes: Any = optimizer.update(given, optimizer.init(params), params)[0]
    return np.asarray(changes["kernel"])


def test_one_step_by_hand():
    """|w| = 5, |g| = 13: r = 0.001 * 5 / (13 + 0.1 * 5) and u = g + 0.1 w = (5.3, 12.4)."""
    found = once([3.0, 4.0], [5.0, 12.0])
    np.testing.assert_allclose(found, -2 * 0.005 / 13.5 * np.array([5.3, 12.4]), rtol=1e-6)
    found = once([3.0, 4.0], [5.0, 12.0], lars_epsilon=6.5, lars_trust_coefficient=0.4)
    np.testing.assert_allclose(found, -2 * 2.0 / 20 * np.array([5.3, 12.4]), rtol=1e-6)


def test_where_a_norm_is_zero_the_ratio_is_one():
    np.testing.assert_allclose(once([0.0, 0.0], [5.0, 12.0]), [-10.0, -24.0])
    np.testing.assert_allclose(once([3.0, 4.0], [0.0, 0.0]), [-0.6, -0.8], rtol=1e-6)
    np.testing.assert_array_equal(once([0.0, 0.0], [0.0, 0.0]), 0.0)
    np.testing.assert_array_equal(once([0.0, 0.0], [0.0, 0.0], decay=0.0), 0.0)


def test_the_rate_is_inside_of_the_momentum():
    """A rate that falls to 0 stops what comes in, not what is under way: m, then 0.9 m."""
    rates = jnp.array([2.0, 0.0])
    optimizer = optim.lars(lambda t: rates[t], 0.9, 0.0, **MLPERF)
    params = {"kernel": jnp.array([3.0, 4.0]), "bias": jnp.ones(1)}
    given = {"kernel": jnp.array([5.0, 12.0]), "bias": jnp.full(1, 7.0)}
    first: Any
    second: Any
    first, state = optimizer.update(given, optimizer.init(params), params)
    second, _ = optimizer.update(given, state, params)
    np.testing.assert_allclose(first["bias"], -14.0)  # the whole rate, no ratio
    for name in params:
        np.testing.assert_allclose(second[name], 0.9 * first[name], rtol=1e-6)


def test_norms_are_float32_whatever_comes_in():
    """300 in bfloat16 squares to what only float32 adds up."""
    optimizer = optim.lars(1.0, 0.0, 0.0, **MLPERF)
    params = {"kernel": jnp.full(4096, 300.0, jnp.bfloat16)}
    given = {"kernel": jnp.full(4096, 1.0, jnp.bfloat16)}
    changes: Any = optimizer.update(given, optimizer.init(params), params)[0]
    assert changes["kernel"].dtype == jnp.float32
    np.testing.assert_allclose(changes["kernel"], -0.3, rtol=1e-5)


def test_it_is_not_the_lars_of_optax():
    """Theirs divides by |g + decay * w|; the same without decay, another function with it."""
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}
    given = {"kernel": 2e-4 * jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}

    def moved(optimizer):
        weights: Any = params
        state = optimizer.init(weights)
        for _ in range(20):
            changes, state = optimizer.update(given, state, weights)
            weights = optax.apply_updates(weights, changes)
        return np.linalg.norm(weights["kernel"] - params["kernel"])

    for decay, same in ((0.0, True), (2e-4, False)):
        ours = moved(optim.lars(10.0, 0.9, decay, **MLPERF))
        theirs = moved(optax.lars(10.0, decay, momentum=0.9, trust_coefficient=0.001))
        assert (abs(ours / theirs - 1) < 1e-4) == same
        assert same or abs(ours / theirs - 1) > 0.1


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"lars_epsilon": -1.0}, "lars_trust_coefficient=0.001, lars_epsilon=-1.0: "),
        ({"lars_trust_coefficient": 0.0}, "lars_trust_coefficient=0.0, lars_epsilon=0.0: "),
    ],
)
def test_numbers_that_cannot_work(numbers, says):
    with pytest.raises(ConfigError) as caught:
        once([1.0], [1.0], **numbers)
    assert str(caught.value).startswith(says)
    assert len(str(caught.value).splitlines()) == 1


def test_what_an_optimizer_wants_is_known():
    assert optim.hyperparameters("sgd") == ["momentum", "nesterov", "weight_decay"]
    assert optim.hyperparameters("lars") == ["momentum", "weight_decay", *MLPERF]
    assert optim.hyperparameters("adamw") == []


def test_what_is_excluded_of_a_resnet50():
    """Every name that has "bias" or "scale" in it, and no other: 54 of 161 are left."""
    model = models.resnet(50, num_classes=1000)
    inputs = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    init = functools.partial(model.init, train=False)
    params = jax.eval_shape(init, jax.random.key(0), inputs)["params"]
    found = {name: bool(kernel) for name, kernel in named(optim.decay_mask(params)).items()}
    assert found == {name: not re.search("bias|scale", name) for name in found}
    assert (len(found), sum(found.values())) == (161, 54)


# --- The schedule.


@pytest.mark.parametrize("power", [1.0, 2.0, 3.5])
@pytest.mark.parametrize("warmup", [0, 100, 651.75])
def test_polynomial_closed_form(warmup, power):
    peak, decay, end = 23.0, 1166.25, 1e-4
    steps = np.arange(0, 2000)
    with np.errstate(divide="ignore", invalid="ignore"):
        rising = peak * steps / warmup
    falling = end + (peak - end) * (1 - np.minimum(steps - warmup, decay) / decay) ** power
    wanted = np.where((steps <= warmup) & (warmup > 0), rising, falling)
    rate = schedules.polynomial_schedule(peak, warmup, decay, end, power)
    found = jax.jit(jax.vmap(rate))(jnp.asarray(steps))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6 * peak)
    assert found[-1] == np.float32(end)


def test_polynomial_spans_what_is_left_of_the_run():
    """T = 1000, W = 200: D = T - W + 1, so that the last step has 2 of 801 left."""
    recipe = schedules.Schedule("polynomial", 8.0, 20, (), 100, per=0)
    rate = schedules.learning_rate(recipe, batch_size=4096, train_steps=1000)
    assert rate(0) == 0 and rate(200) == 8
    np.testing.assert_allclose(rate(100), 4)
    left = np.array([801 - 400.5, 801 - 799]) / 801
    found = [rate(np.float32(600.5)), rate(999)]
    np.testing.assert_allclose(found, 1e-4 + (8 - 1e-4) * left**2, rtol=1e-4)


@pytest.mark.parametrize("train_steps", [1000, 2000])
def test_polynomial_with_a_length_is_stretched_like_the_warmup(train_steps):
    recipe = schedules.Schedule("polynomial", 8.0, 20, (), 100, 0, 50.0, 0.5, 2.0)
    rate = schedules.learning_rate(recipe, batch_size=4096, train_steps=train_steps)
    found = [float(rate(int(train_steps * share))) for share in (0.1, 0.2, 0.45, 0.7, 0.9)]
    np.testing.assert_allclose(found, [4, 8, 0.5 + 7.5 / 4, 0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize(("per", "peak"), [(0, 8.0), (256, 128.0), (4096, 8.0), (1024, 32.0)])
@pytest.mark.parametrize("name", ["step", "cosine", "polynomial"])
def test_what_the_base_rate_is_per(name, per, peak):
    recipe = schedules.Schedule(name, 8.0, 20, (), 100, per=per)
    rate = schedules.learning_rate(recipe, batch_size=4096, train_steps=1000)
    np.testing.assert_allclose(rate(200), peak, rtol=1e-6)


@pytest.mark.parametrize("numbers", [(-1, 10, 2.0), (0, 0, 2.0), (0, 10, 0.0)])
def test_polynomials_that_cannot_be(numbers):
    with pytest.raises(ConfigError, match="^warmup_steps=.*polynomial_power=[^\n]*$"):
        schedules.polynomial_schedule(1.0, numbers[0], numbers[1], 0.0, numbers[2])
