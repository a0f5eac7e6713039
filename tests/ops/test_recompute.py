"""Arrays computed again in the backward pass: what is saved, and that gradients stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops.layers.gram_norm import Recomputed, conv_norm_sum, recompute
from tests.ops.test_gram_norm import EPSILON

RNG = np.random.default_rng(7)


def test_the_two_computations_have_different_inputs():
    """XLA for TPUs then does not merge them; XLA for CPUs does."""

    def pair(x):
        return recompute(jnp.tanh, x)

    np.testing.assert_array_equal(*pair(jnp.arange(3.0)))
    equations = jax.make_jaxpr(pair)(jnp.arange(3.0)).jaxpr.eqns
    inputs = [e.invars[0] for e in equations if e.primitive.name == "tanh"]
    barriers = [e.outvars[0] for e in equations if e.primitive.name == "optimization_barrier"]
    assert len(inputs) == 2 and [x in barriers for x in inputs] == [True, False]


@pytest.mark.long
def test_a_sum_saves_the_array_of_the_backward_pass():
    shape, channels = (4, 3, 3), 5
    x, z = (jnp.asarray(RNG.normal(size=(*shape, c)), jnp.float32) for c in (channels, 2))
    pair = recompute(jnp.tanh, x)
    np.testing.assert_array_equal(*pair)
    kernels = [jnp.asarray(RNG.normal(size=(c, 8)), jnp.float32) for c in (channels, 2)]
    ones, marked = jnp.ones(8), Recomputed(pair.forward, pair.backward + 1)  # differ

    def run(first):
        branches = [(first, kernels[0], ones, ones), (z, kernels[1], ones, ones)]
        return conv_norm_sum(branches, epsilon=EPSILON)[0]

    y, pullback = jax.vjp(run, marked)
    np.testing.assert_array_equal(y, run(pair.forward))
    saved = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == x.shape]
    assert len(saved) == 1
    np.testing.assert_array_equal(saved[0], marked.backward)
    (gradients,) = pullback(y)
    assert not np.any(gradients.forward)
    assert np.any(gradients.backward)
