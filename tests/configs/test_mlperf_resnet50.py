"""ResNet's MLPerf recipes, number by number, against a table of their own; and what is refused."""

import contextlib
import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.errors import DeviceError
from configs import mlperf_resnet50 as recipes
from engine import sharding
from engine.cadence import Every
from tests.conftest import make_programs, plan_of

ROOT = pathlib.Path(__file__).parents[2]
IMAGES = 1_281_167

# Copied from the tables of reference convergence points of mlperf-logging's ResNet, rulesets 1.0.0
# to 4.0.0: batch, mean and least epochs, base rate, warm-up epochs, momentum, weight decay, decay
# steps, BatchNorm span. "-": not published.
RCPS = """
 1632 35.00 33.80  7.4    2 .9      5e-5   27476 204
 2048 38.38 -      8.5    5 .9      2e-4   22530  64
 3264 35.15 34.31 10.5    2 .9      5e-5   14523 204
 4096 39.88 38.63 10      5 .9      2e-4   13137  64
 8192 41.88 40.63 17      5 .9      2e-4    6095  64
13056 45.50 44.68 12.8    9 .9      2.5e-5  4710 204
32768 56.00 55.44 21.2   16 .94     2.5e-5  2267 128
49152 68.00 67.22 19.405 24 .951807 1e-4    1846 256
58880 80.00 78.97 23.246 29 .951807 1e-4    1785 230
64480 86.12 84.95 26     31 .951807 1e-4    1788 155
65536 84.50 83.36 24.699 31 .951807 1e-4    1133 128
67840 85.85 85.18 24.699 31 .951807 1e-4    1133 424
"""
ROWS = [line.split() for line in RCPS.strip().splitlines()]
NAMES = [*(row[0] for row in ROWS), "v0.5", "v0.7-4096", "v0.7-65536"]


def load(name) -> Any:
    return recipes.get_config(name).lock()


@functools.cache
def rates(name):
    """(rates of all steps, f32[T]; the plan)."""
    plan = plan_of(load(name), IMAGES)
    steps = jnp.arange(plan.total_steps)
    return np.asarray(jax.jit(jax.vmap(plan.learning_rate))(steps)), plan


def formula(steps, peak, warmup, decay):
    """The rules' learning rate, float64; `warmup` and `decay` in steps."""
    left = 1 - np.minimum(steps - warmup, decay) / decay
    return np.where(steps <= warmup, peak * steps / warmup, 1e-4 + (peak - 1e-4) * left**2)


def test_all_points_are_there_and_no_other():
    assert [str(batch) for batch in recipes.POINTS] == [row[0] for row in ROWS]
    assert [*recipes.ENTRIES] == NAMES[len(ROWS) :]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_point_is_what_is_published(row):
    batch, mean, least, base, warmup, momentum, decay, decay_steps, span = row
    epochs = float(mean), 0 if least == "-" else float(least)
    assert recipes.POINTS[int(batch)][:2] == epochs
    config = load(batch)
    for key, value in {
        "train_batch_size": int(batch),
        "base_learning_rate": float(base),
        "learning_rate_per": 0,
        "learning_rate_schedule": "polynomial",
        "end_learning_rate": 1e-4,
        "polynomial_power": 2.0,
        "warmup_epochs": float(warmup),
        "optimizer": "lars",
        "lars_epsilon": 0.0,
        "lars_trust_coefficient": 0.001,
        "momentum": float(momentum),
        "weight_decay": float(decay),
        "label_smoothing": 0.1,
        "bn_span": f"{span}/{batch}",
    }.items():
        assert config[key] == value, key
    computed, plan = rates(batch)
    steps = np.arange(len(computed))
    expected = formula(steps, float(base), int(warmup) * IMAGES / int(batch), 1.0)
    rising = expected > 1e-3
    rising[np.argmax(expected) + 1 :] = False
    # A run is a whole number of steps, so its warm-up is up to a fifth of a step longer or shorter.
    np.testing.assert_allclose(computed[rising], expected[rising], rtol=4e-4)
    exact = plan.total_steps * int(warmup) / config.schedule_epochs
    assert abs(exact - int(warmup) * IMAGES / int(batch)) < 0.2
    expected = formula(steps, float(base), exact, int(decay_steps))
    np.testing.assert_allclose(computed, expected, rtol=2e-5, atol=2e-7 * float(base))
    wrong = formula(steps, float(base), exact, int(decay_steps) + 1)
    assert np.abs(computed - wrong).max() > 1e-5 * float(base)  # one step more is seen


def test_v05_is_the_sgd_of_2018():
    config = load("v0.5")
    computed, plan = rates("v0.5")
    assert plan.total_steps == 112_603
    assert (config.train_batch_size, config.target, config.optimizer) == (1024, 0.749, "sgd")
    assert (config.momentum, config.nesterov, config.weight_decay) == (0.9, True, 1e-4)
    assert (config.label_smoothing, config.bn_span, config.eval_offset) == (0.0, 1, "")
    expected = {3128: 0.2, 6256: 0.4, 37_534: 0.04, 75_069: 0.004, 100_092: 0.0004}
    np.testing.assert_allclose(computed[list(expected)], list(expected.values()), rtol=1e-5)


def test_the_jax_entry_has_its_fractions_of_steps():
    """Its epoch is 19.75 steps: W = 33 * 19.75 = 651.75 and D = 92 * 19.75 - W + 1 = 1166.25."""
    config = load("v0.7-65536")
    computed, plan = rates("v0.7-65536")
    assert plan.total_steps == 1817
    assert (config.momentum, config.weight_decay) == (0.9537213777059405, 1e-4)
    expected = formula(np.arange(1817), 23.080977304670448, 651.75, 1166.25)
    np.testing.assert_allclose(computed, expected, rtol=1e-5, atol=1e-6)
    assert evaluations(config)[-2:] == [1738, 1817]


def test_the_cloud_entry_is_not_the_point_of_its_batch():
    config, point = load("v0.7-4096"), load("4096")
    computed, _ = rates("v0.7-4096")
    assert (config.base_learning_rate, config.warmup_epochs) == (13.0, 2.0)
    assert (config.bn_span, point.bn_span) == ("128/4096", "64/4096")
    expected = formula(np.arange(len(computed)), 13.0, len(computed) * 2 / 47, 12169)
    np.testing.assert_allclose(computed, expected, rtol=2e-5, atol=2e-6)


def evaluations(config):
    """Steps at which a run to the end evaluates, on the cadence."""
    sizes = {"batch_size": config.train_batch_size, "num_examples": IMAGES}
    every = Every.parse(config.steps_per_eval, **sizes, name="steps_per_eval")
    every = every.since(config.eval_offset, **sizes, name="eval_offset")
    total, step, steps = plan_of(config, IMAGES).total_steps, 0, []
    while (step := every.next_after(step) or 0) <= total:
        steps.append(step)
    return steps


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_is_by_the_rules_and_there_is_time_for_it(name):
    config = load(name)
    computed, plan = rates(name)
    at = np.array(evaluations(config)) * config.train_batch_size / IMAGES
    np.testing.assert_allclose(np.diff(at), 4, atol=0.06)  # an epoch has 19 to 1251 steps
    assert at[0] < 4.06  # an offset of 0 to 3 epochs
    assert config.stop_at_target and config.target == (0.749 if name == "v0.5" else 0.759)
    if name in recipes.ENTRIES:
        return
    assert evaluations(config)[-1] == plan.total_steps
    mean = recipes.POINTS[int(name)][0]
    assert -0.06 < at[at > mean - 0.06].min() - mean < 1  # just after the expected epoch
    # At least one evaluation where the schedule has ended.
    assert computed[-1] == np.float32(1e-4)
    assert np.sum(computed[np.array(evaluations(config)) - 1] == np.float32(1e-4)) >= 1


# --- Spans of BatchNorm in images.


def test_a_span_of_another_batch_is_refused(tmp_path):
    config = recipes.get_config("4096")
    config.train_batch_size = 2048
    with pytest.raises(DeviceError, match="^config.bn_span=64/4096 is a part of 4096 images, but "):
        make_programs(config, str(tmp_path))
    config = recipes.get_config("4096")
    config.gradient_accumulation_steps = 8
    config.bn_span = "64/512"
    assert make_programs(config, str(tmp_path)).mesh.shape["groups"] == 8


# --- Refusals, and the numbers in the documentation.


@pytest.mark.parametrize("name", ["", "04096"])
def test_another_batch_is_refused(name):
    with pytest.raises(ValueError) as caught:
        recipes.get_config(name)
    assert "NAME is one of 1632, 2048, " in str(caught.value) and "\n" not in str(caught.value)


def device_counts(name):
    """The numbers of devices among which batch and BatchNorm span of a recipe can be divided."""
    config, counts = load(name), []
    for count in range(1, 8193):
        with contextlib.suppress(DeviceError):
            sharding.group_size(config.bn_span, count)
            counts += [count] if config.train_batch_size % count == 0 else []
    return counts


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_has_the_numbers(name):
    text = (ROOT / "docs" / "mlperf.md").read_text()
    rows = re.findall(rf"^\| `:{re.escape(name)}` \|(.*)\|$", text, re.MULTILINE)
    assert len(rows) == 1
    cells = [cell.strip() for cell in rows[0].split("|")]
    if name in recipes.ENTRIES:
        first, last = recipes.ENTRIES[name][2:]
        epochs = [f"reached at {first} to {last}" if last > first else f"reached at {first}", "-"]
    else:
        mean, least = recipes.POINTS[int(name)][:2]
        epochs = [f"{mean:.2f}", f"{least:.2f}" if least else "-"]
    multiple = f"multiples of {device_counts(name)[0]}" if name != "v0.5" else "any"
    assert cells == [*epochs, multiple]
