"""The max-pool of the stem against flax's, and its gradient against XLA's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.layers import max_pool


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 1), (1, 1)), ((0, 1), (1, 3))])
@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (3, 7, 10, 2)])
def test_max_pool_is_flaxs_with_ties(shape, padding):
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.integers(-2, 3, shape), jnp.float32)  # many equal values
    whole = draw.integers(-50, 50, shape).astype(np.float32)  # sums are exact

    @jax.jit
    def both(x, cotangents):
        want, gradient_of = jax.vjp(lambda x: nn.max_pool(x, (3, 3), (2, 2), padding), x)
        got, gradient_by_us = jax.vjp(lambda x: max_pool.max_pool(x, padding), x)
        y = cotangents[:, : want.shape[1], : want.shape[2]]
        return want, got, *gradient_of(y), *gradient_by_us(y)

    want, got, gradient, ours = both(x, whole)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(ours, gradient)


def test_tpus_keep_xlas_gradient_of_max_pool():
    """The platform is known when the program is made; the CPU's branch is not in it."""
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(max_pool.max_pool(x, "SAME"))))
    shape = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    for platform, is_scattered in (("tpu", True), ("cpu", False)):
        program = jax.jit(gradient).trace(shape).lower(lowering_platforms=(platform,)).as_text()
        assert ("select_and_scatter" in program) == is_scattered
        assert ("stablehlo.select " in program) != is_scattered
