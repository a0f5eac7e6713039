"""The learning rates of GNMT's recipes, against the formulas of those who published them."""

from typing import Any

import jax
import numpy as np
import pytest

from common.keys import read_config
from configs import mlperf_gnmt
from engine import schedules
from engine.cadence import to_steps


def reference(t, rate, warmup, remain, interval):
    """MLPerf's reference: the first halving is at `remain`."""
    halvings = np.clip((t - remain) // interval + 1, 0, 4)
    return rate * 0.01 ** np.maximum(0, (warmup - t) / warmup) * 0.5**halvings


def google(t, rate, warmup, remain, interval):
    """Google's entries: a staircase that begins at `remain`, so that one interval is flat."""
    halvings = np.clip((t - remain) // interval, 0, 4)
    return rate * 0.01 ** np.maximum(0, (warmup - t) / warmup) * 0.5**halvings


# By recipe: formula, pairs in an epoch, steps, rate, warm-up, remaining steps, interval.
CASES = {
    "v0.5": (google, 3_534_981, 3452, 0.002, 200, 2301, 287.6),  # "luong234": 2/3, then quarters
    "v0.6-4096": (google, 3_442_299, 6723, 0.0035, 150, 4000, 300),
    "v0.7-2048": (reference, 3_442_299, 6723, 0.002, 200, 4482, 560.2),
    "v0.7-4096": (google, 3_442_299, 6723, 0.003, 150, 3000, 300),
    "v0.7-8192": (google, 3_442_299, 4202, 0.0045, 150, 1924, 241),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rate_is_the_published_one(name):
    formula, pairs, steps, peak, warmup, remain, interval = CASES[name]
    config: Any = mlperf_gnmt.get_config(name)
    sizes = {"batch_size": config.train_batch_size, "num_examples": pairs}
    assert to_steps(config.train_steps, **sizes, name="train_steps") == steps
    rate = schedules.make(read_config(schedules.Schedule, config), **sizes, train_steps=steps)
    t = np.arange(steps)
    expected = formula(t, peak, warmup, remain, interval)
    near = np.min(abs(t[:, None] - remain - interval * np.arange(5)), axis=1) < 1.5
    assert near.sum() <= 15  # boundaries are rounded to steps in several ways
    computed = np.asarray(jax.jit(jax.vmap(rate))(t))
    np.testing.assert_allclose(computed[~near], expected[~near], rtol=3e-5)


def test_google_clips_the_sum_over_a_cores_pairs():
    """5.0 for the sum is 5.0 / 256 for the mean over the 256 pairs of a v3-8's core."""
    config = mlperf_gnmt.get_config("v0.5")
    assert config.gradient_clip_per_device and config.gradient_clip_norm == 5.0 / 256
    config = mlperf_gnmt.get_config("v0.7-2048")
    assert not config.gradient_clip_per_device and config.gradient_clip_norm == 5.0
