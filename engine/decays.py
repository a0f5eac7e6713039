"""Further learning-rate schedules; `engine.schedules.make` has their formulas."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax

from engine.cadence import to_steps
from engine.schedules import Course, Rate, rising


def cosine(course: Course) -> Rate:
    """A warm-up, then half a period of the cosine."""
    warmup = round(course.warmup)
    rise = rising(course.settings, course.peak, warmup)
    fall = optax.cosine_decay_schedule(course.peak, max(1, course.train_steps - warmup))
    return Rate(optax.join_schedules([rise, fall], [warmup]), course.peak, warmup)


def polynomial(course: Course) -> Rate:
    """MLPerf's rule for LARS; the warm-up is not rounded to a step."""
    settings, peak, warmup, sizes = course.settings, course.peak, course.warmup, course.sizes
    decay = to_steps(settings.decay_steps, **sizes, name="decay_steps", allow_off=True)
    decay = round(course.stretched(decay * sizes["batch_size"] / sizes["num_examples"]))
    decay = min(decay, 1 << 30) or max(1, course.train_steps - warmup + 1)
    first, end = settings.warmup_from, settings.end_learning_rate

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)  # exact up to 2**24 steps
        # This form is exactly 0 at the end, however XLA divides.
        left = jnp.clip(warmup + decay - step, 0.0, decay) / decay
        falling = end + (peak - end) * left**settings.polynomial_power
        if not warmup:
            return falling
        # The last bit of optax's linear schedule differs, and old runs must resume exactly.
        rise = first + (peak - first) * step / warmup
        if settings.warmup_shape == "exponential":
            rise = rising(settings, peak, warmup)(step)
        return jnp.where(step <= warmup, rise, falling)

    return Rate(rate, peak, warmup, decay)


def rsqrt(course: Course) -> Rate:
    """The Transformer's rule; the warm-up counts steps from 1."""
    warmup, base = round(course.warmup), course.peak
    peak = base / math.sqrt(max(warmup, 1))
    rise = rising(course.settings, peak, warmup)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(step, jnp.float32) + 1
        return jnp.where(count < warmup, rise(count), base / jnp.sqrt(count))

    return Rate(rate, peak, warmup)
