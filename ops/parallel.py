"""Work on all cores whose results come in order: NumPy leaves Python's lock for most of it."""

from __future__ import annotations

import collections
import concurrent.futures
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def in_order(work: Callable[[Given], Made], inputs: Iterable[Given]) -> Iterator[Made]:
    """`map(work, inputs)` on a thread per core, a few results ahead of who reads them.

    `inputs` may be endless. At most two more than there are cores are held at once.

    Raises:
      Whatever `work` or `inputs` raise, at its place in the order.
    """
    threads = os.cpu_count() or 1
    waiting: collections.deque[concurrent.futures.Future[Made]] = collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    try:
        for given in inputs:
            waiting.append(pool.submit(work, given))
            if len(waiting) > threads + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
