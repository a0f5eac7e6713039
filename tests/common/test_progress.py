"""Progress of long work: to the listener each time, to the log every 10 seconds; times in words."""

import math
import types

import pytest

from common import progress
from common.progress import (
    Progress,
    ProgressBar,
    duration,
    hms,
    report_progress,
    set_progress_listener,
    time,
)


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


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *[(0, "0 s"), (89, "89 s"), (90, "2 min"), (150, "2 min"), (151, "3 min")],
        *[(3569, "59 min"), (3599, "1 h 0 min"), (11_100, "3 h 5 min")],
    ],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_a_bar_has_a_line_every_ten_seconds(clock, capsys):
    """A share of the pictures; of the bytes where their number is not known."""
    bars = ProgressBar("read", 40), ProgressBar("copy", 0, "files", 8_000_000)
    for seconds, number, size in ((9.9, 4, 1_000_000), (0.1, 6, 1_000_000), (9.9, 10, 0)):
        clock.seconds += seconds
        for bar in bars:
            bar.add(number, size)
    clock.seconds += 20.1
    for bar in bars:
        bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "read [#####               ]  25% 10 of 40 images, 1 images/s, 0.2 MB/s, 30 s left",
        "copy [#####               ]  25% 10 files, 1 files/s, 0.2 MB/s, 30 s left",
        "read [##########          ]  50% 20 of 40 images, 0 images/s, 0.1 MB/s, 40 s",
        "copy [#####               ]  25% 20 files, 0 files/s, 0.1 MB/s, 40 s",
    ]
