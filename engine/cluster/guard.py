"""What watches over a training run: its lock, its watchdog, its memory, and the wish to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from engine import mesh as meshes
from engine.cluster import memory, preemption, session
from engine.cluster.hostlog import HostLog
from engine.cluster.hosts import RESTART
from engine.cluster.lock import Lock
from engine.cluster.watchdog import Watchdog
from errors import ConfigError

_MEMORY_PERIOD = 2.0  # seconds


class MemoryFull(RuntimeError):
    """A host's memory is nearly full; the state is saved. `code` is the process's exit code."""

    code = RESTART


class Guard:
    """Held from the start of a training run to its end."""

    def __init__(self, workdir: str, mesh: Mesh, memory_limit: float):
        """Takes the workdir's lock.

        Raises:
          LockError: another run has it.
        """
        self._limit, self._mesh = memory_limit, mesh
        self._lock = (
            Lock(workdir, lost=lambda message: session.fail(f"ERROR: {message}", 1))
            if jax.process_index() == 0
            else None
        )
        self._watchdog: Watchdog | None = None
        self._full, self._looked = 0.0, 0.0
        self._ballots: dict[tuple[bool, bool], Any] = {}
        # Its result arrives with the step it was dispatched after: nobody waits for an answer.
        self._any = jax.jit(lambda x: jnp.any(x, axis=0), out_shardings=meshes.replicated(mesh))

    def watch(
        self,
        seconds: float,
        log: HostLog,
        explain: Callable[[], str],
        rescue: Callable[[], str],
    ) -> None:
        """Starts the watchdog; see there."""
        self._watchdog = watchdog(seconds, log, explain, rescue)

    def ballot(self) -> Any:
        """Asks all hosts whether to stop, without waiting; all must ask after the same step."""
        if jax.process_count() == 1:
            return None
        wish = preemption.requested(), self._memory_is_full()
        if wish not in self._ballots:
            local = np.tile(np.asarray(wish), (jax.local_device_count(), 1))
            sharding = meshes.batch_sharding(self._mesh)
            self._ballots[wish] = jax.make_array_from_process_local_data(sharding, local)
        return self._any(self._ballots[wish])

    def stop(self, ballot: Any) -> BaseException | None:
        """What to raise, on every host, once the state is saved; None to go on."""
        if ballot is None:
            wanted, full = preemption.requested(), self._memory_is_full()
        else:
            wanted, full = map(bool, np.asarray(ballot.addressable_data(0)))
        if wanted:
            return preemption.Preempted(preemption.signum(), agreed=True)
        if full:
            where = f"{self._full:.0%} full" if self._memory_is_full() else "nearly full on a host"
            return MemoryFull(
                f"memory is {where}, more than config.host_memory_limit={self._limit:g}: stopped "
                "before the system kills the run; the same command goes on"
            )
        return None

    def check(self) -> None:
        """Raises LockError if the workdir is no longer this run's."""
        if self._lock:
            self._lock.check()

    def close(self) -> None:
        """Ends the watch and gives the lock back."""
        if self._watchdog:
            self._watchdog.close()
        if self._lock:
            self._lock.close()

    def _memory_is_full(self) -> bool:
        now = time.monotonic()
        if now - self._looked > _MEMORY_PERIOD:
            self._looked, self._full = now, memory.used()
        return self._full > self._limit


def watchdog(
    seconds: float, log: HostLog, explain: Callable[[], str], rescue: Callable[[], str]
) -> Watchdog:
    """Watches this process as one of a run; see `Watchdog`."""
    return Watchdog(
        seconds,
        log,
        explain=explain,
        rescue=rescue,
        leave=_hung,
        life=session.others,
        hurry=preemption.requested,
    )


def _hung(reason: str) -> None:
    code = 128 + preemption.signum() if preemption.requested() else RESTART
    session.fail(f"ERROR: {reason}; exit code {code}", code)


def afford(needed: int, config: Any) -> None:
    """Refuses input that this host's memory cannot hold; `needed` is in bytes.

    Raises:
      ConfigError: it is more than what is free.
    """
    free = memory.available()
    if free is not None and needed > free:
        raise ConfigError(
            f"the input needs about {needed / 1e9:.1f} GB of this host, {free / 1e9:.1f} GB are "
            f"free: {less_memory(config)}"
        )


def less_memory(config: Any) -> str:
    """What to do so that the input needs less memory, in words."""
    for key in ("decoded_cache", "shuffle_buffer_size"):
        if config.get(key):
            return f"set a smaller --config.{key}, or use more hosts"
    return "use hosts with more memory"


def check(config: Any) -> None:
    """Refuses limits that cannot work.

    Raises:
      ConfigError: the message names the key.
    """
    for key in ("hosts_wait_seconds", "host_silence_seconds"):
        if config[key] < 1:
            raise ConfigError(f"config.{key}={config[key]}: must be at least 1")
    if config.watchdog_seconds < 0:
        raise ConfigError(f"config.watchdog_seconds={config.watchdog_seconds}: 0 is never, or more")
    if not 0 < config.host_memory_limit <= 1:
        limit = config.host_memory_limit
        raise ConfigError(f"config.host_memory_limit={limit}: must be a share, above 0, up to 1")
