"""SIGTERM, Ctrl-C and Google's notice: leave at once, or, where there is something to save, save.

A Python signal handler runs when the main thread comes back from C++, and compiling takes minutes
there; so a thread that the C-level handler wakes ends the process where nothing is to be saved.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from engine.cluster import hosts

_GRACE = 3.0  # seconds for the main thread to end by itself
_THREAD = "signals"
_requested: int | None = None
_noted = -math.inf  # when the handler last ran
_deferred = 0
_leave: Callable[[int, str], None] = lambda code, reason: None  # noqa: E731


class Preempted(BaseException):
    """The run was asked to stop; `code` is the process's exit code (128 + signal).

    Like KeyboardInterrupt it is no Exception: it may come in the middle of anything.

    `agreed`: every process of the run stops here, too.
    """

    def __init__(self, signum: int, agreed: bool = False):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.code, self.agreed = 128 + signum, agreed


def listen(leave: Callable[[int, str], None]) -> None:
    """Turns SIGTERM and SIGINT into Preempted; inside `deferred` they are only noted.

    `leave(exit code, reason)` is called in a thread where the main thread does not get to raise
    Preempted, because it is busy in C++; it should end the process.
    """
    global _leave
    _leave = leave
    if not any(thread.name == _THREAD for thread in threading.enumerate()):
        woken, wake = socket.socketpair()
        wake.setblocking(False)
        # detach: the descriptor lives as long as the process, whatever becomes of the object
        signal.set_wakeup_fd(wake.detach(), warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(woken,), daemon=True, name=_THREAD).start()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _note)


def _watch(woken: socket.socket) -> None:
    """Ends the process where the main thread does not come to the signal's handler."""
    while raw := woken.recv(1):
        if raw[0] not in (signal.SIGTERM, signal.SIGINT):
            continue
        arrived = time.monotonic()
        time.sleep(_GRACE)
        if _noted < arrived - _GRACE and not _deferred:
            _leave(128 + raw[0], f"stopped by {signal.Signals(raw[0]).name}")


def watch_cloud(interval: float = 5.0) -> None:
    """Asks this VM's metadata server for a notice of preemption or maintenance, in a thread.

    A notice has the effect of SIGTERM. Source: Compute Engine's metadata keys `preempted` and
    `maintenance-event`.
    """

    def watch() -> None:
        while _requested is None:
            for path, quiet in (("preempted", "FALSE"), ("maintenance-event", "NONE")):
                with contextlib.suppress(OSError):
                    if (notice := hosts.metadata(f"instance/{path}", 10)) not in ("", quiet):
                        os.write(2, f"\nthis VM's {path} is {notice}\n".encode())
                        os.kill(os.getpid(), signal.SIGTERM)
                        return
            time.sleep(interval)

    threading.Thread(target=watch, daemon=True, name="cloud notice").start()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, a signal waits until the program asks; a second one changes nothing."""
    global _deferred
    _deferred += 1
    try:
        yield
    finally:
        _deferred -= 1


def requested() -> bool:
    """Whether the run has been asked to stop."""
    return _requested is not None


def signum() -> int:
    """The signal that arrived; SIGTERM if it was another process's."""
    return signal.SIGTERM if _requested is None else _requested


def raise_if_requested() -> None:
    """Raises Preempted if this process has been asked to stop."""
    if _requested is not None:
        raise Preempted(_requested)


def raise_stop() -> None:
    """Raises Preempted on every process, whichever of them was asked to stop."""
    raise Preempted(signum(), agreed=True)


def _note(signum: int, frame: FrameType | None) -> None:
    global _requested, _noted
    _noted = time.monotonic()
    if _requested is None:
        _requested = signum
        # Not print: a handler that interrupts a print must not enter the same buffer again.
        how = "saving, then stopping" if _deferred else "stopping"
        os.write(2, f"\n{signal.Signals(signum).name}: {how}\n".encode())
    if not _deferred:
        raise Preempted(_requested)
