"""Compares the devices of a run by their bits, for config.check_devices_every.

The programs here add nothing up over the devices: a sum over them depends on their order, and one
faulty device would change the results of all. So healthy devices of one kind agree in every bit.
"""

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from common.errors import ConfigError, UserError, some
from common.trees import by_name
from engine import compiler, step
from engine import mesh as meshes
from engine.checkpoint import Checkpointer
from engine.cluster import watchdog
from engine.start import Run
from engine.step import (
    CompiledStep,
    Recipe,
    TrainState,
    accumulate,
    loss_vjp,
    term_factors,
    term_weights,
)

CODE = 76  # the exit code of a run whose devices disagree
AXIS = "device"  # all devices of the run, in the order of its mesh
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by the bytes of an element


class Corrupted(UserError):
    """A device holds or computes other bits than it should."""


class DeviceCheck:
    """Compares the devices before every N-th step, and before the first one of a start.

    A device must hold the batch that its host sent, and the same state as all others. All shares
    are computed twice by one program, the second time with each share on another device.
    """

    def __init__(self, run: Run, recipe: Recipe, checkpoints: Checkpointer, state: TrainState):
        """Compiles the programs of the check; `state` are ShapeDtypeStructs.

        Raises:
          ConfigError: there is only one device.
        """
        self._run, self._checkpoints = run, checkpoints
        self._every, mesh = run.settings.check_devices_every, run.mesh
        if mesh.size == 1:
            raise ConfigError(
                f"config.check_devices_every={self._every} compares devices, and this run has one: "
                "set it to 0"
            )
        self._devices = list(mesh.devices.flat)
        numbers = np.arange(mesh.size, dtype=np.int32)
        self._numbers = jax.make_array_from_callback(
            numbers.shape, meshes.batch_sharding(mesh), lambda index: numbers[index]
        )
        self._seed = run.programs.seed(recipe)
        options = compiler.options(mesh, run.benchmark.larger_windows)
        shares = make_share_checksums(run.benchmark.loss, mesh, recipe.accumulation, options)
        first = (self._seed, state.step, self._numbers, state.params, state.model_state)
        batches = run.programs.batch_specs("train")
        self._share_checksums = CompiledStep(step.lower(shares, first, batches))
        self._state_checksums = make_state_checksums(mesh).lower(state).compile()
        self._exchange = make_exchange(mesh)
        self._sent: dict[int, Any] = {}  # batches in the host's memory, by step
        self._first = self._agreed = -1  # the first step of this start; the newest that agreed

    def watch(self, batches: Iterable[Any], start: int) -> Iterator[Any]:
        """Yields a host's batches; keeps those of the steps to be checked until `before`."""
        self._first = start
        for number, batch in enumerate(batches, start):
            if self._is_due(number):
                self._sent[number] = batch
            yield batch

    def before(self, number: int, state: TrainState, batch: Any) -> None:
        """Compares the devices, if this is due after `number` steps, before the next one.

        Raises:
          Corrupted: two devices disagree, or a batch is not what the host sent.
        """
        if not self._is_due(number):
            return
        started = time.monotonic()
        with watchdog.during("comparing the devices", number):
            self._compare_batch(number, batch)
            self._compare_state(number, state)
            self._compare_shares(number, state, batch)
        if self._agreed < 0:
            seconds = time.monotonic() - started
            self._run.say(f"the {len(self._devices)} devices agree; comparing took {seconds:.1f} s")
        self._agreed = number

    def _is_due(self, number: int) -> bool:
        return number % self._every == 0 or number == self._first

    def _compare_batch(self, number: int, batch: Any) -> None:
        sent, wrong = self._sent.pop(number), set()
        for name, values in batch.items():
            shards = sorted(values.addressable_shards, key=lambda shard: shard.index[0].start or 0)
            rows = np.split(np.asarray(sent[name], values.dtype), len(shards))
            for shard, own in zip(shards, rows, strict=True):
                if np.asarray(shard.data).tobytes() != own.tobytes():
                    wrong.add(self._devices.index(shard.device))
        own = np.full(jax.local_device_count(), -1)
        own[: len(wrong)] = sorted(wrong)
        everywhere = np.unique(multihost_utils.process_allgather(own))  # all hosts end alike
        if devices := everywhere[everywhere >= 0].tolist():
            raise self._fault(number, "holds another batch than its host has sent", devices)

    def _compare_state(self, number: int, state: TrainState) -> None:
        checksums = np.asarray(self._state_checksums(state))
        differ = (checksums != checksums[0]).any(axis=0)
        if differ.any():
            names = np.array(list(by_name(state)))[differ].tolist()
            votes = [{device: row.tobytes() for device, row in enumerate(checksums)}]
            what = f"holds other bits in {some(names, 2)}"
            raise self._fault(number, what, *judge_votes(votes))

    def _compare_shares(self, number: int, state: TrainState, batch: Any) -> None:
        passes = self._passes(state, batch)
        checksums = [next(passes), next(passes)]
        if np.array_equal(np.roll(checksums[1], 1, axis=0), checksums[0]):
            return
        if len(self._devices) > 2:  # else there is no third device to ask
            checksums.append(next(passes))
        what = "computes other gradients than others from the same examples"
        votes = votes_on_shares(checksums)
        raise self._fault(number, what, *judge_votes(votes))

    def _passes(self, state: TrainState, batch: Any) -> Iterator[np.ndarray]:
        """Yields the checksums of all shares, each time on another device."""
        numbers = self._numbers
        while True:
            arguments = self._seed, state.step, numbers, state.params, state.model_state, batch
            yield np.asarray(self._share_checksums(*arguments))
            numbers, batch = self._exchange((numbers, batch))

    def _fault(
        self, number: int, what: str, devices: Sequence[int], certain: bool = True
    ) -> Corrupted:
        """The error for what devices do, which are numbered in the order of the mesh."""
        names = [
            f"device {device.id} ({device.device_kind}) of host {device.process_index}"
            for device in (self._devices[index] for index in devices)
        ]
        subject = some(names) if certain else f"one of {some(names)}"
        return Corrupted(
            f"{subject} {what}: step {number + 1:,} is not made. {self._advice()}", CODE
        )

    def _advice(self) -> str:
        """How to go on from the newest checkpoint of a step before which the devices agreed."""
        if self._agreed < 0:
            return "No step was made since this start. Use other devices, then the same command"
        steps = self._checkpoints.steps()
        good = max((step for step in steps if step <= self._agreed), default=None)
        agreed = f"The devices last agreed after step {self._agreed:,}"
        if good is None:
            return f"{agreed}, and no checkpoint is as old: use other devices and another --workdir"
        if good == steps[-1]:
            return f"{agreed}, and no checkpoint is newer. Use other devices, then the same command"
        way = self._checkpoints.way_back_to(good)
        return (
            f"{agreed}, and newer checkpoints may be wrong; {good} is not. {way}, on other devices"
        )


def make_state_checksums(mesh: Mesh) -> Any:
    """Returns the jitted function from replicated arrays to checksums u32[devices, arrays]."""

    def on_device(tree: Any) -> jax.Array:
        return _checksums(tree)[None]

    return _jit(mesh, on_device, (PartitionSpec(),), gathered=True)


def make_exchange(mesh: Mesh) -> Any:
    """Returns the jitted function that gives device i the share of device i + 1 of each array."""
    count = mesh.size
    pairs = [((i + 1) % count, i) for i in range(count)]

    def on_device(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)

    return _jit(mesh, on_device, (PartitionSpec(AXIS),), gathered=False)


def make_share_checksums(
    loss: Callable[..., Any],
    mesh: Mesh,
    accumulation: int,
    compiler_options: dict[str, str] | None = None,
) -> Any:
    """Returns the jitted function that differentiates the loss of each device's share alone.

    Its arguments are (seed u32[], step i32[], numbers i32[devices], params, model_state, batch).
    `numbers` are the shares that the devices have; the random key is that of the share, as in the
    train step. BatchNorm's statistics and the weights of the terms are those of the share. The
    result are checksums u32[devices, arrays] of the gradients, the terms and metrics of the loss,
    and the model's new state.
    """
    axes = mesh.axis_names

    def on_device(
        seed: jax.Array, step: jax.Array, numbers: jax.Array, params: Any, state: Any, batch: Any
    ) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), step)
        key = jax.random.fold_in(key, numbers[0])
        if accumulation == 1:
            pullback, *others = loss_vjp(loss, params, state, batch, key)
            outcome = pullback(term_factors(term_weights(others[0]), axes)), *others
        else:
            batches = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
            parts = batches, jax.random.split(key, accumulation)
            outcome = accumulate(loss, axes, params, state, parts)
        return _checksums(outcome)[None]

    shared, everywhere = PartitionSpec(AXIS), PartitionSpec()
    specs = (everywhere, everywhere, shared, everywhere, everywhere, shared)
    return _jit(mesh, on_device, specs, gathered=True, compiler_options=compiler_options)


def judge_votes(votes: Iterable[Mapping[int, bytes]]) -> tuple[list[int], bool]:
    """Which devices are wrong, from votes {device: its value} on several questions.

    A device is wrong where most of the devices with that question have another value.

    Returns:
      (devices, certain). Where no question has a majority, they are all that were asked one whose
      values differ, and nothing is certain.
    """
    wrong, suspects = set(), set()
    for values in votes:
        ((most, count), *_) = collections.Counter(values.values()).most_common(1)
        others = {device for device, value in values.items() if value != most}
        if 2 * count > len(values):
            wrong |= others
        else:
            suspects |= set(values)
    return (sorted(wrong), True) if wrong else (sorted(suspects), False)


def votes_on_shares(passes: Sequence[np.ndarray]) -> list[dict[int, bytes]]:
    """The votes on each share, from checksums [devices, arrays] of several passes.

    In pass k device i computed share i + k.
    """
    count = len(passes[0])
    return [
        {
            (share - k) % count: checksums[(share - k) % count].tobytes()
            for k, checksums in enumerate(passes)
        }
        for share in range(count)
    ]


def _jit(mesh: Mesh, on_device: Any, specs: Any, gathered: bool, **options: Any) -> Any:
    """The jitted `on_device` over `AXIS`; the axes of the run's mesh have the size 1 in it.

    So a loss that averages over them, as BatchNorm over a group, sees its own device only.
    """
    devices, names = mesh.devices.reshape(-1, 1, 1), (AXIS, *mesh.axis_names)
    own = Mesh(devices, names, axis_types=(AxisType.Auto,) * 3)
    shared = PartitionSpec(AXIS)
    mapped = jax.shard_map(on_device, mesh=own, in_specs=specs, out_specs=shared, check_vma=False)
    out = PartitionSpec() if gathered else shared
    return jax.jit(mapped, out_shardings=NamedSharding(own, out), **options)


def _checksums(tree: Any) -> jax.Array:
    return jnp.stack([_checksum(x) for x in jax.tree.leaves(tree)])


def _checksum(x: jax.Array) -> jax.Array:
    """A checksum u32[] of the bits of an array and their positions.

    A change of one element always changes it, a change of several with probability 1 - 2^-32: each
    element is mixed by MurmurHash3's finalizer (Appleby), which has an inverse, and the sum modulo
    2^32 does not depend on the order.
    """
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.uint32(0)
    for axis, size in enumerate(x.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    mixed = bits ^ (position * jnp.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
