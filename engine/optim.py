"""Optimizers as optax transformations, with weight decay, rates and freezing per parameter.

To add one, write a function `(settings, rate, decayed)` like `sgd` and name it in `_RULES`.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax

from engine.schedules import Rate
from errors import ConfigError
from keys import Decay, NotNegative, Positive

# By the value of config.optimizer: "module:function", imported where a recipe names it.
_RULES = {
    "adam": "engine.adaptive:adam",
    "lamb": "engine.adaptive:lamb",
    "lars": "engine.adaptive:lars",
    "sgd": "engine.optim:sgd",
}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The config keys of the optimizer; configs/_loop.py has their defaults."""

    optimizer: Literal["adam", "lamb", "lars", "sgd"]
    momentum: Decay  # factor of the old momentum, for 'sgd' and 'lars'
    nesterov: bool  # whether 'sgd' looks one step of momentum ahead
    weight_decay: NotNegative  # of 'sgd', 'lars' and 'lamb'; 'adam' has none
    decoupled_decay: bool  # whether 'sgd' shrinks the weights apart from the gradient
    lars_trust_coefficient: Positive  # 0.001 in MLPerf
    lars_epsilon: NotNegative  # 0 in MLPerf
    adam_beta1: Decay  # decay of the mean of the gradients, for 'adam' and 'lamb'
    adam_beta2: Decay  # decay of the mean of their squares
    adam_epsilon: Positive  # added to the root of the mean of the squares
    # The largest norm of the gradient over all trained parameters, before weight decay: a larger
    # gradient is scaled down to this norm. 0 clips nothing.
    gradient_clip_norm: Annotated[float, "[0, 1e30]"]


def make(
    settings: Optimizer, learning_rate: Rate, decayed: Any, multipliers: Any
) -> optax.GradientTransformation:
    """Makes an optimizer.

    The tree of its state has one entry for each trained parameter, and depends neither on the
    numbers in `settings` nor on the clipping.

    Args:
      settings: the config's keys.
      learning_rate: the rate of a parameter with the multiplier 1, by step.
      decayed: tree like the parameters: whether weight decay (and with 'lars' and 'lamb' the trust
        ratio) applies; or a function that makes this tree from the parameters.
      multipliers: tree like the parameters: the factor of the learning rate, as Caffe's `lr_mult`;
        or a function that makes this tree. A parameter with 0 is frozen: it never changes, has no
        state, and its gradient does not count in the clipped norm.

    Raises:
      ConfigError: the optimizer has no decoupled decay.
    """
    if settings.decoupled_decay and settings.optimizer != "sgd":
        raise ConfigError(
            f"config.decoupled_decay=True: only 'sgd' has it, not {settings.optimizer!r}"
        )

    rule = pkgutil.resolve_name(_RULES[settings.optimizer])

    def chain(params: Any, factors: Any) -> optax.GradientTransformation:
        mask = decayed(params) if callable(decayed) else decayed
        return rule(settings, learning_rate, _trained(mask, factors))

    def init(params: Any) -> Any:
        factors = multipliers(params) if callable(multipliers) else multipliers
        return chain(params, factors).init(_trained(params, factors))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        factors = multipliers(params) if callable(multipliers) else multipliers
        trained = _trained(updates, factors)
        if settings.gradient_clip_norm:
            clip = optax.clip_by_global_norm(settings.gradient_clip_norm)
            trained, _ = clip.update(trained, optax.EmptyState())
        changes, state = chain(params, factors).update(trained, state, _trained(params, factors))
        changes = jax.tree.map(
            lambda factor, change, update: factor * change if factor else jnp.zeros_like(update),
            *(factors, changes, updates),
        )
        return changes, state

    return optax.GradientTransformation(init, update)


def _trained(tree: Any, factors: Any) -> Any:
    """Replaces the leaves of the frozen parameters by empty nodes."""
    return jax.tree.map(lambda factor, leaf: leaf if factor else optax.MaskedNode(), factors, tree)


def sgd(settings: Optimizer, rate: Rate, decayed: Any) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum m and weight decay.

    With u = gradient + weight_decay * w, or u = gradient where w is not decayed:

        m <- momentum * m + u
        w <- w - rate * (u + momentum * m if nesterov else m)

    The rate is outside of the momentum, as in TensorFlow's MomentumOptimizer. The decay is the
    gradient of weight_decay * |w|^2 / 2 in the loss: it is not decoupled from the rate.

    With `decoupled_decay`, u is the gradient alone, and decayed weights shrink besides, as with
    DecoupledSGDW of MosaicML's Composer (Loshchilov and Hutter 2017, arXiv:1711.05101):

        w <- w - weight_decay * rate / peak rate * w
    """
    decay, momentum = settings.weight_decay, optax.trace(settings.momentum, settings.nesterov)
    if settings.decoupled_decay:
        # The rate multiplies it again; a run whose peak is 0 changes nothing.
        decay = decay / rate.peak if rate.peak else 0.0
    decays = optax.add_decayed_weights(decay, mask=decayed)
    links = (momentum, decays) if settings.decoupled_decay else (decays, momentum)
    return optax.chain(*links, optax.scale_by_learning_rate(rate))
