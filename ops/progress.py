"""Reports the progress of long work on the data to the log and to the program that waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_log = logging.getLogger("tpu_suite")
_listener: Callable[[str], None] | None = None


def set_listener(listener: Callable[[str], None] | None) -> None:
    """From now on, calls `listener` with every report. It may raise to stop the work."""
    global _listener
    _listener = listener


def report(text: str) -> None:
    """Tells the listener how far the work is."""
    if _listener:
        _listener(text)


class Progress:
    """Reports work whose amount is known, and logs it every 10 seconds with the time left."""

    def __init__(self, total: float):
        self._total = total
        self._begin = self._logged = time.monotonic()

    def at(self, done: float, text: str) -> None:
        """Reports that `done` of the total is done; `text` describes the progress."""
        report(text)
        self.log(done, text)

    def log(self, done: float, text: str) -> None:
        """As `at`, but does not call the listener: for work in another thread than the main one."""
        now = time.monotonic()
        if now - self._logged > 10 and done:
            left = (now - self._begin) * (self._total - done) / done
            _log.info("%s, %.0f s left", text, left)
            self._logged = now
