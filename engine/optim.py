"""Optimizers, as optax chains.

To add one, write a function `(learning_rate, **its own hyperparameters)` like `sgd` and name it in
`_OPTIMIZERS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from engine.schedules import LearningRate
from errors import ConfigError


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
      ConfigError: a number that would turn the weights around, or divide by 0.
    """
    if not (lars_trust_coefficient > 0 and lars_epsilon >= 0):
        raise ConfigError(
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
      ConfigError: a number with which the averages would not be averages, or a division by 0.
    """
    if not (0 <= adam_beta1 < 1 and 0 <= adam_beta2 < 1 and adam_epsilon > 0):
        raise ConfigError(
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
      ConfigError: unknown name, or a hyperparameter that is missing or unknown.
    """
    if name not in _OPTIMIZERS:
        known = ", ".join(repr(known) for known in sorted(_OPTIMIZERS))
        raise ConfigError(f"optimizer={name!r}: unknown; known are {known}")
    make = _OPTIMIZERS[name]
    try:
        inspect.signature(make).bind(learning_rate, **hyperparameters)
    except TypeError as error:
        raise ConfigError(f"optimizer={name!r}: {error}") from None
    return make(learning_rate, **hyperparameters)


def ema_update(ema: Any, new: Any, decay: jax.typing.ArrayLike) -> Any:
    """One step of an exponential moving average: decay * ema + (1 - decay) * new.

    Args:
      ema: tree of arrays, the average so far.
      new: the same tree, of any type; integers are no averages: the newest counts.
      decay: in [0, 1]; the average reaches back about 1 / (1 - decay) steps.

    Returns:
      The same tree, floats in float32: in bfloat16 an average with a decay of 0.999 would
      hardly move.
    """

    def average(old: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return new
        return optax.incremental_update(jnp.float32(new), jnp.float32(old), 1.0 - decay)

    return jax.tree.map(average, ema, new)


def ema_dtype(leaf: jax.Array) -> jnp.dtype:
    """The dtype of a leaf in the average of `ema_update`."""
    return jnp.dtype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf.dtype
