"""Checksums of bits, and which device is outvoted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.base import BATCH_AXES
from engine import corruption
from engine import mesh as meshes


def checksum(x):
    return int(jax.jit(corruption._checksum)(jnp.asarray(x)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_every_bit_counts(dtype):
    values = jnp.arange(-6, 6).reshape(3, 4).astype(dtype)
    raw = np.asarray(values)
    sums = {checksum(values)}
    bits = [0] if dtype == "bool" else range(8 * raw.itemsize)
    for element in (0, 7, 11):
        for bit in bits:
            data = bytearray(raw.tobytes())
            data[element * raw.itemsize + bit // 8] ^= 1 << bit % 8
            sums.add(checksum(np.frombuffer(bytes(data), raw.dtype).reshape(3, 4)))
    assert len(sums) == 1 + 3 * len(bits)


def test_signs_and_places_count():
    """A plain sum of bits would miss both."""
    x = np.arange(1, 5, dtype=np.float32)
    others = x * [-1, -1, 1, 1], x[::-1], x.reshape(2, 2).T.reshape(4)
    assert len({checksum(y) for y in (x, *others)}) == 4
    assert checksum(np.zeros((0, 3))) == 0


@pytest.mark.long
def test_a_share_has_the_same_checksums_on_every_device():
    """A loss that averages over devices and draws numbers sees only its share, and its own key."""

    def loss(params, state, batch, rng):
        drawn = batch["x"] * jax.random.normal(rng, batch["x"].shape)
        mean = jax.lax.pmean(jnp.mean(drawn), BATCH_AXES[1])
        values = jnp.sin(drawn - mean) @ params
        terms = {"a": (jnp.sum(values), jnp.float32(1.5)), "b": (jnp.sum(values**2), mean)}
        return terms, {}, {"mean": mean}

    mesh = meshes.make(BATCH_AXES, 4)
    sharding = meshes.batch_sharding(mesh)
    draw = np.random.default_rng(0)
    x = jax.device_put(draw.normal(size=(32, 5)).astype(np.float32), sharding)
    numbers = jax.device_put(np.arange(8, dtype=np.int32), sharding)
    params, state = jnp.ones((5, 3)), {"mean": jnp.float32(0)}
    exchange = corruption.make_exchange(mesh)
    assert np.asarray(exchange(numbers)).tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    for accumulation in (1, 2):
        compute = corruption.make_share_checksums(loss, mesh, accumulation)
        first = jnp.uint32(3), jnp.int32(7)
        compiled = compute.lower(*first, numbers, params, state, {"x": x}).compile()
        own = np.asarray(compiled(*first, numbers, params, state, {"x": x}))
        moved = exchange((numbers, {"x": x}))
        other = np.asarray(compiled(*first, moved[0], params, state, moved[1]))
        assert np.array_equal(np.roll(other, 1, axis=0), own)
        assert len(set(own[:, 0].tolist())) == 8  # no two shares have the same gradient
        swapped = np.asarray(compiled(*first, moved[0], params, state, {"x": x}))
        assert (swapped[:, 0] != own[:, 0]).all()  # the key belongs to the share


def passes(faults):
    """Checksums [5 devices, 1 array] of three passes; `faults` are (pass, device)."""
    shares = np.arange(5)
    rows = [np.roll(shares, -k)[:, None].copy() for k in range(3)]
    for number, device in faults:
        rows[number][device] += 100 * (device + 1)
    return rows


@pytest.mark.parametrize(
    ("faults", "verdict"),
    [
        ([], ([], False)),
        ([(0, 2), (1, 2), (2, 2)], ([2], True)),  # a device that is always wrong
        ([(1, 4)], ([4], True)),  # once
        ([(0, 1), (1, 1), (2, 1), (0, 3), (1, 3), (2, 3)], ([1, 3], True)),  # two: 0 judges 1 ...
        ([(k, d) for k in range(3) for d in range(5)], ([0, 1, 2, 3, 4], False)),
    ],
)
def test_the_device_that_is_outvoted(faults, verdict):
    votes = corruption.votes_on_shares(passes(faults))
    assert [len(vote) for vote in votes] == [3] * 5
    assert corruption.judge(votes) == verdict


def test_two_devices_cannot_tell_which_is_wrong():
    assert corruption.judge([{0: b"a", 1: b"b"}]) == ([0, 1], False)
