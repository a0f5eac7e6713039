"""What is saved, when, and how a run that diverges ends."""

import types
from typing import Any

import pytest

from engine.checkpoint import saving


def at(step: int, totals: Any) -> saving.Position:
    """A position whose state is the number of steps."""
    state: Any = step
    return saving.Position(step, state, totals)


@pytest.fixture
def saver(monkeypatch):
    """A saver without arrays; `saver.events` is what it does."""
    stub: Any = object.__new__(saving.Saver)
    stub.events = []
    stub._reporter = types.SimpleNamespace(
        say=stub.events.append,
        history=types.SimpleNamespace(rows=[], evaluations=lambda: ["scores"]),
    )
    stub._reporter.cut = lambda step: stub.events.append(("cut", step))
    stub._run = types.SimpleNamespace(
        settings=types.SimpleNamespace(
            schedule=types.SimpleNamespace(warmup_steps=""), train_batch_size=4
        ),
        benchmark=types.SimpleNamespace(train_ids=lambda size, step: []),
    )
    stub._guard = types.SimpleNamespace(check=lambda: stub.events.append("lock"))
    stub._facts, stub._init_from, stub._starts = {"a": 1}, "x", []
    stub.checkpoints = types.SimpleNamespace(
        directory="/c",
        save=lambda step, facts, **_: stub.events.append(("save", step, facts)),
        wait=lambda: stub.events.append("wait"),
    )
    stub.saved = 0
    stub._before = {"accepted_data": []}
    monkeypatch.setattr(saving, "checkpoint_items", lambda state, totals: {})
    monkeypatch.setattr(saving.time, "time", lambda: 1e9)
    monkeypatch.setattr(saving.time, "monotonic", lambda: 100.0 + 2 * len(stub.events))
    return stub


def test_a_step_is_saved_once(saver):
    good = {"bad_step": 0}
    facts = {"a": 1, "init_from": "x", "starts": [], "accepted_data": [], "saved": 1e9}
    facts["evaluations"] = ["scores"]
    assert saver.save(at(3, good)) == 4.0  # by the fixture's clock
    assert saver.events == ["lock", ("save", 3, facts)] and saver.saved == 3
    assert saver.save(at(3, good)) == 0.0
    with pytest.raises(saving.Diverged, match="^the loss or the gradient of step 4 is not finite"):
        saver.save(at(5, {"bad_step": 4}))
    assert len(saver.events) == 2
    saver.check(None)


def test_a_new_run_drops_old_metrics(saver):
    position = at(0, {})
    assert saver.start(position, "y") is position and not saver.events
    saver._reporter.history.rows = [{"split": "train", "step": 3}]
    saver.start(position, "y")
    assert saver._init_from == "y" and saver.events[1:] == [("cut", 0)]
