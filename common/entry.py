"""Begins and ends every program: its standard streams, and one way out with its exit code."""

import atexit
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from common.errors import UserError

_results = True  # whether the standard output has the results, see `output_only_shows`


class Stream:
    """A standard output that ends no work: text that cannot be written is dropped.

    `fault` is the first error, unless it is that of a terminal that went away. `buffer` raises.
    """

    def __init__(self, stream: Any):
        self._stream, self._is_terminal = stream, stream.isatty()
        self.fault: OSError | None = None
        with contextlib.suppress(AttributeError):  # a name may have letters that it cannot show
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text, or drops it."""
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Writes what is in memory, or drops it."""
        self._attempt(self._stream.flush)

    def _attempt(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError as error:
            if not (self._is_terminal and error.errno == errno.EIO):
                self.fault = self.fault or error


def output_only_shows() -> None:
    """From now on, an output that cannot be written is no failure: files have the results."""
    global _results
    _results = False


def run(main: Callable[[], Any]) -> NoReturn:
    """Calls `main` and ends the process; its result or its SystemExit is the exit code.

    A failure does not wait for threads: TensorFlow closes a file when Python deletes it, and
    repeats the upload, which takes many minutes on a dead connection.
    """
    _open_streams()
    try:
        code = main()
    except SystemExit as error:
        code = error.code
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        code = error.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    if not code:  # what Python does at its end, before it stops threads: C++ may answer with abort
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
    leave(code or 0)


def leave(code: int) -> NoReturn:
    """Ends the process at once; 0 becomes a failure where the standard output lacks results."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    fault = getattr(sys.stdout, "fault", None)
    if fault and _results and not code:
        code = 1
        if fault.errno == errno.EPIPE:  # the reader has enough, such as `head`
            code = 128 + signal.SIGPIPE
        else:
            print(f"ERROR: cannot write the standard output: {fault.strerror}", file=sys.stderr)
    os._exit(code)


def note(text: str) -> None:
    """Writes to the terminal from a signal handler, which must not enter a buffer of `print`."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _open_streams() -> None:
    """Opens the standard streams that are closed, before a file gets their number."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # nothing can be read from it or written to it
            number = os.open(os.devnull, os.O_RDONLY)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))
    sys.stdout, sys.stderr = Stream(sys.stdout), Stream(sys.stderr)
