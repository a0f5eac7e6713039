"""SIGTERM and Ctrl-C: finish the step, save, leave with an exit code of their own."""

from __future__ import annotations

import os
import signal
from types import FrameType

_requested: int | None = None


class Preempted(Exception):
    """The run was asked to stop; `code` is the process's exit code (128 + signal)."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.code = 128 + signum


def listen() -> None:
    """Notes SIGTERM and SIGINT instead of dying at once; a second one changes nothing."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _note)


def requested() -> bool:
    """Whether the run has been asked to stop."""
    return _requested is not None


def raise_if_requested() -> None:
    """Raises Preempted if the run has been asked to stop."""
    if _requested is not None:
        raise Preempted(_requested)


def _note(signum: int, frame: FrameType | None) -> None:
    global _requested
    if _requested is None:
        _requested = signum
        # Not print: a handler that interrupts a print must not enter the same buffer again.
        os.write(2, f"\n{signal.Signals(signum).name}: saving, then stopping\n".encode())
