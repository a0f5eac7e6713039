"""What the scripts that go through many images share: arguments, progress, threads."""

import argparse
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a bad argument in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the arguments)\n")


def whole(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number of `least` or more."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
            fault = f"must be a whole number of {least} or more, got '{text}'"
            raise argparse.ArgumentTypeError(fault)
        return int(text)

    return convert


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads(*paths: str) -> int:
    """How many threads to work with: one per core; more where a path is remote and reads wait."""
    remote = any("://" in path for path in paths)
    # 256 readers at 50 ms each feed more images than one Python process can handle.
    return max(cores(), min(8 * cores(), 256)) if remote else cores()


def duration(seconds: float) -> str:
    """'45 s', '12 min' or '3 h 5 min'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class Threads(futures.ThreadPoolExecutor):
    """A pool that is waited for at the end of its `with`, but not after an error."""

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self.shutdown(wait=kind is None, cancel_futures=kind is not None)


def run(main: Callable[[], None]) -> None:
    """Calls `main`; if it fails, ends the process without waiting for threads.

    TensorFlow closes its files when they are forgotten, and tries their uploads again: on a dead
    connection that takes many minutes.
    """
    try:
        main()
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def all_done(tasks: list[futures.Future], stop: threading.Event) -> None:
    """Waits for tasks; the first error, or Ctrl-C, sets `stop` and is raised.

    The other tasks then have 10 seconds to clean up: they may wait for a dead connection.
    """
    try:
        for task in futures.as_completed(tasks):
            task.result()
    except BaseException:
        stop.set()
        for task in tasks:
            task.cancel()
        futures.wait(tasks, timeout=10)
        raise


class Progress:
    """A progress bar on stderr: share, images/s, MB/s and time left.

    On a terminal one line that is drawn anew, elsewhere a line every 10 seconds.
    """

    def __init__(self, what: str, total: int, unit: str = "images", total_bytes: int = 0):
        """total: how many `unit` there will be; 0 if only the number of bytes is known."""
        self._what, self._total, self._unit = what, total, unit
        self._total_bytes = total_bytes
        self._live = sys.stderr.isatty()
        self._done = self._bytes = self._width = 0
        self._lock = threading.Lock()
        self._started = self._said = time.monotonic()

    def add(self, number: int = 1, size: int = 0) -> None:
        """Counts `number` more, of `size` bytes; from any thread."""
        with self._lock:
            self._done += number
            self._bytes += size
            now = time.monotonic()
            if now - self._said >= (0.3 if self._live else 10):
                self._said = now
                self._say(self._line(now), "" if self._live else "\n")

    def close(self) -> None:
        """Says the final state."""
        with self._lock:
            now = time.monotonic()
            spent = duration(now - self._started)
            self._say(f"{self._line(now).rsplit(', ', 1)[0]}, {spent}", "\n")

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
            f"{self._what} [{bar:20}] {share:4.0%} {number} {self._unit}, "
            f"{self._done / seconds:,.0f} {self._unit}/s, {self._bytes / seconds / 1e6:,.1f} MB/s, "
            f"{duration(left)} left"
        )

    def _say(self, line: str, end: str) -> None:
        start = "\r" if self._live else ""
        print(f"{start}{line:{self._width}}", end=end, file=sys.stderr, flush=True)
        self._width = len(line) if self._live else 0
