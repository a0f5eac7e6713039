"""Progress of long work: to the listener each time, to the log every 10 seconds; times in words."""

import math
import types

import pytest

from common import progress
from common.progress import Progress, hms, report_progress, set_progress_listener, time


@pytest.fixture
def clock(monkeypatch, caplog):
    """A clock to be set by hand."""
    now = types.SimpleNamespace(seconds=50.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.seconds)
    caplog.set_level("INFO", "tpu_suite")
    return now


def test_long_work_is_logged_with_the_time_left(clock, caplog):
    counting = Progress(40)
    for done, seconds in ((1, 9), (10, 12), (20, 13), (30, 24)):
        clock.seconds = 50.0 + seconds
        counting.at(done, f"{done} done")
    # 10 of 40 took 12 s, 30 took 24 s.
    assert caplog.messages == ["10 done, 36 s left", "30 done, 8 s left"]


def test_the_log_waits_for_more_than_ten_seconds_and_some_work(clock, caplog):
    counting = Progress(8)
    for done, seconds in ((4, 10.0), (0, 10.2), (2, 10.5)):
        clock.seconds = 50.0 + seconds
        counting.log(done, f"{done} of 8")
    assert caplog.messages == ["2 of 8, 32 s left"]  # 10.5 * 6 / 2


def test_only_at_tells_the_listener(clock, monkeypatch):
    texts = []
    monkeypatch.setattr(progress, "_listener", None)
    report_progress("nobody listens")
    set_progress_listener(texts.append)
    counting = Progress(8)
    counting.at(1, "one")
    counting.log(2, "two")
    report_progress("three")
    assert texts == ["one", "three"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0:00"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (245, "4:05"),
        (3599.7, "1:00:00"),
        (3723, "1:02:03"),
        (100 * 3600, "100:00:00"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_hms(seconds, words):
    assert hms(seconds) == words
