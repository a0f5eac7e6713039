"""Optimizers against a NumPy loop over many steps; where LARS has a norm of 0, by hand."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import benchmarks
from common.errors import ConfigError
from common.trees import by_name
from configs import resnet50
from engine import optim
from tests.engine.settings import make_optimizer, make_rate, ones, settings


def draw_params(seed):
    """A nested tree with every kind of leaf of a ResNet, in float64."""
    rng = np.random.default_rng(seed)
    return {
        "stem": {"kernel": rng.normal(size=(3, 3, 2, 4))},
        "block": {
            "conv": {"kernel": rng.normal(size=(1, 1, 4, 4))},
            "norm": {"scale": rng.normal(size=4), "bias": rng.normal(size=4)},
        },
        # A module may be called kernel; only the last name tells what a leaf is.
        "kernel": {"bias": rng.normal(size=3)},
        "head": {"kernel": rng.normal(size=(4, 3)), "bias": rng.normal(size=3)},
    }


DECAYED = {
    "stem": {"kernel": True},
    "block": {"conv": {"kernel": True}, "norm": {"scale": False, "bias": False}},
    "kernel": {"bias": False},
    "head": {"kernel": True, "bias": False},
}
ALL_DECAYED = jax.tree.map(lambda _: True, DECAYED)
ONES = ones(DECAYED)
# As in Mask R-CNN: stem and BatchNorm are frozen, biases learn twice as fast.
MULTIPLIERS = {
    "stem": {"kernel": 0.0},
    "block": {"conv": {"kernel": 1.0}, "norm": {"scale": 0.0, "bias": 0.0}},
    "kernel": {"bias": 2.0},
    "head": {"kernel": 0.5, "bias": 2.0},
}


class Reference:
    """The optimizers as their papers and MLPerf's references have them, float64.

    A multiplier is inside of the momentum here, as Caffe's `lr_mult`.
    """

    def __init__(self, keys, params, decayed, multipliers, peak):
        self.weights = jax.tree.leaves(params)
        self.decayed, self.multipliers = jax.tree.leaves(decayed), jax.tree.leaves(multipliers)
        self.keys, self.peak, self.count = keys, peak, 0
        self.first = [np.zeros_like(w) for w in self.weights]
        self.second = [np.zeros_like(w) for w in self.weights]

    def step(self, gradients, rate):
        keys, self.count = self.keys, self.count + 1
        trained = [g for g, m in zip(gradients, self.multipliers, strict=True) if m]
        norm = np.sqrt(sum((g**2).sum() for g in trained))
        clip = keys.gradient_clip_norm
        scale = clip / norm if clip and norm > clip else 1.0
        for i, g in enumerate(gradients):
            if self.multipliers[i]:
                change = getattr(self, keys.optimizer)(i, scale * g, rate, self.multipliers[i])
                self.weights[i] = self.weights[i] - change

    def sgd(self, i, g, rate, multiplier):
        decay = self.decayed[i] * self.keys.weight_decay * self.weights[i]
        decoupled, momentum = self.keys.decoupled_decay, self.keys.momentum
        u = multiplier * (g if decoupled else g + decay)
        self.first[i] = momentum * self.first[i] + u
        change = rate * (u + momentum * self.first[i] if self.keys.nesterov else self.first[i])
        return change + (multiplier * rate / self.peak * decay if decoupled else 0.0)

    def lars(self, i, g, rate, multiplier):
        decay, w = self.keys.weight_decay, self.weights[i]
        if self.decayed[i]:
            w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
            ratio = self.keys.lars_trust_coefficient * w_norm
            ratio /= g_norm + decay * w_norm + self.keys.lars_epsilon
            g = ratio * (g + decay * w)
        self.first[i] = self.keys.momentum * self.first[i] + rate * multiplier * g
        return self.first[i]

    def adam(self, i, g, rate, multiplier):
        return rate * multiplier * self.direction(i, g)

    def lamb(self, i, g, rate, multiplier):
        u, ratio, w = self.direction(i, g), 1.0, self.weights[i]
        if self.decayed[i]:
            u = u + self.keys.weight_decay * w
            ratio = np.sqrt((w**2).sum()) / np.sqrt((u**2).sum())
        return rate * multiplier * ratio * u

    def direction(self, i, g):
        b1, b2, t = self.keys.adam_beta1, self.keys.adam_beta2, self.count
        self.first[i] = b1 * self.first[i] + (1 - b1) * g
        self.second[i] = b2 * self.second[i] + (1 - b2) * g**2
        mean, square = self.first[i] / (1 - b1**t), self.second[i] / (1 - b2**t)
        return mean / (np.sqrt(square) + self.keys.adam_epsilon)


SGD = {"optimizer": "sgd", "momentum": 0.9}
LARS = {"optimizer": "lars", "momentum": 0.9, "weight_decay": 2e-4}
ADAM = {"optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
LAMB = {"optimizer": "lamb", "adam_epsilon": 1e-6, "weight_decay": 0.02}
DECOUPLED = {**SGD, "decoupled_decay": True, "weight_decay": 5e-4, "momentum": 0.875}
# Peak rate, keys, decayed parameters, multipliers.
CASES = {
    "resnet50": (0.1, {**SGD, "nesterov": True, "weight_decay": 1e-4}, DECAYED, ONES),
    "resnet50, LARS": (10.0, LARS, DECAYED, ONES),
    "ssd decays all": (0.08, {**SGD, "weight_decay": 5e-4}, ALL_DECAYED, ONES),
    "mask_rcnn": (0.02, {**SGD, "weight_decay": 1e-4}, DECAYED, MULTIPLIERS),
    "gnmt": (2e-3, {**ADAM, "gradient_clip_norm": 5.0}, DECAYED, ONES),
    "transformer": (2e-3, {**ADAM, "adam_beta2": 0.98, "adam_epsilon": 1e-9}, DECAYED, ONES),
    "ncf": (5e-4, ADAM, DECAYED, ONES),
    "much decay": (0.1, {**SGD, "weight_decay": 5e-2}, DECAYED, ONES),
    "nesterov in parts": (0.1, {**SGD, "nesterov": True}, DECAYED, MULTIPLIERS),
    "clip in parts": (0.1, {**SGD, "gradient_clip_norm": 2.0}, DECAYED, MULTIPLIERS),
    "LARS, trust and epsilon": (
        0.5,
        {**LARS, "weight_decay": 0.05, "lars_trust_coefficient": 0.02, "lars_epsilon": 0.5},
        DECAYED,
        ONES,
    ),
    "LARS in parts": (10.0, {**LARS, "gradient_clip_norm": 3.0}, ALL_DECAYED, MULTIPLIERS),
    "A3, LAMB": (8e-3, {**LAMB, "gradient_clip_norm": 1.0}, DECAYED, ONES),
    "LAMB in parts": (8e-3, LAMB, ALL_DECAYED, MULTIPLIERS),
    "mild, decoupled": (2.048, DECOUPLED, DECAYED, ONES),
    "decoupled in parts": (0.5, {**DECOUPLED, "nesterov": True}, ALL_DECAYED, MULTIPLIERS),
    "Adam, short memory": (
        0.1,
        {**ADAM, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-2},
        DECAYED,
        ONES,
    ),
    "Adam in parts, without weight decay": (
        2e-3,
        {**ADAM, "gradient_clip_norm": 3.0, "weight_decay": 0.5},
        DECAYED,
        MULTIPLIERS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_optimizers_follow_a_numpy_loop(name):
    peak, keys, decayed, multipliers = CASES[name]
    steps = 400
    schedule = {"base_learning_rate": peak, "warmup_steps": "50"}
    rate = make_rate(steps, **schedule, learning_rate_decay_steps="200, 300")
    rates = [peak * min(1, t / 50) * 0.1 ** ((t >= 200) + (t >= 300)) for t in range(steps)]
    optimizer = make_optimizer(rate, decayed=decayed, multipliers=multipliers, **keys)
    start = draw_params(0)
    reference = Reference(settings(optim.Optimizer, **keys), start, decayed, multipliers, peak)

    # Gradients of a quadratic bowl, so that errors of the path feed back, plus a push per step.
    centres = jax.tree.leaves(draw_params(1))
    pushes = np.random.default_rng(2).normal(size=steps)

    @jax.jit
    def update(params, state, push):
        gradients = jax.tree.map(lambda w, c: 0.3 * (w - c) + push, params, targets)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    params, targets = (jax.tree.map(np.float32, draw_params(seed)) for seed in (0, 1))
    state = optimizer.init(params)
    for t in range(steps):
        params, state = update(params, state, np.float32(pushes[t]))
        pairs = zip(reference.weights, centres, strict=True)
        reference.step([0.3 * (w - c) + pushes[t] for w, c in pairs], rates[t])
        if t in (0, 1, 60, 250, steps - 1):
            for ours, theirs in zip(jax.tree.leaves(params), reference.weights, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=5e-5, atol=5e-6)
    leaves = zip(*map(jax.tree.leaves, (params, start, multipliers)), strict=True)
    for after, before, multiplier in leaves:
        assert np.array_equal(after, np.float32(before)) == (multiplier == 0)


# --- The state: what checkpoints of earlier versions hold.

TRACE = [
    "trace['block']['conv']['kernel']",
    "trace['block']['norm']['bias']",
    "trace['block']['norm']['scale']",
    "trace['head']['bias']",
    "trace['head']['kernel']",
    "trace['kernel']['bias']",
    "trace['stem']['kernel']",
]
PATHS = {
    "sgd": [*(f"[1].{path}" for path in TRACE), "[2].count"],
    "lars": ["[1].count", *(f"[2].{path}" for path in TRACE)],
    "adam": [
        "[0].count",
        *(f"[0].{path.replace('trace', 'mu')}" for path in TRACE),
        *(f"[0].{path.replace('trace', 'nu')}" for path in TRACE),
        "[1].count",
    ],
}
PATHS["lamb"] = [*PATHS["adam"][:-1], "[2].count"]
LINKS = {
    "sgd": ["MaskedState", "TraceState", "ScaleByScheduleState"],
    "lars": ["EmptyState", "ScaleByScheduleState", "TraceState"],
    "adam": ["ScaleByAdamState", "ScaleByScheduleState"],
    "lamb": ["ScaleByAdamState", "EmptyState", "ScaleByScheduleState"],
}


def paths_of(state):
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [jax.tree_util.keystr(path) for path, _ in leaves]


@pytest.mark.parametrize("changes", [{}, {"gradient_clip_norm": 1.0}, {"momentum": 0.0}])
@pytest.mark.parametrize("name", PATHS)
def test_old_checkpoints_fit(name, changes):
    state = make_optimizer(0.1, optimizer=name, **changes).init(draw_params(0))
    assert paths_of(state) == PATHS[name]
    assert [type(link).__name__ for link in state] == LINKS[name]
    assert type(state) is tuple


@pytest.mark.parametrize("name", PATHS)
def test_frozen_parameters_have_no_state(name):
    params = draw_params(0)
    state = make_optimizer(0.1, optimizer=name, multipliers=MULTIPLIERS).init(params)
    frozen = ("stem", "norm")
    assert paths_of(state) == [p for p in PATHS[name] if not any(f in p for f in frozen)]


def test_a_frozen_parameter_survives_any_gradient():
    optimizer = make_optimizer(1.0, multipliers={"w": 1.0, "v": 0.0}, gradient_clip_norm=1.0)
    params = {"w": jnp.ones(2), "v": jnp.ones(3)}
    gradients = {"w": jnp.array([3.0, 4.0]), "v": jnp.array([jnp.nan, jnp.inf, 1e30])}
    changes, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(changes["w"], [-0.6, -0.8], rtol=1e-6)
    np.testing.assert_array_equal(changes["v"], 0.0)


def test_clipping_leaves_small_gradients_alone():
    optimizer = make_optimizer(1.0, gradient_clip_norm=5.1)
    params, gradients = {"w": jnp.ones(2)}, {"w": jnp.array([3.0, 4.0])}
    changes, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_array_equal(changes["w"], [-3.0, -4.0])


@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.0}])
def test_lamb_is_that_of_optax_where_all_parameters_decay(changes):
    """optax adapts the rate of all parameters; a weight or an update of 0 has the ratio 1."""
    keys = {**LAMB, **changes}
    params = jax.tree.map(np.float32, draw_params(0)) | {"zero": {"kernel": np.zeros(3, "f")}}
    decayed = jax.tree.map(lambda _: True, params)
    ours = make_optimizer(0.01, decayed=decayed, **keys)
    theirs = optax.lamb(0.01, eps=1e-6, weight_decay=keys["weight_decay"])
    states = [optimizer.init(params) for optimizer in (ours, theirs)]
    for seed in range(3):
        gradients = jax.tree.map(np.float32, draw_params(seed)) | {
            "zero": {"kernel": np.full(3, float(seed > 0), "f")}
        }
        first, states[0] = ours.update(gradients, states[0], params)
        second, states[1] = theirs.update(gradients, states[1], params)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
        params = optax.apply_updates(params, first)


# --- The keys.


def test_every_key_is_compared():
    """The loop in NumPy runs with other values of each."""
    fields = {field.name for field in dataclasses.fields(optim.Optimizer)}
    compared = {key for _, keys, _, _ in CASES.values() for key in keys}
    assert fields == compared | {
        "gradient_clip_per_device"
    }  # which leaves the clipping to the step


def test_only_sgd_has_decoupled_decay():
    with pytest.raises(ConfigError, match="^config.decoupled_decay=True: .* not 'lamb'"):
        make_optimizer(0.1, optimizer="lamb", decoupled_decay=True)


def once(weights, gradient, rate=2.0, decay=0.1, **numbers):
    """What one step adds to a kernel."""
    optimizer = make_optimizer(rate, optimizer="lars", weight_decay=decay, **numbers)
    params = {"kernel": jnp.asarray(weights, jnp.float32)}
    gradients = {"kernel": jnp.asarray(gradient, jnp.float32)}
    changes: Any = optimizer.update(gradients, optimizer.init(params), params)[0]
    return np.asarray(changes["kernel"])


def test_where_a_norm_is_zero_the_ratio_is_one():
    np.testing.assert_allclose(once([0.0, 0.0], [5.0, 12.0]), [-10.0, -24.0])
    np.testing.assert_allclose(once([3.0, 4.0], [0.0, 0.0]), [-0.6, -0.8], rtol=1e-6)
    np.testing.assert_array_equal(once([0.0, 0.0], [0.0, 0.0]), 0.0)
    np.testing.assert_array_equal(once([0.0, 0.0], [0.0, 0.0], decay=0.0), 0.0)


def test_norms_are_float32_whatever_comes_in():
    """Only float32 adds up the squares of 4096 times 300."""
    optimizer = make_optimizer(1.0, optimizer="lars", momentum=0.0)
    params = {"kernel": jnp.full(4096, 300.0, jnp.bfloat16)}
    gradients = {"kernel": jnp.full(4096, 1.0, jnp.bfloat16)}
    changes: Any = optimizer.update(gradients, optimizer.init(params), params)[0]
    assert changes["kernel"].dtype == jnp.float32
    np.testing.assert_allclose(changes["kernel"], -0.3, rtol=1e-5)


def test_what_is_excluded_of_a_resnet50():
    """Weight decay excludes every name with "bias" or "scale" in it: 54 of 161 are left."""
    benchmark = benchmarks.load(resnet50.get_config().lock(), "")
    params, _ = jax.eval_shape(benchmark.init, jax.random.key(0))
    labels = {name: benchmark.label(name) for name in by_name(params)}
    decayed = {name: benchmark.groups[label].decayed for name, label in labels.items()}
    assert decayed == {name: not re.search("bias|scale", name) for name in decayed}
    assert (len(decayed), sum(decayed.values())) == (161, 54)
