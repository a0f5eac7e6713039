"""Sharpness-aware minimization against two explicit gradients, in NumPy and in plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.base import BATCH_AXES
from engine import mesh as meshes
from engine import step as steps
from tests.engine.test_step import (  # noqa: F401 (a fixture)
    hashed,
    mesh,
    mlp,
    mlp_loss,
    numpy_gradients,
    put,
    recipe,
    run,
    zeros,
)

close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
RATE, RADIUS = 0.1, 0.5


def length(tree: Any) -> float:
    return np.sqrt(sum(float((np.asarray(x, float) ** 2).sum()) for x in jax.tree.leaves(tree)))


def moved(params: Any, gradients: Any, by: float) -> Any:
    return jax.tree.map(lambda w, g: np.asarray(w) + by * np.asarray(g), params, gradients)


def train(devices: Any, plan: steps.Recipe, count: int) -> list[Any]:
    """[(state, totals, loss), ...] of steps on the batch of `mlp`, in NumPy."""
    params, batch = jax.tree.map(np.float32, mlp())
    state = put(devices, steps.state_of(params, {"rows": jnp.float32(100)}, plan))
    batch = put(devices, batch, batch=True)
    totals, results = zeros(mlp_loss, devices, state, batch), []
    train_step = steps.make_train_step(mlp_loss, devices, plan)
    for _ in range(count):
        state, totals, value = train_step(np.uint32(0), state, totals, batch)
        results.append(jax.tree.map(np.array, (state, totals, value)))
    return results


@pytest.mark.parametrize(("every", "accumulation"), [(1, 1), (2, 1), (2, 2)])
def test_every_such_step_has_the_gradient_uphill(mesh, every, accumulation):  # noqa: F811
    """NumPy in float64; the reports are of the pass at the weights, as without it."""
    sam: Any = {"sam_radius": RADIUS, "sam_every": every, "accumulation": accumulation}
    results = train(mesh, recipe(optimizer=optax.sgd(RATE), **sam), 4)
    params, batch = mlp()
    loss = norm = 0.0
    for number, (state, totals, value) in enumerate(results, 1):
        sums, gradients = numpy_gradients(params, batch)
        loss, norm = loss + sums["loss"][0], norm + length(gradients)
        if number % every == 0:
            uphill = moved(params, gradients, RADIUS / length(gradients))
            _, gradients = numpy_gradients(uphill, batch)
        params = moved(params, gradients, -RATE)
        jax.tree.map(close, state.params, params)
        close(value, sums["loss"][0])
        close(totals["loss"][0], loss)
        close(totals["gradient_norm"][0], norm)
        # The state counts rows of a device's share: once per step, not once per gradient.
        close(state.model_state["rows"], 100 + number * 32 / 8)


def test_the_number_of_devices_does_not_matter(mesh):  # noqa: F811
    """The step uphill is along the gradient of the global batch, not of each device's share."""
    plan = recipe(optimizer=optax.sgd(RATE), sam_radius=RADIUS)
    alone = meshes.make(BATCH_AXES, 1, jax.devices()[:1])
    (_, _, _), (one, _, _) = train(alone, plan, 2)
    (_, _, _), (eight, _, _) = train(mesh, plan, 2)
    jax.tree.map(close, one.params, eight.params)


def test_both_gradients_have_the_same_randomness(mesh):  # noqa: F811
    def loss(params, model_state, batch, rng):
        kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
        value = jnp.sum(jnp.exp(params["w"] * kept * batch["x"]))
        return {"dropout": (value, jnp.float32(len(batch["x"])))}, {}, model_state

    x = hashed((32, 3), 7).astype(np.float32)
    plan = recipe(seed=11, optimizer=optax.sgd(RATE), sam_radius=RADIUS)
    ((state, _, _),) = run(loss, mesh, plan, [{"x": x}])

    @jax.jit
    @jax.grad
    def slope(w):
        key = jax.random.fold_in(jax.random.key(11), 0)
        parts = [
            loss({"w": w}, {}, {"x": rows}, jax.random.fold_in(key, shard))[0]["dropout"][0]
            for shard, rows in enumerate(x.reshape(8, 4, 3))
        ]
        return jnp.sum(jnp.stack(parts)) / 32

    w = jnp.full(3, 2.0)
    gradient = slope(w)
    uphill = w + RADIUS * gradient / jnp.linalg.norm(gradient)
    close(state.params["w"], w - RATE * slope(uphill))


def test_frozen_parameters_stay_and_have_no_part_in_the_direction(mesh):  # noqa: F811
    def loss(params, model_state, batch, rng):
        value = jnp.sum(batch["x"]) * params["frozen"] * jnp.sum(params["w"] ** 2)
        return {"square": (value, jnp.float32(len(batch["x"])))}, {}, model_state

    batch = {"x": np.ones(16, np.float32)}
    frozen = lambda _: {"w": False, "frozen": True}  # noqa: E731
    plan = recipe(optimizer=optax.sgd(RATE), sam_radius=RADIUS, frozen=frozen)
    start = steps.state_of({"w": jnp.array([3.0, 4.0]), "frozen": jnp.float32(2)}, {}, plan)
    start, batch = put(mesh, start), put(mesh, batch, batch=True)
    totals = zeros(loss, mesh, start, batch)
    state, totals, _ = steps.make_train_step(loss, mesh, plan)(np.uint32(0), start, totals, batch)
    # The gradient is 4 w, of length 20; w + 0.5 * (0.6, 0.8) = (3.3, 4.4).
    close(state.params["w"], [3 - RATE * 4 * 3.3, 4 - RATE * 4 * 4.4])
    close(totals["gradient_norm"][0], 20)
    assert state.params["frozen"] == 2


def test_a_gradient_uphill_that_is_not_finite_is_remembered(mesh):  # noqa: F811
    """-sqrt(2.1 - w) is steep at w = 2, and no number at w + 0.5."""

    def loss(params, model_state, batch, rng):
        value = -jnp.sum(jnp.sqrt(2.1 - params["w"]) * batch["x"])
        return {"root": (value, jnp.float32(len(batch["x"])))}, {}, model_state

    batches = [{"x": np.ones((16, 3), np.float32)}] * 3
    for radius, bad in ((0.0, [0, 0, 0]), (RADIUS, [0, 2, 2])):
        plan = recipe(optimizer=optax.sgd(0.0), sam_radius=radius, sam_every=2)
        assert [int(totals["bad_step"]) for _, totals, _ in run(loss, mesh, plan, batches)] == bad


@pytest.mark.parametrize(
    ("sam", "passes"),
    [({}, [1, 1, 1, 1]), ({"sam_every": 3, "sam_radius": RADIUS}, [1, 1, 2, 1])],
)
def test_other_steps_compute_one_gradient(mesh, sam, passes):  # noqa: F811
    calls = []

    def loss(params, model_state, batch, rng):
        jax.debug.callback(lambda: calls.append(1))
        count = jnp.float32(len(batch["x"]))
        return {"linear": (jnp.sum(params["w"] * batch["x"]), count)}, {}, model_state

    results = run(loss, mesh, recipe(**sam), [{"x": np.ones((16, 3), np.float32)}] * 4)
    counts = []
    for _ in results:
        jax.effects_barrier()
        counts.append(len(calls))
    assert np.diff([0, *counts]).tolist() == [8 * number for number in passes]  # 8 devices
