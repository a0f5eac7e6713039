"""Compiles in another process: libtpu may crash, writes to the terminal, and cannot be interrupted.

A worker is a module that runs as a program. It takes one request from its parent and sends back
texts, which say what it is doing, and one answer, which is anything but a text.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import IO, Any

from common.errors import UserError, one_line
from engine.forecast import kernels

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_CHILD = [sys.executable, "-m"]  # and a module
# With an unlimited stack Linux uses its legacy memory layout, in which libtpu 0.0.42.1 does not
# crash on train steps for v6e. Where the limit cannot be raised, the default layout is used.
_OLD_LAYOUT = ["sh", "-c", 'ulimit -s unlimited 2>/dev/null; exec "$@"', "sh"]
# The last variable allows compilation while another process uses this machine's TPU. What jax kept
# of a program has no lines of its code, and libtpu writes nothing of its kernels.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_FULL = "RESOURCE_EXHAUSTED: "
# A kernel's memory on the chip can be exhausted, too: another batch size does not change that.
_ON_CHIP = re.compile(r"\b[vs]mem\b", re.IGNORECASE)
# In lines that libtpu always writes: of its signal handler, its stack trace, a missing TPU VM.
_NOISE = re.compile(
    r"^(@|\*\*\*|PC:|=== |https://symbolize|learning/)| RAW: "
    r"|TPU_WORKER_HOSTNAMES|TPU_ACCELERATOR_TYPE|Logging before InitGoogle"
)


class CompilerDied(UserError):
    """The worker ended without an answer."""


def ask(module: str, request: Any, name: str) -> Any:
    """What the worker `module` answers to `request`.

    Prints to stderr what it does, after `name`, that of the slice. CompilerDied, if it dies.
    """
    phase = "starting"
    with tempfile.TemporaryFile() as noise, _child(noise, module) as (process, connection):
        with contextlib.suppress(EOFError, ConnectionError):  # the child has died
            connection.send(request)
            while isinstance(message := connection.recv(), str):
                phase = message
                say(f"{name}: {phase} ...")
            return message
        code = process.wait()
        signal_name = signal.Signals(-code).name if code < 0 else ""
        reason = f"signal {-code} ({signal_name})" if signal_name else f"exit code {code}"
        raise CompilerDied(f"the compiler died while {phase}: {reason}{_last_line(noise)}")


@contextlib.contextmanager
def _child(noise: IO[bytes], module: str) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    """Starts a module as a program; its output and libtpu's go to `noise`."""
    # The variables of a TPU VM describe the slice that it is a part of.
    others = {name: x for name, x in os.environ.items() if not name.startswith("TPU_")}
    others.pop("PYTHONSAFEPATH", None)  # this repository's folder must be on the path
    ours, theirs = multiprocessing.Pipe()
    with ours, tempfile.TemporaryDirectory() as bundles:
        with theirs:
            process = subprocess.Popen(
                [*_OLD_LAYOUT, *_CHILD, module, str(theirs.fileno())],
                env=others | _ENVIRONMENT | {kernels.FOLDER: bundles},
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=noise,
                stderr=noise,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the parent, which kills the child
            )
        try:
            yield process, ours
        finally:
            process.kill()
            process.wait()


def _last_line(noise: IO[bytes]) -> str:
    """The last message in the output of a dead compiler, after a colon; "" without any."""
    noise.seek(0)
    lines = noise.read().decode(errors="replace").splitlines()
    lines = [" ".join(line.split()) for line in lines if line.strip()]
    lines = [line for line in lines if not _NOISE.search(line)]
    return f": {lines[-1][:200]}" if lines else ""


def say(text: str) -> None:
    """Prints a line to stderr."""
    print(text, file=sys.stderr, flush=True)


# In the child.


def receive(connection: Connection) -> Any:
    """The request of the parent, with which this process then ends."""
    request = connection.recv()

    def watch() -> None:
        try:
            connection.recv()
        except (EOFError, ConnectionError):
            os._exit(1)
        except (OSError, TypeError):  # closed by this process, which ends and may have to say why
            pass

    threading.Thread(target=watch, daemon=True).start()
    return request


def refusal(error: BaseException, what: str) -> tuple[str, bool | None]:
    """What the compiler says against a program, in one line, and whether the program fits.

    `what` names the program: "the train step". The second value is False if it needs too much HBM,
    and None if that is not known.
    """
    line = one_line(error)
    if not line.startswith(_FULL) or _ON_CHIP.search(line):
        return line, None
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    reason = line.removeprefix(_FULL).rstrip("." if notes else "")
    return f"{what} does not fit: {reason}{notes}", False
