"""What a run took, from its starts and its rows; the expected figures are computed by hand."""

import math
import time
from typing import Any

import pytest

from common import entry
from engine.forecast import topology
from engine.report import starts as run_starts


def start(step=0, seconds=0.0, lost=0, chips=8, device="TPU v5 lite") -> dict[str, Any]:
    sizes = {"step": step, "seconds": seconds, "lost_steps": lost}
    return {**sizes, "chips": chips, "device": device}


def train(step, seconds):
    return {"split": "train", "step": step, "step_seconds": seconds}


ROWS = [train(100, 2.0), train(200, 3.0), {"split": "eval", "step": 200, "seconds": 9.0}]


def test_one_start():
    price = topology.CHIPS["v5e"].price
    assert run_starts.cost_rows([start(seconds=1000.0)], ROWS) == {
        "time of the program": "16:40",
        "goodput": "50 % of that time trained steps that stayed",  # (100 * 2 + 100 * 3) / 1000
        "chip hours": "2.22",
        "cost": f"about {8000 / 3600 * price:.2f} US dollars at the list price",
    }


def test_starts_on_other_slices_add_up():
    starts = [start(seconds=3600.0, lost=40), start(step=100, seconds=1800.0, chips=4)]
    result = run_starts.cost_rows([*starts, start(150, 600.0, 5, 4)], ROWS)
    assert result["time of the program"] == "1:40:00, 2 restarts: 45 steps lost"
    assert result["chip hours"] == f"{8 + 4 * 0.5 + 4 / 6:.2f}"
    # The row of step 200 covers the 50 steps since the last start, not those before it.
    assert result["goodput"].startswith(f"{100 * (100 * 2.0 + 50 * 3.0) / 6000:.0f} %")


@pytest.mark.parametrize("device", ["cpu", "TPU v99", ""])
def test_no_price_no_dollars(device):
    assert [*run_starts.cost_rows([start(seconds=10.0, device=device)], ROWS)][-1] == "chip hours"


def test_nothing_is_claimed_of_starts_without_times():
    assert run_starts.cost_rows([], ROWS) == {}
    assert run_starts.cost_rows([start(seconds=5.0), start(100)], ROWS) == {}
    unknown = [{"step": 0, "chips": 1, "device": "cpu"}, start()]
    assert run_starts.cost_summary(unknown, ROWS) == ""


def test_rows_without_a_time_count_nothing():
    rows = [train(10, math.nan), {"split": "train", "step": 20}, train(30, 1.0)]
    assert run_starts.training_seconds(rows, [0]) == [30.0]


def test_the_last_start_lasted_for_its_lost_steps():
    begun = [start(seconds=5.0), {"step": 0, "seconds": 300.0, "chips": 1, "device": "cpu"}]
    manifest = {"starts": begun, "step": 100}
    rows = [train(100, 2.0), train(150, 1.0), train(170, 4.0)]
    rows += [{"split": "eval", "step": 150, "seconds": 7.0}]
    first, last = run_starts.past_starts(manifest, rows)
    assert first == begun[0]
    assert last["lost_steps"] == 70
    assert last["seconds"] == 300 + 50 * 1.0 + 20 * 4.0 + 7
    assert begun[1]["seconds"] == 300.0  # the manifest's stays


@pytest.mark.parametrize("now", [0.0, 2000.0, 4e9])
def test_summary_of_this_moment(now, monkeypatch):
    """Whatever somebody sets the clock to."""
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "monotonic", lambda: entry.BEGUN + 1000.0)
    line = run_starts.cost_summary([start(device="cpu", chips=1)], ROWS)
    assert line == (
        "time of the program: 16:40; goodput: 50 % of that time trained steps that stayed; "
        "chip hours: 0.28"
    )


def test_the_seconds_of_several_starts_add_up(monkeypatch):
    """Each start's are of its own clock; a machine that boots begins at zero again."""
    starts = []
    for begun, until in ((7000.0, 7100.5), (3.0, 63.0)):
        monkeypatch.setattr(entry, "BEGUN", begun)
        monkeypatch.setattr(time, "monotonic", lambda until=until: until)
        starts = run_starts.starts_now([*starts, start()])
        starts = run_starts.past_starts({"starts": starts, "step": 0})
    assert [one["seconds"] for one in starts] == [100.5, 60.0]
