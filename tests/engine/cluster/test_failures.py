"""How a process ends after an error: whose fault it is, and what all processes print."""

import jax
import pytest

from engine.cluster import processes
from engine.cluster.hosts import RESTART
from errors import CheckpointError, HostError


class FakeHeartbeat:
    """A heartbeat that knows of nobody's death."""

    silence = -5.0  # what is waited beyond 5 s

    def __init__(self):
        self.failures = []

    def fail(self, message, code):
        self.failures.append((code, message))


class Ended(BaseException):
    """The process would have ended."""


@pytest.fixture
def exits(monkeypatch):
    """The exit codes with which the process would have ended."""
    codes = []

    def leave(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(processes, "_exit_now", leave)
    return codes


@pytest.fixture
def heartbeat(monkeypatch, exits):
    fake = FakeHeartbeat()
    monkeypatch.setattr(processes, "_heartbeat", fake)
    return fake


def failure(cause):
    """A checkpoint that could not be saved, for this reason."""
    try:
        raise CheckpointError("checkpoint 4 could not be saved") from cause
    except CheckpointError as error:
        return error


def end_with(error):
    with pytest.raises(Ended):
        processes.fail_with(error)


GLOO = "UNKNOWN: Gloo AllGather failed: Connection reset by peer"


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_of_jax_means_that_another_host_is_lost(wrapped, heartbeat, capsys):
    error = jax.errors.JaxRuntimeError(GLOO)
    end_with(failure(error) if wrapped else error)
    ((code, message),) = heartbeat.failures
    assert code == RESTART and message.endswith("start the same command again on all hosts")
    assert ("checkpoint 4" if wrapped else "Gloo AllGather") in message
    assert capsys.readouterr().err == f"ERROR: {message}; exit code 75\n"


@pytest.mark.parametrize(
    "cause",
    [OSError("File too large"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")],
    ids=str,
)
def test_a_fault_of_this_host_is_its_own(cause, heartbeat):
    end_with(failure(cause))
    assert heartbeat.failures == [(1, "checkpoint 4 could not be saved")]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (HostError("host 1 did not come", RESTART), 75, "host 1 did not come; exit code 75"),
        (CheckpointError("no checkpoint"), 1, "no checkpoint"),
        (OSError(28, "No space left"), 1, "[Errno 28] No space left"),
    ],
)
def test_what_a_person_can_mend_is_one_line(error, code, line, exits, capsys):
    end_with(error)
    assert exits == [code] and capsys.readouterr().err == f"ERROR: {line}\n"


def test_an_unexpected_error_goes_to_all_with_its_stack_on_this_host(heartbeat, exits, capsys):
    try:
        _ = 1 / 0
    except ZeroDivisionError as error:
        end_with(error)
    assert heartbeat.failures == [(1, "ZeroDivisionError: division by zero")] and exits == [1]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "ERROR: ZeroDivisionError: division by zero"


def test_alone_python_prints_the_unexpected(exits):
    processes.fail_with(jax.errors.JaxRuntimeError(GLOO))
    assert not exits


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (1, "ERROR: host 1 (b): the disk is full"),
        (RESTART, "ERROR: host 1 (b): the disk is full; start the same command again on all hosts"),
        (143, "host 1 (b): the disk is full"),
    ],
)
def test_the_failure_of_another_host_ends_this_one(code, line, exits, capsys):
    with pytest.raises(Ended):
        processes._follow("host 1 (b): the disk is full", code)
    suffix = "" if code == 1 else f"; exit code {code}"
    assert exits == [code] and capsys.readouterr().err == f"{line}{suffix}\n"
