"""Compares the devices of a run by their bits, for config.check_devices_every.

The programs here add nothing up over the devices: a sum over them depends on their order, and one
faulty device would change the results of all. So healthy devices of one kind agree in every bit.
"""

import collections
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from common.errors import CORRUPTED, UserError, some
from common.trees import by_name
from engine import compiler, sharding, step
from engine.checkpoint.checkpointer import Checkpointer
from engine.cluster import watchdog
from engine.plan import Programs
from engine.step import CompiledStep, TrainState, accumulate, loss_vjp, term_factors, term_weights

AXIS = "device"  # all devices of the run, in the order of its mesh
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by the bytes of an element


class Corrupted(UserError):
    """A device holds or computes other bits than it should."""


class DeviceCheck:
    """Compares the devices before every N-th step, and before the first one of a start.

    All devices must hold the same state. Every device's share of the batch is computed twice by one
    program, the second time on another device.
    """

    def __init__(self, programs: Programs, checkpoints: Checkpointer, state: TrainState):
        """Compiles the programs of the check; `state` are ShapeDtypeStructs."""
        self._checkpoints, benchmark = checkpoints, programs.benchmark
        self._every, mesh = programs.settings.check_devices_every, programs.mesh
        self._devices = list(mesh.devices.flat)
        numbers = np.arange(mesh.size, dtype=np.int32)
        self._numbers = jax.make_array_from_callback(
            numbers.shape, sharding.batch_sharding(mesh), lambda index: numbers[index]
        )
        self._seed = programs.seed()
        options = compiler.options(mesh, benchmark.larger_windows)
        shares = make_share_checksums(benchmark.loss, mesh, programs.micro_batches, options)
        first = (self._seed, state.step, self._numbers, state.params, state.model_state)
        batches = programs.batch_specs("train")
        self._share_checksums = CompiledStep(step.lower(shares, first, batches))
        checksums = _jit(mesh, lambda x: _checksums(x)[None], (PartitionSpec(),), gathered=True)
        self._state_checksums = checksums.lower(state).compile()  # u32[devices, arrays]
        self._exchange = make_exchange(mesh)
        self._agreed = -1  # the newest step of this start before which the devices agreed

    def before(self, number: int, state: TrainState, batch: Any) -> None:
        """Compares the devices before the next step, if that is due after `number` steps."""
        if number % self._every and self._agreed >= 0:
            return
        started = time.monotonic()
        with watchdog.during("comparing the devices", number):
            self._compare_state(number, state)
            self._compare_shares(number, state, batch)
        if self._agreed < 0:
            seconds = time.monotonic() - started
            text = f"the {len(self._devices)} devices agree; comparing took {seconds:.1f} s"
            logging.getLogger("tpu_suite").info("%s", text)
        self._agreed = number

    def _compare_state(self, number: int, state: TrainState) -> None:
        checksums = np.asarray(self._state_checksums(state))
        differ = (checksums != checksums[0]).any(axis=0)
        if differ.any():
            names = np.array(list(by_name(state)))[differ].tolist()
            held = [row.tobytes() for row in checksums]
            ((majority, count),) = collections.Counter(held).most_common(1)
            certain = 2 * count > len(held)
            wrong = [i for i, row in enumerate(held) if row != majority or not certain]
            raise self._error(number, f"holds other bits in {some(names, 2)}", wrong, certain)

    def _compare_shares(self, number: int, state: TrainState, batch: Any) -> None:
        """Has device i compute the share i of the batch, and then the share i + 1."""

        def computed(numbers: jax.Array, batch: Any) -> np.ndarray:
            arguments = self._seed, state.step, numbers, state.params, state.model_state, batch
            return np.asarray(self._share_checksums(*arguments))

        own = computed(self._numbers, batch)
        others = computed(*self._exchange((self._numbers, batch)))
        suspects = suspected(own, others)
        if suspects:
            what = "computes other gradients than others from the same examples"
            raise self._error(number, what, suspects, certain=len(suspects) == 1)

    def _error(self, number: int, what: str, devices: Sequence[int], certain: bool) -> Corrupted:
        """The error that says `what` devices, numbered as in the mesh, have done."""
        names = [
            f"device {device.id} ({device.device_kind}) of host {device.process_index}"
            for device in (self._devices[index] for index in devices)
        ]
        subject = some(names) if certain else f"one of {some(names)}"
        return Corrupted(
            f"{subject} {what}: step {number + 1:,} is not made. {self._advice()}", CORRUPTED
        )

    def _advice(self) -> str:
        """How to go on from the newest checkpoint of a step before which the devices agreed."""
        if self._agreed < 0:
            return "No step was made since this start. Use other devices, then the same command"
        agreed = f"The devices last agreed after step {self._agreed:,}"
        steps = self._checkpoints.steps()
        good = max((step for step in steps if step <= self._agreed), default=None)
        if good is None:
            return f"{agreed}, and no checkpoint is as old: use other devices and another --workdir"
        if good == steps[-1]:
            return f"{agreed}, and no checkpoint is newer. Use other devices, then the same command"
        way = self._checkpoints.way_back_to(good)
        return f"{agreed}, newer checkpoints may be wrong, {good} is not. {way}, on other devices"


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

    It takes (seed u32[], step i32[], numbers i32[devices], params, model_state, batch); `numbers`
    says which share each device has. The random key depends on the share, as in the train step.
    BatchNorm's statistics and the weights of the terms come from the share alone. The result is
    checksums u32[devices, arrays] of the gradients, the terms and metrics of the loss, and the
    model's new state.
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


def suspected(own: np.ndarray, others: np.ndarray) -> list[int]:
    """The devices of which one must be wrong; [] if all agree.

    `own` has checksums [devices, arrays], where device i computed the share i; in `others` it
    computed the share i + 1.
    """
    count = len(own)
    shares = np.flatnonzero((np.roll(others, 1, axis=0) != own).any(axis=1)).tolist()
    pairs = [{share, (share - 1) % count} for share in shares]
    if not pairs:
        return []
    return sorted(set.intersection(*pairs) or set.union(*pairs))


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
