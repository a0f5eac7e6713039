"""Copes with calls that may never return, such as a write to a gs:// that is silent."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable

from etils import epath

from common.errors import one_line

# What TensorFlow and Google's client raise after their last attempt; TensorStore's text.
_GAVE_UP = ("AbortedError", "UnavailableError", "DeadlineExceededError", "RetryError")
_GAVE_UP_TEXT = re.compile(r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED): ")

# What a thread does inside a module of a library that tells nobody what it waits for.
_MODULES = {
    "jax._src.compilation_cache": "reading or writing the compiled programs in {cache}",
    "orbax.checkpoint._src.path.deleter": "deleting checkpoints that newer ones replace",
}


def within(work: Callable[[], str], seconds: float) -> str:
    """The result of `work`, what it raised in parentheses, or "" if it takes too long.

    Work that takes too long goes on in a thread that keeps no process alive.
    """
    results: list[str] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(f"({one_line(error)})")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else ""


def in_libraries(cache: str) -> list[str]:
    """What the threads of this process do inside libraries; `cache` has the compiled programs."""
    modules: set[str] = set()
    for frame in sys._current_frames().values():
        while frame is not None:
            modules.add(frame.f_globals.get("__name__", ""))
            frame = frame.f_back
    return [text.format(cache=cache) for name, text in _MODULES.items() if name in modules]


def is_no_answer(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, says that a service did not answer, after many tries."""
    while error is not None:
        is_text = isinstance(error, ValueError) and bool(_GAVE_UP_TEXT.match(str(error)))
        if is_text or type(error).__name__ in _GAVE_UP:
            return True
        error = error.__cause__
    return False


def no_answer(error: Exception, paths: Iterable[str]) -> str:
    """Why gs:// does not answer for one of the paths, after an `error` at reading; "" if it does.

    Some libraries take a folder of gs:// for missing where they get no answer.
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
