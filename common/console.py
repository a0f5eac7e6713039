"""Arguments of programs, and the progress of long work: on the terminal, in the log.

`report_progress` also tells the program that waits, such as a run that counts its records.
"""

import argparse
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from common.errors import INVALID, UserError

MOST_SHARDS = 99_999  # files of a split: their names have five digits
MOST_WORKERS = 4096
_ROWS = 20  # lines of a list
_log = logging.getLogger("tpu_suite")
_listener: Callable[[str], None] | None = None


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an invalid argument in one line."""

    def error(self, message: str) -> NoReturn:
        name = self.prog.removeprefix("python -m scripts.")
        help_ = "--help lists the arguments, CHANGELOG.md those that are gone"
        self.exit(INVALID, f"{name}: {UserError(message)} ({help_})\n")


def summary(doc: str | None) -> str:
    """The first line of a module's docstring; python -OO has none."""
    return (doc or "").partition("\n")[0]


def underscored(argv: Sequence[str]) -> list[str]:
    """The arguments with --a-name as --a_name; their values stay."""

    def convert(text: str) -> str:
        name, *value = text.split("=", 1)
        return "=".join([f"--{name[2:].replace('-', '_')}", *value])

    return [convert(text) if text.startswith("--") and text != "--" else text for text in argv]


def integer(least: int, most: int = 10**18) -> Callable[[str], int]:
    """Returns the type of an argument that is a whole number from `least` to `most`."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not least <= int(text) <= most:
            limit = f" and {most:,} or less" if most < 10**18 else ""
            message = f"must be a whole number of {least} or more{limit}, got '{text}'"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return convert


def share(text: str) -> float:
    """The type of an argument that is a number from 0 to 1."""
    if not re.fullmatch(r"[0-9.]+(e-[0-9]+)?", text) or not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got '{text}'")
    return value


def path(text: str) -> str:
    """The type of an argument that names a file or folder: TensorFlow needs UTF-8."""
    if not is_utf8(text):
        raise argparse.ArgumentTypeError(f"the path {os.fsencode(text)!r} is not UTF-8")
    return text


def is_utf8(name: str) -> bool:
    """Whether the name of a file is text; Python keeps other bytes as lone surrogates."""
    return name == name.encode(errors="replace").decode()


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


def print_row(number: int, total: int, text: str) -> None:
    """Prints the line of a file, the `number`-th from 0 of `total`; at most twenty lines come."""
    if number < _ROWS - 1 or total == _ROWS:
        print(text, flush=True)
    elif number == _ROWS - 1:
        print(f"... and {total - number:,} more", flush=True)


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
