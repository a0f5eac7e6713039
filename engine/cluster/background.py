"""Host-side work in a thread, which the watchdog can tell from a thread that hangs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from engine.cluster import watchdog

T = TypeVar("T")
_TICK = 1.0  # seconds between signs of life


class Background(Generic[T]):
    """Runs `work` in a thread from the moment it is made."""

    def __init__(self, work: Callable[[], T], name: str):
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._name, self._started = name, time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._future.done()

    def result(self) -> T:
        """Waits for the result; raises what `work` raised.

        While the thread computes, the activity changes every second. This is a sign of life for
        the watchdog of this host and of the others. A thread that hangs gives none.
        """
        used = -1.0
        while not self._future.done():
            with contextlib.suppress(Exception):  # the last line raises it
                self._future.result(_TICK)
            now = self._cpu_seconds()
            if now > used + 1e-3:
                used = now
                watchdog.doing(f"{self._name} for {time.monotonic() - self._started:.0f} s")
        return self._future.result()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # the thread that waits raises it
            self._future.set_exception(error)

    def _cpu_seconds(self) -> float:
        """Seconds of CPU time that the thread has used; the time where Linux does not tell."""
        try:
            with open(f"/proc/self/task/{self._thread.native_id}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return time.monotonic()
