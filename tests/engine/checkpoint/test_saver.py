"""What is saved, when, and how a run that diverges ends."""

import types
from typing import Any

import pytest

from engine.checkpoint import saver as module
from engine.checkpoint.saver import Diverged, Position, Saver


def at(step: int, totals: Any) -> Position:
    """A position whose state is the number of steps."""
    state: Any = step
    return Position(step, state, totals)


@pytest.fixture
def saver(monkeypatch):
    """A saver without arrays; `saver.events` is what it does."""
    stub: Any = object.__new__(Saver)
    stub.events = []
    stub._reporter = types.SimpleNamespace(
        say=stub.events.append,
        history=types.SimpleNamespace(rows=[], evaluations=lambda: ["scores"]),
    )
    stub._reporter.cut = lambda step: stub.events.append(("cut", step))
    stub._programs = types.SimpleNamespace(
        settings=types.SimpleNamespace(warmup_steps="", train_batch_size=4),
        benchmark=types.SimpleNamespace(train_ids=lambda size, step: []),
    )
    stub._guard = types.SimpleNamespace(check=lambda: stub.events.append("lock"))
    stub._manifest, stub._starts, stub._splits = {"a": 1, "init_from": "x"}, [], ()
    stub.checkpoints = types.SimpleNamespace(
        directory="/c",
        save=lambda step, manifest, **_: stub.events.append(("save", step, manifest)),
        wait=lambda: stub.events.append("wait"),
    )
    stub.saved = 0
    stub._plan = types.SimpleNamespace(num_examples=9)
    monkeypatch.setattr(module, "describe_run", lambda *_, data: {"data": {}})
    monkeypatch.setattr(module, "checkpoint_items", lambda state, totals: {})
    monkeypatch.setattr(module.time, "time", lambda: 1e9)
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0 + 2 * len(stub.events))
    return stub


def test_a_step_is_saved_once(saver):
    good = {"bad_step": 0}
    manifest = {"a": 1, "init_from": "x", "starts": [], "saved": 1e9, "evaluations": ["scores"]}
    assert saver.save(at(3, good)) == 4.0  # by the fixture's clock
    assert saver.events == ["lock", ("save", 3, manifest)] and saver.saved == 3
    assert saver.save(at(3, good)) == 0.0
    with pytest.raises(Diverged, match="^the loss or the gradient of step 4 is not finite"):
        saver.save(at(5, {"bad_step": 4}))
    assert len(saver.events) == 2
    saver.check(None)


def test_a_new_run_drops_old_metrics(saver):
    position = at(0, {})
    assert saver.start(position, "y") is position and not saver.events
    saver._reporter.history.rows = [{"split": "train", "step": 3}]
    saver.start(position, "y")
    assert saver._manifest["init_from"] == "y" and saver.events[1:] == [("cut", 0)]
