"""Pools of threads: how many, results in order, and an end that does not wait after an error.

NumPy, TensorFlow and libjpeg release Python's lock, so that threads use all cores.
"""

import collections
import concurrent.futures
import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from etils import epath

In = TypeVar("In")
Out = TypeVar("Out")


def cores(cgroup: str = "/sys/fs/cgroup") -> int:
    """Returns the number of processor cores that this process may use.

    A container's quota counts in whole cores, rounded up.
    """
    may_use = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        may_use = len(os.sched_getaffinity(0))
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # v2, v1
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number: no quota
            texts = [(epath.Path(cgroup) / name).read_text() for name in names]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0:  # v1 has -1 where there is none
                may_use = min(may_use, math.ceil(quota / period))
    return may_use


def threads(*paths: str) -> int:
    """Returns the number of threads: one per core, or more if a path is remote and reads wait."""
    is_remote = any("://" in path for path in paths)
    # 256 readers of 50 ms per image read more images than one Python process can handle.
    return max(cores(), min(8 * cores(), 256)) if is_remote else cores()


class Threads(concurrent.futures.ThreadPoolExecutor):
    """A pool whose `with` waits for its threads at the end, but not after an error."""

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self.shutdown(wait=kind is None, cancel_futures=kind is not None)


def ordered(
    pool: concurrent.futures.Executor, work: Callable[[In], Out], inputs: Iterable[In], ahead: int
) -> Iterator[Out]:
    """The results of `work` for each input, in order, computed in `pool`; inputs may be endless.

    At most `ahead` results are under way or wait to be read.
    """
    pending: collections.deque[concurrent.futures.Future[Out]] = collections.deque()
    try:
        for value in inputs:
            pending.append(pool.submit(work, value))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def all_done(tasks: list[concurrent.futures.Future], stop: threading.Event) -> None:
    """Waits for tasks; sets `stop` and raises at the first error or Ctrl-C.

    The other tasks then have 10 seconds to clean up, because they may wait for a dead connection.
    """
    try:
        for task in concurrent.futures.as_completed(tasks):
            task.result()
    except BaseException:
        stop.set()
        for task in tasks:
            task.cancel()
        concurrent.futures.wait(tasks, timeout=10)
        raise
