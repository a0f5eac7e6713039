"""Ends the process in order after a signal that asks to stop, or Google's notice of preemption.

While the run has a state to save, a signal waits until the program asks. Otherwise the process ends
soon. A handler that raises may interrupt a finalizer, and Python drops that exception; and it runs
only when the main thread returns from C++, where compiling takes minutes. So the handler sets a
flag, and a thread, which the C-level handler wakes, sees to it that the process ends.
"""

import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from common import entry
from common.errors import INTERRUPTED, TERMINATED

_TICK = 1.0  # seconds for the main thread to come to a safe point, where it asks
_GRACE = 3.0  # seconds for the main thread to end by itself
# The last three are warnings: of SLURM (--signal=USR1@300), of others, and of `ulimit -t`.
STOPS = [signal.Signals[f"SIG{x}"] for x in ("TERM", "INT", "HUP", "USR1", "USR2", "XCPU")]
_requested: int | None = None  # the first signal that arrived
_quiet_until = -math.inf  # a signal changes nothing before: the program has begun to stop
_is_raised = False  # whether the handler has raised Preempted, and Python has not dropped it
_deferred = 0  # how many `deferred` blocks are open
_leave: Callable[[int, str], None] = lambda code, reason: None  # noqa: E731


class Preempted(BaseException):
    """The run was asked to stop; `code` is the process's exit code: 130 for Ctrl-C, else 143.

    Like KeyboardInterrupt it is no Exception: it may interrupt any line. `agreed`: every process of
    the run stops at this step.
    """

    def __init__(self, signum: int, agreed: bool = False):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.code = INTERRUPTED if signum == signal.SIGINT else TERMINATED
        self.agreed = agreed


def stop_signals() -> list[signal.Signals]:
    """The signals that ask this process to stop.

    Those that its parent ignores stay ignored, as SIGHUP under nohup, except SIGTERM and Ctrl-C.
    """
    ignored = {signum for signum in STOPS[2:] if signal.getsignal(signum) == signal.SIG_IGN}
    return [signum for signum in STOPS if signum not in ignored]


def listen(leave: Callable[[int, str], None]) -> None:
    """Notes the signals that ask to stop, for the program to ask; see `deferred`.

    Outside of `deferred` the main thread gets Preempted, wherever it is, if it has not asked within
    a second. `leave(exit code, reason)` is called in a thread if that is of no use, because the
    main thread stays in C++ or Python drops the exception; it should end the process.
    """
    global _leave
    _leave = leave
    if not any(thread.name == "signals" for thread in threading.enumerate()):
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        sys.unraisablehook = functools.partial(_drop, sys.unraisablehook)
        threading.Thread(target=_watch, args=(receiver,), daemon=True, name="signals").start()
    for signum in stop_signals():
        signal.signal(signum, _handle)


def _watch(receiver: int) -> None:
    """Sees to it that the process ends after a signal."""
    global _requested
    main = threading.main_thread().ident or 0
    while True:
        signum, waited = os.read(receiver, 1)[0], 0.0  # seconds outside of `deferred`
        arrived = time.monotonic()
        while waited < _GRACE and signal.getsignal(signum) == _handle:
            time.sleep(_TICK)
            if arrived < _quiet_until:
                break
            _requested = _requested or signum  # the handler does not run while C++ does
            waited += 0.0 if _deferred else _TICK
            if waited == _GRACE:
                stop = Preempted(signum)
                _leave(stop.code, str(stop))
            elif not (_deferred or _is_raised):
                signal.pthread_kill(main, signum)  # now the handler raises
                os.read(receiver, 1)


def _drop(show: Callable[[Any], None], dropped: Any) -> None:
    """Hides Preempted from the user where Python drops it; `_watch` sends the signal again."""
    global _is_raised
    if issubclass(dropped.exc_type, Preempted):
        _is_raised = False
    else:
        show(dropped)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside the block a signal waits until the program asks; a second one changes nothing.

    Three seconds after the answer one counts again: it ends what hangs outside of such a block.
    """
    global _deferred, _quiet_until
    _deferred += 1
    try:
        yield
    finally:
        if requested():
            _quiet_until = time.monotonic() + _GRACE
        _deferred -= 1


def requested() -> bool:
    """Whether a signal has asked this process to stop."""
    return _requested is not None


def answer(agreed: bool = False) -> Preempted:
    """The exception for the main thread to raise now, at a safe point.

    It names SIGTERM if another process received the signal.
    """
    global _quiet_until
    _quiet_until = time.monotonic() + _GRACE
    return Preempted(_requested or signal.SIGTERM, agreed)


def raise_if_requested() -> None:
    """Raises Preempted if this process has been asked to stop."""
    if requested():
        raise answer()


def _handle(signum: int, frame: FrameType | None) -> None:
    global _requested, _is_raised
    if _requested is None:
        _requested = signum
        what_next = "saving, then stopping" if _deferred else "stopping"
        entry.note(f"\n{signal.Signals(signum).name}: {what_next}\n")
    elif not (_deferred or time.monotonic() < _quiet_until):
        _is_raised = True
        raise Preempted(_requested)
