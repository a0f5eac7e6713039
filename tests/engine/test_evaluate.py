"""Waiting for the next checkpoint; tests/test_train.py has evaluations of whole runs."""

import types
from typing import Any

import pytest

from engine import evaluate
from engine.cluster import preemption


@pytest.fixture
def slept(monkeypatch):
    """The sleeps, which take no time."""
    slept: list[float] = []
    clock = types.SimpleNamespace(sleep=slept.append, monotonic=lambda: 1000 + sum(slept))
    monkeypatch.setattr(evaluate, "time", clock)
    return slept


def test_the_next_step_is_the_first_new_one(slept):
    checkpoints: Any = types.SimpleNamespace(steps=lambda: [1, 2, *([3, 4] if slept[24:] else [])])
    assert evaluate.next_step(checkpoints, 1, 60.0) == 2 and not slept
    assert evaluate.next_step(checkpoints, 2, 60.0) == 3
    assert 25 <= len(slept) < 25 + 15


def test_waiting_gives_up_and_can_be_stopped(slept, monkeypatch):
    checkpoints: Any = types.SimpleNamespace(steps=lambda: [1])
    assert evaluate.next_step(checkpoints, 1, 30.0) is None
    assert 30 < sum(slept) < 35
    monkeypatch.setattr(preemption, "raise_if_requested", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate.next_step(checkpoints, 1, 30.0)
