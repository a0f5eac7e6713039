"""Pools of threads: how many, results in order, and an end that does not wait after an error.

NumPy, TensorFlow and libjpeg release Python's lock, so that threads use all cores.
"""

import collections
import concurrent.futures
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def cores() -> int:
    """Returns the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
