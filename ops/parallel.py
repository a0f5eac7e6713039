"""Works on threads and returns the results in order; NumPy and TensorFlow release Python's lock."""

from __future__ import annotations

import collections
import concurrent.futures
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def ordered(
    pool: concurrent.futures.Executor, work: Callable[[In], Out], inputs: Iterable[In], ahead: int
) -> Iterator[Out]:
    """`map(work, inputs)` in `pool`, for endless inputs too; errors come at their place.

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


def in_order(work: Callable[[In], Out], inputs: Iterable[In]) -> Iterator[Out]:
    """`ordered` with a thread per core, a few results ahead of the reader."""
    threads = os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        yield from ordered(pool, work, inputs, threads + 2)
