"""Runs host-side work in a thread, and shows the watchdog whether the thread computes or hangs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import psutil

from engine.cluster import watchdog

T = TypeVar("T")
_TICK = 1.0  # seconds between signs of life


class Background(threading.Thread, Generic[T]):
    """Runs `work` in a thread, from its construction on."""

    def __init__(self, work: Callable[[], T], name: str):
        super().__init__(name=name, daemon=True)
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work, self._begun = work, time.monotonic()
        self.start()

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
        while not concurrent.futures.wait([self._future], _TICK).done:
            if (now := self._cpu_seconds()) > used:
                used = now
                watchdog.doing(f"{self.name} for {time.monotonic() - self._begun:.0f} s")
        return self._future.result()

    def run(self) -> None:
        """Does the work; not for callers."""
        try:
            self._future.set_result(self._work())
        except BaseException as error:  # the thread that waits raises it
            self._future.set_exception(error)

    def _cpu_seconds(self) -> float:
        """The CPU time that the thread has used; the wall time where the system hides it."""
        with contextlib.suppress(psutil.Error):
            used = {t.id: t.user_time + t.system_time for t in psutil.Process().threads()}
            return used.get(self.native_id or 0, 0.0)
        return time.monotonic()
