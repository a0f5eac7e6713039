"""The progress of long work: on the terminal, in the log, and to whoever waits for it.

`report_progress` also tells the program that waits, such as a run that counts its records.
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("tpu_suite")
_listener: Callable[[str], None] | None = None


def duration(seconds: float) -> str:
    """'45 s', '12 min' or '3 h 5 min'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def hms(seconds: float) -> str:
    """Seconds as 1:02:03 or 4:05; "?" if they are not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class ProgressBar:
    """A progress bar on stderr: share, images/s, MB/s and time left.

    On a terminal it redraws one line; elsewhere it prints a line every 10 seconds.
    """

    def __init__(self, title: str, total: int, unit: str = "images", total_bytes: int = 0):
        """`total` is the number of `unit`; 0 if only the number of bytes is known."""
        self._title, self._total, self._unit = title, total, unit
        self._total_bytes = total_bytes
        self._is_live = sys.stderr.isatty()
        self._done = self._bytes = self._width = 0
        self._lock = threading.Lock()
        self._started = self._printed = time.monotonic()

    def add(self, number: int = 1, size: int = 0) -> None:
        """Adds `number` units of `size` bytes in all; any thread may call it."""
        with self._lock:
            self._done += number
            self._bytes += size
            now = time.monotonic()
            if now - self._printed >= (0.3 if self._is_live else 10):
                self._printed = now
                self._print(self._line(now), "" if self._is_live else "\n")

    def close(self) -> None:
        """Prints the final state."""
        with self._lock:
            now = time.monotonic()
            spent = duration(now - self._started)
            self._print(f"{self._line(now).rsplit(', ', 1)[0]}, {spent}", "\n")

    def _line(self, now: float) -> str:
        seconds = max(now - self._started, 1e-3)
        done, total = self._done, self._total
        number = f"{done:,} of {total:,}"
        if not total:
            done, total, number = self._bytes, self._total_bytes, f"{done:,}"
        share = min(done / max(total, 1), 1)
        left = seconds / max(done, 1) * max(total - done, 0)
        bar = "#" * int(share * 20)
        return (
            f"{self._title} [{bar:20}] {share:4.0%} {number} {self._unit}, "
            f"{self._done / seconds:,.0f} {self._unit}/s, {self._bytes / seconds / 1e6:,.1f} MB/s, "
            f"{duration(left)} left"
        )

    def _print(self, line: str, end: str) -> None:
        start = "\r" if self._is_live else ""
        print(f"{start}{line:{self._width}}", end=end, file=sys.stderr, flush=True)
        self._width = len(line) if self._is_live else 0


def set_progress_listener(listener: Callable[[str], None] | None) -> None:
    """Sets what is called with every report from now on; it may raise to stop the work."""
    global _listener
    _listener = listener


def report_progress(text: str) -> None:
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
        report_progress(text)
        self.log(done, text)

    def log(self, done: float, text: str) -> None:
        """Logs the progress without a call of the listener, for work in other threads."""
        now = time.monotonic()
        if now - self._logged > 10 and done:
            left = (now - self._begin) * (self._total - done) / done
            _log.info("%s, %.0f s left", text, left)
            self._logged = now
