"""Adam against the formulas of the paper, in NumPy and float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from engine import optim, schedules
from errors import ConfigError


def test_adam_is_the_papers():
    """Algorithm 1 of arXiv:1412.6980 in float64, with gradients so small that epsilon counts."""
    b1, b2, epsilon = 0.8, 0.95, 1e-3
    rate = schedules.polynomial_schedule(0.1, 10, 100, 0.01, 1.0)
    numbers = {"adam_beta1": b1, "adam_beta2": b2, "adam_epsilon": epsilon}
    optimizer = optim.make_optimizer("adam", rate, **numbers)
    draw = np.random.default_rng(0)
    w = draw.normal(size=5)
    params: Any = {"w": jnp.asarray(w, jnp.float32)}
    update: Any = None
    state, m, v = optimizer.init(params), np.zeros(5), np.zeros(5)
    for t in range(1, 60):
        g = draw.normal(size=5) * 10.0 ** draw.integers(-5, 2, 5)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        step = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + epsilon)
        w = w - float(rate(t - 1)) * step
        given: Any = {"w": jnp.asarray(g, jnp.float32)}
        update, state = optimizer.update(given, state, params)
        params = {"w": params["w"] + np.asarray(update["w"])}
    np.testing.assert_allclose(params["w"], w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("numbers", [(1.0, 0.9, 1e-8), (0.9, -0.1, 1e-8), (0.9, 0.9, 0.0)])
def test_numbers_that_adam_cannot_have(numbers):
    names = ("adam_beta1", "adam_beta2", "adam_epsilon")
    with pytest.raises(ConfigError, match=f"adam_beta1={numbers[0]}, "):
        optim.make_optimizer("adam", 0.1, **dict(zip(names, numbers, strict=True)))
