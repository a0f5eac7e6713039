"""Knows what this process is doing, and ends a run in which nothing happens any more."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from engine.cluster.hostlog import HostLog

_TICK = 1.0  # seconds between two looks
_HURRY = 30.0  # seconds without a sign of life that a run may take after a signal asked it to stop
_log = logging.getLogger("tpu_suite")


@dataclasses.dataclass(frozen=True)
class Activity:
    """What the process is doing, at which optimizer step, and when it last said so."""

    what: str
    step: int
    time: float  # time.monotonic()

    def __str__(self) -> str:
        return f"{self.what} (step {self.step:,})" if self.step else self.what


_activity = Activity("starting", 0, time.monotonic())


def activity() -> Activity:
    """What this process is doing now."""
    return _activity


def doing(what: str, step: int | None = None) -> None:
    """Notes what this process is doing now; without `step` the step stays as it was.

    Every call is a sign of life for this process's own watchdog. The other hosts learn the text
    within seconds, and only a new text is a sign of life for theirs. So long work on one host,
    which others wait for, must say how far it is: "counting examples: file 3 of 64".
    """
    global _activity
    _activity = Activity(what, _activity.step if step is None else step, time.monotonic())


@contextlib.contextmanager
def during(what: str, step: int | None = None) -> Iterator[None]:
    """Notes `what` as the activity of the block; afterwards the former activity counts again."""
    before = _activity.what
    doing(what, step)
    try:
        yield
    finally:
        doing(before)


class Watchdog:
    """A thread that ends the process when no sign of life comes; it runs until it is closed."""

    def __init__(
        self,
        seconds: float,
        log: HostLog,
        *,
        explain: Callable[[], str],
        rescue: Callable[[], str],
        leave: Callable[[str], None],
        others: Callable[[], Any] = lambda: None,
        hurry: Callable[[], bool] = lambda: False,
    ):
        """Starts to watch.

        Args:
          seconds: time without a sign of life after which a warning comes and the stacks of all
            threads are written; after twice this time the run ends. 0 watches nothing.
          log: this host's log; the stacks go into a file beside it.
          explain: says what the process waits for; may take a while.
          rescue: saves what can be saved and says what it did.
          leave: ends the process; its argument is the reason.
          others: any value that changes while other hosts, for which this one may wait, make
            progress.
          hurry: whether the run has been asked to stop. Then half a minute is enough, unless
            something is being written.
        """
        self._seconds, self._log = seconds, log
        self._explain, self._rescue, self._leave = explain, rescue, leave
        self._others, self._hurry = others, hurry
        self._seen, self._idle, self._has_warned = self._signs(), 0.0, False
        self._closed = threading.Event()
        if seconds:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(_TICK):
            now = time.monotonic()
            # A process that was itself stopped (SIGSTOP, a paused VM) has not been idle.
            if self._has_ended(min(now - before, 2 * _TICK)):
                return
            before = now

    def _has_ended(self, passed: float) -> bool:
        """Looks for signs of life `passed` seconds after the last look; whether the run ended."""
        if (signs := self._signs()) != self._seen:
            self._seen, self._idle, self._has_warned = signs, 0.0, False
            return False
        self._idle += passed
        is_writing = _activity.what.startswith(("writing", "saving"))
        in_hurry = self._hurry() and not is_writing
        if self._idle > (min(_HURRY, self._seconds) if in_hurry else 2 * self._seconds):
            self._end()
            return True
        if self._idle > self._seconds and not self._has_warned:
            self._has_warned = True
            self._warn()
        return False

    def _signs(self) -> Any:
        return _activity.time, self._others()

    def _state(self) -> str:
        detail = _within(self._explain, 30.0)
        return f"{_activity}; {detail}" if detail else str(_activity)

    def _warn(self) -> None:
        path = self._log.note("stacks.txt", stacks())
        _log.warning(
            "WARNING nothing has happened for %.0f s: %s. The stacks of all threads are in %s; "
            "after as long again the run ends",
            *(self._seconds, self._state(), path or "(not written)"),
        )

    def _end(self) -> None:
        state = self._state()
        saved = _within(self._rescue, max(self._seconds, 30.0))
        self._leave(
            f"nothing has happened for {self._idle:.0f} s: {state}; "
            f"{saved or 'nothing more could be saved'}"
        )


def _within(work: Callable[[], str], seconds: float) -> str:
    """The result of `work`, or "" if it takes too long: it may hang where the run hangs."""
    results: list[str] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(f"({' '.join(str(error).split())[:300]})")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else ""


def stacks() -> str:
    """The Python stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
