"""Compares both forms of `benchmarks.translation.sums` with NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.translation import sums


@pytest.mark.parametrize("form", ["product", "reduction"])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32), (jnp.float64, jnp.float64)],
)
def test_the_sum_over_the_last_axis(dtype, wide, form):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).random((3, 5, 1000)), dtype)
        actual = (sums._by_products if form == "product" else sums.last)(x, wide)
        assert actual.dtype == wide
        np.testing.assert_allclose(actual, np.sum(np.asarray(x, float), -1), rtol=3e-6)


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e9])
def test_the_logarithm_neither_overflows_nor_vanishes(shift):
    scores = np.float32(np.random.default_rng(1).normal(scale=20, size=(4, 300)) + shift)
    actual = jax.jit(sums.log_sum_exp)(scores)
    largest = scores.max(-1, keepdims=True).astype(float)
    expected = largest[:, 0] + np.log(np.exp(scores - largest).sum(-1))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_only_tpus_multiply_by_ones():
    x = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)
    traced = jax.jit(lambda x: sums.last(x, jnp.float32)).trace(x)
    on_tpu, on_cpu = (
        traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cpu")
    )
    assert "dot_general" in on_tpu and "stablehlo.reduce" not in on_tpu
    assert "dot_general" not in on_cpu and "stablehlo.reduce" in on_cpu
