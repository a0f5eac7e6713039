"""The watchdog by its own clock."""

import queue
import types
from typing import Any

import pytest

from engine.cluster import preemption, processes, watchdog
from engine.cluster.watchdog import Watchdog, doing
from engine.run import Run

SECONDS = 10.0


@pytest.fixture
def dog(tmp_path):
    """A watchdog without a thread, whose clock a test moves; and the reasons why it ended runs."""
    ended = []
    watching = Watchdog(
        *(0.0, processes.attach_log(str(tmp_path), 3).note),
        leave=ended.append,
        others=lambda: ["host 1 is training"],
    )
    watching._seconds = SECONDS
    return watching, ended


def test_a_run_that_hangs_is_explained_and_ended(tmp_path, caplog, dog):
    dog, ended = dog
    doing("waiting for input", 41)
    with caplog.at_level("INFO", logger="tpu_suite"):
        assert [dog._has_ended(1.0) for _ in range(22)] == [False] * 21 + [True]
    (reason,) = ended
    assert reason.startswith("nothing has happened for 21 s: waiting for input (step 41)")
    assert reason.endswith("; host 1 is training")
    assert caplog.text.count("nothing has happened for 10 s: waiting for input (step 41)") == 1
    stacks = (tmp_path / "hosts" / "host-003.stacks.txt").read_text()
    assert "test_a_run_that_hangs_is_explained_and_ended" in stacks
    assert stacks.startswith("Thread 0x") and " (MainThread):\n" in stacks
    assert f"are in {tmp_path}/hosts/host-003.stacks.txt; after as long" in caplog.text
    assert "nothing has happened" in (tmp_path / "hosts" / "host-003.log").read_text()


def test_a_pause_counts_as_two_checks(dog, monkeypatch):
    dog, _ = dog
    times, passed = iter((100.0, 101.25, 191.25, 192.25)), []
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(dog._closed, "wait", lambda seconds: False)
    monkeypatch.setattr(dog, "_has_ended", lambda s: passed.append(s) or len(passed) == 3)
    dog._watch()
    assert passed == [1.25, 2 * watchdog._TICK, 1.0]


def test_signs_of_life_keep_it_quiet(caplog, dog):
    """Those of other hosts, too: a host that waits for another's count of files is not hanging."""
    dog, ended = dog
    for step in range(50):
        doing("training", step)
        assert not any(dog._has_ended(1.0) for _ in range(10))
    doing("waiting for host 0 to read the data")
    files = iter(range(1000))
    dog._others = lambda: [f"host 0 is counting: file {next(files) // 9}"]
    assert not any(dog._has_ended(1.0) for _ in range(500))
    assert not ended and "nothing has happened" not in caplog.text


@pytest.mark.parametrize("what", ["training", "writing gs://b/run/checkpoints/3"])
def test_a_run_that_was_asked_to_stop_may_hang_for_a_short_time_only(what, dog):
    """But writing may take as long as ever."""
    dog, ended = dog
    dog._seconds, dog._hurry = 100.0, lambda: True
    doing(what)
    looks = 1
    while not dog._has_ended(1.0):
        looks += 1
    assert looks == {"training": 32}.get(what, 202) and what in ended[0]


def test_a_run_of_slow_steps_that_was_asked_to_stop_may_end_its_step(dog):
    dog, ended = dog
    dog._seconds, dog._hurry = 100.0, lambda: True
    for step in range(3):  # of 25 s
        doing("training", step)
        assert not any(dog._has_ended(1.0) for _ in range(26))
    assert not any(dog._has_ended(1.0) for _ in range(25)) and not ended
    assert any(dog._has_ended(1.0) for _ in range(3))


def test_the_thread_watches_the_clock(tmp_path):
    ended = queue.Queue()
    doing("training")
    note = processes.attach_log(str(tmp_path), 0).note
    Watchdog(0.1, note, leave=ended.put)
    assert "training" in ended.get()  # a test that hangs here has failed


@pytest.mark.parametrize(("signum", "code"), [(None, 75), (15, 143), (2, 130), (1, 143)])
def test_a_run_that_hangs_ends_with_the_code_of_a_restart(signum, code, monkeypatch):
    failures, made = [], []
    monkeypatch.setattr(preemption, "_requested", signum)
    monkeypatch.setattr(processes, "fail", lambda *args: failures.append(args))
    dog = types.SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(watchdog, "Watchdog", lambda *_, **more: made.append(more) or dog)
    settings = types.SimpleNamespace(watchdog_seconds=60.0)
    run: Any = types.SimpleNamespace(settings=settings, log=types.SimpleNamespace(note=str))
    with Run.watched(run):
        made[0]["leave"]("nothing moved")
    assert failures == [("nothing moved", code)]


def test_the_activity_before_counts_again():
    doing("training", 7)
    with watchdog.during("saving x"):
        assert str(watchdog.activity()) == "saving x (step 7)"
    assert str(watchdog.activity()) == "training (step 7)"
