"""What this process is doing, for the watchdog, the other hosts and the person who asks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Activity:
    """`what` in words, at optimizer step `step`, begun or last seen to go on at `since`."""

    what: str
    step: int
    since: float  # time.monotonic()

    def __str__(self) -> str:
        return f"{self.what} (step {self.step:,})" if self.step else self.what


_now = Activity("starting", 0, time.monotonic())


def current() -> Activity:
    """What is being done."""
    return _now


def at(what: str, step: int | None = None) -> None:
    """Says what begins, or goes on."""
    global _now
    _now = Activity(what, _now.step if step is None else step, time.monotonic())


@contextlib.contextmanager
def doing(what: str, step: int | None = None) -> Iterator[None]:
    """Says what is done inside, and afterwards again what was done before."""
    before = _now.what
    at(what, step)
    try:
        yield
    finally:
        at(before)
