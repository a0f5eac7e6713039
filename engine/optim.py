"""Optimizers as optax transformations, with weight decay, rates and freezing per parameter.

There are SGD with momentum, LARS, Adam and LAMB; the last three adapt the rate of each layer or of
each weight. To add one, write a function `(settings, rate, decayed)` like `sgd` and name it in
`_RULES`.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax

from common.errors import ConfigError
from common.keys import Decay, NotNegative, Positive


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
    gradient_clip_per_device: bool  # whether the step clips each device's gradient instead


@dataclasses.dataclass(frozen=True)
class Rate:
    """The learning rate of one run, step (an int or i32[], traced or not) -> rate f32[]."""

    schedule: Callable[..., Any]  # computes the rate of a step, in any float type
    peak: float  # the highest rate
    warmup_steps: float  # steps until the peak; not rounded with 'polynomial'
    decay_steps: float = 0.0  # from the peak to the last rate of 'polynomial'; else 0

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        return jnp.asarray(self.schedule(step), jnp.float32)


def make(
    settings: Optimizer,
    learning_rate: Rate,
    decayed: Callable[[Any], Any],
    multipliers: Callable[[Any], Any],
) -> optax.GradientTransformation:
    """Makes an optimizer.

    The tree of its state has one entry for each trained parameter, and depends neither on the
    numbers in `settings` nor on the clipping.

    Args:
      settings: the config's keys.
      learning_rate: the rate of a parameter with the multiplier 1, by step.
      decayed: makes a tree like the parameters from them: whether weight decay (and with 'lars' and
        'lamb' the trust ratio) applies.
      multipliers: makes a tree like the parameters: the factor of the learning rate, as Caffe's
        `lr_mult`. A parameter with 0 is frozen: it never changes, has no state, and its gradient
        does not count in the clipped norm.
    """
    if settings.decoupled_decay and settings.optimizer != "sgd":
        raise ConfigError(
            f"config.decoupled_decay=True: only 'sgd' has it, not {settings.optimizer!r}"
        )
    clip = optax.identity()
    if settings.gradient_clip_norm and not settings.gradient_clip_per_device:
        clip = optax.clip_by_global_norm(settings.gradient_clip_norm)

    def trained(params: Any, factors: Any) -> optax.GradientTransformationExtraArgs:
        rule = _RULES[settings.optimizer](settings, learning_rate, decayed(params))
        return optax.masked(rule, jax.tree.map(lambda factor: factor != 0, factors))

    # Checkpoints hold the rule's own state, whose tree does not show what is frozen or clipped.
    def init(params: Any) -> Any:
        state: Any = trained(params, multipliers(params)).init(params)
        return state.inner_state

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        factors = multipliers(params)
        frozen = jax.tree.map(lambda factor: factor == 0, factors)
        first = _stateless(optax.masked(optax.set_to_zero(), frozen), clip)
        updates, _ = first.update(updates, optax.EmptyState(), params)
        state = optax.MaskedState(state)
        updates, state = trained(params, factors).update(updates, state, params)
        changes = jax.tree.map(lambda factor, update: factor * update, factors, updates)
        return changes, state.inner_state

    return optax.GradientTransformation(init, update)


def _stateless(*links: optax.GradientTransformation) -> optax.GradientTransformation:
    """A chain of links whose states hold nothing, with one empty state as checkpoints have it."""
    chain = optax.chain(*links)

    def update(updates: Any, params: Any) -> Any:
        return chain.update(updates, chain.init(params), params)[0]

    return optax.stateless(update)


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


def lars(settings: Optimizer, rate: Rate, decayed: Any) -> optax.GradientTransformation:
    """Layer-wise adaptive rates (You et al. 2017, arXiv:1708.03888), as MLPerf's reference does.

    For each decayed parameter with gradient g and weights w, norms in float32:

        r = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon); 1 if |g| or |w| is 0
        m <- momentum * m + rate * r * (g + weight_decay * w)
        w <- w - m

    Biases and the scales of normalisation have r = 1, no decay and the full rate. The rate is
    inside of the momentum, unlike in `sgd`. `optax.lars` differs: it divides by
    |g + weight_decay * w|, which is less than the sum of the norms above.
    """
    decay = settings.weight_decay

    def adapt(gradient: Any, weight: Any) -> jax.Array:
        g, w = jnp.asarray(gradient, jnp.float32), jnp.asarray(weight, jnp.float32)
        g_norm, w_norm = jnp.linalg.norm(g.ravel()), jnp.linalg.norm(w.ravel())
        positive = (g_norm > 0) & (w_norm > 0)
        # `where` computes both branches, so the divisor must not be 0 either.
        divisor = jnp.where(positive, g_norm + decay * w_norm + settings.lars_epsilon, 1.0)
        ratio = jnp.where(positive, settings.lars_trust_coefficient * w_norm / divisor, 1.0)
        return ratio * (g + decay * w)

    return optax.chain(
        _stateless(optax.masked(optax.stateless_with_tree_map(adapt), decayed)),
        optax.scale_by_learning_rate(rate),
        optax.trace(decay=settings.momentum),
    )


def adam(settings: Optimizer, rate: Rate, decayed: Any) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2014, arXiv:1412.6980, algorithm 1), without weight decay.

    With a gradient g at step t, counted from 1:

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        w <- w - rate * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)
    """
    return optax.chain(
        optax.scale_by_adam(settings.adam_beta1, settings.adam_beta2, settings.adam_epsilon),
        optax.scale_by_learning_rate(rate),
    )


def lamb(settings: Optimizer, rate: Rate, decayed: Any) -> optax.GradientTransformation:
    """Layer-wise adaptive Adam (You et al. 2019, arXiv:1904.00962, algorithm 2), as timm's Lamb.

    With m and v of `adam`, for each decayed parameter w, norms in float32:

        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * w
        w <- w - rate * |w| / |u| * u; the ratio is 1 if |w| or |u| is 0

    Biases and the scales of normalisation have no decay and the ratio 1, unlike in `optax.lamb`.
    timm clips the gradient before: its `max_grad_norm` is `gradient_clip_norm`.
    """
    decays = optax.add_decayed_weights(settings.weight_decay, mask=decayed)
    adapts = optax.masked(optax.scale_by_trust_ratio(), decayed)
    return optax.chain(
        optax.scale_by_adam(settings.adam_beta1, settings.adam_beta2, settings.adam_epsilon),
        _stateless(decays, adapts),
        optax.scale_by_learning_rate(rate),
    )


_RULES = {"adam": adam, "lamb": lamb, "lars": lars, "sgd": sgd}  # by config.optimizer
