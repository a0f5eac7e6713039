"""The learning rates of the six benchmarks, each as config keys and as its published formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.settings import make_rate


def staircase(t, boundaries, factor):
    return factor ** sum((t >= np.array(boundary)).astype(float) for boundary in boundaries)


def noam(t, base, width, warmup):
    """Section 5.3 of arXiv:1706.03762 with a factor before it; its steps count from 1."""
    return base * width**-0.5 * np.minimum((t + 1) ** -0.5, (t + 1) * warmup**-1.5)


# Batch, examples in an epoch, steps; keys; formula of step t.
CASES = {
    "resnet50, Google v0.5": (
        (1024, 1_281_167, 112_603),
        {"learning_rate_per": 256, "warmup_epochs": 5, "learning_rate_decay_epochs": (30, 60, 80)},
        # 5, 30, 60 and 80 of 90 epochs.
        lambda t: 0.4 * np.minimum(1, t / 6256) * staircase(t, (37_534, 75_069, 100_092), 0.1),
    ),
    "resnet50, LARS at 4096": (
        (4096, 1_281_167, 12_824),
        {"learning_rate_schedule": "polynomial", "base_learning_rate": 10.0, "schedule_epochs": 41}
        | {"warmup_epochs": 5, "decay_steps": "11000", "end_learning_rate": 1e-4},
        lambda t: np.where(
            t <= 12_824 * 5 / 41,
            10 * t / (12_824 * 5 / 41),
            1e-4 + (10 - 1e-4) * (1 - np.minimum((t - 12_824 * 5 / 41) / 11_000, 1)) ** 2,
        ),
    ),
    # Boundaries of 160,000 and 200,000 batches of 32, epochs of 120,000.
    "ssd, Google v0.5": (
        (1024, 120_000, 7500),
        {"base_learning_rate": 2.5e-3, "learning_rate_per": 32, "schedule_epochs": 64}
        | {"warmup_epochs": 3.0, "learning_rate_decay_epochs": (160 / 3.75, 200 / 3.75)},
        lambda t: 0.08 * np.minimum(1, t / 352) * staircase(t, (5000, 6250), 0.1),
    ),
    "ssd, Google v0.7 at 1024": (
        (1024, 117_266, 6872),
        {"base_learning_rate": 3.1e-3, "learning_rate_per": 32, "schedule_epochs": 60}
        | {"warmup_steps": "577", "learning_rate_decay_epochs": (40, 50)},
        lambda t: 0.0992 * np.minimum(1, t / 577) * staircase(t, (4581, 5727), 0.1),
    ),
    "mask_rcnn, Google v0.5": (
        (16, 118_287, 90_000),
        {"base_learning_rate": 0.02, "learning_rate_per": 16, "warmup_from": 0.0067}
        | {"warmup_steps": "500", "learning_rate_decay_steps": "60000, 80000"},
        lambda t: (
            np.where(t < 500, 0.0067 + (0.02 - 0.0067) * t / 500, 0.02)
            * staircase(t, (60_000, 80_000), 0.1)
        ),
    ),
    "mask_rcnn, Google v0.7 at 128": (
        (128, 118_287, 13_862),
        {"base_learning_rate": 0.02, "learning_rate_per": 16}
        | {"warmup_steps": "1000", "learning_rate_decay_steps": "9750, 13000"},
        lambda t: 0.16 * np.minimum(1, t / 1000) * staircase(t, (9750, 13_000), 0.1),
    ),
    # Constant for two thirds of the run, then halved four times, at once and at equal distances.
    "gnmt, the reference at 2048": (
        (2048, 3_534_981, 3452),
        {"base_learning_rate": 2e-3, "warmup_steps": "200", "warmup_shape": "exponential"}
        | {"schedule_epochs": 12, "learning_rate_decay_epochs": (8, 9, 10, 11)}
        | {"learning_rate_decay_factors": (0.5,)},
        lambda t: (
            2e-3
            * 0.01 ** np.maximum(0, (200 - t) / 200)
            * staircase(t, (2301, 2589, 2877, 3164), 0.5)
        ),
    ),
    # remain_steps 4000, decay_interval 300.
    "gnmt, the reference's rule at 4096": (
        (4096, 3_442_299, 6723),
        {"base_learning_rate": 3.5e-3, "warmup_steps": "150", "warmup_shape": "exponential"}
        | {"learning_rate_decay_steps": "4000, 4300, 4600, 4900"}
        | {"learning_rate_decay_factors": (0.5,)},
        lambda t: (
            3.5e-3
            * 0.01 ** np.maximum(0, (150 - t) / 150)
            * 0.5 ** np.clip((t - 4000) // 300 + 1, 0, 4)
        ),
    ),
    "transformer, Google v0.6": (
        (512, 566_340, 4348),
        {"learning_rate_schedule": "rsqrt", "base_learning_rate": 2.0 * 1024**-0.5}
        | {"warmup_steps": "1000"},
        lambda t: noam(t, 2.0, 1024, 1000),
    ),
    "transformer, Google v0.7": (
        (2048, 566_340, 1382),
        {"learning_rate_schedule": "rsqrt", "base_learning_rate": 3.309 * 1024**-0.5}
        | {"warmup_steps": "664"},
        lambda t: noam(t, 3.309, 1024, 664),
    ),
    "ncf": (
        (2048, 99_308_850, 969_813),
        {"base_learning_rate": 0.0005},
        lambda t: np.full(t.shape, 0.0005),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_schedules_of_the_six_benchmarks(name):
    (batch_size, num_examples, train_steps), keys, formula = CASES[name]
    sizes = {"batch_size": batch_size, "num_examples": num_examples}
    rate = make_rate(train_steps, **sizes, **keys)
    steps = np.arange(min(train_steps, 120_000))
    computed = np.asarray(jax.jit(jax.vmap(rate))(jnp.asarray(steps)))
    expected = formula(steps.astype(float))
    np.testing.assert_allclose(computed, expected, rtol=3e-5, atol=1e-6 * rate.peak)
    np.testing.assert_allclose(rate.peak, expected.max(), rtol=1e-4)
