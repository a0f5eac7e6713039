"""Compares `reductions` with NumPy in float64, and looks at its programs for TPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.translation import reductions

SUMS = {"last": reductions.sum_last_axis, "first": reductions.sum_first_axes}
AXES = {"last": 2, "first": (0, 1)}


@pytest.mark.parametrize("axes", SUMS)
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32), (jnp.float64, jnp.float64)],
)
def test_both_forms_add_up_all_values(dtype, wide, axes, monkeypatch):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).random((3, 5, 1000)), dtype)
        reduction = SUMS[axes](x, wide)
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, tpu, default: tpu(*x))
        product = SUMS[axes](x, wide)
        for actual in (reduction, product):
            assert actual.dtype == wide
            np.testing.assert_allclose(actual, np.asarray(x, float).sum(AXES[axes]), rtol=3e-6)


@pytest.mark.parametrize("shift", [0.0, 300.0, -1e6])
def test_the_logarithm_neither_overflows_nor_vanishes(shift):
    scores = (np.random.default_rng(1).normal(size=(4, 300)) + shift).astype(np.float32)
    scores[:, 200:] = -1e9  # words that do not exist
    actual = jax.jit(reductions.log_sum_exp)(scores)
    largest = scores.max(-1).astype(float)
    expected = np.log(np.exp(scores - largest[:, None]).sum(-1))
    assert expected.min() > 2
    np.testing.assert_allclose(actual - largest, expected, atol=max(1e-5, 1e-7 * abs(shift)))


@pytest.mark.parametrize("axes", SUMS)
@pytest.mark.parametrize(("dtype", "precision"), [(jnp.bfloat16, "DEFAULT"), (jnp.float32, "HIGH")])
def test_only_tpus_multiply_by_ones(dtype, precision, axes):
    x = jax.ShapeDtypeStruct((4, 8, 256), dtype)
    traced = jax.jit(partial(SUMS[axes], dtype=jnp.float32)).trace(x)
    on_tpu, on_cpu = (
        traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cpu")
    )
    assert "stablehlo.reduce" not in on_tpu
    (product,) = [line for line in on_tpu.splitlines() if "stablehlo.dot_general" in line]
    assert f"precision = [{precision}, {precision}]" in product
    assert "dot_general" not in on_cpu and "stablehlo.reduce" in on_cpu
