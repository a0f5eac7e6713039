"""GNMT: published sizes, the formulas word by word, padding and decoding."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from benchmarks.translation import losses
from benchmarks.translation.gnmt import models
from common.hashing import keep_mask

WORDS, WIDTH, LAYERS = 11, 4, 3
PAIRS = [([5, 2, 9, 1], [3, 3, 8, 10, 1]), ([7, 1], [4, 6, 1]), ([2, 8, 4, 10, 6, 1], [9, 1])]
SEEDS = np.array([7, -2, 7], np.int32)


def tiny(**changes: Any) -> Any:
    sizes = {"vocab_size": WORDS, "width": WIDTH, "dropout": 0.0, "dtype": jnp.float32}
    layers = {"encoder_layers": LAYERS, "decoder_layers": LAYERS}
    return models.GNMT(**{**sizes, **layers, **changes})


def batch(pairs: Any = PAIRS, size=6) -> Any:
    """Pairs as rows with zeros behind them."""
    sides = zip(("inputs", "targets"), zip(*pairs, strict=True), strict=True)
    return {
        name: np.array([side + [0] * (size - len(side)) for side in texts], np.int32)
        for name, texts in sides
    }


def weights(model, dtype: Any = np.float32) -> Any:
    """Random parameters in which every array matters."""
    draw, shapes = np.random.default_rng(0), shapes_of(model)
    return jax.tree.map(lambda leaf: draw.normal(0, 0.5, leaf.shape).astype(dtype), shapes)


def shapes_of(model):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), batch(), None))["params"]


def loss(model, params, rows, seeds=None) -> Any:
    """(the loss's sum, logits [T, b, V])."""
    features = model.apply({"params": params}, rows, seeds)
    kernel, bias = params["classifier"]["kernel"], params["classifier"].get("bias")
    targets = rows["targets"].T
    real = (targets > 0).astype(features.dtype)
    value = losses.smoothed_cross_entropy(
        features, kernel, bias, targets, real, vocab_size=WORDS, smoothing=0.1, slices=2
    )
    return value, losses.logits(features, kernel, bias, WORDS)[..., :WORDS]


evaluate = functools.partial(jax.jit, static_argnums=0)(loss)
derive = functools.partial(jax.jit, static_argnums=0)(jax.value_and_grad(loss, 1, has_aux=True))


# The formulas, for one pair and without any padding.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_written_out(layer, inputs, direction=0):
    kernel, recurrent = layer["kernel"][direction], layer["recurrent_kernel"][direction]
    h = c = np.zeros(WIDTH)
    actual = []
    for x in inputs:
        i, f, g, o = np.split(x @ kernel + h @ recurrent + layer["bias"][direction], 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        actual.append(h)
    return actual


def attention_written_out(layer, query, values):
    direction = layer["gain"] * layer["direction"] / math.sqrt(sum(layer["direction"] ** 2))
    scores = [
        direction @ np.tanh(query @ layer["query"]["kernel"] + v @ layer["key"]["kernel"] + b)
        for v, b in zip(values, [layer["bias"]] * len(values), strict=True)
    ]
    powers = np.exp(scores)
    return powers @ np.array(values) / powers.sum()


KEEP = jax.jit(keep_mask, static_argnums=(0, 1))


@functools.cache
def mask(count, width, rate, seed, site):
    """The dropout of a row of so many positions."""
    seeds = np.array([seed], np.int32)
    return np.asarray(KEEP((1, count, width), rate, seeds, site))[0] if rate else np.ones(count)


def written_out(params, source, target, rate=0.0, seed=0):
    """(the loss's sum, logits [T, V]) of one pair."""

    def dropped(xs, site):
        kept = mask(len(xs), len(xs[0]), rate, int(seed), site)
        return [x * k / (1 - rate) for x, k in zip(xs, kept, strict=True)]

    x = dropped([params["embedding"][i] for i in source], 0)
    forward = lstm_written_out(params["encoder_0"], x)
    backward = lstm_written_out(params["encoder_0"], x[::-1], 1)[::-1]
    x = [np.concatenate(pair) for pair in zip(forward, backward, strict=True)]
    x = lstm_written_out(params["encoder_1"], dropped(x, 1))
    y = lstm_written_out(params["encoder_2"], dropped(x, 2))
    values = [a + b for a, b in zip(x, y, strict=True)]

    x = dropped([params["embedding"][i] for i in [0, *target[:-1]]], 1000)
    x = lstm_written_out(params["decoder_0"], x)
    actual = [attention_written_out(params["attention"], query, values) for query in x]
    both = [np.concatenate(pair) for pair in zip(x, actual, strict=True)]
    x = lstm_written_out(params["decoder_1"], dropped(both, 1001))
    both = [np.concatenate(pair) for pair in zip(x, actual, strict=True)]
    y = lstm_written_out(params["decoder_2"], dropped(both, 1002))
    features = np.array([a + b for a, b in zip(x, y, strict=True)])

    classifier = params["classifier"]
    logits = features @ classifier["kernel"] + classifier.get("bias", 0)
    logits = logits[:, :WORDS]
    costs = np.log(np.exp(logits).sum(1, keepdims=True)) - logits
    smooth = costs.mean(1).sum()
    return 0.9 * sum(costs[t, word] for t, word in enumerate(target)) + 0.1 * smooth, logits


@pytest.mark.parametrize(("rate", "has_bias"), [(0.0, True), (0.4, False)])
def test_logits_loss_and_gradients_are_those_of_the_formulas(rate, has_bias):
    """Pairs of different lengths and a row of padding; gradients by central differences."""
    rows = {name: np.pad(x, ((0, 1), (0, 0))) for name, x in batch().items()}
    seeds: Any = np.append(SEEDS, np.int32(0)) if rate else None
    with jax.enable_x64(True):
        model = tiny(dtype=jnp.float64, dropout=rate, projection_bias=has_bias)
        params = weights(model, np.float64)
        assert ("bias" in params["classifier"]) == has_bias
        (value, logits), gradients = jax.device_get(derive(model, params, rows, seeds))

    def total(params):
        each = [
            written_out(params, *pair, rate, seed) for pair, seed in zip(PAIRS, SEEDS, strict=True)
        ]
        return sum(value for value, _ in each), [logits for _, logits in each]

    wanted, by_row = total(params)
    np.testing.assert_allclose(value, wanted, rtol=1e-12)
    for row, mine in enumerate(by_row):
        np.testing.assert_allclose(logits[: len(mine), row], mine, rtol=0, atol=1e-12)
    draw = np.random.default_rng(1)
    leaves, tree = jax.tree.flatten(params)
    for number, mine in enumerate(jax.tree.leaves(gradients)):
        way = draw.normal(size=mine.shape)
        ends = []
        for sign in (1, -1):
            moved = [x + sign * 1e-4 * way if i == number else x for i, x in enumerate(leaves)]
            ends.append(total(jax.tree.unflatten(tree, moved))[0])
        expected = (ends[0] - ends[1]) / 2e-4
        np.testing.assert_allclose(np.sum(mine * way), expected, rtol=1e-5, atol=1e-6)


def decoded(model, params, inputs, targets):
    """Logits [b, k, T, Vp] and attention [b, k, T, S] of a decoder that reads the targets."""
    params = jax.tree.map(jnp.asarray, params)
    run = jax.jit(lambda *x: model.apply({"params": params}, *x, method="step"))
    memory = jax.jit(lambda x: model.apply({"params": params}, x, method="encode"))(inputs)
    rows, beams, steps = targets.shape
    cache = model.apply({"params": params}, rows, beams, method="init_cache")
    ids, actual = np.zeros((rows, beams), np.int32), []
    for position in range(steps):
        *results, cache = run(ids, cache, memory)
        actual.append(results)
        ids = targets[:, :, position]
    return [np.stack(x, 2) for x in zip(*actual, strict=True)]


@pytest.mark.long
def test_decoding_step_by_step_is_what_is_taught():
    model = tiny()
    params, beams, steps = weights(model), 2, 5
    targets = np.random.default_rng(0).integers(1, WORDS, (3, beams, steps)).astype(np.int32)
    inputs = batch()["inputs"]
    logits, attention = decoded(model, params, inputs, targets)
    assert logits.dtype == attention.dtype == np.float32
    np.testing.assert_allclose(attention.sum(-1), 1, rtol=1e-5)
    hidden = np.broadcast_to(inputs[:, None, None] == 0, attention.shape)
    assert not attention[hidden].any() and (logits[..., WORDS:] == -1e9).all()
    rows = {"inputs": np.repeat(inputs, beams, 0), "targets": targets.reshape(-1, steps)}
    _, wanted = evaluate(model, params, rows)
    actual = logits[..., :WORDS].reshape(-1, steps, WORDS)
    np.testing.assert_allclose(actual, np.swapaxes(wanted, 0, 1), rtol=1e-5, atol=1e-5)


def test_the_arrays_that_decoding_keeps():
    """None of the encoder's has an axis of beams; the cells are in float32."""
    model = tiny(dtype=jnp.bfloat16)
    inputs, ids = batch()["inputs"], np.zeros((3, 2), np.int32)

    def step(params):
        memory: Any = model.apply({"params": params}, inputs, method="encode")
        start: Any = model.apply({"params": params}, 3, 2, method="init_cache")
        _, attention, after = model.apply({"params": params}, ids, start, memory, method="step")
        return memory, attention, start, after

    memory, attention, start, after = jax.eval_shape(step, shapes_of(model))
    assert [x.shape for x in memory] == [(3, 6, WIDTH), (3, 6, WIDTH), (3, 6)]
    assert attention.shape == (3, 2, 6) and attention.dtype == jnp.float32
    h, c = (jax.ShapeDtypeStruct((3, 2, WIDTH), kind) for kind in (jnp.bfloat16, jnp.float32))
    assert start == after == {f"layer_{i}": {"h": h, "c": c} for i in range(LAYERS)}


def test_the_number_of_parameters_is_the_published_one():
    """160.6 million for V = 32,320: written out from the reference's modules."""
    words, h = 32_320, 1024
    tree = shapes_of(models.GNMT(words))
    padded = tree["embedding"].shape[0]
    assert padded % 128 == 0 and 0 <= padded - words < 128
    count = sum(x.size for x in jax.tree.leaves(tree)) - (padded - words) * (2 * h + 1)
    inputs = [h, h, 2 * h, h, h] + [h, 2 * h, 2 * h, 2 * h]  # of each LSTM
    stacks = sum(4 * h * (n + h + 1) for n in inputs)
    assert count == words * h + stacks + 2 * h * h + 2 * h + 1 + (h + 1) * words == 160_634_433
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(tree))


def test_initial_weights():
    changes = {"encoder_layers": 2, "decoder_layers": 1, "width": 32}
    model = tiny(init_scale=0.3, attention_gain=0.7, **changes)
    params = jax.jit(model.init)(jax.random.key(0), batch(), None)["params"]
    attention = params["attention"]
    assert attention.pop("gain") == np.float32(0.7)
    assert not attention.pop("bias").any()
    for leaf in jax.tree.leaves(params):
        bound = np.abs(leaf).max()
        assert 0.25 < bound <= 0.3 and abs(np.std(leaf) / 0.3 - 1 / math.sqrt(3)) < 0.1


def test_the_tanh_of_all_pairs_is_not_kept():
    model, rows = tiny(width=64), batch(size=16)
    params = shapes_of(model)

    def kept(params):
        pullback = jax.vjp(lambda p: model.apply({"params": p}, rows, None), params)[1]
        return [x for x in jax.tree.leaves(pullback) if hasattr(x, "shape")]

    sizes = [x.size for x in jax.eval_shape(kept, params)]
    assert max(sizes) < 16 * 16 * 3 * 64


def test_no_gradient_is_summed_up_in_bfloat16():
    """Sums over steps and rows, such as those of biases; products add up in float32 anyway."""
    model = tiny(dtype=jnp.bfloat16, dropout=0.2)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: loss(model, p, batch(), SEEDS)[0]))(shapes_of(model))

    def sums(jaxpr):
        for equation in jaxpr.eqns:
            before, after = equation.invars[:1], equation.outvars[0].aval
            is_sum = equation.primitive.name == "reduce_sum" and before[0].aval.size > after.size
            if is_sum or equation.primitive.name == "scatter-add":
                yield after.dtype
            for inner in jaxprs_in_params(equation.params):
                yield from sums(inner)

    actual = list(sums(jaxpr.jaxpr))
    assert len(actual) > 2 * LAYERS and set(actual) == {jnp.dtype("float32")}
