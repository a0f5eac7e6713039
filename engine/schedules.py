"""Learning-rate schedules.

A schedule maps the number of updates already done to the rate of the next one: the first update
has the rate of step 0, the last of a run that of train_steps - 1.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from errors import ConfigError

# Step (an int or i32[], traced or not) -> rate f32[].
LearningRate = Callable[[jax.typing.ArrayLike], jax.Array]


def step_schedule(
    peak: float, warmup_steps: int, boundaries: Sequence[int], factor: float = 0.1
) -> LearningRate:
    """Linear warm-up from 0, then constant, multiplied by `factor` at each boundary.

    The warm-up is that of Goyal et al. 2017 (arXiv:1706.02677, section 2.2), but begins at 0 as
    in the TensorFlow tutorials for TPUs, not at the rate for one device.

    Args:
      peak: rate at the end of the warm-up.
      warmup_steps: length of the warm-up; 0 for none.
      boundaries: steps from which on the rate is multiplied once more, in any order. One that
        is given twice counts twice: in a run of a few steps, several may fall together.
      factor: what the rate is multiplied by.
    """
    # optax takes {boundary: factor} and would count a repeated boundary once.
    repeats = collections.Counter(boundaries)
    decay = optax.piecewise_constant_schedule(
        1.0, {step: factor**count for step, count in repeats.items()}
    )
    # optax reads a warm-up of 0 steps as "stay at the initial value", which here is 0.
    warmup = (
        optax.linear_schedule(0.0, peak, warmup_steps)
        if warmup_steps > 0
        else optax.constant_schedule(peak)
    )
    return lambda step: jnp.asarray(warmup(step) * decay(step), jnp.float32)


def cosine_schedule(
    peak: float, warmup_steps: int, total_steps: int, end: float = 0.0
) -> LearningRate:
    """Linear warm-up from 0, then half a cosine from `peak` down to `end`.

    Loshchilov & Hutter 2016 (arXiv:1608.03983, equation 5), without restarts.

    Args:
      peak: rate at the end of the warm-up.
      warmup_steps: length of the warm-up; 0 for none.
      total_steps: the step, counted from the start of the warm-up, at which `end` is reached;
        the rate stays there.
      end: the final rate, not a fraction of `peak`.

    Raises:
      ConfigError: the warm-up leaves no step for the cosine.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ConfigError(
            f"warmup_steps={warmup_steps}: must be at least 0 and less than the total of"
            f" {total_steps} steps"
        )
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak,
        warmup_steps=warmup_steps,
        decay_steps=total_steps,
        end_value=end,
    )
    return lambda step: jnp.asarray(schedule(step), jnp.float32)


def polynomial_schedule(
    peak: float, warmup_steps: float, decay_steps: float, end: float, power: float
) -> LearningRate:
    """Linear warm-up from 0, then a power of the time that is left, from `peak` down to `end`.

    MLPerf's rule for LARS: with W = warmup_steps and D = decay_steps, step t has the rate

        peak * t / W                                              for t <= W, if W > 0
        end + (peak - end) * (1 - min(t - W, D) / D) ** power     else

    Args:
      peak: rate at the end of the warm-up.
      warmup_steps: W, which need not be whole; 0 for none.
      decay_steps: D, counted from the end of the warm-up; need not be whole. The rate stays at
        `end` from then on.
      end: the final rate, not a fraction of `peak`.
      power: 2 in MLPerf.

    Raises:
      ConfigError: there is nothing to decay over, or no power to do it with.
    """
    if not (warmup_steps >= 0 and decay_steps > 0 and power > 0):
        raise ConfigError(
            f"warmup_steps={warmup_steps}, decay_steps={decay_steps}, polynomial_power={power}:"
            " the first must be at least 0, the others more than 0"
        )

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)  # exact up to 2**24 steps
        # So that it is exactly 0 at the end, however XLA divides.
        left = jnp.clip(warmup_steps + decay_steps - step, 0.0, decay_steps) / decay_steps
        decayed = end + (peak - end) * left**power
        if not warmup_steps:
            return decayed
        return jnp.where(step <= warmup_steps, peak * step / warmup_steps, decayed)

    return rate


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A recipe for the learning rate, for any batch size and any length of training.

    Attributes:
      name: 'step', 'cosine' or 'polynomial'.
      base: peak rate per `per` examples in a batch.
      warmup_epochs: end of the linear warm-up.
      decay_epochs: where 'step' multiplies the rate by 0.1; the others do not use it.
      schedule_epochs: the length of training that all other epochs here refer to. A run of
        another length stretches them in proportion: with 90, an entry of 30 is a third of the run.
      per: the examples that `base` is for; 0: `base` is the peak of any batch size.
      polynomial_epochs: how long 'polynomial' decays after the warm-up; 0: to the end of the run.
      end: the final rate of 'polynomial'.
      power: that of 'polynomial'.
    """

    name: str
    base: float
    warmup_epochs: float
    decay_epochs: Sequence[float]
    schedule_epochs: float
    per: int = 256
    polynomial_epochs: float = 0.0
    end: float = 1e-4
    power: float = 2.0


_SCHEDULES = ("cosine", "polynomial", "step")


@dataclasses.dataclass(frozen=True)
class Rate:
    """The learning rate of one run: a `LearningRate`, and the numbers that made it.

    Attributes:
      schedule: what a call of this gives.
      peak: the highest rate.
      warmup_steps: until it is reached; whole but for 'polynomial'.
      decay_steps: from then to the last rate of 'polynomial'; 0 with the others.
    """

    schedule: LearningRate
    peak: float
    warmup_steps: float
    decay_steps: float = 0.0

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        return self.schedule(step)


def learning_rate(schedule: Schedule, *, batch_size: int, train_steps: int) -> Rate:
    """Makes the learning rate of one run from a recipe.

    The peak is base * batch_size / per, the linear scaling rule of Goyal et al. 2017
    (arXiv:1706.02677, section 2.1). Epoch e of the recipe is step
    round(train_steps * e / schedule_epochs), so the schedule always spans the whole run. The
    warm-up of 'polynomial' is not rounded, and by default it decays over the T - W + 1 steps
    that are left, both as in MLPerf.

    Args:
      schedule: the recipe.
      batch_size: examples per step over all devices.
      train_steps: steps of the whole run, of which a resumed run is a part.

    Raises:
      ConfigError: unknown name; or a length that is not positive; or a warm-up that does not end
        within the run; or a number of examples below 0.
    """
    if schedule.name not in _SCHEDULES:
        known = ", ".join(map(repr, _SCHEDULES))
        raise ConfigError(f"schedule={schedule.name!r}: unknown; known are {known}")
    if batch_size < 1 or train_steps < 1:
        raise ConfigError(
            f"batch_size={batch_size}, train_steps={train_steps}: both must be at least 1"
        )
    if not 0 <= schedule.warmup_epochs < schedule.schedule_epochs:
        raise ConfigError(
            f"warmup_epochs={schedule.warmup_epochs}: must be at least 0 and less than"
            f" schedule_epochs={schedule.schedule_epochs}"
        )
    if schedule.per < 0:
        raise ConfigError(f"learning_rate_per={schedule.per}: must be a number of images, or 0")

    def to_step(epoch: float) -> int:
        return round(train_steps * epoch / schedule.schedule_epochs)

    peak = schedule.base * (batch_size / schedule.per if schedule.per else 1)
    if schedule.name == "polynomial":
        exact = train_steps * schedule.warmup_epochs / schedule.schedule_epochs
        exact = min(exact, train_steps - 1)
        decay = to_step(schedule.polynomial_epochs) or train_steps - exact + 1
        rates = polynomial_schedule(peak, exact, decay, schedule.end, schedule.power)
        return Rate(rates, peak, exact, decay)
    # Rounding must not let the warm-up of a run of a few steps take all of them.
    warmup_steps = min(to_step(schedule.warmup_epochs), train_steps - 1)
    if schedule.name == "cosine":
        return Rate(cosine_schedule(peak, warmup_steps, train_steps), peak, warmup_steps)
    boundaries = [to_step(epoch) for epoch in schedule.decay_epochs]
    return Rate(step_schedule(peak, warmup_steps, boundaries), peak, warmup_steps)
