"""A start writes itself down while it lasts; what a run took, from its starts and its rows.

The expected figures are computed by hand.
"""

import json
import math
import threading
import time
import types
from typing import Any

import jax
import pytest

from engine.aot import topology
from engine.report import starts as run_starts


@pytest.fixture
def mesh() -> Any:
    return jax.sharding.Mesh(jax.devices(), ("data",))


def written(folder):
    return json.loads((folder / "starts.json").read_text())


def test_a_start_is_written_when_it_begins_and_when_it_ends(tmp_path, mesh, monkeypatch):
    process = types.SimpleNamespace(create_time=lambda: 1000.04)
    monkeypatch.setattr(run_starts.psutil, "Process", lambda: process)
    times = iter([1010.0, 1015.0, 1042.0])
    clock = {"time": lambda: next(times), "strftime": time.strftime, "gmtime": time.gmtime}
    monkeypatch.setattr(run_starts, "time", types.SimpleNamespace(**clock))
    known: list[Any] = [{"step": 0, "seconds": 7.0}]
    record = run_starts.StartRecord(str(tmp_path), known, 50, mesh)
    assert written(tmp_path) == known and len(known) == 2
    own = {"step": 50, "begun": 1000.0, "seconds": 10.0, "device": "cpu", "chips": 8}
    assert own.items() <= known[1].items()
    record.note(compile_seconds=3.0)
    assert written(tmp_path)[1] == {**known[1], "compile_seconds": 3.0, "seconds": 15.0}
    record.close()
    assert written(tmp_path)[1]["seconds"] == 42.0 and written(tmp_path)[0] == known[0]


def test_a_thread_notes_how_long_it_lasts(tmp_path, mesh, monkeypatch):
    """So that the end of a killed start is known."""
    monkeypatch.setattr(run_starts, "_DISK", 0.01)
    noted = threading.Semaphore(0)
    monkeypatch.setattr(run_starts.StartRecord, "note", lambda self: noted.release())
    record = run_starts.StartRecord(str(tmp_path), [], 0, mesh)
    assert all(noted.acquire(timeout=20) for _ in range(3))  # the first one when it began
    record.close()


def test_what_cannot_be_written_stops_nothing(tmp_path, mesh):
    known: list[Any] = []
    record = run_starts.StartRecord(str(tmp_path / "missing"), known, 0, mesh)
    record.close()
    assert known[0]["seconds"] > 0 and not (tmp_path / "missing").exists()


def test_process_0_alone_writes(tmp_path, mesh, monkeypatch):
    monkeypatch.setattr(run_starts.jax, "process_index", lambda: 1)
    run_starts.StartRecord(str(tmp_path), [], 0, mesh).close()
    assert not list(tmp_path.iterdir())


# What a run took.


def start(step=0, seconds=0.0, lost=0, chips=8, device="TPU v5 lite"):
    return {
        **{"step": step, "seconds": seconds, "lost_steps": lost},
        **{"chips": chips, "device": device},
    }


def train(step, seconds):
    return {"split": "train", "step": step, "step_seconds": seconds}


ROWS = [train(100, 2.0), train(200, 3.0), {"split": "eval", "step": 200, "seconds": 9.0}]


def test_one_start():
    result = run_starts.cost_of([start(seconds=1000.0)], ROWS)
    assert result is not None and result.kept == 100 * 2.0 + 100 * 3.0
    assert result.goodput == 0.5 and result.chip_hours == pytest.approx(8 * 1000 / 3600)
    price = topology.CHIPS["v5e"].price
    assert result.dollars == pytest.approx(8 * 1000 / 3600 * price)
    assert result.rows() == [
        ("time of the program", "16:40"),
        ("goodput", "50 % of that time trained steps that stayed"),
        ("chip hours", "2.22"),
        ("cost", f"about {8000 / 3600 * price:.2f} US dollars at the list price"),
    ]


def test_starts_on_other_slices_add_up():
    starts = [start(seconds=3600.0, lost=40), start(step=100, seconds=1800.0, chips=4)]
    result = run_starts.cost_of([*starts, start(150, 600.0, 5, 4)], ROWS)
    assert result is not None and result.chip_hours == pytest.approx(8 + 4 * 0.5 + 4 / 6)
    assert result.lost_steps == 45 and result.seconds == 6000
    # The row of step 200 covers the 50 steps since the last start, not those before it.
    assert result.kept == 100 * 2.0 + 50 * 3.0
    assert result.rows()[0] == ("time of the program", "1:40:00, 2 restarts: 45 steps lost")


@pytest.mark.parametrize("device", ["cpu", "TPU v99", ""])
def test_no_price_no_dollars(device):
    result = run_starts.cost_of([start(seconds=10.0, device=device)], ROWS)
    assert result is not None and math.isnan(result.dollars)
    assert [name for name, _ in result.rows()][-1] == "chip hours"


def test_nothing_is_claimed_of_starts_without_times():
    assert run_starts.cost_of([], ROWS) is None
    assert run_starts.cost_of([start(seconds=5.0), start(100)], ROWS) is None
    older = [{"step": 0, "chips": 1, "device": "cpu"}]
    assert (
        run_starts.cost_summary(older, ROWS)
        == "goodput: not known, because an older program began the run"
    )


def test_more_training_than_time_is_not_more_than_all():
    result = run_starts.cost_of([start(seconds=100.0)], ROWS)
    assert result is not None and result.goodput == 1.0


def test_rows_without_a_time_count_nothing():
    rows = [train(10, math.nan), {"split": "train", "step": 20}, train(30, 1.0)]
    assert run_starts.training_seconds(rows, [0]) == [30.0]


def test_a_killed_start_lasted_for_its_lost_steps():
    begun = [{"step": 0, "begun": 1000.0, "chips": 1, "device": "cpu"}]
    rows = [train(100, 2.0), train(150, 1.0), train(170, 4.0)]
    rows += [{"split": "eval", "step": 150, "seconds": 7.0}]
    (last,) = run_starts.ended(begun, 1300.0, 100, rows)
    assert last["lost_steps"] == 70
    assert last["seconds"] == 1300 - 1000 + 50 * 1.0 + 20 * 4.0 + 7
    assert begun[0].keys() == {"step", "begun", "chips", "device"}  # the manifest's stays


def test_only_the_last_start_gets_a_time():
    first, last = run_starts.ended(
        [start(seconds=5.0), {"begun": 10.0}], 30.0, 100, [train(100, 1.0)]
    )
    assert first == start(seconds=5.0)
    assert (last["seconds"], last["lost_steps"]) == (20.0, 0)
    assert run_starts.ended([{"begun": 50.0}], 30.0)[0]["seconds"] == 0.0  # the clock was set back


def test_summary_of_this_moment(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 2000.0)
    line = run_starts.cost_summary([{**start(device="cpu", chips=1), "begun": 1000.0}], ROWS)
    assert line == (
        "time of the program: 16:40; goodput: 50 % of that time trained steps that stayed; "
        "chip hours: 0.28"
    )


# starts.json beside the manifest.


def noted(begun, seconds=60.0, **more):
    row = {"step": 0, "begun": begun, "chips": 8, "device": "TPU v5 lite", "seconds": seconds}
    return row | more


def past(folder, starts: Any, manifest: Any, rows=()):
    (folder / "starts.json").write_text(starts if isinstance(starts, str) else json.dumps(starts))
    return run_starts.past_starts(str(folder), manifest, rows)


def test_starts_that_saved_nothing_count(tmp_path):
    """Two without a checkpoint; then two more after the one that saved step 100."""
    first = [noted(1000.0), noted(2000.0, 90.0, compile_seconds=5.0)]
    rows = [train(10, 1.0), train(20, 1.0)]
    starts = past(tmp_path, first, {}, rows)
    assert starts == [first[0], {**first[1], "lost_steps": 20}]
    saving = {**noted(3000.0), "seconds": 1.0}
    more = [*starts, noted(3000.0, 70.0, compile_seconds=5.0), noted(4000.0, 30.0)]
    manifest = {"starts": [*starts, saving], "saved": 3050.0, "step": 100}
    # The last one did not come to its steps, so that it lost none.
    assert past(tmp_path, more, manifest, [train(100, 1.0), train(130, 1.0)]) == more
    result = run_starts.cost_of(more, [train(100, 1.0)])
    assert result is not None and (result.starts, result.seconds) == (4, 60 + 90 + 70 + 30)
    assert result.lost_steps == 20


def test_the_manifest_counts_where_starts_json_does_not_go_on_from_it(tmp_path):
    manifest = {"starts": [noted(1000.0, 2.0)], "saved": 1050.0, "step": 100}
    rows = [train(100, 1.0), train(140, 2.0)]
    expected = [noted(1000.0, 50.0 + 80.0, lost_steps=40)]
    assert run_starts.past_starts(str(tmp_path), manifest, rows) == expected  # there is none
    for other in ([noted(7.0)], [noted(7.0), noted(1000.0)], [], "", "[[", "3", [3], {"a": 1}):
        assert past(tmp_path, other, manifest, rows) == expected, other
