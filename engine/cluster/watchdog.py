"""Ends a run that does nothing any more, after saying what it was at and saving what can be."""

from __future__ import annotations

import faulthandler
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from engine.cluster import activity
from engine.cluster.hostlog import HostLog

_TICK = 1.0
_HURRY = 30.0  # seconds
_log = logging.getLogger("tpu_suite")


class Watchdog:
    """Watches `engine.cluster.activity` in a thread until closed."""

    def __init__(
        self,
        seconds: float,
        log: HostLog,
        *,
        explain: Callable[[], str],
        rescue: Callable[[], str],
        leave: Callable[[str], None],
        life: Callable[[], Any] = lambda: None,
        hurry: Callable[[], bool] = lambda: False,
    ):
        """Starts to watch.

        Args:
          seconds: without a sign of life, after which stacks are written; after twice as long the
            run ends. 0 watches nothing.
          log: this host's, beside which the stacks go.
          explain: says what is waited for, in words; may take a while.
          rescue: saves what can be saved and says what it did.
          leave: ends the process, told why.
          life: anything that changes while others, whom this process may wait for, go on.
          hurry: whether the run has been asked to stop; then half a minute is enough, unless
            something is being written.
        """
        self._seconds, self._log = seconds, log
        self._explain, self._rescue, self._leave = explain, rescue, leave
        self._life, self._hurry = life, hurry
        self._closed = threading.Event()
        if seconds:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def close(self) -> None:
        """Watches no more."""
        self._closed.set()

    def _watch(self) -> None:
        seen, idle, told = self._signs(), 0.0, False
        before = time.monotonic()
        while not self._closed.wait(_TICK):
            now = time.monotonic()
            # A process that was itself stopped (SIGSTOP, a paused VM) has not been idle.
            passed, before = min(now - before, 2 * _TICK), now
            if self._signs() != seen:
                seen, idle, told = self._signs(), 0.0, False
                continue
            idle += passed
            writing = activity.current().what.startswith(("writing", "saving"))
            if self._hurry() and not writing and idle > min(_HURRY, self._seconds):
                self._end(idle)
                return
            if idle > self._seconds and not told:
                told = True
                self._tell()
            elif idle > 2 * self._seconds:
                self._end(idle)
                return

    def _signs(self) -> Any:
        return activity.current().since, self._life()

    def _tell(self) -> None:
        what, detail = activity.current(), self._within(self._explain, 30.0)
        where = self._log.note("stacks.txt", stacks())
        _log.warning(
            "WARNING nothing has happened for %.0f s: %s%s. The stacks of all threads are in %s; "
            "after as long again the run ends",
            *(self._seconds, what, f"; {detail}" if detail else "", where or "(not written)"),
        )

    def _end(self, idle: float) -> None:
        what = activity.current()
        detail = self._within(self._explain, 30.0)
        saved = self._within(self._rescue, max(self._seconds, 30.0))
        self._leave(
            f"nothing has happened for {idle:.0f} s: {what}"
            f"{f'; {detail}' if detail else ''}; {saved or 'nothing more could be saved'}"
        )

    def _within(self, work: Callable[[], str], seconds: float) -> str:
        """What `work` says, "" if that takes too long or fails: what hangs may hang it, too."""
        said: list[str] = []

        def run() -> None:
            try:
                said.append(work())
            except Exception as error:
                said.append(f"({' '.join(str(error).split())[:300]})")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        return said[0] if said else ""


def stacks() -> str:
    """The Python stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
