"""Makes the train step and the predict step of any benchmark.

`jax.jit` is outside, and `jax.shard_map` is inside, around the gradient. The loss and the
prediction are functions of one device's share of the batch, so that BatchNorm's span is a choice of
mesh axes. The step adds the sums and the gradients over all devices.

A loss has terms, {name: (sum f32[], weight f32[])}, each of which is divided by its weight in the
global batch. `accumulate` is for config.gradient_accumulation_steps.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from common.errors import DataError
from engine import compiler, sharding

_shard_map = functools.partial(jax.shard_map, check_vma=False)


class TrainState(NamedTuple):
    """The state of a training run, replicated on every device."""

    step: jax.Array  # i32[], the number of steps done
    params: Any
    model_state: Any
    opt_state: Any
    ema: Any  # {} or {"params", "model_state"} averaged, f32


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """The settings that shape the train step, with durations in steps."""

    optimizer: optax.GradientTransformation  # of the trainable parameters
    ema_decay: float  # decay of the average of the weights per update; 0 keeps no average
    device_clip: float  # largest norm of each device's own gradient; 0 clips nothing
    frozen: Callable[[Any], Any]  # params -> the same tree of bools: which ones never change
    sum_dtype: Any = None  # of gradients while they are added over devices; None: their own
    ema_every: int = 1  # steps from one update of the average to the next


def init_state(init: Callable[[jax.Array], Any], settings: StepSettings, seed: Any) -> TrainState:
    """Returns the state before the first step; `init(key)` returns (params, model_state).

    The seed u32[] is an argument and no constant, so that all seeds share a compiled program.
    """
    params, model_state = init(jax.random.key(seed))
    return state_of(params, model_state, settings)


def state_of(params: Any, model_state: Any, settings: StepSettings) -> TrainState:
    """Returns the state before the first step, with these weights."""
    ema = {}
    if settings.ema_decay:
        ema = first_average({"params": params, "model_state": model_state})
    return TrainState(jnp.int32(0), params, model_state, settings.optimizer.init(params), ema)


def model_items(state: TrainState) -> dict[str, Any]:
    """Returns the item "model" of a checkpoint: the arrays that evaluation needs."""
    return {"params": state.params, "model_state": state.model_state, "ema": state.ema}


def checkpoint_items(state: TrainState, totals: Any) -> dict[str, Any]:
    """Returns the items of a checkpoint; `totals` belong to the log interval in progress."""
    optimizer = {"step": state.step, "opt_state": state.opt_state, "totals": totals}
    return {"model": model_items(state), "optimizer": optimizer}


@functools.lru_cache(1)
def make_gradients(
    loss: Callable[..., Any],
    mesh: Mesh,
    accumulation: int,
    device_clip: float = 0.0,
    sum_dtype: Any = None,
) -> Callable[..., Any]:
    """Returns the function (params, model_state, batch, key) -> (gradients, sums, model_state).

    `sums` is {name: (sum f32[], weight f32[])} over the global batch, for the terms of the loss and
    for the metrics. The loss is the sum of sum / weight over the terms, however the batch is cut; a
    term of weight 0 counts as 0. With `device_clip`, each device's own gradient is clipped to that
    norm before the mean. Gradients are added over the devices in `sum_dtype`, or their own dtype.
    """
    axes = mesh.axis_names

    def on_device(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        before, untouched = model_state, [True] * len(jax.tree.leaves(model_state))

        def noting(params: Any, model_state: Any, *rest: Any) -> Any:
            """The loss; `untouched` says which leaves of the state it returns as they were."""
            terms, metrics, after = loss(params, model_state, *rest)
            pairs = zip(jax.tree.leaves(model_state), jax.tree.leaves(after), strict=True)
            untouched[:] = [
                same and old is new for same, (old, new) in zip(untouched, pairs, strict=True)
            ]
            return terms, metrics, after

        if accumulation == 1:
            pullback, terms, metrics, model_state = loss_vjp(
                noting, params, model_state, batch, key
            )
            gradients = pullback(term_factors(term_weights(terms), axes))
        else:
            batches = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
            parts = batches, jax.random.split(key, accumulation)
            gradients, terms, metrics, model_state = accumulate(
                noting, axes, params, model_state, parts
            )
        if device_clip:
            # This is the device's share of the mean; its own gradient is mesh.size times as long.
            norm = optax.tree.norm(gradients) * mesh.size
            gradients = jax.tree.map(
                lambda g: g * (device_clip / jnp.maximum(norm, device_clip)), gradients
            )
        rounded = jax.tree.map(lambda g: g.astype(sum_dtype or g.dtype), gradients)
        everything = rounded, terms, metrics
        if mesh.size > 1:  # a sum over one device would copy all gradients on CPUs
            everything = jax.lax.psum(everything, axes)
        added, terms, metrics = everything
        gradients = jax.tree.map(lambda g, own: g.astype(own.dtype), added, gradients)
        same = jax.tree.unflatten(jax.tree.structure(before), untouched)
        model_state = jax.tree.map(  # the mean over devices of equal values would round them
            lambda same, old, new: old if same else _over_devices(new, axes),
            same,
            before,
            model_state,
        )
        return gradients, reported_sums(terms, metrics), model_state

    everywhere, shared = PartitionSpec(), PartitionSpec(axes)
    specs = everywhere, everywhere, shared, everywhere
    mapped = _shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=everywhere)
    return jax.jit(mapped, inline=True)  # jit keeps the trace; inline, no step has a call


def _over_devices(x: jax.Array, axes: Any) -> jax.Array:
    """Combines a leaf of the model's state: the mean of floats; integers must be equal."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jax.lax.pmean(x, axes)
    if x.dtype == jnp.bool_:
        return jax.lax.pmax(x.astype(jnp.int32), axes).astype(jnp.bool_)
    return jax.lax.pmax(x, axes)


def accumulate(loss: Any, axes: Any, params: Any, model_state: Any, parts: Any) -> Any:
    """Runs one device's micro-batches through the loss, with one backward pass for each.

    `parts` is (batch, key) with the micro-batches along a new first dimension. Returns (the
    device's part of the mean gradient, terms of the loss, metrics, new model_state).
    """

    def weigh(model_state: Any, part: Any) -> Any:
        terms, _, model_state = loss(params, model_state, *part)
        return model_state, term_weights(terms)

    first = jax.tree.map(lambda x: x[0], parts)
    _, names = jax.eval_shape(weigh, model_state, first)
    if len(names) == 1:  # the gradient of a single term can be divided by its weight afterwards
        factors = {name: jnp.float32(1) for name in names}
    else:
        # The gradient of a term needs the weight in the global batch. This loop computes only the
        # weights: the compiler removes all else from the forward pass.
        _, weights = jax.lax.scan(weigh, model_state, parts)
        factors = term_factors({name: jnp.sum(w) for name, w in weights.items()}, axes)

    def differentiate(model_state: Any, part: Any) -> Any:
        pullback, terms, metrics, model_state = loss_vjp(loss, params, model_state, *part)
        return (pullback(factors), terms, metrics), model_state

    def add(carry: Any, part: Any) -> Any:
        sums, model_state = carry
        more, model_state = differentiate(model_state, part)
        return (jax.tree.map(jnp.add, sums, more), model_state), None

    shapes, _ = jax.eval_shape(differentiate, model_state, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (sums, model_state), _ = jax.lax.scan(add, (zeros, model_state), parts)
    gradients, terms, metrics = sums
    if len(terms) == 1:
        ((_, weight),) = terms.values()
        total = jax.lax.psum(weight, axes)
        gradients = jax.tree.map(lambda g: g / jnp.where(total, total, 1), gradients)
    return gradients, terms, metrics, model_state


def loss_vjp(loss: Any, params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
    """Returns (function from factors of the terms to the gradient, terms, metrics, model_state)."""

    def evaluate(params: Any) -> Any:
        terms, *others = loss(params, model_state, batch, key)
        return {name: value for name, (value, _) in terms.items()}, (terms, *others)

    _, pullback, (terms, metrics, model_state) = jax.vjp(evaluate, params, has_aux=True)
    return lambda factors: pullback(factors)[0], terms, metrics, model_state


def term_weights(terms: Any) -> dict[str, Any]:
    """The weight of each term."""
    return {name: weight for name, (_, weight) in terms.items()}


def term_factors(weights: dict[str, Any], axes: Any) -> dict[str, Any]:
    """The factor 1 / weight of each term, with its weight in the global batch."""
    totals = jax.lax.psum(weights, axes)
    return {name: weighted_mean(1.0, weight) for name, weight in totals.items()}


def weighted_mean(total: Any, weight: jax.Array) -> jax.Array:
    """Returns total / weight, and 0 where the weight is 0."""
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))


def reported_sums(terms: Any, metrics: Any) -> dict[str, Any]:
    """What a step reports, {name: (sum f32[], weight f32[])}, from sums over all devices."""
    value = sum(weighted_mean(value, weight) for value, weight in terms.values())
    several = terms if len(terms) > 1 else {}
    return {"loss": (value, jnp.float32(1)), **several, **metrics}


def make_train_step(
    loss: Callable[..., Any],
    mesh: Mesh,
    settings: StepSettings,
    compiler_options: dict[str, str] | None = None,
    accumulation: int = 1,
) -> Any:
    """Returns the jitted train step (seed, state, totals, batch) -> (state, totals, loss f32[]).

    `totals` is {name: (sum f32[], weight f32[])} of all metrics since the totals were zeros, and
    "bad_step" i32[]: the first step, counted from 1, whose loss or gradient was not finite, or 0.
    The state and the totals are donated. `accumulation` is the number of micro-batches.
    """
    gradients_of = _gradients_of_step(loss, mesh, settings, accumulation)

    def step(seed: jax.Array, state: TrainState, totals: Any, batch: Any) -> Any:
        gradients, added, model_state = gradients_of(seed, state, batch)
        gradients = jax.tree.map(
            lambda g, frozen: jnp.zeros_like(g) if frozen else g,
            gradients,
            settings.frozen(gradients),
        )
        norm, value = _norm(gradients, mesh), added["loss"][0]
        added = {**added, "gradient_norm": (norm, jnp.float32(1))}
        with jax.named_scope("optimizer"):
            updates, opt_state = settings.optimizer.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if settings.ema_decay:
            with jax.named_scope("average"):
                newest = {"params": params, "model_state": model_state}

                def average() -> Any:
                    done = state.step // settings.ema_every  # updates before this one
                    return update_average(state.ema, newest, done, settings.ema_decay)

                ema = _every(settings.ema_every, state.step, average, ema)
        number = state.step + 1
        bad = jnp.where(jnp.isfinite(value) & jnp.isfinite(norm), 0, number)
        bad = jnp.where(totals["bad_step"] > 0, totals["bad_step"], bad)
        added = jax.tree.map(jnp.add, {k: totals[k] for k in added}, added)
        new = TrainState(number, params, model_state, opt_state, ema)
        return new, {**added, "bad_step": bad}, value

    return jax.jit(
        step,
        donate_argnums=(1, 2),
        out_shardings=sharding.replicated(mesh),
        compiler_options=compiler_options,
    )


def _gradients_of_step(
    loss: Callable[..., Any], mesh: Mesh, settings: StepSettings, accumulation: int
) -> Callable[[jax.Array, TrainState, Any], Any]:
    """`make_gradients` as a function of (seed, state, batch), with the key of the state's step."""
    clip, dtype = settings.device_clip, settings.sum_dtype
    gradients_of = make_gradients(loss, mesh, accumulation, clip, dtype)

    def compute(seed: jax.Array, state: TrainState, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        return gradients_of(state.params, state.model_state, batch, key)

    return compute


def _norm(gradients: Any, mesh: Mesh) -> jax.Array:
    """The 2-norm f32[] of all gradients together."""
    if mesh.devices.flat[0].platform != "cpu":
        return optax.tree.norm(gradients)
    # XLA would share the squares with Adam and write them to the memory. The barrier prevents that.
    leaves = jax.lax.optimization_barrier(jax.tree.leaves(gradients))
    return jnp.sqrt(sum(jnp.vdot(g, g) for g in leaves))


def _every(steps: int, step: jax.Array, then: Callable[[], Any], otherwise: Any) -> Any:
    """`then()` in steps `steps`, 2 * `steps`, ..., and `otherwise` in all others."""
    if steps == 1:
        return then()
    # Without the condition, the compiler would compute both in every step.
    with jax.named_scope(f"one_step_in_{steps}"):  # `engine.forecast.hlo` reads it
        return jax.lax.cond((step + 1) % steps == 0, then, lambda: otherwise)


def first_average(tree: Any) -> Any:
    """The average before the first step: a copy with floats in float32.

    In bfloat16 an average with decay 0.999 hardly moves. The step donates its state, and one buffer
    cannot be donated twice.
    """

    def copied(x: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        return jnp.array(x, jnp.float32 if is_float else x.dtype, copy=True)

    return jax.tree.map(copied, tree)


def update_average(average: Any, newest: Any, done: jax.Array, decay: float) -> Any:
    """One update of an average, after `done` others: decay * average + (1 - decay) * newest.

    The memory is short at first: the decay is at most (1 + done) / (10 + done), as with
    TensorFlow's ExponentialMovingAverage. Later it reaches back about 1 / (1 - decay) updates.

    The averages are float32, `newest` has any dtypes, and `done` is i32[]. Integers are not
    averaged: the newest value counts.
    """
    now = jnp.minimum(decay, (1.0 + done) / (10.0 + done))

    def averaged(old: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return new
        mean: Any = optax.incremental_update(jnp.float32(new), jnp.float32(old), 1.0 - now)
        return mean

    return jax.tree.map(averaged, average, newest)


def totals_spec(
    loss: Callable[..., Any],
    mesh: Mesh,
    settings: StepSettings,
    arguments: tuple[Any, TrainState, Any],
    accumulation: int = 1,
) -> Any:
    """Returns the totals of `make_train_step` as ShapeDtypeStructs, for its (seed, state, batch).

    They come from the gradients that the step computes: jax traces these once for both.
    """
    gradients_of = _gradients_of_step(loss, mesh, settings, accumulation)
    _, shapes, _ = jax.eval_shape(gradients_of, *arguments)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    extra = {"gradient_norm": (scalar, scalar), "bad_step": jax.ShapeDtypeStruct((), jnp.int32)}
    return sharding.abstract({**shapes, **extra}, sharding.replicated(mesh))


def make_predict_step(predict: Callable[..., Any], mesh: Mesh) -> Any:
    """Returns the jitted predict step (params, model_state, batch) -> rows.

    The rows are {name: [B, ...]}, replicated: the arrays that `predict` returns for each device's
    share, and the batch's "mask".
    """

    def on_device(params: Any, model_state: Any, batch: Any) -> Any:
        return {**predict(params, model_state, batch), "mask": batch["mask"]}

    everywhere, shared = PartitionSpec(), PartitionSpec(mesh.axis_names)
    specs = everywhere, everywhere, shared
    sharded = _shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=shared)
    options = compiler.options(mesh)
    return jax.jit(sharded, out_shardings=sharding.replicated(mesh), compiler_options=options)


def lower(step: Any, first: tuple[Any, ...], batches: tuple[Any, ...]) -> list[Any]:
    """Lowers a jitted `step(*first, batch)`: [(batch, jax.stages.Lowered), ...] for `batches`."""
    return [(batch, step.lower(*first, batch)) for batch in batches]


class CompiledStep:
    """A compiled step with one program for each shape of the batch, its last argument."""

    def __init__(self, lowered: list[Any]):
        """Compiles the programs that `lower` returns."""
        self.programs = {_shape(batch): program.compile() for batch, program in lowered}
        self.batch_size: int = next(iter(self.programs))[0][1][0]

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program for the batch's shape, which the benchmark's `batch_spec` declares."""
        shape = _shape(arguments[-1])
        if shape not in self.programs:
            declared = " or ".join(_describe(known) for known in self.programs)
            raise DataError(
                f"the input has a batch of {_describe(shape)}, but the benchmark's batch_spec "
                f"declares {declared}"
            )
        return self.programs[shape](*arguments)


def _shape(batch: Any) -> tuple[Any, ...]:
    return tuple((name, batch[name].shape) for name in sorted(batch))


def _describe(shape: tuple[Any, ...]) -> str:
    return ", ".join(f"{name}{list(sizes)}" for name, sizes in shape)
