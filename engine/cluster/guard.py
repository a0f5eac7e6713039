"""Guards a run: the lock of its workdir, its memory, the hosts' vote to stop."""

import contextlib
import dataclasses
import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import psutil
from etils import epath
from jax.sharding import Mesh

from common import locks
from common.errors import FAILED, RESTART, ConfigError
from engine import sharding
from engine.cluster import preemption, processes

_log = logging.getLogger("tpu_suite")
_MEMORY_PERIOD = 2.0  # seconds between two readings of the memory
_STACKS = 1 << 30  # bytes of addresses, not of memory, for the threads that an input starts


class MemoryFull(RuntimeError):
    """A host's memory is nearly full; the state is saved. `code` is the process's exit code."""

    code = RESTART


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long hosts wait for one another and how full memory may be."""

    watchdog_seconds: Annotated[float, "[0, 1e7]"]  # without a sign of life; 0: for ever
    host_memory_limit: Annotated[float, "[0.01, 1]"]  # a host that is fuller saves and stops
    hosts_wait_seconds: Annotated[float, "[1, 1e7]"]  # for all hosts at the start
    host_silence_seconds: Annotated[float, "[1, 1e7]"]  # after which a host counts as dead


@dataclasses.dataclass(frozen=True)
class Vote:
    """The hosts' common answer after one step; its properties wait for that step."""

    read: Callable[[], Sequence[bool]]  # asked to stop, memory nearly full, score ready
    memory_full: MemoryFull  # the exception if memory is nearly full

    @property
    def stop(self) -> BaseException | None:
        """The exception to raise on every host once the state is saved, or None to go on."""
        requested, full, _ = self.read()
        if requested:
            return preemption.answer(agreed=True)
        return self.memory_full if full else None

    @property
    def score_ready(self) -> bool:
        """Whether a host has its score ready."""
        return self.read()[2]


class Guard:
    """Holds the workdir's lock while a run trains, and asks after each step whether to stop."""

    def __init__(self, workdir: str, mesh: Mesh, host_memory_limit: float):
        """Takes the workdir's lock; LockError if another run has it."""
        self._limit, self._mesh = host_memory_limit, mesh
        self._memory_full = MemoryFull(
            f"a host uses more than config.host_memory_limit={host_memory_limit:g} of its memory: "
            "stopped before the system kills the run; the same command continues"
        )
        self._lock = None
        if jax.process_index() == 0:
            self._lock = locks.take(
                str(epath.Path(workdir) / "run.lock"),
                f"trains in {workdir}",
                "use another --workdir",
                lost=lambda message: processes.fail(message, FAILED),
                say=_log.info,
            )
        self._memory_used, self._memory_time = 0.0, -_MEMORY_PERIOD

    def vote(self, score_ready: bool = False) -> Vote:
        """Asks all hosts whether to stop and whether a score is ready, without waiting.

        All hosts must call it after the same step.
        """

        def ask() -> tuple[bool, ...]:
            now = time.monotonic()
            if now - self._memory_time > _MEMORY_PERIOD:
                self._memory_time, self._memory_used = now, memory_used()
            return preemption.requested(), self._memory_used > self._limit, score_ready

        return Vote(sharding.ask_processes(self._mesh, ask), self._memory_full)

    def check(self) -> None:
        """Raises LockError if the workdir no longer belongs to this run."""
        if self._lock:
            self._lock.check()

    def close(self) -> None:
        """Releases the lock."""
        if self._lock:
            self._lock.close()


def afford(needed: Mapping[tuple[str, ...], int], values: Mapping[str, Any]) -> None:
    """Refuses input that needs more memory than this host has.

    `needed` has the bytes of each part of the input, by the config keys that decide how large it
    is; `values` has the values of these keys.
    """
    total, free = sum(needed.values()), memory_free()
    if total > free:
        raise ConfigError(
            f"the input needs about {total / 1e9:.1f} GB of this host, {free / 1e9:.1f} GB are "
            f"free: {less_memory(needed, values)}"
        )


def less_memory(needed: Mapping[tuple[str, ...], int], values: Mapping[str, Any]) -> str:
    """The fix for input that does not fit: smaller values of the keys of its largest part."""
    keys = max(needed, key=lambda keys: needed[keys], default=())
    if not keys:
        return "use hosts with more memory"
    settings = " and ".join(f"--config.{key}={values[key]}" for key in keys)
    return f"{needed[keys] / 1e9:.1f} GB are for {settings}; set a smaller value, or use more hosts"


def memory_used(cgroup: str = "/sys/fs/cgroup") -> float:
    """The used share of memory, of the machine or of the container, whichever is fuller."""
    return max(1 - free / total for free, total in _memory(cgroup))


def memory_free(cgroup: str = "/sys/fs/cgroup", limit: float = 1.0) -> int:
    """Bytes that this process can still get until the share `limit` of the memory is used.

    Of the machine, of the container and of `ulimit -v`.
    """
    memory, allowed = _memory(cgroup), resource.getrlimit(resource.RLIMIT_AS)[0]
    if allowed != resource.RLIM_INFINITY:
        memory.append((allowed - psutil.Process().memory_info().vms - _STACKS, allowed))
    return min(int(free - (1 - limit) * total) for free, total in memory)


def _memory(cgroup: str) -> list[tuple[int, int]]:
    """(free, total) bytes of the machine and, if it has a limit, of the container.

    Files that the kernel keeps in memory only for speed are free.
    """
    folder, machine = epath.Path(cgroup), psutil.virtual_memory()
    memory = [(machine.available, machine.total)]
    with contextlib.suppress(OSError, KeyError, ValueError):  # "max" is not a number: no limit
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
        cached = int(stat["inactive_file"]) + int(stat["active_file"])
        memory.append((limit - used + cached, limit))
    return memory
