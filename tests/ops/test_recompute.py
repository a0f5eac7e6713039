"""Arrays computed again in the backward pass: what is saved, and that gradients stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops.layers.gram_norm import Recomputed, conv_norm_sum, recompute, save_only_arguments
from tests.ops.test_gram_norm import EPSILON, jitted

RNG = np.random.default_rng(7)


def layer(x, weights):
    hidden = jnp.tanh(x @ weights)
    return jnp.square(hidden), jnp.sum(hidden)


def test_only_the_arguments_are_saved():
    x, weights = RNG.normal(size=(5, 3)), RNG.normal(size=(3, 7))
    with jax.enable_x64(True):
        shapes = [
            {leaf.shape for leaf in jax.tree.leaves(jax.vjp(f, x, weights)[1]) if leaf.shape}
            for f in (layer, save_only_arguments(layer))
        ]
    assert shapes[1] == {(5, 3), (3, 7)}
    assert (5, 7) in shapes[0]


def test_values_and_gradients_are_the_same():
    """Both outputs, one of them without a gradient, under jit and inside another function."""
    x, weights = RNG.normal(size=(5, 3)), RNG.normal(size=(3, 7))

    def loss(f):
        def inner(x, weights):
            values, total = f(2 * x, weights)
            return jnp.sum(values * jnp.arange(7.0)), (values, total)

        return jax.value_and_grad(inner, argnums=(0, 1), has_aux=True)

    with jax.enable_x64(True):
        actual = jitted(loss(save_only_arguments(layer)), x, weights)
        expected = jitted(loss(layer), x, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), actual, expected)


def products(step, *inputs):
    """The number of matrix products in the compiled program."""
    text = jax.jit(step).lower(*inputs).compile().as_text() or ""
    return sum(" dot(" in line or "matmul" in line for line in text.splitlines())


def test_the_compiled_program_computes_again():
    """Without the barrier XLA would merge the two passes' computations of the same inputs."""
    inputs = jnp.ones((64, 64)), jnp.ones((64, 64))

    def step(f):
        return jax.value_and_grad(lambda *inputs: jnp.sum(f(*inputs)[0]), argnums=(0, 1))

    assert products(step(save_only_arguments(layer)), *inputs) == products(step(layer), *inputs) + 1


def test_one_argument_is_refused():
    with pytest.raises(TypeError):
        save_only_arguments(jnp.tanh)(jnp.ones(3))


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
