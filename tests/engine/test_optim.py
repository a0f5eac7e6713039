"""Schedules and optimizers against the published numbers and a NumPy loop in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from engine import optim, schedules
from errors import ConfigError

# The recipe of the tutorial and of MLPerf v0.5; 112,590 steps are 90 times 1251.
RECIPE = schedules.Schedule(
    name="step", base=0.1, warmup_epochs=5, decay_epochs=(30, 60, 80), schedule_epochs=90
)
STEPS = 112_590
EPOCH = 1251


def _rates(schedule, steps):
    """One compiled call for many steps, as traced int32."""
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.asarray(steps, jnp.int32)))


@pytest.mark.parametrize(("batch_size", "peak"), [(256, 0.1), (1024, 0.4), (16384, 6.4)])
def test_step_recipe_has_the_published_rates(batch_size, peak):
    rate = schedules.learning_rate(RECIPE, batch_size=batch_size, train_steps=STEPS)
    expected = {
        0: 0.0,
        1: peak / (5 * EPOCH),
        EPOCH: peak / 5,
        5 * EPOCH // 2: peak * (5 * EPOCH // 2) / (5 * EPOCH),
        5 * EPOCH - 1: peak * (1 - 1 / (5 * EPOCH)),
        5 * EPOCH: peak,
        30 * EPOCH - 1: peak,
        30 * EPOCH: peak * 0.1,
        60 * EPOCH - 1: peak * 0.1,
        60 * EPOCH: peak * 0.01,
        80 * EPOCH - 1: peak * 0.01,
        80 * EPOCH: peak * 0.001,
        STEPS - 1: peak * 0.001,
        STEPS + EPOCH: peak * 0.001,  # the tutorial's code never goes to 0
    }
    # optax computes the warm-up in float32 as a difference from the peak.
    np.testing.assert_allclose(
        _rates(rate, list(expected)), list(expected.values()), rtol=1e-6, atol=2e-7 * peak
    )


@pytest.mark.parametrize("train_steps", [900, 28_148, 45_000, 437_850])
def test_step_recipe_is_stretched_to_the_run(train_steps):
    rate = schedules.learning_rate(RECIPE, batch_size=1024, train_steps=train_steps)
    steps = np.unique(np.linspace(0, train_steps - 1, 800).astype(int))
    warmup, *boundaries = (math.floor(train_steps * e / 90 + 0.5) for e in (5, 30, 60, 80))
    expected = [
        0.4 * min(1, t / warmup) * 0.1 ** sum(t >= boundary for boundary in boundaries)
        for t in steps.tolist()
    ]
    np.testing.assert_allclose(_rates(rate, steps), expected, rtol=1e-6, atol=1e-7)
    for i, boundary in enumerate(boundaries):
        before, after = _rates(rate, [boundary - 1, boundary])
        np.testing.assert_allclose([before, after], [0.4 * 0.1**i, 0.4 * 0.1 ** (i + 1)], rtol=1e-6)


def test_boundaries_that_fall_together_all_count():
    rate = schedules.step_schedule(1.0, 0, [1, 1, 2])
    np.testing.assert_allclose(_rates(rate, [0, 1, 2]), [1.0, 0.01, 0.001], rtol=1e-6)


def test_step_schedule_without_warmup_or_with_another_factor():
    np.testing.assert_array_equal(_rates(schedules.step_schedule(0.5, 0, []), [0, 1, 99]), 0.5)
    rate = schedules.step_schedule(8.0, 4, [7, 5], factor=0.5)
    np.testing.assert_allclose(
        _rates(rate, range(9)), [0, 2, 4, 6, 8, 4, 4, 2, 2], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("end", [0.0, 0.01])
@pytest.mark.parametrize("warmup", [0, 100])
def test_cosine_closed_form(warmup, end):
    peak, total = 0.8, 1100
    steps = np.arange(0, total + 50)
    expected = [
        peak * t / warmup
        if t < warmup
        else end
        + (peak - end) * (1 + math.cos(math.pi * min(1, (t - warmup) / (total - warmup)))) / 2
        for t in steps.tolist()
    ]
    rate = schedules.cosine_schedule(peak, warmup, total, end)
    np.testing.assert_allclose(_rates(rate, steps), expected, rtol=1e-5, atol=2e-7)


def test_cosine_recipe_spans_the_run():
    recipe = dataclasses.replace(RECIPE, name="cosine")
    rate = schedules.learning_rate(recipe, batch_size=4096, train_steps=9000)
    middle = (500 + 9000) // 2
    np.testing.assert_allclose(
        _rates(rate, [0, 250, 500, middle, 9000]), [0, 0.8, 1.6, 0.8, 0], rtol=1e-6, atol=3e-7
    )
    assert 0 < rate(8999) < 1e-6


@pytest.mark.parametrize("name", ["step", "cosine", "polynomial"])
def test_rates_are_float32_scalars_and_tracing_changes_nothing(name):
    recipe = dataclasses.replace(RECIPE, name=name)
    rate = schedules.learning_rate(recipe, batch_size=1024, train_steps=STEPS)
    for step in (0, 3000, 50_000, STEPS - 1):
        plain, traced = rate(step), jax.jit(rate)(step)
        assert plain.dtype == traced.dtype == jnp.float32
        assert plain.shape == traced.shape == ()
        np.testing.assert_allclose(plain, traced, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["step", "cosine", "polynomial"])
@pytest.mark.parametrize("train_steps", [1, 2, 3, 10])
def test_a_run_of_a_few_steps_learns(name, train_steps):
    recipe = dataclasses.replace(RECIPE, name=name, warmup_epochs=60)
    rate = schedules.learning_rate(recipe, batch_size=1024, train_steps=train_steps)
    rates = _rates(rate, range(train_steps))
    assert np.all(np.isfinite(rates))
    assert rates.max() > 0


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        (
            {"name": "poly"},
            {},
            "schedule='poly': unknown; known are 'cosine', 'polynomial', 'step'",
        ),
        ({"per": -1}, {}, "learning_rate_per=-1: must be a number of images, or 0"),
        ({}, {"batch_size": 0}, "batch_size=0, train_steps=90: both must be at least 1"),
        ({}, {"train_steps": 0}, "batch_size=256, train_steps=0: both must be at least 1"),
        (
            {"warmup_epochs": 90},
            {},
            "warmup_epochs=90: must be at least 0 and less than schedule_epochs=90",
        ),
        (
            {"warmup_epochs": -1},
            {},
            "warmup_epochs=-1: must be at least 0 and less than schedule_epochs=90",
        ),
        (
            {"schedule_epochs": 0},
            {},
            "warmup_epochs=5: must be at least 0 and less than schedule_epochs=0",
        ),
    ],
)
def test_bad_recipes(changes, sizes, message):
    with pytest.raises(ConfigError) as caught:
        schedules.learning_rate(
            dataclasses.replace(RECIPE, **changes),
            **({"batch_size": 256, "train_steps": 90} | sizes),
        )
    assert str(caught.value) == message


def test_cosine_needs_a_step_after_the_warmup():
    with pytest.raises(ConfigError, match="^warmup_steps=10: .* total of 10 steps$"):
        schedules.cosine_schedule(1.0, 10, 10)


def _params(seed):
    """A nested tree with every kind of leaf of a ResNet, in float64."""
    rng = np.random.default_rng(seed)
    return {
        "stem": {"kernel": rng.normal(size=(3, 3, 2, 4))},
        "block": {
            "conv": {"kernel": rng.normal(size=(1, 1, 4, 4))},
            "norm": {"scale": rng.normal(size=4), "bias": rng.normal(size=4)},
        },
        # A module may be called kernel; only the last name says what a leaf is.
        "kernel": {"bias": rng.normal(size=3)},
        "head": {"kernel": rng.normal(size=(4, 3)), "bias": rng.normal(size=3)},
    }


DECAYED = {
    "stem": {"kernel": True},
    "block": {"conv": {"kernel": True}, "norm": {"scale": False, "bias": False}},
    "kernel": {"bias": False},
    "head": {"kernel": True, "bias": False},
}


def test_decay_mask():
    assert optim.decay_mask(_params(0)) == DECAYED
    assert optim.decay_mask({}) == {}
    assert optim.decay_mask(np.zeros(3)) is False


@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_follows_a_numpy_loop(nesterov):
    momentum, weight_decay, steps = 0.9, 5e-2, 400
    make_rate = schedules.step_schedule(0.1, 50, [200, 300])
    rates = [0.1 * min(1, t / 50) * 0.1 ** ((t >= 200) + (t >= 300)) for t in range(steps)]
    optimizer = optim.make_optimizer(
        "sgd", make_rate, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
    )

    # Gradients of a quadratic bowl, so that errors of the path feed back, plus a push per step.
    weights, decayed = jax.tree.leaves(_params(0)), jax.tree.leaves(DECAYED)
    centres = jax.tree.leaves(_params(1))
    buffers = [np.zeros_like(w) for w in weights]
    pushes = np.random.default_rng(2).normal(size=steps)

    @jax.jit
    def update(params, state, push):
        gradients = jax.tree.map(lambda w, c: 0.3 * (w - c) + push, params, targets)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    params, targets = (jax.tree.map(np.float32, _params(seed)) for seed in (0, 1))
    state = optimizer.init(params)
    for t in range(steps):
        params, state = update(params, state, np.float32(pushes[t]))
        for i, w in enumerate(weights):
            g = 0.3 * (w - centres[i]) + pushes[t] + (weight_decay * w if decayed[i] else 0.0)
            buffers[i] = momentum * buffers[i] + g
            step = g + momentum * buffers[i] if nesterov else buffers[i]
            weights[i] = w - rates[t] * step
        if t in (0, 1, 60, 250, steps - 1):
            for ours, theirs in zip(jax.tree.leaves(params), weights, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_sgd_takes_a_constant_rate():
    optimizer = optim.sgd(0.5, momentum=0.0, nesterov=False, weight_decay=0.0)
    params = {"kernel": jnp.ones(2)}
    changes, _ = optimizer.update({"kernel": jnp.full(2, 3.0)}, optimizer.init(params), params)
    (kernel,) = jax.tree.leaves(optax.apply_updates(params, changes))
    np.testing.assert_allclose(kernel, -0.5)


def test_state_does_not_depend_on_the_numbers():
    params = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
    rate = schedules.step_schedule(0.1, 5, [])
    one = optim.sgd(rate, 0.9, True, 1e-4).init(params)
    other = optim.sgd(rate, 0.0, False, 0.0).init(params)
    assert jax.tree.structure(one) == jax.tree.structure(other)


@pytest.mark.parametrize(
    ("name", "hyperparameters", "message"),
    [
        ("lamb", {}, "optimizer='lamb': unknown; known are 'adam', 'lars', 'sgd'"),
        (
            "sgd",
            {"momentum": 0.9, "nesterov": True},
            "optimizer='sgd': missing a required argument: 'weight_decay'",
        ),
        (
            "sgd",
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0, "beta": 1},
            "optimizer='sgd': got an unexpected keyword argument 'beta'",
        ),
    ],
)
def test_bad_optimizers(name, hyperparameters, message):
    with pytest.raises(ConfigError) as caught:
        optim.make_optimizer(name, 0.1, **hyperparameters)
    assert str(caught.value) == message


@pytest.mark.parametrize("decay", [0.9, 0.9999])
def test_ema_update(decay):
    rng = np.random.default_rng(0)
    average = {"a": {"kernel": rng.normal(size=5)}, "mean": rng.normal(size=2)}
    ema = jax.tree.map(np.float32, average)
    update = jax.jit(optim.ema_update)
    for _ in range(50):
        new = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), average)
        average = jax.tree.map(lambda e, n: decay * e + (1 - decay) * n, average, new)
        ema = update(ema, jax.tree.map(np.float32, new), decay)
    for ours, theirs in zip(jax.tree.leaves(ema), jax.tree.leaves(average), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_ema_is_float32_whatever_comes_in():
    ones = {"kernel": jnp.ones(3, jnp.bfloat16)}
    ema = optim.ema_update(jax.tree.map(jnp.zeros_like, ones), ones, 0.999)
    assert ema["kernel"].dtype == jnp.float32
    np.testing.assert_allclose(ema["kernel"], 0.001, rtol=1e-5)
