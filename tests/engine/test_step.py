"""The train and predict steps against NumPy in float64 and jax.grad without a mesh."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import benchmarks
from benchmarks.base import BATCH_AXES
from common.errors import DataError
from configs import resnet50
from engine import sharding
from engine import step as steps
from tests.engine.settings import make_optimizer

QUICK: Any = {"xla_backend_optimization_level": 0}  # most of a test's time is compilation


def hashed(shape: tuple[int, ...], salt: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    """float64 in [low, high), each a hash of its index: no library's generator can change it."""
    x = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(salt << 32)
    for shift in (33, 29, 32):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(0x9E3779B97F4A7C15)
    return (low + (high - low) * (x >> np.uint64(11)).astype(np.float64) / 2**53).reshape(shape)


def put(mesh: Any, tree: Any, batch: bool = False) -> Any:
    placement = sharding.batch_sharding(mesh) if batch else sharding.replicated(mesh)
    return jax.tree.map(lambda x: jax.device_put(jnp.array(x, copy=True), placement), tree)


def step_settings(**kwargs: Any) -> steps.StepSettings:
    sgd = make_optimizer(0.0, nesterov=True, weight_decay=1e-4)
    defaults = {"optimizer": sgd, "ema_decay": 0.0, "device_clip": 0.0}
    defaults |= {"frozen": lambda params: jax.tree.map(lambda _: False, params)}
    return steps.StepSettings(**{**defaults, **kwargs})


def zeros(loss: Any, mesh: Any, state: Any, batch: Any) -> Any:
    arguments = jnp.uint32(0), state, batch
    spec = steps.totals_spec(loss, mesh, step_settings(), arguments)
    return jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), spec)


@pytest.fixture(scope="module")
def mesh():
    return sharding.make(BATCH_AXES, 2)


# --- The train step.


def vector_init(key):
    return {"w": jnp.full(3, 2.0)}, {"mean": jnp.zeros(3)}


def linear_loss(params, model_state, batch, rng):
    """Sum of w * x; the state is half the old one and half the mean of x over the batch."""
    count = jnp.float32(len(batch["x"]))
    terms = {"linear": (jnp.sum(params["w"] * batch["x"]), count)}
    return terms, {}, {"mean": (model_state["mean"] + jnp.mean(batch["x"], axis=0)) / 2}


def run(
    loss: Any,
    mesh: Any,
    settings: steps.StepSettings,
    batches: list[Any],
    seed: int = 3,
    accumulation: int = 1,
) -> Any:
    """Yields (state, totals, loss) after each step, in NumPy, because the next one donates them."""
    state = put(mesh, steps.init_state(vector_init, settings, seed))
    batches = [put(mesh, batch, batch=True) for batch in batches]
    totals = zeros(loss, mesh, state, batches[0])
    step = steps.make_train_step(loss, mesh, settings, accumulation=accumulation)
    for batch in batches:
        state, totals, value = step(np.uint32(seed), state, totals, batch)
        yield jax.tree.map(np.array, (state, totals, value))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_rng_is_a_function_of_seed_step_and_shard(mesh, accumulation):
    def loss(params, model_state, batch, rng):
        kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
        count = jnp.float32(len(batch["x"]))
        return {"dropout": (jnp.sum(kept * batch["x"]), count)}, {}, model_state

    x = hashed((32, 3), 7).astype(np.float32)
    results = run(loss, mesh, step_settings(), [{"x": x}] * 3, 11, accumulation)
    seen = set()
    for step, (_, _, value) in enumerate(results):
        total = 0.0
        for shard, rows in enumerate(x.reshape(8, accumulation, -1, 3)):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(11), step), shard)
            keys = [key] if accumulation == 1 else jax.random.split(key, accumulation)
            for key, part in zip(keys, rows, strict=True):
                total += np.sum(part[np.asarray(jax.random.bernoulli(key, 0.5, part.shape))])
        np.testing.assert_allclose(value, total / 32, rtol=1e-5)
        seen.add(float(value))
    assert len(seen) == 3


def test_totals_are_sums_over_steps(mesh):
    batches = [{"x": hashed((16, 3), salt).astype(np.float32)} for salt in range(30, 34)]
    loss = norm = mean = 0.0
    for i, (state, totals, value) in enumerate(run(linear_loss, mesh, step_settings(), batches), 1):
        x = batches[i - 1]["x"].astype(float)
        np.testing.assert_allclose(value, 2 * x.sum() / 16, rtol=1e-5)
        loss, norm = loss + 2 * x.sum() / 16, norm + np.linalg.norm(x.mean(0))
        want = {"loss": (loss, i), "gradient_norm": (norm, i), "bad_step": 0}
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), totals, want)
        mean = (mean + x.mean(0)) / 2
        np.testing.assert_allclose(state.model_state["mean"], mean, rtol=1e-5, atol=1e-7)
        assert state.step == i and state.ema == {}


def root_loss(params, model_state, batch, rng):
    """sqrt(w - 2 + x): at w = 2 and x = 0 finite, but infinitely steep."""
    terms = {"root": (jnp.sum(jnp.sqrt(params["w"] - 2 + batch["x"])), jnp.float32(1))}
    return terms, {}, model_state


def log_loss(params, model_state, batch, rng):
    """w + log(x): at x = 0 infinite, but no steeper than elsewhere."""
    return {"log": (jnp.sum(params["w"] + jnp.log(batch["x"])), jnp.float32(1))}, {}, model_state


@pytest.mark.parametrize(
    ("loss", "bad", "finite"),
    [(linear_loss, np.nan, False), (log_loss, 0.0, False), (root_loss, 0.0, True)],
)
def test_first_step_that_is_not_finite_is_remembered(mesh, loss, bad, finite):
    good, wrong = np.ones((16, 3), np.float32), np.ones((16, 3), np.float32)
    wrong[13, 1] = bad  # one row on one device
    batches = [{"x": x} for x in (good, good, wrong, good, wrong)]
    results = list(run(loss, mesh, step_settings(), batches))
    assert [int(totals["bad_step"]) for _, totals, _ in results] == [0, 0, 3, 3, 3]
    assert [int(state.step) for state, _, _ in results] == [1, 2, 3, 4, 5]
    assert np.isfinite(results[2][2]) == finite


def test_state_and_totals_are_donated_and_the_batch_is_not(mesh):
    """The state is made in one jit, as a run does, and must not share buffers."""
    settings = step_settings(ema_decay=0.5)
    make = functools.partial(steps.init_state, vector_init, settings)
    state = jax.jit(make, out_shardings=sharding.replicated(mesh))(np.uint32(3))
    batch = put(mesh, {"x": np.ones((16, 3), np.float32)}, batch=True)
    totals = zeros(linear_loss, mesh, state, batch)
    new_state, new_totals, value = steps.make_train_step(linear_loss, mesh, settings)(
        np.uint32(3), state, totals, batch
    )
    assert all(x.is_deleted() for x in jax.tree.leaves((state, totals)))
    assert not any(x.is_deleted() for x in jax.tree.leaves((new_state, new_totals, value, batch)))
    assert all(x.is_fully_replicated for x in jax.tree.leaves((new_state, new_totals, value)))


def test_predict_returns_every_row_in_order_on_every_device(mesh):
    def predict(params, model_state, batch):
        return {"y": params["w"] * batch["x"] + model_state["b"]}

    batch = {"x": np.arange(24, dtype=np.float32), "mask": (np.arange(24) < 21).astype(np.float32)}
    rows = steps.make_predict_step(predict, mesh)(
        *put(mesh, ({"w": np.float32(3)}, {"b": np.float32(1)})), put(mesh, batch, batch=True)
    )
    assert all(x.is_fully_replicated for x in rows.values())
    np.testing.assert_array_equal(rows["y"], 3 * batch["x"] + 1)
    np.testing.assert_array_equal(rows["mask"], batch["mask"])
    assert set(rows) == {"y", "mask"}


# --- The average of the weights that is updated every few steps, against a NumPy loop.


@pytest.mark.parametrize("every", [1, 2, 3])
def test_updates_are_every_few_steps_and_the_decay_is_of_an_update(mesh, every):
    """The memory is short at first, in updates: min(0.25, (1 + n) / (10 + n)) after n updates."""
    sgd = make_optimizer(0.5, momentum=0.0)
    batches = [{"x": hashed((16, 3), salt).astype(np.float32)} for salt in range(20, 28)]
    settings = step_settings(optimizer=sgd, ema_decay=0.25, ema_every=every)
    want = {"params": {"w": np.full(3, 2.0)}, "model_state": {"mean": np.zeros(3)}}
    decays = [1 / 10, 2 / 11, 3 / 12, *[0.25] * 5]
    done = 0
    for number, (state, _, _) in enumerate(run(linear_loss, mesh, settings, batches), 1):
        if number % every == 0:
            new = {"params": state.params, "model_state": state.model_state}
            want = jax.tree.map(
                lambda old, new, d=decays[done]: d * old + (1 - d) * new.astype(float), want, new
            )
            done += 1
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), state.ema, want)
    assert done == 8 // every


def test_integers_are_those_of_the_last_update(mesh):
    def loss(params, model_state, batch, rng):
        terms = {"linear": (jnp.sum(params["w"] * batch["x"]), jnp.float32(len(batch["x"])))}
        return terms, {}, {"batches": model_state["batches"] + 1}

    settings = step_settings(ema_decay=0.5, ema_every=2)
    start = steps.init_state(
        lambda key: ({"w": jnp.ones(3)}, {"batches": jnp.int32(0)}), settings, 0
    )
    state, batch = put(mesh, start), put(mesh, {"x": np.ones((16, 3), "f")}, batch=True)
    totals, seen = zeros(loss, mesh, state, batch), []
    train_step = steps.make_train_step(loss, mesh, settings)
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


# --- A tiny ResNet: pinned numbers, and the same step without a mesh.

RATES = (0.2, 0.1, 0.05)
MOMENTUM, DECAY = 0.9, 1e-2


def resnet(**overrides: Any) -> Any:
    config = resnet50.get_config()
    config.update({"dataset": "fake", "num_train_images": 16, "num_eval_images": 16})
    config.update({"resnet_depth": 18, "num_filters": 4, "image_size": 32})
    config.update({"num_label_classes": 5, "precision": "float32", "label_smoothing": 0.1})
    config.update(overrides)
    return benchmarks.load(config.lock(), "")


def resnet_state() -> tuple[Any, Any]:
    """(params, model_state), float32; every gamma is away from 0, so every layer has a say."""
    shapes = jax.eval_shape(resnet().init, jax.random.key(0))
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)

    def draw(salt: int, path: Any, leaf: Any) -> np.ndarray:
        name = path[-1].key
        size = np.sqrt(3 / np.prod(leaf.shape[:-1])) if name == "kernel" else 0.3
        value = hashed(leaf.shape, salt, -size, size) + (name in ("scale", "var"))
        return value.astype(np.float32)

    return jax.tree.unflatten(tree, [draw(i, *leaf) for i, leaf in enumerate(leaves)])


def resnet_batch() -> dict[str, np.ndarray]:
    return {
        "image": hashed((32, 32, 32, 3), 90, 0, 256).astype(np.uint8),
        "label": hashed((32,), 91, 0, 5).astype(np.int32),
        "flip": hashed((32,), 92) > 0,
        "id": np.arange(32, dtype=np.int32),
    }


@pytest.fixture(scope="module")
def trained():
    """Three steps on one batch, BatchNorm over all devices: [(state, totals), ...] in NumPy."""
    mesh, loss = sharding.make(BATCH_AXES, 0), resnet(bn_span=0).loss
    params, model_state = resnet_state()
    rate: Any = optax.piecewise_constant_schedule(RATES[0], {1: 0.5, 2: 0.5})
    optimizer = make_optimizer(rate, momentum=MOMENTUM, nesterov=True, weight_decay=DECAY)
    settings = step_settings(optimizer=optimizer)
    state = put(mesh, steps.init_state(lambda key: (params, model_state), settings, 0))
    batch = put(mesh, resnet_batch(), batch=True)
    totals, results = zeros(loss, mesh, state, batch), []
    lowered = steps.make_train_step(loss, mesh, settings).lower(np.uint32(0), state, totals, batch)
    step = lowered.compile(QUICK)
    for _ in RATES:
        state, totals, _ = step(np.uint32(0), state, totals, batch)
        results.append(jax.tree.map(np.array, (state, totals)))
    return results


# Means over the first 1, 2 and 3 steps, as this code computed them; jax 0.10.2 and 0.11.2, with
# XLA's optimizations on and off, agree within 3e-6. A change that moves them must say why.
GOLDEN = {
    "loss": (2.343546, 2.044590, 1.907285),
    "top_1_accuracy": (4 / 32, 15 / 64, 27 / 96),
    "gradient_norm": (21.17613, 15.44689, 12.26789),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_metrics_of_three_steps(trained, name):
    means = [totals[name][0] / totals[name][1] for _, totals in trained]
    np.testing.assert_allclose(means, GOLDEN[name], rtol=1e-4)


@pytest.mark.long
def test_two_steps_are_those_of_plain_jax_and_sgd_by_hand(trained):
    params, model_state = resnet_state()
    batch = resnet_batch()
    loss = resnet(bn_span=1).loss  # one device: its own statistics are everyone's

    @functools.partial(jax.jit, compiler_options=QUICK)
    @functools.partial(jax.value_and_grad, has_aux=True)
    def value_and_gradient(params, model_state):
        terms, _, model_state = loss(params, model_state, batch, jax.random.key(0))
        total, weight = terms["cross_entropy"]
        return total / weight, model_state

    momentum = [0.0] * len(jax.tree.leaves(params))
    summed = 0.0
    for rate, (state, totals) in zip(RATES, trained[:2], strict=False):
        (value, model_state), gradients = value_and_gradient(params, model_state)
        summed += float(value)
        np.testing.assert_allclose(totals["loss"][0], summed, rtol=1e-5)
        new = []
        for i, (path, weight) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
            u = np.asarray(jax.tree.leaves(gradients)[i], float)
            u += DECAY * weight * (path[-1].key == "kernel")
            momentum[i] = MOMENTUM * momentum[i] + u
            new.append(np.float32(weight - rate * (u + MOMENTUM * momentum[i])))
        params = jax.tree.unflatten(jax.tree.structure(params), new)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
            (state.params, state.model_state),
            (params, model_state),
        )


# --- Weights of 0, integers, clipping, frozen parameters.


def masked_loss(params, model_state, batch, rng):
    """Squared errors of one product, and of its first rows; counts batches in its state."""
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


def gradients_of(mesh: Any, of: tuple[Any, Any, Any], accumulation: int = 1, **more: Any) -> Any:
    """(gradients, sums, model_state) of `masked_loss` for (params, model_state, batch)."""
    params, state, batch = of
    compute = jax.jit(steps.make_gradients(masked_loss, mesh, accumulation, **more))
    return compute(*put(mesh, (params, state)), put(mesh, batch, batch=True), jax.random.key(0))


def wanted_gradient(params: Any, batch: Any) -> np.ndarray:
    x, error = batch["x"], 2 * (batch["x"] @ params["w"] - batch["y"])
    weights = np.full(32, 1 / 32) + batch["rare"] / max(batch["rare"].sum(), 1)
    return x.T @ (error * weights)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("rare", [0, 1, 5, 19])
def test_gradients_are_those_of_the_whole_batch(mesh, rare, accumulation):
    """Also where some devices or micro-batches have no weight of a term, or one has all of it.

    A term without weight counts as 0.
    """
    params, _, batch = problem(rare)
    gradients, sums, _ = gradients_of(mesh, problem(rare), accumulation)
    assert list(gradients) == ["w"]
    np.testing.assert_allclose(gradients["w"], wanted_gradient(params, batch), rtol=1e-5, atol=1e-6)
    errors = (batch["x"] @ params["w"] - batch["y"]) ** 2
    value = errors.mean() + (errors[:rare].mean() if rare else 0)
    wanted = {"all": (errors.sum(), 32), "rare": (errors[:rare].sum(), rare), "loss": (value, 1)}
    wanted["rare_rows"] = (rare, rare)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), dict(sums), wanted)


def test_integers_in_the_models_state_stay_integers(mesh):
    _, _, state = gradients_of(mesh, problem(3), accumulation=2)
    assert (state["batches"].dtype, int(state["batches"])) == (np.int32, 9)  # two micro-batches
    assert (state["seen"].dtype, bool(state["seen"])) == (np.bool_, True)


@pytest.mark.parametrize("clip", [0.01, 1.0, 1e9])
def test_each_device_clips_its_own_gradient_before_the_mean(mesh, clip):
    params, state, batch = problem(0)
    gradients, _, _ = gradients_of(mesh, (params, state, batch), device_clip=clip)
    own = []
    for x, y in zip(batch["x"].reshape(8, 4, 3), batch["y"].reshape(8, 4), strict=True):
        gradient = 2 * x.T @ (x @ params["w"] - y) / 4
        own.append(gradient * min(1.0, clip / np.linalg.norm(gradient)))
    np.testing.assert_allclose(gradients["w"], np.mean(own, axis=0), rtol=1e-5)


def test_gradients_are_rounded_before_they_are_added_over_devices(mesh):
    params, state, batch = problem(0)
    alone = np.arange(32) // 4 == 5  # only one device has a gradient, so that no sum is rounded
    batch = {
        name: values * alone.reshape(-1, *[1] * (values.ndim - 1)) for name, values in batch.items()
    }
    exact, rounded = (
        gradients_of(mesh, (params, state, batch), sum_dtype=dtype)[0]["w"]
        for dtype in (None, jnp.bfloat16)
    )
    assert rounded.dtype == np.float32
    wanted = np.asarray(exact).astype(jnp.bfloat16).astype(np.float32)
    assert (wanted != np.asarray(exact)).any()
    np.testing.assert_array_equal(rounded, wanted)


def test_frozen_parameters_have_no_part_in_the_norm(mesh):
    params, state, batch = problem(0)
    params = {"w": params["w"], "frozen": np.array([3.0], np.float32)}

    def loss(params, model_state, batch, rng):
        terms, metrics, model_state = masked_loss(params, model_state, batch, rng)
        value, weight = terms["all"]
        return {"all": (value * params["frozen"][0], weight)}, metrics, model_state

    settings = step_settings(
        optimizer=optax.sgd(0.1), frozen=lambda p: {"w": False, "frozen": True}
    )
    start = steps.init_state(lambda key: (params, state), settings, 0)
    start, placed = put(mesh, start), put(mesh, batch, batch=True)
    totals = zeros(loss, mesh, start, placed)
    after, totals, _ = steps.make_train_step(loss, mesh, settings)(
        np.uint32(0), start, totals, placed
    )
    assert float(after.params["frozen"][0]) == 3.0
    norm = np.linalg.norm(3 * wanted_gradient(params, batch))
    np.testing.assert_allclose(totals["gradient_norm"][0], norm, rtol=1e-5)


def test_micro_batches_cost_one_backward_pass(mesh):
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


# --- What happens in some steps only.


def test_the_program_for_the_shape_of_the_last_argument_runs():
    def lowered(name):
        return types.SimpleNamespace(compile=lambda: lambda *arguments: (name, len(arguments)))

    small, large = {"x": np.zeros((2, 3))}, {"x": np.zeros((4, 3)), "y": np.zeros(4)}
    compiled = steps.CompiledStep([(small, lowered("small")), (large, lowered("large"))])
    assert compiled({"x": np.zeros(9)}, large) == ("large", 2)
    assert compiled(small) == ("small", 1)
    assert compiled.batch_size == 2
    with pytest.raises(DataError) as caught:
        compiled(small, {"x": np.zeros((5, 3))})
    assert str(caught.value) == (
        "the input has a batch of x[5, 3], but the benchmark's batch_spec declares x[2, 3] or "
        "x[4, 3], y[4]"
    )
