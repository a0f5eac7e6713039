"""Adam against the formulas of the paper, in NumPy and float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.engine.settings import make_optimizer, make_rate


def test_adam_is_the_papers():
    """Algorithm 1 of arXiv:1412.6980 in float64, with gradients so small that epsilon counts."""
    b1, b2, epsilon = 0.8, 0.95, 1e-3
    schedule: Any = {"base_learning_rate": 0.1, "end_learning_rate": 0.01, "polynomial_power": 1.0}
    rate = make_rate(109, learning_rate_schedule="polynomial", warmup_steps="10", **schedule)
    keys = {"adam_beta1": b1, "adam_beta2": b2, "adam_epsilon": epsilon}
    optimizer = make_optimizer(rate, optimizer="adam", **keys)
    rng = np.random.default_rng(0)
    w = rng.normal(size=5)
    params: Any = {"w": jnp.asarray(w, jnp.float32)}
    update: Any = None
    state, m, v = optimizer.init(params), np.zeros(5), np.zeros(5)
    for t in range(1, 60):
        g = rng.normal(size=5) * 10.0 ** rng.integers(-5, 2, 5)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        step = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + epsilon)
        r = 0.1 * (t - 1) / 10 if t <= 11 else 0.01 + 0.09 * (111 - t) / 100
        w = w - r * step
        gradient: Any = {"w": jnp.asarray(g, jnp.float32)}
        update, state = optimizer.update(gradient, state, params)
        params = {"w": params["w"] + np.asarray(update["w"])}
    np.testing.assert_allclose(params["w"], w, rtol=1e-4, atol=1e-6)
