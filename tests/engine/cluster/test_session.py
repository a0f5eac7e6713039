"""Whose fault an error is, in a run of several processes."""

import jax
import pytest

from engine.checkpoint import CheckpointError
from engine.cluster import session
from engine.cluster.hosts import RESTART


class Line:
    """A lifeline that knows of nobody's death."""

    silence = -5.0  # what is waited beyond 5 s

    def __init__(self):
        self.said = []

    def leave(self, code=0, message=""):
        self.said.append((code, message))


@pytest.fixture
def line(monkeypatch):
    made = Line()
    monkeypatch.setattr(session, "_line", made)
    monkeypatch.setattr(session, "leave_now", lambda code: None)
    return made


def failure(cause):
    """A checkpoint that could not be saved, for this reason."""
    try:
        raise CheckpointError("checkpoint 4 could not be saved") from cause
    except CheckpointError as error:
        return error


GLOO = "UNKNOWN: Gloo AllGather failed: Connection reset by peer"


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_of_jax_means_that_another_host_is_lost(wrapped, line):
    error = jax.errors.JaxRuntimeError(GLOO)
    session.blame(failure(error) if wrapped else error)
    ((code, said),) = line.said
    assert code == RESTART and said.endswith("start the same command again on all hosts")
    assert ("checkpoint 4" if wrapped else "Gloo AllGather") in said


@pytest.mark.parametrize(
    "cause",
    [OSError("File too large"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")],
    ids=str,
)
def test_a_fault_of_this_host_is_its_own(cause, line):
    session.blame(failure(cause))
    assert not line.said


def test_alone_nobody_else_is_to_blame(monkeypatch):
    monkeypatch.setattr(session, "leave_now", None)
    session.blame(failure(jax.errors.JaxRuntimeError(GLOO)))
