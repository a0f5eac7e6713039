"""The average of the weights that is updated every few steps, against a NumPy loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine import step as steps
from tests.engine.settings import make_optimizer
from tests.engine.test_step import hashed, linear_loss, mesh, put, recipe, run, zeros  # noqa: F401 (a fixture)

close = functools.partial(np.testing.assert_allclose, rtol=1e-5)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_updates_are_every_few_steps_and_the_decay_is_of_an_update(mesh, every):  # noqa: F811
    """The memory is short at first, in updates: min(0.25, (1 + n) / (10 + n)) after n updates."""
    sgd = make_optimizer(0.5, momentum=0.0)
    batches = [{"x": hashed((16, 3), salt).astype(np.float32)} for salt in range(20, 28)]
    plan = recipe(optimizer=sgd, ema_decay=0.25, ema_every=every)
    want = {"params": {"w": np.full(3, 2.0)}, "model_state": {"mean": np.zeros(3)}}
    decays = [1 / 10, 2 / 11, 3 / 12, *[0.25] * 5]
    done = 0
    for number, (state, _, _) in enumerate(run(linear_loss, mesh, plan, batches), 1):
        if number % every == 0:
            new = {"params": state.params, "model_state": state.model_state}
            want = jax.tree.map(
                lambda old, new, d=decays[done]: d * old + (1 - d) * new.astype(float), want, new
            )
            done += 1
        jax.tree.map(close, state.ema, want)
    assert done == 8 // every


def test_integers_are_those_of_the_last_update(mesh):  # noqa: F811
    def loss(params, model_state, batch, rng):
        terms = {"linear": (jnp.sum(params["w"] * batch["x"]), jnp.float32(len(batch["x"])))}
        return terms, {}, {"batches": model_state["batches"] + 1}

    plan = recipe(ema_decay=0.5, ema_every=2)
    start = steps.init_state(lambda key: ({"w": jnp.ones(3)}, {"batches": jnp.int32(0)}), plan, 0)
    state, batch = put(mesh, start), put(mesh, {"x": np.ones((16, 3), "f")}, batch=True)
    totals, seen = zeros(loss, mesh, state, batch), []
    train_step = steps.make_train_step(loss, mesh, plan)
    for _ in range(5):
        state, totals, _ = train_step(np.uint32(0), state, totals, batch)
        seen.append(int(state.ema["model_state"]["batches"]))
    assert seen == [0, 2, 2, 4, 4]


def test_an_average_is_float32_whatever_comes_in():
    ones = {"kernel": jnp.ones(3, jnp.bfloat16)}
    average = steps.update_average(
        steps.first_average(ones), jax.tree.map(jnp.zeros_like, ones), jnp.int32(999), 0.999
    )
    assert average["kernel"].dtype == jnp.float32
    np.testing.assert_allclose(average["kernel"], 1 - 9 / 1009, rtol=1e-5)
