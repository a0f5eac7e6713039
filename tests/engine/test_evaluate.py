"""Waiting for the next checkpoint; tests/test_train.py has evaluations of whole runs."""

import types
from typing import Any

import pytest

from engine import evaluate


@pytest.mark.parametrize(
    ("appears", "found", "asked"), [(0, 6, 0), (2, 6, 10), (4, 6, 20), (99, -1, 30)]
)
def test_a_newer_step_is_waited_for(appears, found, asked, monkeypatch):
    """It looks every two seconds, and a last time after the timeout of 4 s; it can be stopped."""
    now, stops = types.SimpleNamespace(tenths=1000), []

    def sleep(seconds):
        now.tenths += round(10 * seconds)

    clock = types.SimpleNamespace(monotonic=lambda: now.tenths / 10, sleep=sleep)
    monkeypatch.setattr(evaluate, "time", clock)
    stop = types.SimpleNamespace(raise_if_requested=lambda: stops.append(None))
    monkeypatch.setattr(evaluate, "preemption", stop)
    steps = lambda: [3, 5] + [6, 7] * (now.tenths >= 1000 + 10 * appears)  # noqa: E731
    checkpoints: Any = types.SimpleNamespace(steps=steps)
    assert evaluate.next_step(checkpoints, 5, 4.0) == found
    assert len(stops) == asked and now.tenths == 1000 + 2 * asked
