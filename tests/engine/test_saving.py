"""What is saved, when, and how a run that diverges ends."""

import types
from typing import Any

import jax
import pytest

from engine import saving
from engine.cluster import watchdog


def at(step: int, totals: Any) -> saving.Position:
    """A position whose state is the number of steps."""
    state: Any = step
    return saving.Position(step, state, totals)


@pytest.fixture
def saver(monkeypatch):
    """A saver without arrays; `saver.events` is what it does."""
    stub: Any = object.__new__(saving.Saver)
    stub.events = []
    stub.reporter = types.SimpleNamespace(
        say=stub.events.append,
        history=types.SimpleNamespace(rows=[], evaluations=lambda: ["scores"]),
    )
    stub.reporter.cut = lambda step: stub.events.append(("cut", step))
    stub._run = types.SimpleNamespace(
        settings=types.SimpleNamespace(
            schedule=types.SimpleNamespace(warmup_steps=""), train_batch_size=4
        ),
        benchmark=types.SimpleNamespace(train_ids=lambda size, step: []),
    )
    stub._guard = types.SimpleNamespace(check=lambda: stub.events.append("lock"))
    stub._facts, stub._init_from, stub.starts = {"a": 1}, "x", []
    stub.checkpoints = types.SimpleNamespace(
        directory="/c",
        save=lambda step, facts, **_: stub.events.append(("save", step, facts)),
        wait=lambda: stub.events.append("wait"),
    )
    stub.report, stub.saved, stub.latest = lambda: None, 0, None
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


@pytest.mark.parametrize(
    ("latest", "processes", "what", "words"),
    [
        (None, 1, saving.INPUT, "nothing is saved"),
        (5, 1, saving.INPUT, "saved step 5"),
        (5, 2, saving.INPUT, "nothing is saved"),
        (5, 1, saving.STEP, "nothing is saved"),
        (5, 1, "saving x", "nothing is saved"),
        (3, 1, saving.INPUT, "the last checkpoint is step 3, if it was complete"),
        (4, 1, saving.INPUT, "saved step 4"),
    ],
)
def test_what_the_watchdog_rescues(latest, processes, what, words, saver, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(watchdog, "activity", lambda: types.SimpleNamespace(what=what))
    saver.saved = 3 if latest in (3, 4) else 0
    saver.latest = latest and at(latest, {"bad_step": 0})
    assert saver.rescue() == words
    assert ("wait" in saver.events) == words.startswith("saved")


def test_a_new_run_drops_old_metrics(saver):
    position = at(0, {})
    assert saver.start(position, "y") is position and not saver.events
    saver.reporter.history.rows = [{"split": "train", "step": 3}]
    saver.start(position, "y")
    assert saver._init_from == "y" and saver.events[1:] == [("cut", 0)]
