"""This process among the processes of a run: joining, comparing, leaving. Alone, all is empty."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from engine.cluster import activity
from engine.cluster.hostlog import HostLog
from engine.cluster.hosts import RESTART, HostError, Place
from engine.cluster.lifeline import Lifeline, leave_now
from errors import one_line

_FACTS_BYTES = 4096
_line: Lifeline | None = None
_index = 0
_last_words: Callable[[], None] | None = None
_log = logging.getLogger("tpu_suite")


def join(place: Place, facts: dict[str, Any], wait: float, silence: float) -> None:
    """Waits for the other hosts, compares `facts`, and starts jax on all of them together.

    Call before anything asks for devices. See `engine.cluster.lifeline.Lifeline` for the arguments.

    Raises:
      HostError: a host is missing, differs, or jax cannot start.
    """
    global _line, _index
    _index = place.index
    activity.at("waiting for all hosts to arrive")
    _line = Lifeline(place, facts, wait=wait, silence=silence, end=_lost)
    activity.at("starting jax")
    # Its notifier would take SIGTERM away from engine.cluster.preemption.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.address,
            place.count,
            place.index,
            initialization_timeout=round(wait),
            # The lifeline notices earlier; jax's own way to end is to abort with a C++ stack.
            heartbeat_timeout_seconds=max(100, round(3 * silence)),
            shutdown_timeout_seconds=60,
        )
    except RuntimeError as error:
        raise HostError(f"jax cannot start on {place.count} hosts: {error}") from error


def joined() -> bool:
    """Whether this process runs together with others."""
    return _line is not None


def names() -> list[str]:
    """ "host 2 (name)" of every process, in order."""
    return _line.names() if _line else ["host 0"]


def others() -> list[str]:
    """What each of the other hosts is doing, in words."""
    if not _line:
        return []
    return [f"{host} is {host.what}" for i, host in sorted(_line.hosts.items()) if i != _index]


def compare(facts: dict[str, Any]) -> None:
    """Refuses to go on where hosts found different facts; all must call it.

    Raises:
      HostError: a host differs from host 0; it is named.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    text = json.dumps(facts, sort_keys=True).encode()
    if len(text) > _FACTS_BYTES:
        raise ValueError(f"{len(text)} bytes of facts are more than {_FACTS_BYTES}")
    rows = multihost_utils.process_allgather(np.frombuffer(text.ljust(_FACTS_BYTES), np.uint8))
    found = [json.loads(bytes(np.asarray(row))) for row in rows]
    for name, theirs in zip(names(), found, strict=True):
        for key, value in found[0].items():
            if theirs[key] != value:
                raise HostError(
                    f"{name} found {key} = {theirs[key]}, but {names()[0]} {value}: do all hosts "
                    "see the same files?"
                )


def broadcast(value: Any, waiting: str) -> Any:
    """Process 0's `value`, of JSON types, on every process; all must call it.

    `waiting` is the activity of the other processes meanwhile.
    """
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    barrier(waiting)  # jax's own collectives on CPUs give up after half a minute
    text = json.dumps(value).encode()
    length = int(multihost_utils.broadcast_one_to_all(np.asarray(len(text))))
    text = np.frombuffer(text.ljust(length)[:length], np.uint8)
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(text))))


def barrier(what: str) -> None:
    """Waits until all processes are here; all must come. `what` is the activity meanwhile.

    Not jax's: on CPUs its collectives give up when a process comes half a minute late.
    """
    if _line:
        with activity.doing(what):
            _line.barrier()


def first_process_first(work: Callable[[], Any]) -> Any:
    """Runs `work` on process 0, then on the others, which find what the first has cached."""
    result = work() if _index == 0 else None
    barrier("waiting for the other hosts" if _index == 0 else "waiting for host 0 to read the data")
    return result if _index == 0 else work()


def on_failure(work: Callable[[], None] | None) -> None:
    """Has `work` called when a failure, of this process or another, ends this one; None: nothing.

    It is called from any thread, and what it raises is lost.
    """
    global _last_words
    _last_words = work


def leave() -> None:
    """Ends this process's part in a run that went well, or that all stop together."""
    if _line:
        activity.at("ending")
        _line.leave()


def fail(message: str, code: int) -> NoReturn:
    """Ends this process and, with the reason, all others."""
    try:
        _say(message)
        if _line:
            _line.leave(code, message.removeprefix("ERROR: ").removesuffix(_exits(code)))
    finally:  # whatever cannot be written any more
        leave_now(code)


def blame(error: BaseException) -> None:
    """Ends a run of several processes after an error of jax's, or one raised from it.

    jax fails where another host is lost, in a step or while it saves; then the lifeline knows more,
    sooner or later. Returns if alone, or if the error is another, as a lack of memory is.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, jax.errors.JaxRuntimeError):
        found = found.__cause__
    if _line and found is not None and not str(found).startswith("RESOURCE_EXHAUSTED"):
        activity.at("finding out which host is lost")
        time.sleep(_line.silence + 5.0)
        fail(f"ERROR: {one_line(error)}; start the same command again on all hosts", RESTART)


def explain(error: Exception) -> None:
    """Ends a run of several processes after an error that nobody expected; returns if alone."""
    if _line is None:
        return
    traceback.print_exc()
    fail(f"ERROR: {type(error).__name__}: {one_line(error)}", 1)


def end(code: int) -> NoReturn:
    """Ends this process with nothing more to do, in a run that went well or stops together."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # too late
    leave()
    if code == 0 and _line is None:
        sys.exit(0)  # the ordinary way
    _flush()
    leave_now(code)


def _lost(message: str, code: int) -> None:
    """Another host cannot go on: neither can this one."""
    try:
        again = "; start the same command again on all hosts" if code == RESTART else ""
        kind = "ERROR: " if code in (1, RESTART) else ""
        _say(f"{kind}{message}{again}{_exits(code)}")
    finally:
        leave_now(code)


def _exits(code: int) -> str:
    return f"; exit code {code}"


def _say(message: str) -> None:
    """Says it on the terminal and in the host's log, which are perhaps no longer writable."""
    if _last_words is not None:
        with contextlib.suppress(Exception):
            _last_words()
    with contextlib.suppress(Exception):
        print(message, file=sys.stderr, flush=True)
    record = logging.LogRecord("tpu_suite", logging.ERROR, "", 0, "%s", (message,), None)
    for handler in _log.handlers:
        if isinstance(handler, HostLog):
            handler.handle(record)
    _flush()


def _flush() -> None:
    for handler in _log.handlers:
        with contextlib.suppress(Exception):
            handler.flush()
