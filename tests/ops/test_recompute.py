"""`ops.layers.recompute`: what is kept for the backward pass, and gradients as without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops.layers.gram_norm import conv_norm_sum
from ops.layers.recompute import Twice, recomputed, twice
from tests.ops.test_gram_norm import EPSILON, jitted

RNG = np.random.default_rng(7)


def layer(x, weights):
    hidden = jnp.tanh(x @ weights)
    return jnp.square(hidden), jnp.sum(hidden)


def test_recomputed_keeps_its_arguments_only():
    x, weights = RNG.normal(size=(5, 3)), RNG.normal(size=(3, 7))
    with jax.enable_x64(True):
        shapes = [
            {leaf.shape for leaf in jax.tree.leaves(jax.vjp(f, x, weights)[1]) if leaf.shape}
            for f in (layer, recomputed(layer))
        ]
    assert shapes[1] == {(5, 3), (3, 7)}
    assert (5, 7) in shapes[0]


def test_recomputed_has_the_same_values_and_gradients():
    """Both outputs, one of them without a gradient, under jit and inside another function."""
    x, weights = RNG.normal(size=(5, 3)), RNG.normal(size=(3, 7))

    def loss(f):
        def inner(x, weights):
            values, total = f(2 * x, weights)
            return jnp.sum(values * jnp.arange(7.0)), (values, total)

        return jax.value_and_grad(inner, argnums=(0, 1), has_aux=True)

    with jax.enable_x64(True):
        found, wanted = (jitted(loss(f), x, weights) for f in (recomputed(layer), layer))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, wanted)


def products(step, *inputs):
    """How many matrix products XLA makes of it."""
    text = jax.jit(step).lower(*inputs).compile().as_text() or ""
    return sum(" dot(" in line or "matmul" in line for line in text.splitlines())


def test_recomputed_is_computed_again_in_the_compiled_program():
    """XLA would merge what the two passes compute of the same inputs, were it not kept from it."""
    inputs = jnp.ones((64, 64)), jnp.ones((64, 64))

    def step(f):
        return jax.value_and_grad(lambda *inputs: jnp.sum(f(*inputs)[0]), argnums=(0, 1))

    assert products(step(recomputed(layer)), *inputs) == products(step(layer), *inputs) + 1


def test_one_argument_cannot_be_held_back():
    with pytest.raises(TypeError):
        recomputed(jnp.tanh)(jnp.ones(3))


def test_the_two_computations_of_twice_have_different_inputs():
    """For XLA for TPUs, which then does not merge them; that for CPUs does all the same."""

    def pair(x):
        return twice(jnp.tanh, x)

    now, again = pair(jnp.arange(3.0))
    np.testing.assert_array_equal(now, again)
    equations = jax.make_jaxpr(pair)(jnp.arange(3.0)).jaxpr.eqns
    inputs = [e.invars[0] for e in equations if e.primitive.name == "tanh"]
    barriers = [e.outvars[0] for e in equations if e.primitive.name == "optimization_barrier"]
    assert len(inputs) == 2 and [x in barriers for x in inputs] == [True, False]


def test_the_backward_pass_of_a_sum_keeps_what_is_computed_again():
    shape, channels = (4, 3, 3), 5
    x, z = (jnp.asarray(RNG.normal(size=(*shape, c)), jnp.float32) for c in (channels, 2))
    pair = twice(jnp.tanh, x)
    np.testing.assert_array_equal(*pair)
    kernels = [jnp.asarray(RNG.normal(size=(c, 8)), jnp.float32) for c in (channels, 2)]
    ones, marked = jnp.ones(8), Twice(pair.now, pair.again + 1)  # to tell the two apart

    def run(first):
        branches = [(first, kernels[0], ones, ones), (z, kernels[1], ones, ones)]
        return conv_norm_sum(branches, epsilon=EPSILON)[0]

    y, pullback = jax.vjp(run, marked)
    np.testing.assert_array_equal(y, run(pair.now))
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == x.shape]
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0], marked.again)
    (gradients,) = pullback(y)
    assert not np.any(gradients.now)
    assert np.any(gradients.again)
