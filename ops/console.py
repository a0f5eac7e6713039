"""Arguments, progress and threads of the scripts that process many images."""

import argparse
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NoReturn

from errors import UserError

MOST_SHARDS = 99_999  # files of a split: their names have five digits
MOST_WORKERS = 4096


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an invalid argument in one line."""

    def error(self, message: str) -> NoReturn:
        name = self.prog.removeprefix("python -m scripts.")
        self.exit(2, f"{name}: {UserError(message)} (--help lists the arguments)\n")


def summary(doc: str | None) -> str:
    """The first line of a module's docstring; python -OO has none."""
    return (doc or "").partition("\n")[0]


def underscored(argv: Sequence[str]) -> list[str]:
    """The arguments with --a-name as --a_name; their values stay."""

    def convert(text: str) -> str:
        name, *value = text.split("=", 1)
        return "=".join([f"--{name[2:].replace('-', '_')}", *value])

    return [convert(text) if text.startswith("--") and text != "--" else text for text in argv]


def whole(least: int, most: int = 10**18) -> Callable[[str], int]:
    """Returns the type of an argument that is a whole number from `least` to `most`."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not least <= int(text) <= most:
            limit = f" and {most:,} or less" if most < 10**18 else ""
            fault = f"must be a whole number of {least} or more{limit}, got '{text}'"
            raise argparse.ArgumentTypeError(fault)
        return int(text)

    return convert


def share(text: str) -> float:
    """The type of an argument that is a number from 0 to 1."""
    if not re.fullmatch(r"[0-9.]+(e-[0-9]+)?", text) or not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got '{text}'")
    return value


def path(text: str) -> str:
    """The type of an argument that names a file or folder, for TensorFlow, which takes UTF-8."""
    if not is_utf8(text):
        raise argparse.ArgumentTypeError(f"the path {os.fsencode(text)!r} is not UTF-8")
    return text


def is_utf8(name: str) -> bool:
    """Whether the name of a file is text; Python keeps other bytes as lone surrogates."""
    return name == name.encode(errors="replace").decode()


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


def duration(seconds: float) -> str:
    """'45 s', '12 min' or '3 h 5 min'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class Threads(futures.ThreadPoolExecutor):
    """A pool whose `with` waits for its threads at the end, but not after an error."""

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self.shutdown(wait=kind is None, cancel_futures=kind is not None)


def all_done(tasks: list[futures.Future], stop: threading.Event) -> None:
    """Waits for tasks; sets `stop` and raises at the first error or Ctrl-C.

    The other tasks then have 10 seconds to clean up, because they may wait for a dead connection.
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
