"""The train step and the predict step: `jax.jit` outside, `shard_map` inside around the gradient.

The steps know no benchmark. The loss and the prediction are functions on one device's share of the
batch, so that BatchNorm's span is a choice of mesh axes and a detector's loops stay on their
device. The step adds sums and gradients over all devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from engine import mesh as meshes
from engine import optim, schedules
from errors import DataError


class TrainState(NamedTuple):
    """All that a run carries from step to step; replicated on every device."""

    step: jax.Array  # i32[], steps done
    params: Any
    model_state: Any
    opt_state: Any
    ema: Any  # {} or {"params", "model_state"} averaged, f32


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The part of a config that shapes the train step, with durations in steps.

    Attributes:
      seed: of the initial weights and of the randomness in the loss.
      total_steps: of the whole run.
      learning_rate: maps a step to its rate.
      optimizer: for the trainable parameters.
      accumulation: micro-batches in a step.
      ema_decay: of the average of the weights; 0 keeps no average.
      device_clip: largest norm of each device's own gradient; 0 does not clip.
      frozen: maps params to the same tree with True for parameters that never change.
    """

    seed: int
    total_steps: int
    learning_rate: schedules.Rate
    optimizer: optax.GradientTransformation
    accumulation: int
    ema_decay: float
    device_clip: float
    frozen: Callable[[Any], Any]


def init_state(init: Callable[[jax.Array], Any], recipe: Recipe) -> TrainState:
    """The state before the first step; `init(key)` returns (params, model_state)."""
    params, model_state = init(jax.random.key(recipe.seed))
    return state_of(params, model_state, recipe)


def state_of(params: Any, model_state: Any, recipe: Recipe) -> TrainState:
    """The state before the first step, with such weights."""
    # The averages are copies: the step donates its state, and one buffer cannot be donated twice.
    average = {"params": params, "model_state": model_state} if recipe.ema_decay else {}
    ema = jax.tree.map(lambda x: jnp.array(x, optim.ema_dtype(x), copy=True), average)
    return TrainState(jnp.int32(0), params, model_state, recipe.optimizer.init(params), ema)


def model_items(state: TrainState) -> dict[str, Any]:
    """The part of a state that a checkpoint keeps as item "model"."""
    return {"params": state.params, "model_state": state.model_state, "ema": state.ema}


def items(state: TrainState, totals: Any) -> dict[str, Any]:
    """All that a checkpoint keeps, by item; `totals` are those of the log interval in progress."""
    optimizer = {"step": state.step, "opt_state": state.opt_state, "totals": totals}
    return {"model": model_items(state), "optimizer": optimizer}


def make_gradients(
    loss: Callable[..., Any], mesh: Mesh, accumulation: int, device_clip: float = 0.0
) -> Callable[..., Any]:
    """Returns (params, model_state, batch, key) -> (gradients, sums, model_state).

    `sums` is {name: (sum f32[], weight f32[])} over the global batch for the terms of the loss and
    the metrics. The loss is the sum over terms of sum / weight, however the batch is cut; a term of
    weight 0 counts as 0. With `device_clip`, each device's own gradient is clipped to that norm
    before the mean over devices.
    """

    axes = mesh.axis_names

    def differentiate(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        """Returns (values of the terms, pullback, (their weights, metrics, model_state))."""

        def sums(params: Any) -> Any:
            terms, metrics, state = loss(params, model_state, batch, key)
            values = {k: value for k, (value, _) in terms.items()}
            return values, ({k: weight for k, (_, weight) in terms.items()}, metrics, state)

        return jax.vjp(sums, params, has_aux=True)

    def on_whole_share(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        values, pullback, (weights, metrics, model_state) = differentiate(
            params, model_state, batch, key
        )
        weights_of_all = jax.lax.psum(weights, axes)
        (gradients,) = pullback({k: _mean(1.0, w) for k, w in weights_of_all.items()})
        terms = {k: (value, weights[k]) for k, value in values.items()}
        return gradients, terms, metrics, model_state

    def on_micro_batches(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        """One backward pass per micro-batch, however many terms the loss has."""
        inputs = (
            jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch),
            jax.random.split(key, accumulation),
        )

        def weigh(model_state: Any, x: Any) -> Any:
            terms, _, model_state = loss(params, model_state, *x)
            return model_state, {k: weight for k, (_, weight) in terms.items()}

        _, shapes = jax.eval_shape(weigh, model_state, jax.tree.map(lambda x: x[0], inputs))
        single = len(shapes) == 1  # its weight can be applied afterwards
        if single:
            scales = {k: jnp.float32(1) for k in shapes}
        else:
            # The gradient of a term needs the weight of the whole batch. This loop computes the
            # weights alone: the compiler removes what they do not need of the forward pass.
            _, weights = jax.lax.scan(weigh, model_state, inputs)
            total = jax.lax.psum({k: jnp.sum(w) for k, w in weights.items()}, axes)
            scales = {k: _mean(1.0, w) for k, w in total.items()}

        def one(model_state: Any, x: Any) -> Any:
            values, pullback, (weights, metrics, model_state) = differentiate(
                params, model_state, *x
            )
            terms = {k: (value, weights[k]) for k, value in values.items()}
            return (*pullback(scales), terms, metrics), model_state

        def body(carry: Any, x: Any) -> Any:
            old, model_state = carry
            new, model_state = one(model_state, x)
            return (jax.tree.map(jnp.add, old, new), model_state), None

        shapes, _ = jax.eval_shape(one, model_state, jax.tree.map(lambda x: x[0], inputs))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        ((gradients, terms, metrics), model_state), _ = jax.lax.scan(
            body, (zeros, model_state), inputs
        )
        if single:
            ((_, weight),) = terms.values()
            total = jax.lax.psum(weight, axes)
            gradients = jax.tree.map(lambda g: g / jnp.where(total, total, 1), gradients)
        return gradients, terms, metrics, model_state

    def on_device(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        compute = on_whole_share if accumulation == 1 else on_micro_batches
        gradients, terms, metrics, model_state = compute(params, model_state, batch, key)
        if device_clip:
            # This is the device's share of the mean; its own gradient is mesh.size times as long.
            norm = optax.tree.norm(gradients) * mesh.size
            gradients = jax.tree.map(
                lambda g: g * (device_clip / jnp.maximum(norm, device_clip)), gradients
            )
        gradients, terms, metrics = jax.lax.psum((gradients, terms, metrics), axes)
        value = sum(_mean(value, weight) for value, weight in terms.values())
        several = terms if len(terms) > 1 else {}
        sums = {"loss": (value, jnp.float32(1)), **several, **metrics}
        return gradients, sums, jax.tree.map(lambda x: _over_devices(x, axes), model_state)

    everywhere, shared = PartitionSpec(), PartitionSpec(axes)
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, shared, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )


def _mean(total: Any, weight: jax.Array) -> jax.Array:
    """total / weight, and 0 for a weight of 0: such a term of the loss counts as 0."""
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))


def _over_devices(x: jax.Array, axes: Any) -> jax.Array:
    """A leaf of the model's state for all devices: the mean of floats; integers are equal."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jax.lax.pmean(x, axes)
    if x.dtype == jnp.bool_:
        return jax.lax.pmax(x.astype(jnp.int32), axes).astype(jnp.bool_)
    return jax.lax.pmax(x, axes)


def make_train_step(loss: Callable[..., Any], mesh: Mesh, recipe: Recipe) -> Any:
    """Returns the jitted (state, totals, batch) -> (state, totals, loss f32[]).

    `totals` is {name: (sum, weight)} of all metrics since it was zeros, and "bad_step": the first
    step (counted from 1) whose loss or gradient was not finite, else 0. State and totals are
    donated.
    """
    gradients_of = make_gradients(loss, mesh, recipe.accumulation, recipe.device_clip)

    def step(state: TrainState, totals: Any, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
        gradients, sums, model_state = gradients_of(state.params, state.model_state, batch, key)
        gradients = jax.tree.map(
            lambda g, frozen: jnp.zeros_like(g) if frozen else g,
            *(gradients, recipe.frozen(gradients)),
        )
        norm, value = optax.tree.norm(gradients), sums["loss"][0]
        sums = {**sums, "gradient_norm": (norm, jnp.float32(1))}
        updates, opt_state = recipe.optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if recipe.ema_decay:
            # A short memory at first, as TensorFlow's ExponentialMovingAverage has with a step.
            decay = jnp.minimum(recipe.ema_decay, (1.0 + state.step) / (10.0 + state.step))
            ema = optim.ema_update(ema, {"params": params, "model_state": model_state}, decay)
        number = state.step + 1
        bad = jnp.where(jnp.isfinite(value) & jnp.isfinite(norm), 0, number)
        bad = jnp.where(totals["bad_step"] > 0, totals["bad_step"], bad)
        sums = jax.tree.map(jnp.add, {k: totals[k] for k in sums}, sums)
        new = TrainState(number, params, model_state, opt_state, ema)
        return new, {**sums, "bad_step": bad}, value

    return jax.jit(step, donate_argnums=(0, 1), out_shardings=meshes.replicated(mesh))


def totals_spec(loss: Callable[..., Any], mesh: Mesh, state: TrainState, batch: Any) -> Any:
    """The totals of `make_train_step` as ShapeDtypeStructs, for such state and batch."""
    _, sums, _ = jax.eval_shape(
        make_gradients(loss, mesh, 1),
        *(state.params, state.model_state, batch, jax.random.key(0)),
    )
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    extra = {"gradient_norm": (scalar, scalar), "bad_step": jax.ShapeDtypeStruct((), jnp.int32)}
    return meshes.abstract({**sums, **extra}, meshes.replicated(mesh))


def lower(step: Any, first: tuple[Any, ...], batches: tuple[Any, ...]) -> list[Any]:
    """Lowers a jitted `step(*first, batch)` for every shape of batch that may occur.

    `first` and `batches` are trees of ShapeDtypeStructs that carry shardings. Returns a
    (batch, jax.stages.Lowered) for each.
    """
    return [(batch, step.lower(*first, batch)) for batch in batches]


class Compiled:
    """A step that `lower` has lowered, compiled for each shape of its last argument, the batch."""

    def __init__(self, lowered: list[Any]):
        self._by_shape = {_shape(batch): program.compile() for batch, program in lowered}

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program for this batch.

        Raises:
          DataError: the benchmark has not declared the batch's shape.
        """
        shape = _shape(arguments[-1])
        if shape not in self._by_shape:
            declared = " or ".join(_describe(known) for known in self._by_shape)
            raise DataError(
                f"the input has a batch of {_describe(shape)}, but the benchmark's batch_spec "
                f"declares {declared}"
            )
        return self._by_shape[shape](*arguments)


def _shape(batch: Any) -> tuple[Any, ...]:
    return tuple((name, batch[name].shape) for name in sorted(batch))


def _describe(shape: tuple[Any, ...]) -> str:
    return ", ".join(f"{name}{list(sizes)}" for name, sizes in shape)


def make_predict_step(predict: Callable[..., Any], mesh: Mesh) -> Any:
    """Returns the jitted (params, model_state, batch) -> rows [B, ...] on every device.

    The rows are what `predict` returns for each device's share, and the batch's "mask".
    """

    def on_device(params: Any, model_state: Any, batch: Any) -> Any:
        return {**predict(params, model_state, batch), "mask": batch["mask"]}

    everywhere, shared = PartitionSpec(), PartitionSpec(mesh.axis_names)
    sharded = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, shared),
        out_specs=shared,
        check_vma=False,
    )
    return jax.jit(sharded, out_shardings=meshes.replicated(mesh))
