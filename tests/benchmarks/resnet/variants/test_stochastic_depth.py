"""Stochastic depth: which rows it drops, and what a model with it computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.resnet.variants import stochastic_depth
from tests.benchmarks.resnet.networks import make
from tests.ops.test_hashing import plain
from tests.test_models import apply_and_capture, make_images, random_variables


def drops(seed, rate, block):
    return plain(int(seed), 0x70617468, block) < round(rate * 2**32)


def test_rows_are_those_of_pythons_integers():
    seeds: Any = np.random.default_rng(0).integers(-(2**31), 2**31, 20_000, dtype=np.int32)
    previous = np.zeros(len(seeds))
    for block, rate in ((1, 0.05), (2, 0.3)):
        factors = jax.jit(stochastic_depth.factors, static_argnums=(0, 2))(rate, seeds, block)
        assert factors is not None and factors.dtype == jnp.float32
        for seed, factor in zip(seeds[:200], np.asarray(factors[:200]), strict=True):
            assert factor == (0 if drops(seed, rate, block) else np.float32(1 / (1 - rate)))
        dropped = np.asarray(factors) == 0
        assert abs(dropped.mean() - rate) < 5 * (rate * (1 - rate) / len(seeds)) ** 0.5
        if block == 2:
            assert abs(np.corrcoef(dropped, previous)[0, 1]) < 0.04
        previous = dropped


def test_bfloat16_is_scaled_in_float32():
    y = jnp.asarray(make_images(2, 3, 3, 2), jnp.bfloat16)
    scaled = stochastic_depth.scale(y, jnp.array([1 / 0.95, 0.0]))
    assert scaled.dtype == jnp.bfloat16
    wanted = jnp.asarray(np.asarray(y, np.float32) * np.float32(1 / 0.95)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(scaled[0], wanted[0])
    assert not scaled[1].any()


KINDS = {
    "1.5": {},
    "basic": {"resnet_depth": 18},
    "basic 2": {"resnet_version": "2", "resnet_depth": 18},
}
SEEDS: Any = np.arange(6, dtype=np.int32) * 17


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_its_shortcut_for_the_rows_that_are_dropped(kind):
    plain_model = make(2, 1, **KINDS[kind])
    model = stochastic_depth.compose(plain_model, 0.6, SEEDS)
    variables, images = random_variables(model), make_images(6, 24, 24, 3)
    logits, _, outputs = apply_and_capture(model, variables, images, True)
    x = np.asarray(outputs["stage1_block1"])
    dropped = np.array([drops(seed, 0.3, 1) for seed in SEEDS])
    assert 0 < dropped.sum() < len(SEEDS)
    # Block 2 has no projection. Its branch without drop path, from the same input:
    y = np.asarray(outputs["stage1_block2"])
    shortcut = x if "2" in kind else np.maximum(x, 0)
    np.testing.assert_array_equal(y[dropped], shortcut[dropped])
    assert np.isfinite(np.asarray(logits)).all()
    _, _, reference = apply_and_capture(plain_model, variables, images, True)
    if "2" in kind:
        branch = np.asarray(reference["stage1_block2"]) - x  # the input of the block is the same
        wanted = x + branch / 0.7
        np.testing.assert_allclose(y[~dropped], wanted[~dropped], rtol=0, atol=1e-5)
    else:
        last = "bn2" if kind == "basic" else "bn3"
        wanted = np.maximum(x + np.asarray(reference[f"stage1_block2/{last}"]) / 0.7, 0)
        np.testing.assert_allclose(y[~dropped], wanted[~dropped], rtol=0, atol=1e-5)


@pytest.mark.parametrize("blocks", [(2, 3, 1), (1,)])
def test_rates_grow_in_equal_steps(blocks, monkeypatch):
    """The first block is never dropped, the last one with the given rate."""
    drawn = []
    monkeypatch.setattr(
        stochastic_depth, "factors", lambda rate, seeds, number: drawn.append((number, rate))
    )
    model = stochastic_depth.compose(make(*blocks), 0.15, SEEDS)
    images = jax.ShapeDtypeStruct((6, 16, 16, 3), np.float32)
    monkeypatch.setattr(stochastic_depth, "scale", lambda y, factors: y)
    jax.eval_shape(lambda x: model.init(jax.random.key(0), x, True), images)
    rates = np.linspace(0, 0.15, sum(blocks)).tolist()
    assert drawn == [(i, pytest.approx(rate)) for i, rate in enumerate(rates) if rate]
