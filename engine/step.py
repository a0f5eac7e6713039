"""The train and predict steps: jit outside, `shard_map` inside around the gradient.

Knows no benchmark: the loss and the prediction arrive as functions on one device's share of the
batch, so that BatchNorm's span is a choice of mesh axes and a detector's loops stay on their
device. Sums and gradients are added over all devices.
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


class TrainState(NamedTuple):
    """All that a run carries from step to step; replicated on every device."""

    step: jax.Array  # i32[], steps done
    params: Any
    model_state: Any
    opt_state: Any
    ema: Any  # {} or {"params", "model_state"} averaged, f32


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The part of a config that shapes the train step, with durations in steps."""

    seed: int
    total_steps: int
    learning_rate: schedules.Rate
    optimizer: optax.GradientTransformation
    accumulation: int
    ema_decay: float


def init_state(init: Callable[[jax.Array], Any], recipe: Recipe) -> TrainState:
    """The state before the first step; `init(key)` returns (params, model_state)."""
    params, model_state = init(jax.random.key(recipe.seed))
    # Copies: the step donates its state, and one buffer cannot be donated twice.
    average = {"params": params, "model_state": model_state} if recipe.ema_decay else {}
    ema = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), average)
    return TrainState(jnp.int32(0), params, model_state, recipe.optimizer.init(params), ema)


def model_items(state: TrainState) -> dict[str, Any]:
    """The part of a state that a checkpoint keeps as item "model"."""
    return {"params": state.params, "model_state": state.model_state, "ema": state.ema}


def items(state: TrainState, totals: Any) -> dict[str, Any]:
    """All that a checkpoint keeps, by item; `totals` are those of the log interval in progress."""
    optimizer = {"step": state.step, "opt_state": state.opt_state, "totals": totals}
    return {"model": model_items(state), "optimizer": optimizer}


def make_gradients(loss: Callable[..., Any], mesh: Mesh, accumulation: int) -> Callable[..., Any]:
    """Returns (params, model_state, batch, key) -> (gradients, sums, model_state).

    `sums` is {name: (sum f32[], weight f32[])} over the global batch for the terms of the loss and
    the metrics. The loss is the sum over terms of sum / weight, however the batch is cut.
    """

    axes = mesh.axis_names

    def part(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        def sums(params: Any) -> Any:
            terms, metrics, state = loss(params, model_state, batch, key)
            values = {k: value for k, (value, _) in terms.items()}
            return values, ({k: weight for k, (_, weight) in terms.items()}, metrics, state)

        return jax.vjp(sums, params, has_aux=True)

    def whole(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        values, pullback, (weights, metrics, model_state) = part(params, model_state, batch, key)
        total = jax.lax.psum(weights, axes)
        (gradients,) = pullback({k: 1 / weight for k, weight in total.items()})
        terms = {k: (value, weights[k]) for k, value in values.items()}
        return gradients, terms, metrics, model_state

    def accumulated(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        # A term's weight is known only after the last part, so terms keep gradients of their own.
        def one(model_state: Any, x: Any) -> Any:
            values, pullback, (weights, metrics, model_state) = part(params, model_state, *x)
            unit = {k: {j: jnp.float32(j == k) for j in values} for k in values}
            gradients = {k: pullback(unit[k])[0] for k in values}
            terms = {k: (value, weights[k]) for k, value in values.items()}
            return (gradients, terms, metrics), model_state

        def body(carry: Any, x: Any) -> Any:
            old, model_state = carry
            new, model_state = one(model_state, x)
            return (jax.tree.map(jnp.add, old, new), model_state), None

        parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
        keys = jax.random.split(key, accumulation)
        first = jax.tree.map(lambda x: x[0], (parts, keys))
        shapes, _ = jax.eval_shape(one, model_state, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        ((gradients, terms, metrics), model_state), _ = jax.lax.scan(
            body, (zeros, model_state), (parts, keys)
        )
        total = jax.lax.psum({k: weight for k, (_, weight) in terms.items()}, axes)
        scaled = [jax.tree.map(lambda g, k=k: g / total[k], v) for k, v in gradients.items()]
        return jax.tree.map(lambda *g: sum(g), *scaled), terms, metrics, model_state

    def on_device(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        compute = whole if accumulation == 1 else accumulated
        gradients, terms, metrics, model_state = compute(params, model_state, batch, key)
        gradients, terms, metrics = jax.lax.psum((gradients, terms, metrics), axes)
        value = sum(value / weight for value, weight in terms.values())
        several = terms if len(terms) > 1 else {}
        sums = {"loss": (value, jnp.float32(1)), **several, **metrics}
        # Each device has running statistics of its own share; the state keeps their mean.
        return gradients, sums, jax.lax.pmean(model_state, axes)

    everywhere, shared = PartitionSpec(), PartitionSpec(axes)
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, shared, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )


def make_train_step(loss: Callable[..., Any], mesh: Mesh, recipe: Recipe) -> Any:
    """Returns the jitted (state, totals, batch) -> (state, totals, loss f32[]).

    `totals` is {name: (sum, weight)} of all metrics since it was zeros, and "bad_step": the first
    step (counted from 1) whose loss or gradient was not finite, else 0. State and totals are
    donated.
    """
    gradients_of = make_gradients(loss, mesh, recipe.accumulation)

    def step(state: TrainState, totals: Any, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
        gradients, sums, model_state = gradients_of(state.params, state.model_state, batch, key)
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
    """A step that was lowered by `lower`, compiled; the batch comes last."""

    def __init__(self, lowered: list[Any]):
        self._by_shape = {_shape(batch): program.compile() for batch, program in lowered}

    def __call__(self, *arguments: Any) -> Any:
        return self._by_shape[_shape(arguments[-1])](*arguments)


def _shape(batch: Any) -> tuple[Any, ...]:
    return tuple((name, batch[name].shape) for name in sorted(batch))


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
