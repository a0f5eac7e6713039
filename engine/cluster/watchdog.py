"""Knows what this process is doing, and ends a run in which nothing happens any more.

A write to a gs:// that is silent may never return. `within` limits such a call. `Background` runs
work in a thread, and shows the watchdog whether the thread computes or hangs.
"""

import concurrent.futures
import contextlib
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import psutil
from etils import epath

from common.errors import one_line

_TICK = 1.0  # seconds between two checks
_HURRY = 30.0  # seconds without a sign of life that a run may take after a signal asked it to stop
_SIGN = 1.0  # seconds between signs of life of work in the background
# What TensorFlow and Google's client raise after their last attempt; TensorStore's text.
_GAVE_UP = ("AbortedError", "UnavailableError", "DeadlineExceededError", "RetryError")
_GAVE_UP_TEXT = re.compile(r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED): ")
_log = logging.getLogger("tpu_suite")
T = TypeVar("T")


class Activity(NamedTuple):
    """What the process is doing, at which optimizer step, since which time.monotonic()."""

    what: str
    step: int
    time: float

    def __str__(self) -> str:
        return f"{self.what} (step {self.step:,})" if self.step else self.what


_activity = Activity("starting", 0, time.monotonic())


def activity() -> Activity:
    """What this process is doing now."""
    return _activity


def doing(what: str, step: int | None = None) -> None:
    """Notes what this process is doing now; without `step` the step stays as it was.

    Every call is a sign of life for this process's own watchdog. The other hosts learn the text
    within seconds, and only a new text is a sign of life for theirs. So long work on one host must
    say how far it is: "counting examples: file 3 of 64".
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
        note: Callable[[str, str], str],
        leave: Callable[[str], None],
        others: Callable[[], list[str]] = list,
        hurry: Callable[[], bool] = lambda: False,
    ):
        """Starts to watch.

        Args:
          seconds: time without a sign of life after which a warning comes and the stacks of all
            threads are written; after twice this time the run ends. 0 watches nothing.
          note: writes the file of a name and a text next to this host's log; returns its path.
          leave: ends the process; its argument is the reason.
          others: says what the other hosts are doing; a change is a sign of life.
          hurry: whether the run was asked to stop. Then it ends after 30 s, or twice the longest
            time that the same activity has taken, such as a step, unless it is writing.
        """
        self._seconds, self._note = seconds, note
        self._leave, self._others, self._hurry = leave, others, hurry
        self._seen, self._idle = self._signs_of_life(), 0.0
        self._longest: dict[str, float] = {}  # seconds of each activity between two signs of life
        self._what = ""  # the activity at the last check
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
        """Looks for signs of life `passed` seconds after the last check; whether the run ended."""
        signs = self._signs_of_life()
        if signs != self._seen:
            self._longest[self._what] = max(self._idle, self._longest.get(self._what, 0.0))
            self._seen, self._idle, self._what = signs, 0.0, _activity.what
            return False
        before, self._idle = self._idle, self._idle + passed
        limit = 2 * self._seconds
        if self._hurry() and not _activity.what.startswith(("writing", "saving")):
            limit = min(max(_HURRY, 2 * self._longest.get(_activity.what, 0.0)), self._seconds)
        if self._idle > limit:
            self._leave(f"nothing has happened for {self._idle:.0f} s: {self._state()}")
            return True
        if before <= self._seconds < self._idle:
            path = self._note("stacks.txt", stacks()) or "(not written)"
            _log.warning(
                "WARNING nothing has happened for %.0f s: %s. The stacks of all threads are in %s; "
                "after as long again the run ends",
                self._seconds,
                self._state(),
                path,
            )
        return False

    def _signs_of_life(self) -> Any:
        return _activity.time, self._others()

    def _state(self) -> str:
        return "; ".join([str(_activity), *self._others()])


def stacks() -> str:
    """The Python stacks of all threads of this process, the newest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(  # faulthandler leaves out all threads after the 100th
        f"Thread 0x{ident:016x} ({names.get(ident, 'of a library')}):\n"
        + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    )


class Background(threading.Thread, Generic[T]):
    """Runs `work` in a thread, from its construction on; the thread keeps no process alive."""

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
        used = -1.0  # seconds of CPU time
        while not concurrent.futures.wait([self._future], _SIGN).done:
            now = time.monotonic()  # where the system hides the times of threads
            with contextlib.suppress(psutil.Error):
                threads = {t.id: t.user_time + t.system_time for t in psutil.Process().threads()}
                now = threads.get(self.native_id or 0, 0.0)
            if now > used:
                used = now
                doing(f"{self.name} for {time.monotonic() - self._begun:.0f} s")
        return self._future.result()

    def run(self) -> None:
        """Does the work; not for callers."""
        try:
            self._future.set_result(self._work())
        except BaseException as error:  # the thread that waits raises it
            self._future.set_exception(error)


def within(work: Callable[[], str], seconds: float) -> str:
    """The result of `work`, or in parentheses what it raised; "" if it takes longer."""
    thread = Background(work, "limited")
    thread.join(seconds)
    if not thread.is_done:
        return ""
    try:
        return thread.result()
    except Exception as error:
        return f"({one_line(error)})"


def is_no_answer(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, says that a service did not answer, after many tries."""
    while error is not None:
        is_text = isinstance(error, ValueError) and bool(_GAVE_UP_TEXT.match(str(error)))
        if is_text or type(error).__name__ in _GAVE_UP:
            return True
        error = error.__cause__
    return False


def no_answer(error: Exception, paths: Iterable[str]) -> str:
    """Why gs:// does not answer for one of the paths after a read failed; "" if it does.

    Some libraries call a folder on gs:// missing when they get no answer.
    """
    if is_no_answer(error):
        return one_line(error)
    for path in paths:
        try:
            epath.Path(path).stat()
        except Exception as reason:  # TensorFlow's, which may be NotFoundError
            if is_no_answer(reason):
                return one_line(reason)
    return ""
