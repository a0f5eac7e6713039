"""SIGTERM and Ctrl-C: leave at once, or, where there is something to save, save first."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

_requested: int | None = None
_deferred = 0


class Preempted(Exception):
    """The run was asked to stop; `code` is the process's exit code (128 + signal)."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.code = 128 + signum


def listen() -> None:
    """Turns SIGTERM and SIGINT into Preempted; inside `deferred` they are only noted."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _note)


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


def raise_if_requested() -> None:
    """Raises Preempted if the run has been asked to stop."""
    if _requested is not None:
        raise Preempted(_requested)


def raise_stop() -> None:
    """Raises Preempted, also where another process was asked to stop and this one was not."""
    raise Preempted(signal.SIGTERM if _requested is None else _requested)


def _note(signum: int, frame: FrameType | None) -> None:
    global _requested
    if _requested is None:
        _requested = signum
        # Not print: a handler that interrupts a print must not enter the same buffer again.
        how = "saving, then stopping" if _deferred else "stopping"
        os.write(2, f"\n{signal.Signals(signum).name}: {how}\n".encode())
    if not _deferred:
        raise Preempted(_requested)
