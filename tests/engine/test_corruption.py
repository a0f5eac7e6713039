"""A flipped bit in one device's parameters or gradients ends a run, and names the device."""

import dataclasses
import json
import re
import shlex
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from benchmarks.base import BATCH_AXES
from common.errors import CORRUPTED
from engine import corruption, sharding
from engine.checkpoint.checkpointer import Checkpointer
from engine.plan import Programs, read_settings
from engine.sharding import Feed
from tests.conftest import open_run, opened, plan_of
from tests.fixtures.recipes import languages


def config(data_dir, **overrides):
    values = languages.get_config()
    small = {"train_steps": "12", "steps_per_eval": "", "steps_per_checkpoint": "3"}
    small |= {"num_train_texts": 72, "num_eval_texts": 23, "eval_batch_size": 8}
    values.update({**small, "data_dir": data_dir, "check_devices_every": 4, **overrides})
    return values


def flipped(x, device):
    """An array with another lowest bit in the first element that a device holds."""
    buffers = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.reshape(-1).view(np.uint8)[0] ^= 1
        buffers.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, buffers)


def prepared(run, data_dir):
    """(a check of a run, its first state, its batches)."""
    plan = plan_of(config(data_dir), 72)
    checkpoints = Checkpointer(f"{run.settings.workdir}/checkpoints", keep=1, best=None)
    abstract = run.programs.abstract_state(plan)
    check = corruption.DeviceCheck(run.programs, checkpoints, abstract)
    batches = opened(run.benchmark).train_batches(24, 0, 1, 0)
    return check, run.programs.initial_state(plan), Feed(batches, run.mesh)


def gradient_of(device):
    """The identity, whose gradient has a flipped bit on one device."""

    @jax.custom_vjp
    def same(x):
        return x

    def backward(_, gradient):
        bits = jax.lax.bitcast_convert_type(gradient, jnp.uint32)
        is_faulty = jax.lax.axis_index(corruption.AXIS) == device
        bits = bits.at[0, 0].set(bits[0, 0] ^ is_faulty.astype(jnp.uint32))
        return (jax.lax.bitcast_convert_type(bits, jnp.float32),)

    same.defvjp(lambda x: (x, None), backward)
    return same


@pytest.mark.parametrize("part", ["params", "gradients"])
@pytest.mark.parametrize("count", [8, 2])
def test_a_flipped_bit(part, count, tiny_texts, tmp_path, monkeypatch):
    run = open_run(config(tiny_texts), tmp_path)
    programs = Programs.make(run.settings, str(tmp_path / "data_index"), jax.devices()[:count])
    run = dataclasses.replace(run, programs=programs)
    if part == "gradients":
        loss, faulty = run.benchmark.loss, gradient_of(1)
        monkeypatch.setattr(
            run.benchmark,
            "loss",
            lambda params, *rest: loss({**params, "embedding": faulty(params["embedding"])}, *rest),
        )
    check, state, feed = prepared(run, tiny_texts)
    batch = next(iter(feed))
    if part == "params":
        params = {**state.params, "embedding": flipped(state.params["embedding"], 1)}
        state = state._replace(params=params)
    with pytest.raises(corruption.Corrupted) as raised:
        check.before(0, state, batch)
    device = r"device 1 \(cpu\) of host 0"
    if count == 2:
        device = rf"one of device 0 \(cpu\) of host 0, {device}"
    what = {
        "params": "holds other bits in params/embedding",
        "gradients": "computes other gradients than others from the same examples",
    }[part]
    end = r"No step was made since this start. Use other devices, then the same command"
    assert re.fullmatch(rf"{device} {what}: step 1 is not made\. {end}", str(raised.value))
    assert raised.value.code == CORRUPTED == 76


def test_no_false_alarm_in_fifty_checks(tiny_texts, tmp_path):
    run = open_run(config(tiny_texts, check_devices_every=1), tmp_path)
    check, state, feed = prepared(run, tiny_texts)
    for number, batch in zip(range(50), feed, strict=False):
        check.before(number, state, batch)
    assert check._agreed == 49


def final_state(workdir):
    state = (workdir / "checkpoints/12/manifest/metadata").read_text()
    return json.loads(state)["checksums"]


@pytest.mark.long
def test_a_run_ends_and_goes_on_from_before(tiny_texts, tmp_path, monkeypatch):
    """The state that may be wrong is moved away; the rest is as if nothing had happened."""
    calm = tmp_path / "calm"
    train.train_and_evaluate(
        read_settings(config(tiny_texts, check_devices_every=0), str(calm)), False
    )

    before = corruption.DeviceCheck.before

    def disturbed(self, number, state, batch):
        if number == 8:
            state = state._replace(params=jax.tree.map(lambda x: flipped(x, 6), state.params))
        before(self, number, state, batch)

    workdir = tmp_path / "a run"
    settings = read_settings(config(tiny_texts), str(workdir))
    monkeypatch.setattr(corruption.DeviceCheck, "before", disturbed)
    with pytest.raises(corruption.Corrupted) as raised:
        train.train_and_evaluate(settings, False)
    match = re.fullmatch(
        r"device 6 \(cpu\) of host 0 .* in params/embedding, params/head/bias and 1 more: step 9 .*"
        r"last agreed after step 4, .*, 3 is not\. To go on from it, type (.*) and then the .*",
        str(raised.value),
    )
    assert match, raised.value
    subprocess.run(match[1], shell=True, check=True)
    aside = [path.name for path in (workdir / "damaged_checkpoints").iterdir()]
    assert shlex.split(match[1])[:2] == ["mkdir", "-p"] and aside == ["6"]

    monkeypatch.setattr(corruption.DeviceCheck, "before", before)
    train.train_and_evaluate(settings, False)
    assert final_state(workdir) == final_state(calm)


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


@pytest.mark.long
def test_a_share_has_the_same_checksums_on_every_device():
    """A loss that averages over devices and draws numbers sees only its share, and its own key."""

    def loss(params, state, batch, rng):
        drawn = batch["x"] * jax.random.normal(rng, batch["x"].shape)
        mean = jax.lax.pmean(jnp.mean(drawn), BATCH_AXES[1])
        values = jnp.sin(drawn - mean) @ params
        terms = {"a": (jnp.sum(values), jnp.float32(1.5)), "b": (jnp.sum(values**2), mean)}
        return terms, {}, {"mean": mean}

    mesh = sharding.make(BATCH_AXES, 4)
    placement = sharding.batch_sharding(mesh)
    draw = np.random.default_rng(0)
    x = jax.device_put(draw.normal(size=(32, 5)).astype(np.float32), placement)
    numbers = jax.device_put(np.arange(8, dtype=np.int32), placement)
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


@pytest.mark.parametrize(
    ("first", "second", "devices"),
    [
        ([], [], []),
        ([2], [2], [2]),  # a device that is always wrong
        ([], [4], [0, 4]),  # wrong once: either of the two that computed its share
        ([1, 3], [1, 3], [0, 1, 2, 3, 4]),  # two devices
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ],
)
def test_the_devices_that_are_suspected(first, second, devices):
    """Five devices; those in `first` and `second` compute their share, then the next one, wrong."""
    own = np.arange(5)[:, None]
    others = np.roll(own, -1, axis=0)
    own, others = own.copy(), others.copy()
    own[first] += 100 * (1 + np.array(first, int))[:, None]
    others[second] += 100 * (1 + np.array(second, int))[:, None]
    assert corruption.suspected(own, others) == devices
    assert corruption.suspected(np.array([[0], [9]]), np.array([[1], [0]])) == [0, 1]
