"""Joins the processes of a run, keeps them together, and ends all of them.

A process that runs alone waits for nobody.
"""

import contextlib
import ctypes
import logging
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
from etils import epath

from common import entry, keys
from common.errors import FAILED, RESTART, HostError, UserError, is_of_files, one_line
from engine import environment
from engine.cluster import preemption, watchdog
from engine.cluster.heartbeat import Heartbeat
from engine.cluster.hosts import ProcessGroup

_AGAIN = "; start the same command again on all hosts"
_heartbeat: Heartbeat | None = None  # None in a process that runs alone
_index = 0  # of this process
_last_words: Callable[[], None] | None = None  # called before a failure ends this process
_PATIENCE = 10.0  # seconds that gs:// may keep a thread that has something more important to do
_log = logging.getLogger("tpu_suite")
_LIBRARIES = logging.getLogger("absl")  # Orbax writes its errors there


class HostLog(logging.Handler):
    """Appends log records to hosts/host-NNN.log; a log that cannot be written stops nothing.

    gs:// cannot append, so that only the notes are written there.
    """

    def __init__(self, workdir: str, index: int):
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.workdir = workdir
        self.path = epath.Path(workdir) / "hosts" / f"host-{index:03d}.log"
        try:
            if "://" not in workdir:
                self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _log.warning("WARNING no log in %s: %s", self.path, one_line(error))

    def emit(self, record: logging.LogRecord) -> None:
        """Appends a line, unless that fails."""
        # Whatever fills the disk stops the run elsewhere, with a message.
        with contextlib.suppress(OSError):
            if "://" not in self.workdir:
                with open(self.path, "a") as file:
                    file.write(self.format(record) + "\n")

    def note(self, name: str, text: str) -> str:
        """Writes hosts/host-NNN.NAME; returns its path, or "" if that fails or takes over 10 s."""
        path = self.path.with_suffix(f".{name}")

        def write() -> str:
            with contextlib.suppress(Exception):  # the caller has something more important to say
                path.write_text(text)
                return str(path)
            return ""

        return watchdog.within(write, _PATIENCE)


def attach_log(workdir: str, index: int) -> HostLog:
    """Sends the program's log and Orbax's errors to host `index`'s file; twice, the same log."""
    for handler in [h for h in _log.handlers if isinstance(h, HostLog)]:
        if handler.workdir == workdir:
            return handler
        for logger in (_log, _LIBRARIES):
            logger.removeHandler(handler)
    handler = HostLog(workdir, index)
    for logger in (_log, _LIBRARIES):
        logger.addHandler(handler)
    return handler


def join(group: ProcessGroup, facts: dict[str, Any], wait: float, silence: float) -> None:
    """Waits for the other hosts, compares `facts`, and starts jax on all of them together.

    Call it before anything asks for devices. It waits `wait` seconds for the last host; later a
    host counts as dead after `silence` seconds without a sign of life. HostError says which host is
    missing or differs, or why jax cannot start.
    """
    global _heartbeat, _index
    watchdog.doing("waiting for all hosts to arrive")
    _heartbeat = Heartbeat(group, facts, wait=wait, silence=silence, end=follow)
    _index = group.index
    watchdog.doing("starting jax")
    # jax aborts as soon as it does not reach host 0. sleep(6), 6 being SIGABRT, delays this: within
    # these seconds the heartbeat ends the process with the name of the lost host and code 75. POSIX
    # allows sleep in a signal handler.
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, libc.sleep)
    # Its notifier would take SIGTERM away from engine.cluster.preemption.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            group.address,
            group.count,
            group.index,
            initialization_timeout=round(wait),
            # Our heartbeat notices earlier; jax's own way to end is to abort with a C++ stack.
            heartbeat_timeout_seconds=max(100, round(3 * silence)),
            shutdown_timeout_seconds=60,
        )
    except RuntimeError as error:
        raise HostError(f"jax cannot start on {group.count} hosts: {error}") from error


def run_facts(recipe: Mapping[str, Any]) -> dict[str, str]:
    """What all hosts must share: the configuration, the libraries' versions and the commit."""
    facts = {"Python": platform.python_version(), "the program's commit": environment.commit()}
    facts |= {f"the version of {name}": text for name, text in environment.versions().items()}
    return facts | {f"config.{key}": str(value) for key, value in keys.flat(recipe).items()}


def is_joined() -> bool:
    """Whether this process runs together with others."""
    return _heartbeat is not None


def others() -> list[str]:
    """What each of the other hosts is doing, in words."""
    hosts = sorted(_heartbeat.hosts.items()) if _heartbeat else []
    return [f"{host} is {host.activity}" for index, host in hosts if index != _index]


def barrier(what: str, facts: dict[str, Any] | None = None) -> None:
    """Waits until every process calls it; `what` is this one's activity meanwhile.

    If the `facts` of two processes differ, all end with a message that names the host.
    """
    if _heartbeat:
        with watchdog.during(what):
            _heartbeat.barrier(facts)


def first_process_first(work: Callable[[], Any]) -> Any:
    """Runs `work` on process 0, then on the others, which use what process 0 has cached."""
    result = work() if _index == 0 else None
    barrier("waiting for the other hosts" if _index == 0 else "waiting for host 0 to read the data")
    return result if _index == 0 else work()


# The end of a run.


def on_failure(work: Callable[[], None] | None) -> None:
    """Sets what is called, in any thread, when a failure on any host ends this process.

    Errors of `work` are dropped; None calls nothing any more.
    """
    global _last_words
    _last_words = work


def finish(code: int) -> NoReturn:
    """Ends this process with the others, after a run that went well or that all hosts stop."""
    for signum in preemption.STOPS:
        signal.signal(signum, signal.SIG_IGN)  # too late
    if _heartbeat:
        watchdog.doing("ending")
        _heartbeat.barrier()
        with contextlib.suppress(RuntimeError):  # if not, jax aborts where host 0 ends first
            jax.distributed.shutdown()
        _heartbeat.leave()
    elif code == 0:
        sys.exit(0)  # the ordinary way, which waits for threads
    _exit_now(code)


def fail(message: str, code: int) -> NoReturn:
    """Ends this process and, with the message, all others.

    It writes "ERROR: MESSAGE; exit code N" to the terminal and to the host's log. A stop by a
    signal is no ERROR, and code 1 is left out.
    """
    try:
        with contextlib.suppress(Exception):
            if _last_words is not None:
                _last_words()
        number = f"; exit code {code}" if code != FAILED else ""
        line = f"{'ERROR: ' if code < 128 else ''}{message}{number}"
        with contextlib.suppress(Exception):  # the terminal may be gone
            print(line, file=sys.stderr, flush=True)
        record = logging.LogRecord("tpu_suite", logging.ERROR, "", 0, "%s", (line,), None)
        for handler in _log.handlers:
            if isinstance(handler, HostLog):
                handler.handle(record)
        if _heartbeat:
            _heartbeat.fail(message, code)
    finally:  # even if a signal interrupts the message
        _exit_now(code)


def fail_with(error: Exception) -> None:
    """Ends this process, and with the reason all others, after an exception.

    It returns only for an unexpected error in a process that runs alone: Python prints that one.
    """
    if _heartbeat and _lost_host_may_explain(error):
        # Another host is lost, and sooner or later the heartbeat knows which: it ends the process.
        watchdog.doing("finding out which host is lost")
        time.sleep(_heartbeat.silence + 5.0)
        follow(one_line(error), RESTART)
    elif isinstance(error, UserError):
        fail(str(error), RESTART if watchdog.is_no_answer(error) else error.code)
    elif is_of_files(error):
        fail(one_line(error), RESTART if watchdog.is_no_answer(error) else FAILED)
    elif _heartbeat:
        traceback.print_exc()
        fail(f"{type(error).__name__}: {one_line(error)}", FAILED)


def _lost_host_may_explain(error: BaseException | None) -> bool:
    """Whether jax failed, in a step or in a save, for another reason than lack of memory."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return not str(error).startswith("RESOURCE_EXHAUSTED")
        if "Gloo" in str(error):  # a ValueError, where a program begins
            return True
        error = error.__cause__
    return False


def follow(message: str, code: int) -> NoReturn:
    """Ends this process because another host cannot go on."""
    fail(message.removesuffix(_AGAIN) + _AGAIN * (code == RESTART), code)


def _exit_now(code: int) -> NoReturn:
    """Ends the process without waiting for its threads, once its output is written."""
    for handler in _log.handlers:
        with contextlib.suppress(Exception):
            handler.flush()
    entry.leave(code)
