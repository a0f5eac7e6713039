"""Learning rates against formulas in NumPy and float64; what every key does, and its errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.errors import ConfigError
from tests.engine.settings import make_rate

# The recipe of the tutorial and of MLPerf v0.5; 112,590 steps are 90 times 1251.
RECIPE = {
    "learning_rate_per": 256,
    "warmup_epochs": 5,
    "learning_rate_decay_epochs": (30, 60, 80),
    "end_learning_rate": 1e-4,
}
STEPS = 112_590
NAMES = ["step", "cosine", "polynomial", "rsqrt"]


def rates_of(schedule, steps):
    """One compiled call for many steps, as traced int32."""
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.asarray(steps, jnp.int32)))


def assert_close(rates, expected, rtol, atol=0.0):
    """Accelerators may compute powers and cosines with fewer digits (not verified on a chip)."""
    if jax.default_backend() != "cpu":
        rtol, atol = max(rtol, 1e-4), max(atol, 1e-5 * np.max(expected))
    np.testing.assert_allclose(rates, expected, rtol=rtol, atol=atol)


@pytest.mark.device
@pytest.mark.parametrize("train_steps", [900, 28_148, 45_000, STEPS, 437_850])
def test_step_recipe_is_stretched_to_the_run(train_steps):
    rate = make_rate(train_steps, batch_size=1024, **RECIPE)
    steps = np.unique(np.linspace(0, train_steps + 99, 800).astype(int))  # it never goes to 0
    warmup, *boundaries = (math.floor(train_steps * e / 90 + 0.5) for e in (5, 30, 60, 80))
    expected = [
        0.4 * min(1, t / warmup) * 0.1 ** sum(t >= boundary for boundary in boundaries)
        for t in steps.tolist()
    ]
    assert_close(rates_of(rate, steps), expected, 1e-6, 1e-7)
    assert (rate.peak, rate.warmup_steps, rate.decay_steps) == (0.4, warmup, 0)
    for i, boundary in enumerate(boundaries):
        before, after = rates_of(rate, [boundary - 1, boundary])
        assert_close([before, after], [0.4 * 0.1**i, 0.4 * 0.1 ** (i + 1)], 1e-6)


def test_boundaries_that_fall_together_all_count():
    keys = {"base_learning_rate": 1.0, "learning_rate_decay_steps": "1, 1, 2"}
    rate = make_rate(9, **keys)
    np.testing.assert_allclose(rates_of(rate, [0, 1, 2]), [1.0, 0.01, 0.001], rtol=1e-6)
    rate = make_rate(9, **keys, learning_rate_decay_factors=(0.5, 0.2, 3.0))
    np.testing.assert_allclose(rates_of(rate, [0, 1, 2]), [1.0, 0.1, 0.3], rtol=1e-6)


def test_step_without_warmup_or_with_other_factors():
    constant = make_rate(99, base_learning_rate=0.5)
    np.testing.assert_array_equal(rates_of(constant, [0, 1, 98]), 0.5)
    keys = {"base_learning_rate": 8.0, "warmup_steps": "4"}
    keys |= {"learning_rate_decay_steps": "7, 5", "learning_rate_decay_factors": (0.5,)}
    rate = make_rate(9, **keys)
    np.testing.assert_allclose(
        rates_of(rate, range(9)), [0, 2, 4, 6, 8, 4, 4, 2, 2], rtol=1e-6, atol=1e-6
    )
    rate = make_rate(9, **{**keys, "learning_rate_decay_factors": (0.5, 2.0)})
    np.testing.assert_allclose(rates_of(rate, [4, 5, 6, 7]), [8, 16, 16, 8], rtol=1e-6)


@pytest.mark.parametrize("name", ["step", "cosine"])
def test_steps_are_not_stretched(name):
    """400 examples in an epoch, 4 in a batch: '1 epoch' is 100 steps, however long the run."""
    sizes = {"batch_size": 4, "num_examples": 400}
    for train_steps in (300, 2000):
        keys = {"learning_rate_schedule": name, "base_learning_rate": 1.0, "schedule_epochs": 3}
        rate = make_rate(train_steps, **sizes, **keys, warmup_steps="1 epoch", warmup_epochs=2)
        np.testing.assert_allclose(rates_of(rate, [50, 99, 100]), [0.5, 0.99, 1.0], rtol=1e-6)
        assert rate.warmup_steps == 100
    keys["learning_rate_decay_steps"] = "150, 180"
    if name == "step":
        rate = make_rate(900, **sizes, **keys)
        np.testing.assert_allclose(rates_of(rate, [149, 150, 180]), [1, 0.1, 0.01], rtol=1e-6)


@pytest.mark.device
@pytest.mark.parametrize("warmup", [0, 100])
def test_cosine_closed_form(warmup):
    peak, total = 0.8, 1100
    steps = np.arange(0, total + 50)
    expected = [
        peak * t / warmup
        if t < warmup
        else peak * (1 + math.cos(math.pi * min(1, (t - warmup) / (total - warmup)))) / 2
        for t in steps.tolist()
    ]
    keys = {"base_learning_rate": peak, "warmup_steps": str(warmup)}
    rate = make_rate(total, learning_rate_schedule="cosine", **keys)
    assert_close(rates_of(rate, steps), expected, 1e-5, 2e-7)


@pytest.mark.device
@pytest.mark.parametrize("power", [1.0, 2.0, 3.5])
@pytest.mark.parametrize("warmup", [0, 100, 651.75])
def test_polynomial_closed_form(warmup, power):
    """By default it decays over the D = T - W + 1 steps after the warm-up."""
    peak, end, train_steps = 23.0, 1e-4, 1817
    decay = train_steps - warmup + 1
    steps = np.arange(0, 2000)
    with np.errstate(divide="ignore", invalid="ignore"):
        rising = peak * steps / warmup
    falling = end + (peak - end) * (1 - np.minimum(steps - warmup, decay) / decay) ** power
    expected = np.where((steps <= warmup) & (warmup > 0), rising, falling)
    keys = {"base_learning_rate": peak, "warmup_epochs": warmup, "schedule_epochs": train_steps}
    keys |= {"end_learning_rate": end, "polynomial_power": power}
    rate = make_rate(train_steps, learning_rate_schedule="polynomial", **keys)
    computed = rates_of(rate, steps)
    assert_close(computed, expected, 1e-4, 1e-6 * peak)
    assert computed[-1] == np.float32(end)
    assert (rate.peak, rate.warmup_steps, rate.decay_steps) == (peak, warmup, decay)


@pytest.mark.parametrize("train_steps", [1000, 2000])
def test_polynomial_with_a_length_is_stretched_like_the_warmup(train_steps):
    keys = {"learning_rate_schedule": "polynomial", "base_learning_rate": 8.0, "warmup_epochs": 20}
    keys |= {"schedule_epochs": 100, "decay_steps": "50 epochs", "end_learning_rate": 0.5}
    rate = make_rate(train_steps, batch_size=4096, num_examples=40_960, **keys)
    shares = [int(train_steps * share) for share in (0.1, 0.2, 0.45, 0.7, 0.9)]
    expected = [4, 8, 0.5 + 7.5 / 4, 0.5, 0.5]
    np.testing.assert_allclose(rates_of(rate, shares), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["step", "cosine", "polynomial"])
@pytest.mark.parametrize("shape", ["linear", "exponential"])
@pytest.mark.parametrize("first", [0.0, 0.3])
def test_every_warmup_begins_and_ends_as_asked(name, shape, first):
    steps = np.arange(41)
    keys = {"learning_rate_schedule": name, "base_learning_rate": 8.0, "warmup_steps": "40"}
    rate = make_rate(1000, warmup_shape=shape, warmup_from=first, **keys)
    start = 0.08 if shape == "exponential" and not first else first
    expected = {
        "linear": start + (8 - start) * steps / 40,
        "exponential": 8 * (start / 8) ** ((40 - steps) / 40),
    }[shape]
    np.testing.assert_allclose(rates_of(rate, steps), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("per", "peak"), [(0, 8.0), (256, 128.0), (4096, 8.0), (1024, 32.0)])
@pytest.mark.parametrize("name", NAMES)
def test_the_rate_grows_with_the_batch(name, per, peak):
    keys = {"base_learning_rate": 8.0, "learning_rate_per": per, "warmup_steps": "200"}
    rate = make_rate(1000, batch_size=4096, learning_rate_schedule=name, **keys)
    expected = peak if name != "rsqrt" else peak / math.sqrt(201)
    np.testing.assert_allclose(rate(200), expected, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_float32_scalars_and_tracing_changes_nothing(name):
    rate = make_rate(STEPS, batch_size=1024, **RECIPE, learning_rate_schedule=name)
    for step in (0, 3000, 50_000, STEPS - 1):
        plain, traced = rate(step), jax.jit(rate)(step)
        assert plain.dtype == traced.dtype == jnp.float32
        assert plain.shape == traced.shape == ()
        np.testing.assert_allclose(plain, traced, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("train_steps", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [{"warmup_epochs": 60}, {"warmup_steps": "6"}])
def test_a_run_of_a_few_steps_learns(name, train_steps, warmup):
    """A run that is shorter than `warmup_steps` ends in the warm-up."""
    rate = make_rate(train_steps, learning_rate_schedule=name, **{**RECIPE, **warmup})
    rates = rates_of(rate, range(train_steps + 1))
    assert np.all(np.isfinite(rates)) and rates.max() > 0
    if "warmup_epochs" in warmup:  # the warm-up ends before the last step
        assert rates[:-1].max() > 0


@pytest.mark.device
@pytest.mark.parametrize(
    ("warmup", "peak"), [(0, 8.0), (1, 8.0), (2, 8 / math.sqrt(2)), (4, 4.0), (25, 1.6)]
)
def test_rsqrt_closed_form(warmup, peak):
    """It counts steps from 1; `base_learning_rate` is its rate without a warm-up."""
    keys = {"base_learning_rate": 8.0, "warmup_steps": str(warmup)}
    rate = make_rate(1000, learning_rate_schedule="rsqrt", **keys)
    counts = np.arange(1, 1001)
    falling = 8 / np.sqrt(counts)
    expected = np.where(counts < warmup, peak * counts / max(warmup, 1), falling)
    assert_close(rates_of(rate, counts - 1), expected, 1e-5)
    assert (rate.peak, rate.warmup_steps) == (pytest.approx(peak), warmup)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"warmup_epochs": 90}, "config.warmup_epochs"),  # of 90
        ({"learning_rate_decay_factors": (0.1, 0.2)}, "config.learning_rate_decay_factors"),
        ({"learning_rate_decay_factors": ()}, "config.learning_rate_decay_factors"),
        ({"learning_rate_decay_epochs": (60, 30)}, "config.learning_rate_decay_epochs"),
        ({"warmup_steps": "1e9"}, "config.warmup_steps"),  # of 90
        ({"learning_rate_decay_steps": "5, 0"}, "learning_rate_decay_steps"),
        ({"learning_rate_schedule": "polynomial", "decay_steps": "-1"}, "decay_steps"),
    ],
)
def test_values_that_cannot_work(changes, key):
    with pytest.raises(ConfigError, match=f"^{key}=.*\\Z"):
        make_rate(**{"train_steps": 90, **RECIPE, **changes})
