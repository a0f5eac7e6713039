"""Compares the devices of a run by their bits, for config.check_devices_every.

Only runs with that key load this module.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from engine import compiler, corruption, step
from engine import mesh as meshes
from engine.checkpoint import Checkpointer
from engine.cluster import watchdog
from engine.step import Compiled, Recipe, TrainState
from errors import ConfigError, UserError, some
from ops.trees import by_name
from start import Run

CODE = 76  # the exit code of a run whose devices disagree


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
        shares = corruption.make_share_checksums(
            run.benchmark.loss, mesh, recipe.accumulation, options
        )
        first = (self._seed, state.step, self._numbers, state.params, state.model_state)
        batches = run.programs.batch_specs("train")
        self._share_checksums = Compiled(step.lower(shares, first, batches))
        self._state_checksums = corruption.make_state_checksums(mesh).lower(state).compile()
        self._exchange = corruption.make_exchange(mesh)
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
            raise self._fault(number, what, *corruption.judge(votes))

    def _compare_shares(self, number: int, state: TrainState, batch: Any) -> None:
        passes = self._passes(state, batch)
        checksums = [next(passes), next(passes)]
        if np.array_equal(np.roll(checksums[1], 1, axis=0), checksums[0]):
            return
        if len(self._devices) > 2:  # else there is no third device to ask
            checksums.append(next(passes))
        what = "computes other gradients than others from the same examples"
        votes = corruption.votes_on_shares(checksums)
        raise self._fault(number, what, *corruption.judge(votes))

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
            f"{subject} {what}: step {number + 1:,} is not made. {self._remedy()}", CODE
        )

    def _remedy(self) -> str:
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
