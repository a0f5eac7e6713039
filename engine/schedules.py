"""Makes learning-rate schedules: functions from the number of steps done to the next step's rate.

The first step of a run has the rate of step 0, and the last step has the rate of train_steps - 1.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax

from common.errors import ConfigError
from common.keys import Count, NotNegative, Positive
from engine.cadence import list_to_steps, to_steps
from engine.optim import Rate

_LONGEST_WARMUP = 1_000_000  # steps; a trial of few steps may end long before its warm-up does


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The config keys of the learning rate; configs/_loop.py has their defaults.

    Epoch e is step train_steps * e / schedule_epochs, so a run of another length stretches all
    epochs in proportion: with schedule_epochs=90, an entry of 30 is a third of the run. The steps
    of `warmup_steps` and `learning_rate_decay_steps` are not stretched.
    """

    learning_rate_schedule: Literal["step", "cosine", "polynomial", "rsqrt"]  # see `make`
    # The peak P for a batch of `learning_rate_per` examples. It grows with the batch: the linear
    # scaling rule of Goyal et al. 2017 (arXiv:1706.02677, section 2.1).
    base_learning_rate: NotNegative
    learning_rate_per: Count  # 0: the peak does not depend on the batch
    # The length of training that all epochs here refer to.
    schedule_epochs: Annotated[float, "[1e-3, 1e6]"]
    warmup_epochs: NotNegative  # the end W of the warm-up
    warmup_steps: str  # a duration that replaces `warmup_epochs`; '' for none
    warmup_shape: Literal["linear", "exponential"]
    warmup_from: NotNegative  # the first rate F of the warm-up; 'exponential' replaces 0 by P / 100
    # The boundaries of 'step'.
    learning_rate_decay_epochs: Annotated[Sequence[NotNegative], "[0, 1000] rising"]
    learning_rate_decay_steps: str  # a list of durations that replaces these epochs; '' for none
    learning_rate_decay_factors: Sequence[NotNegative]  # one, or one for each boundary of 'step'
    # How long 'polynomial' decays after the warm-up: a duration that is converted to epochs and
    # stretched like them; '' is to the end of the run.
    decay_steps: str
    end_learning_rate: NotNegative  # the final rate E of 'polynomial'
    polynomial_power: Positive  # the power p of 'polynomial'


def make(settings: Schedule, *, batch_size: int, train_steps: int, num_examples: int) -> Rate:
    """Makes the learning rate of one run.

    With the peak P, a warm-up of W steps and T = train_steps, step t of the warm-up has the rate

        'linear'        F + (P - F) * t / W
        'exponential'   P * (F / P) ** ((W - t) / W)

    and a step after it

        'step'          P * the factors of the boundaries <= t
        'cosine'        P * (1 + cos(pi * (t - W) / (T - W))) / 2
        'polynomial'    E + (P - E) * (1 - min(t - W, D) / D) ** p
        'rsqrt'         P * sqrt(W / (t + 1)), where P = base / sqrt(W)

    'step' multiplies the rates of the warm-up as well. 'cosine' is equation 5 of Loshchilov &
    Hutter 2016 (arXiv:1608.03983) without restarts. 'polynomial' is MLPerf's rule for LARS: W is
    not rounded to a step, and D is T - W + 1 unless `decay_steps` sets it. 'rsqrt' is the
    Transformer's (Vaswani et al. 2017, arXiv:1706.03762, section 5.3), whose base contains
    width ** -0.5; its warm-up counts t from 1.

    `batch_size` counts the examples of a step over all devices, `train_steps` the steps of the
    complete run, also where this process resumes it, and `num_examples` the examples of an epoch.
    """
    sizes: Any = {"batch_size": batch_size, "num_examples": num_examples}
    # A mistake in a duration is refused even where the schedule does not use it.
    warmup, _ = (
        to_steps(getattr(settings, key), **sizes, name=key, allow_off=True)
        for key in ("warmup_steps", "decay_steps")
    )
    if settings.warmup_epochs >= settings.schedule_epochs:
        raise ConfigError(
            f"config.warmup_epochs={settings.warmup_epochs}: must be less than "
            f"config.schedule_epochs={settings.schedule_epochs}"
        )
    if warmup > max(_LONGEST_WARMUP, train_steps):
        raise ConfigError(
            f"config.warmup_steps={settings.warmup_steps!r}: a run of {train_steps:,} steps would "
            f"end at a rate near 0; use at most '{_LONGEST_WARMUP} steps', or '' for none"
        )
    if durations := settings.learning_rate_decay_steps:
        list_to_steps(durations, **sizes, name="learning_rate_decay_steps")
    peak = settings.base_learning_rate
    if settings.learning_rate_per:
        peak *= batch_size / settings.learning_rate_per
    course = Course(settings, peak, train_steps, sizes)
    return _SHAPES[settings.learning_rate_schedule](course)


@dataclasses.dataclass(frozen=True)
class Course:
    """What the shape of a schedule is made from."""

    settings: Schedule
    peak: float  # the rate P
    train_steps: int  # of the complete run
    sizes: Any  # {"batch_size", "num_examples"}, for `engine.cadence`

    def stretched(self, epoch: float) -> float:
        """The step of an epoch of the schedule, not rounded."""
        return self.train_steps * epoch / self.settings.schedule_epochs

    @property
    def warmup(self) -> float:
        """The end W of the warm-up in steps, not rounded."""
        if steps := self.settings.warmup_steps:
            return to_steps(steps, **self.sizes, name="warmup_steps", allow_off=True)
        # Rounding must not make the warm-up as long as a run of a few steps.
        return min(self.stretched(self.settings.warmup_epochs), self.train_steps - 1)


def steps(course: Course) -> Rate:
    """The shape 'step': the warm-up, times the factors of the boundaries so far."""
    settings, warmup = course.settings, round(course.warmup)
    epochs, end = settings.learning_rate_decay_epochs, course.train_steps
    boundaries = [round(min(course.stretched(epoch), end)) for epoch in epochs]
    if durations := settings.learning_rate_decay_steps:
        boundaries = list_to_steps(durations, **course.sizes, name="learning_rate_decay_steps")
    rise = rising(settings, course.peak, warmup)
    factor = _step_factor(boundaries, settings.learning_rate_decay_factors)
    return Rate(lambda step: rise(step) * factor(step), course.peak, warmup)


def rising(settings: Schedule, peak: float, steps: float) -> Callable[..., Any]:
    """Returns a schedule that rises for `steps` steps and then stays at `peak`."""
    if not steps:
        return optax.constant_schedule(peak)
    if settings.warmup_shape == "linear":
        return optax.linear_schedule(settings.warmup_from, peak, steps)  # pyright: ignore
    first = settings.warmup_from or peak / 100

    def rise(step: jax.typing.ArrayLike) -> jax.Array:
        left = jnp.clip(steps - jnp.asarray(step, jnp.float32), 0.0, steps) / steps
        return first**left * peak ** (1 - left)

    return rise


def _step_factor(boundaries: Sequence[int], factors: Sequence[float]) -> Callable[..., Any]:
    """Returns the product of the factors of all boundaries up to a step."""
    if len(factors) not in (1, len(boundaries)):
        raise ConfigError(
            f"config.learning_rate_decay_factors={tuple(factors)}: use one factor, or one for each"
            f" of the {len(boundaries)} boundaries of learning_rate_decay_epochs or _steps"
        )
    # In a run of a few steps several boundaries may be the same step.
    products: dict[int, float] = {}
    for boundary, factor in zip(boundaries, itertools.cycle(factors)):
        products[boundary] = products.get(boundary, 1.0) * factor
    return optax.piecewise_constant_schedule(1.0, products)


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


# By config.learning_rate_schedule.
_SHAPES = {"cosine": cosine, "polynomial": polynomial, "rsqrt": rsqrt, "step": steps}
