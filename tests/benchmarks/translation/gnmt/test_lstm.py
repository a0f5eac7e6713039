"""LSTMs against the formulas in float64, their gradients against autodiff's, and PyTorch."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.translation.gnmt import lstm as lstms
from benchmarks.translation.gnmt.lstm import lstm

STEPS, ROWS, WIDTH = 5, 3, 4
LENGTHS = np.array([5, 3, 1])


def example(seed=0) -> Any:
    draw = np.random.default_rng(seed)
    gates, bias = draw.normal(size=(STEPS, ROWS, 4 * WIDTH)), draw.normal(size=4 * WIDTH)
    return gates, draw.normal(0, 0.5, (WIDTH, 4 * WIDTH)), bias


def alive_to(lengths, reverse=False) -> Any:
    """Where sentences have tokens: bool[T, b], from the first step or from the last one."""
    alive = np.arange(STEPS)[:, None] < lengths
    return alive[::-1] if reverse else alive


def written_out(gates, kernel, bias, alive=None, reverse=False, xp: Any = np):
    """The formulas step by step, with NumPy or jax's autodiff."""
    h = c = xp.zeros((gates.shape[1], WIDTH))
    actual = {}
    for t in reversed(range(STEPS)) if reverse else range(STEPS):
        z = gates[t] + h @ kernel + bias
        i, f, o = (1 / (1 + xp.exp(-z[:, WIDTH * n : WIDTH * (n + 1)])) for n in (0, 1, 3))
        c = f * c + i * xp.tanh(z[:, 2 * WIDTH : 3 * WIDTH])
        h = o * xp.tanh(c)
        if alive is not None:
            h, c = h * alive[t][:, None], c * alive[t][:, None]
        actual[t] = h
    return xp.stack([actual[t] for t in range(STEPS)])


@partial(jax.jit, static_argnums=0)
def pulled(function, gradient, *arrays):
    actual, pullback = jax.vjp(function, *arrays)
    return actual, pullback(gradient)


@pytest.mark.parametrize("kind", ["", "cpu"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_outputs_and_their_gradients(reverse, masked, kind, monkeypatch):
    monkeypatch.setattr(lstms, "device_kind", lambda: kind)
    arrays, how = example(), {"reverse": reverse}
    # Both kinds of padding: behind the last step that is run, and in front of the first one.
    for alive in (alive_to(LENGTHS), alive_to(LENGTHS, True)) if masked else (None,):
        gradient = np.random.default_rng(1).normal(size=(STEPS, ROWS, WIDTH))
        with jax.enable_x64(True):
            ours = pulled(lambda *x, a=alive: lstm(*x, mask=a, **how), gradient, *arrays)
            plain: Any = partial(written_out, alive=alive, **how)
            theirs = pulled(partial(plain, xp=jnp), gradient, *arrays)
            primal = jax.jit(partial(lstm, mask=alive, **how))(*arrays)
        assert ours[0].dtype == np.float64
        for actual in (primal, ours[0]):
            np.testing.assert_allclose(actual, plain(*arrays), rtol=0, atol=1e-12)
        for mine, other in zip(ours[1], theirs[1], strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)


def test_bfloat16_has_cells_in_float32():
    """A cell gains 1/1024 in each step, which is nothing to a 1 in bfloat16."""
    steps, gain = 256, 2**-10
    z = np.zeros((steps, 1, 4, 1))
    z[..., 0, :], z[..., 1, :], z[..., 3, :] = 0.0, 30.0, 30.0  # i = 1/2, f = o = 1
    z[..., 2, :] = np.arctanh(2 * gain)
    z[0, ..., 0, :], z[0, ..., 2, :] = 30.0, 30.0  # the cell is 1 after the first step
    gates = jnp.asarray(z.reshape(steps, 1, 4), jnp.bfloat16)
    actual = lstm(gates, jnp.zeros((1, 4)), jnp.zeros(4))
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(float(actual[-1, 0, 0]), np.tanh(1 + 255 * gain), rtol=0.005)


@pytest.mark.parametrize("kind", ["", "cpu"])
def test_bfloat16_and_what_is_kept_for_the_backward_pass(kind, monkeypatch):
    monkeypatch.setattr(lstms, "device_kind", lambda: kind)
    gates, kernel, bias = example()
    rounded, *others = jnp.bfloat16(gates), np.float32(jnp.bfloat16(kernel)), np.float32(bias)
    actual, pullback = jax.jit(partial(jax.vjp, lstm))(rounded, *others)
    exact: Any = [np.asarray(x, float) for x in (rounded, *others)]
    wanted = written_out(*exact)
    np.testing.assert_allclose(np.asarray(actual, float), wanted, rtol=0.03, atol=0.01)
    kept = [x for x in jax.tree.leaves(pullback) if hasattr(x, "dtype")]
    assert {x.shape for x in kept if x.dtype != jnp.bfloat16} == {kernel.shape, bias.shape}
    assert sum(x.size for x in kept) == kernel.size + bias.size + STEPS * ROWS * WIDTH * 6
    of_gates, *of_others = jax.jit(lambda pullback, y: pullback(y))(pullback, jnp.ones_like(actual))
    assert of_gates.dtype == jnp.bfloat16 and all(x.dtype == np.float32 for x in of_others)
    plain = partial(written_out, xp=jnp)
    _, wanted = pulled(plain, np.ones(actual.shape), np.float32(rounded), *others)
    for mine, theirs in zip((of_gates, *of_others), wanted, strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(np.float32(mine), theirs, rtol=0, atol=0.02 * scale)


@pytest.mark.parity
def test_both_directions_are_those_of_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(5, WIDTH, bidirectional=True).double()
    x = torch.randn(STEPS, ROWS, 5, dtype=torch.float64, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(LENGTHS))
    wanted, _ = torch.nn.utils.rnn.pad_packed_sequence(theirs(packed)[0])
    gradient = torch.randn_like(wanted)
    (wanted * gradient).sum().backward()
    own = {name: value.detach().numpy() for name, value in theirs.named_parameters()}
    alive = alive_to(LENGTHS)

    def ours(x, kernels, recurrent, bias):
        sides = [
            lstm(x @ kernels[turned].T, recurrent[turned].T, bias[turned], alive, bool(turned))
            for turned in range(2)
        ]
        return jnp.concatenate(sides, -1)

    def stacked(name, values):
        return np.stack([values[f"{name}_l0"], values[f"{name}_l0_reverse"]])

    with jax.enable_x64(True):
        arrays = [stacked(name, own) for name in ("weight_ih", "weight_hh")]
        bias = stacked("bias_ih", own) + stacked("bias_hh", own)
        actual, gradients = pulled(ours, gradient.numpy(), x.detach().numpy(), *arrays, bias)
    np.testing.assert_allclose(actual, wanted.detach().numpy(), rtol=0, atol=1e-12)
    of_weights = {name: value.grad.numpy() for name, value in theirs.named_parameters()}
    others = [stacked(name, of_weights) for name in ("weight_ih", "weight_hh", "bias_ih")]
    for mine, other in zip(gradients, [x.grad.numpy(), *others], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-11)
