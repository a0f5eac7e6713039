"""Ends the process in order after SIGTERM, SIGHUP, Ctrl-C or Google's notice of preemption.

While the run has a state to save, a signal waits until the program asks. Otherwise the process ends
at once. A Python signal handler runs only when the main thread returns from C++, and compiling
takes minutes there. So the C-level handler wakes a thread, which then ends the process.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from common import entry

_GRACE = 3.0  # seconds for the main thread to end by itself
_requested: int | None = None  # the first signal that arrived
_handled = -math.inf  # when the Python handler last ran
_deferred = 0  # how many `deferred` blocks are open
_leave: Callable[[int, str], None] = lambda code, reason: None  # noqa: E731


class Preempted(BaseException):
    """The run was asked to stop; `code` is the process's exit code: 128 + signal; 143 for SIGHUP.

    Like KeyboardInterrupt it is no Exception: it may interrupt any line. `agreed`: every process of
    the run stops at this step.
    """

    def __init__(self, signum: int, agreed: bool = False):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.code = 128 + (signal.SIGTERM if signum == signal.SIGHUP else signum)
        self.agreed = agreed


def listen(leave: Callable[[int, str], None]) -> None:
    """Turns SIGTERM, SIGHUP and SIGINT into Preempted; inside `deferred` they are only noted.

    Where nohup has SIGHUP ignored, which a closed terminal sends, that stays so.

    `leave(exit code, reason)` is called in a thread if the main thread stays in C++ and so cannot
    raise Preempted; it should end the process.
    """
    global _leave
    _leave = leave
    if not any(thread.name == "signals" for thread in threading.enumerate()):
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(receiver,), daemon=True, name="signals").start()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _handle)


def _watch(receiver: int) -> None:
    while True:
        signum, arrived = os.read(receiver, 1)[0], time.monotonic()
        if signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            time.sleep(_GRACE)
            if _handled < arrived - _GRACE and not _deferred:
                stop = Preempted(signum)
                _leave(stop.code, str(stop))


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside the block a signal waits until the program asks; a second one changes nothing."""
    global _deferred
    _deferred += 1
    try:
        yield
    finally:
        _deferred -= 1


def requested() -> bool:
    """Whether a signal has asked this process to stop."""
    return _requested is not None


def signum() -> int:
    """The signal that arrived; SIGTERM if another process received it."""
    return signal.SIGTERM if _requested is None else _requested


def raise_if_requested() -> None:
    """Raises Preempted if this process has been asked to stop."""
    if _requested is not None:
        raise Preempted(_requested)


def _handle(signum: int, frame: FrameType | None) -> None:
    global _requested, _handled
    _handled = time.monotonic()
    if _requested is None:
        _requested = signum
        what_next = "saving, then stopping" if _deferred else "stopping"
        entry.note(f"\n{signal.Signals(signum).name}: {what_next}\n")
    if not _deferred:
        raise Preempted(_requested)
