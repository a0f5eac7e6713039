"""Begins and ends every program: its standard streams, and one way out with its exit code."""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from common.errors import BROKEN_PIPE, FAILED, INTERRUPTED, OutputError, UserError

BEGUN = time.monotonic()  # when this program began; no clock that is set changes it


class Stream:
    """A standard output that drops text which cannot be written, instead of an error.

    So a run goes on when its terminal goes away, or the reader of its pipe. `buffer` still raises.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        with contextlib.suppress(AttributeError):  # a name may have letters that it cannot show
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text, or drops it."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is in memory, or drops it."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def run(main: Callable[[], Any]) -> NoReturn:
    """Calls `main` and ends the process; its result or its SystemExit is the exit code.

    A failure does not wait for threads: TensorFlow closes a file when Python deletes it, and
    repeats the upload, which takes many minutes on a dead connection.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: no file may get its number
            number = os.open(os.devnull, os.O_RDONLY)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))
    sys.stdout, sys.stderr = Stream(sys.stdout), Stream(sys.stderr)
    try:
        code = main()
    except SystemExit as error:
        code = error.code
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        code = error.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = FAILED
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = FAILED
    if not code:  # what Python does at its end, before it stops threads: C++ may answer with abort
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
    leave(code or 0)


def result(text: str) -> None:
    """Writes a part of the program's result; OutputError if it cannot be written.

    A reader that has enough, such as `head`, ends the program.
    """
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        sys.exit(BROKEN_PIPE)
    except OSError as error:
        raise OutputError(f"cannot write the standard output: {error.strerror}") from error


def leave(code: int) -> NoReturn:
    """Ends the process at once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def note(text: str) -> None:
    """Writes to the terminal from a signal handler, which must not enter a buffer of `print`."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
