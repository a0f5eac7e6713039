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
      OptimError: there is nothing to decay over, or no power to do it with.
    """
    if not (warmup_steps >= 0 and decay_steps > 0 and power > 0):
        raise OptimError(
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


def learning_rate(schedule: Schedule, *, batch_size: int, train_steps: int) -> LearningRate:
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
      OptimError: unknown name; or a length that is not positive; or a warm-up that does not end
        within the run; or a number of examples below 0.
    """
    if schedule.name not in _SCHEDULES:
        known = ", ".join(map(repr, _SCHEDULES))
        raise OptimError(f"schedule={schedule.name!r}: unknown; known are {known}")
    if batch_size < 1 or train_steps < 1:
        raise OptimError(
            f"batch_size={batch_size}, train_steps={train_steps}: both must be at least 1"
        )
    if not 0 <= schedule.warmup_epochs < schedule.schedule_epochs:
        raise OptimError(
            f"warmup_epochs={schedule.warmup_epochs}: must be at least 0 and less than"
            f" schedule_epochs={schedule.schedule_epochs}"
        )
    if schedule.per < 0:
        raise OptimError(f"learning_rate_per={schedule.per}: must be a number of images, or 0")

    def to_step(epoch: float) -> int:
        return round(train_steps * epoch / schedule.schedule_epochs)

    peak = schedule.base * (batch_size / schedule.per if schedule.per else 1)
    if schedule.name == "polynomial":
        exact = train_steps * schedule.warmup_epochs / schedule.schedule_epochs
        exact = min(exact, train_steps - 1)
        decay = to_step(schedule.polynomial_epochs) or train_steps - exact + 1
        return polynomial_schedule(peak, exact, decay, schedule.end, schedule.power)
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


def trust_ratio(trust_coefficient: float, epsilon: float, weight_decay: float) -> Any:
    """The part of `lars` before rate and momentum, as an optax transformation without state."""

    def of_kernel(gradient: jax.Array, weight: jax.Array) -> jax.Array:
        g, w = jnp.asarray(gradient, jnp.float32), jnp.asarray(weight, jnp.float32)
        g_norm, w_norm = jnp.linalg.norm(g.ravel()), jnp.linalg.norm(w.ravel())
        found = (g_norm > 0) & (w_norm > 0)
        # The inner `where` keeps 0 / 0 out of a branch that is computed all the same.
        divisor = jnp.where(found, g_norm + weight_decay * w_norm + epsilon, 1.0)
        ratio = jnp.where(found, trust_coefficient * w_norm / divisor, 1.0)
        return ratio * (g + weight_decay * w)

    def update(gradients: Any, params: Any = None) -> Any:
        return jax.tree.map(
            lambda g, w, kernel: of_kernel(g, w) if kernel else g,
            *(gradients, params, decay_mask(params)),
        )

    return optax.stateless(update)


def lars(
    learning_rate: float | LearningRate,
    momentum: float,
    weight_decay: float,
    lars_trust_coefficient: float,
    lars_epsilon: float,
) -> optax.GradientTransformation:
    """Layer-wise adaptive rates (You et al. 2017, arXiv:1708.03888), as MLPerf's reference does.

    For each kernel (see `decay_mask`) with gradient g and weights w, norms in float32:

        r = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon); 1 if |g| or |w| is 0
        m <- momentum * m + rate * r * (g + weight_decay * w)
        w <- w - m

    All others, biases and the scales of normalisation, have r = 1 and no decay, but the whole
    rate. The rate is inside of the momentum, unlike in `sgd`. `optax.lars` is another function:
    it divides by |g + weight_decay * w|, which is less than the sum of the norms above.

    Args:
      learning_rate: a schedule, or a constant.
      momentum: factor of the old m.
      weight_decay: that of the formulas; the loss has no term for it.
      lars_trust_coefficient: that of the formulas, 0.001 in MLPerf.
      lars_epsilon: that of the formulas, 0 in MLPerf.

    Raises:
      OptimError: a number that would turn the weights around, or divide by 0.
    """
    if not (lars_trust_coefficient > 0 and lars_epsilon >= 0):
        raise OptimError(
            f"lars_trust_coefficient={lars_trust_coefficient}, lars_epsilon={lars_epsilon}: the"
            " first must be more than 0 (MLPerf: 0.001), the second at least 0 (MLPerf: 0)"
        )
    return optax.chain(
        trust_ratio(lars_trust_coefficient, lars_epsilon, weight_decay),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(decay=momentum),
    )


def adam(
    learning_rate: float | LearningRate, adam_beta1: float, adam_beta2: float, adam_epsilon: float
) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2014, arXiv:1412.6980, algorithm 1), without weight decay.

    With a gradient g at step t, counted from 1:

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        w <- w - rate * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)

    Args:
      learning_rate: a schedule, or a constant.
      adam_beta1: that of the formulas.
      adam_beta2: that of the formulas.
      adam_epsilon: that of the formulas.

    Raises:
      OptimError: a number with which the averages would not be averages, or a division by 0.
    """
    if not (0 <= adam_beta1 < 1 and 0 <= adam_beta2 < 1 and adam_epsilon > 0):
        raise OptimError(
            f"adam_beta1={adam_beta1}, adam_beta2={adam_beta2}, adam_epsilon={adam_epsilon}: the"
            " first two must be in [0, 1), the last more than 0"
        )
    return optax.chain(
        optax.scale_by_adam(adam_beta1, adam_beta2, adam_epsilon),
        optax.scale_by_learning_rate(learning_rate),
    )


_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adam": adam,
    "lars": lars,
    "sgd": sgd,
}


def hyperparameters(name: str) -> list[str]:
    """The arguments that `make_optimizer` wants for `name`; [] if it does not know it."""
    return list(inspect.signature(_OPTIMIZERS[name]).parameters)[1:] if name in _OPTIMIZERS else []


def make_optimizer(
    name: str, learning_rate: float | LearningRate, **hyperparameters: Any
) -> optax.GradientTransformation:
    """Makes the optimizer called `name`.

    Args:
      name: 'adam', 'lars' or 'sgd'.
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
