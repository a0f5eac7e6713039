"""Learning-rate schedules and optimizers, as optax chains.

A schedule maps the number of updates already done to the rate of the next one: the first update
has the rate of step 0, the last of a run that of train_steps - 1.

To add an optimizer, write a function `(learning_rate, **its own hyperparameters)` like `sgd` and
name it in `_OPTIMIZERS`.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

# Step (an int or i32[], traced or not) -> rate f32[].
LearningRate = Callable[[jax.typing.ArrayLike], jax.Array]


class OptimError(ValueError):
    """A schedule or an optimizer that cannot be made; the message is one line."""


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
      OptimError: the warm-up leaves no step for the cosine.
    """
    if not 0 <= warmup_steps < total_steps:
        raise OptimError(
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


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A recipe for the learning rate, for any batch size and any length of training.

    Attributes:
      name: 'step' or 'cosine'.
      base: peak rate per 256 examples in a batch.
      warmup_epochs: end of the linear warm-up.
      decay_epochs: where 'step' multiplies the rate by 0.1; 'cosine' does not use it.
      schedule_epochs: the length of training that the other two refer to. A run of another
        length stretches all three in proportion: with 90, an entry of 30 is a third of the run.
    """

    name: str
    base: float
    warmup_epochs: float
    decay_epochs: Sequence[float]
    schedule_epochs: float


def learning_rate(schedule: Schedule, *, batch_size: int, train_steps: int) -> LearningRate:
    """Makes the learning rate of one run from a recipe.

    The peak is base * batch_size / 256, the linear scaling rule of Goyal et al. 2017
    (arXiv:1706.02677, section 2.1). Epoch e of the recipe is step
    round(train_steps * e / schedule_epochs), so the schedule always spans the whole run.

    Args:
      schedule: the recipe.
      batch_size: examples per step over all devices.
      train_steps: steps of the whole run, of which a resumed run is a part.

    Raises:
      OptimError: unknown name; or a length that is not positive; or a warm-up that does not end
        within the run.
    """
    if schedule.name not in ("step", "cosine"):
        raise OptimError(f"schedule={schedule.name!r}: unknown; known are 'cosine', 'step'")
    if batch_size < 1 or train_steps < 1:
        raise OptimError(
            f"batch_size={batch_size}, train_steps={train_steps}: both must be at least 1"
        )
    if not 0 <= schedule.warmup_epochs < schedule.schedule_epochs:
        raise OptimError(
            f"warmup_epochs={schedule.warmup_epochs}: must be at least 0 and less than"
            f" schedule_epochs={schedule.schedule_epochs}"
        )

    def to_step(epoch: float) -> int:
        return round(train_steps * epoch / schedule.schedule_epochs)

    peak = schedule.base * batch_size / 256
    # Rounding must not let the warm-up of a run of a few steps take all of them.
    warmup_steps = min(to_step(schedule.warmup_epochs), train_steps - 1)
    if schedule.name == "cosine":
        return cosine_schedule(peak, warmup_steps, train_steps)
    return step_schedule(peak, warmup_steps, [to_step(epoch) for epoch in schedule.decay_epochs])


def decay_mask(params: Any) -> Any:
    """Which parameters weight decay applies to: those named 'kernel'.

    These are the weights of convolutions and dense layers; biases and the scales of
    normalisation are left out (Goyal et al. 2017, arXiv:1706.02677, section 5.1, says so for
    BatchNorm).

    Args:
      params: nested dicts of arrays.

    Returns:
      The same tree with a bool for each array.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) == "kernel", params
    )


def sgd(
    learning_rate: float | LearningRate, momentum: float, nesterov: bool, weight_decay: float
) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum m and weight decay.

    With u = gradient + weight_decay * w (kernels only, see `decay_mask`):

        m <- momentum * m + u
        w <- w - rate * (u + momentum * m if nesterov else m)

    The rate is outside of the momentum, as in TensorFlow's MomentumOptimizer, and the decay is
    the gradient of weight_decay * |w|^2 / 2 in the loss, not decoupled from the rate.

    Args:
      learning_rate: a schedule, or a constant.
      momentum: factor of the old m.
      nesterov: whether to look one step of momentum ahead.
      weight_decay: the lambda above.
    """
    # The same links whatever the numbers are, so a checkpoint's tree does not depend on them.
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.trace(decay=momentum, nesterov=nesterov),
        optax.scale_by_learning_rate(learning_rate),
    )


_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {"sgd": sgd}


def make_optimizer(
    name: str, learning_rate: float | LearningRate, **hyperparameters: Any
) -> optax.GradientTransformation:
    """Makes the optimizer called `name`.

    Args:
      name: 'sgd'.
      learning_rate: a schedule, or a constant.
      **hyperparameters: all the further arguments of the function of that name.

    Raises:
      OptimError: unknown name, or a hyperparameter that is missing or unknown.
    """
    if name not in _OPTIMIZERS:
        known = ", ".join(repr(known) for known in sorted(_OPTIMIZERS))
        raise OptimError(f"optimizer={name!r}: unknown; known are {known}")
    make = _OPTIMIZERS[name]
    try:
        inspect.signature(make).bind(learning_rate, **hyperparameters)
    except TypeError as error:
        raise OptimError(f"optimizer={name!r}: {error}") from None
    return make(learning_rate, **hyperparameters)


def ema_update(ema: Any, new: Any, decay: jax.typing.ArrayLike) -> Any:
    """One step of an exponential moving average: decay * ema + (1 - decay) * new.

    Args:
      ema: tree of arrays, the average so far.
      new: the same tree, of any float type.
      decay: in [0, 1]; the average reaches back about 1 / (1 - decay) steps.

    Returns:
      The same tree in float32: in bfloat16 an average with a decay of 0.999 would hardly move.
    """
    ema, new = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (ema, new))
    return optax.incremental_update(new, ema, 1.0 - decay)
