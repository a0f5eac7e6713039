"""Promises of the train step: weights of 0, integers, clipping, frozen parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from engine import step as steps
from errors import DataError
from tests.engine.test_step import mesh, put, recipe, zeros  # noqa: F401 (a fixture)


def linear_loss(params, model_state, batch, rng):
    """Two squared errors of one product; the rows of the second are masked."""
    error = (batch["x"] @ params["w"] - batch["y"]) ** 2
    rare = batch["rare"]
    terms = {
        "all": (jnp.sum(error), jnp.float32(len(error))),
        "rare": (jnp.sum(error * rare), jnp.sum(rare)),
    }
    state = {"batches": model_state["batches"] + 1, "seen": model_state["seen"] | True}
    return terms, {"rare_rows": (jnp.sum(rare), jnp.sum(rare))}, state


def problem(rare: float) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    batch = {
        "x": draw.normal(size=(32, 3)).astype(np.float32),
        "y": draw.normal(size=32).astype(np.float32),
        "rare": (np.arange(32) < rare).astype(np.float32),
    }
    state = {"batches": np.int32(7), "seen": np.bool_(False)}
    return {"w": np.array([0.5, -1.0, 2.0], np.float32)}, state, batch


def wanted_gradient(params: Any, batch: Any) -> np.ndarray:
    x, error = batch["x"], 2 * (batch["x"] @ params["w"] - batch["y"])
    weights = np.full(32, 1 / 32) + batch["rare"] / max(batch["rare"].sum(), 1)
    return x.T @ (error * weights)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("rare", [0, 1, 5])
def test_a_term_without_weight_counts_as_0(mesh, rare, accumulation):  # noqa: F811
    """Also where a single device, or a single micro-batch, has all of the weight."""
    params, state, batch = problem(rare)
    compute = jax.jit(steps.make_gradients(linear_loss, mesh, accumulation))
    arguments = put(mesh, params), put(mesh, state), put(mesh, batch, batch=True)
    gradients, sums, _ = compute(*arguments, jax.random.key(0))
    np.testing.assert_allclose(gradients["w"], wanted_gradient(params, batch), rtol=1e-5)
    errors = (batch["x"] @ params["w"] - batch["y"]) ** 2
    value = errors.mean() + (errors[:rare].mean() if rare else 0)
    np.testing.assert_allclose(sums["loss"][0], value, rtol=1e-5)


def test_integers_in_the_models_state_stay_integers(mesh):  # noqa: F811
    params, state, batch = problem(3)
    compute = jax.jit(steps.make_gradients(linear_loss, mesh, 2))
    arguments = put(mesh, params), put(mesh, state), put(mesh, batch, batch=True)
    _, _, state = compute(*arguments, jax.random.key(0))
    assert (state["batches"].dtype, int(state["batches"])) == (np.int32, 9)  # two micro-batches
    assert (state["seen"].dtype, bool(state["seen"])) == (np.bool_, True)


def test_averages_leave_integers_alone(mesh):  # noqa: F811
    params, state, batch = problem(3)
    plan = recipe(optimizer=optax.sgd(0.1), ema_decay=0.5)
    start = steps.init_state(lambda key: (params, state), plan, 0)
    start, batch = put(mesh, start), put(mesh, batch, batch=True)
    train_step = steps.make_train_step(linear_loss, mesh, plan)
    after, _, _ = train_step(np.uint32(0), start, zeros(linear_loss, mesh, start, batch), batch)
    averaged = after.ema["model_state"]["batches"]
    assert (averaged.dtype, int(averaged)) == (np.int32, 8)
    assert after.ema["params"]["w"].dtype == np.float32


@pytest.mark.parametrize("clip", [0.01, 1.0, 1e9])
def test_each_device_clips_its_own_gradient_before_the_mean(mesh, clip):  # noqa: F811
    params, state, batch = problem(0)
    compute = jax.jit(steps.make_gradients(linear_loss, mesh, 1, clip))
    arguments = put(mesh, params), put(mesh, state), put(mesh, batch, batch=True)
    gradients, _, _ = compute(*arguments, jax.random.key(0))
    own = []
    for x, y in zip(batch["x"].reshape(8, 4, 3), batch["y"].reshape(8, 4), strict=True):
        gradient = 2 * x.T @ (x @ params["w"] - y) / 4
        own.append(gradient * min(1.0, clip / np.linalg.norm(gradient)))
    np.testing.assert_allclose(gradients["w"], np.mean(own, axis=0), rtol=1e-5)


def test_gradients_are_rounded_before_they_are_added_over_devices(mesh):  # noqa: F811
    params, state, batch = problem(0)
    alone = np.arange(32) // 4 == 5  # only one device has a gradient, so that no sum is rounded
    batch = {
        name: values * alone.reshape(-1, *[1] * (values.ndim - 1)) for name, values in batch.items()
    }
    arguments = put(mesh, params), put(mesh, state), put(mesh, batch, batch=True)
    exact, rounded = (
        jax.jit(steps.make_gradients(linear_loss, mesh, 1, sum_dtype=dtype))(
            *arguments, jax.random.key(0)
        )[0]["w"]
        for dtype in (None, jnp.bfloat16)
    )
    assert rounded.dtype == np.float32
    wanted = np.asarray(exact).astype(jnp.bfloat16).astype(np.float32)
    assert (wanted != np.asarray(exact)).any()
    np.testing.assert_array_equal(rounded, wanted)


def test_frozen_parameters_have_no_part_in_the_norm(mesh):  # noqa: F811
    params, state, batch = problem(0)
    params = {"w": params["w"], "frozen": np.array([3.0], np.float32)}

    def loss(params, model_state, batch, rng):
        terms, metrics, model_state = linear_loss(params, model_state, batch, rng)
        value, weight = terms["all"]
        return {"all": (value * params["frozen"][0], weight)}, metrics, model_state

    plan = recipe(optimizer=optax.sgd(0.1), frozen=lambda p: {"w": False, "frozen": True})
    start = steps.init_state(lambda key: (params, state), plan, 0)
    start, placed = put(mesh, start), put(mesh, batch, batch=True)
    totals = zeros(loss, mesh, start, placed)
    after, totals, _ = steps.make_train_step(loss, mesh, plan)(np.uint32(0), start, totals, placed)
    assert float(after.params["frozen"][0]) == 3.0
    norm = np.linalg.norm(3 * wanted_gradient(params, batch))
    np.testing.assert_allclose(totals["gradient_norm"][0], norm, rtol=1e-5)


def test_an_undeclared_shape_is_one_line(mesh):  # noqa: F811
    spec = {"x": jax.ShapeDtypeStruct((8, 4), np.float32)}
    program = jax.jit(lambda batch: batch["x"].sum())
    compiled = steps.Compiled([(spec, program.lower(spec))])
    assert float(compiled({"x": jnp.ones((8, 4))})) == 32
    with pytest.raises(DataError, match=r"a batch of x\[8, 5\], but .* declares x\[8, 4\]"):
        compiled({"x": jnp.ones((8, 5))})


def test_micro_batches_cost_one_backward_pass(mesh):  # noqa: F811
    """With five terms the compiled step has hardly more operations than with one."""
    width, rows = 128, 64

    def loss_of(count: int) -> Any:
        def loss(params, model_state, batch, rng):
            hidden = batch["x"]
            for w in params["layers"]:
                hidden = jnp.tanh(hidden @ w)
            terms = {
                f"term {i}": (jnp.sum(hidden[:, i]), jnp.sum(batch["x"][:, i] > 0).astype(float))
                for i in range(count)
            }
            return terms, {}, model_state

        return loss

    params = {"layers": [np.ones((width, width), np.float32)] * 4}
    batch = {"x": np.ones((rows, width), np.float32)}
    counts = {}
    for count in (1, 5):
        compute = jax.jit(steps.make_gradients(loss_of(count), mesh, 2))
        arguments = put(mesh, params), {}, put(mesh, batch, batch=True), jax.random.key(0)
        text = compute.lower(*arguments).compile().as_text() or ""
        counts[count] = sum(" dot(" in line or "dot_general" in line for line in text.splitlines())
    assert counts[1] > 0 and counts[5] == counts[1], counts
