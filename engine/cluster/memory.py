"""How full this host's memory is."""

from __future__ import annotations

import contextlib


def used(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> float:
    """The share of memory that cannot be had any more, of the machine's or of the container's.

    Files that the kernel keeps in memory only for speed do not count. 0 where it is not known.
    """
    return max((1 - free / total for free, total in _limits(proc, cgroup)), default=0.0)


def available(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that can still be had, of the machine and of the container; None if not known."""
    return min((free for free, _ in _limits(proc, cgroup)), default=None)


def _limits(proc: str, cgroup: str) -> list[tuple[int, int]]:
    """(free, total) bytes of the machine and, if it has a limit, of the container."""
    found = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        with open(f"{proc}/meminfo") as file:
            info = {key: int(rest.split()[0]) for key, _, rest in (s.partition(":") for s in file)}
        found.append((info["MemAvailable"] << 10, info["MemTotal"] << 10))
    with contextlib.suppress(OSError, KeyError, ValueError):  # "max" is no number: no limit
        with open(f"{cgroup}/memory.max") as file:
            limit = int(file.read())
        with open(f"{cgroup}/memory.current") as file:
            current = int(file.read())
        with open(f"{cgroup}/memory.stat") as file:
            stat = {key: int(value) for key, value in (line.split() for line in file)}
        found.append((limit - current + stat["inactive_file"] + stat["active_file"], limit))
    return found
