"""The clock of a training run, and durations in words."""

import math

import pytest

from engine.report import progress
from engine.report.progress import Progress, bar, fitted


def test_windows_leave_pauses_out(clock):
    clocked = Progress(100, 400)
    assert math.isnan(clocked.remaining(100))
    clock.seconds += 12.0
    clocked.pause(1.5)
    clocked.pause(0.5)
    assert clocked.window(120) == (pytest.approx(10.0), 20)
    assert clocked.remaining(120) == pytest.approx(280 * 0.5)
    clock.seconds += 8.0
    assert clocked.window(130) == (pytest.approx(8.0), 10)
    assert clocked.remaining(130) == pytest.approx(270 * 0.8)
    assert clocked.remaining(400) == 0


def test_what_is_left_includes_evaluations(clock):
    clocked = Progress(0, 50)
    assert (clocked.evals_left, clocked.eval_seconds) == (0, 0.0)
    clock.seconds += 10.0
    clocked.window(10)
    clocked.evals_left, clocked.eval_seconds = 3, 7.0
    assert clocked.remaining(10) == pytest.approx(40 * 1.0 + 21.0)
    assert clocked.remaining(20) == pytest.approx(30 * 1.0 + 21.0)


@pytest.mark.parametrize(
    ("next_eval", "step", "left"),
    [
        (None, 10, 0),
        (lambda step: None, 10, 1),  # the clock decides
        (lambda step: 60 if step < 60 else None, 10, 1),  # the last one
        (lambda step: 60 if step < 60 else None, 60, 1),
        (lambda step: (step // 20 + 1) * 20, 0, 5),
        (lambda step: (step // 20 + 1) * 20, 39, 4),  # at 40, 60, 80 and 100
        (lambda step: (step // 20 + 1) * 20, 100, 1),
        (lambda step: (step // 300 + 1) * 300, 10, 1),
    ],
)
def test_the_evaluations_that_are_left_of_100_steps(next_eval, step, left):
    clocked = Progress(0, 100)
    clocked.foresee(step, next_eval)
    assert clocked.evals_left == left


def test_odd_windows_stay_finite(clock):
    clocked = Progress(0, 50)
    seconds, steps = clocked.window(0)  # no step, no time
    assert 0 < seconds < 1e-6 and steps == 1
    clock.seconds += 1.0
    clocked.pause(3.0)  # clocks differ by a little
    assert clocked.window(1)[0] > 0


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
def test_duration(seconds, words):
    assert progress.duration(seconds) == words


def test_a_line_that_is_too_long_loses_its_least_important_cells():
    cells = [(0, "aaaa"), (2, "bbbb"), (1, "cccc"), (2, "dddd"), (0, "eeee")]
    assert fitted(cells, 28) == "aaaa  bbbb  cccc  dddd  eeee"
    assert fitted(cells, 27) == "aaaa  bbbb  cccc  eeee"
    assert fitted(cells, 22) == "aaaa  bbbb  cccc  eeee"
    assert fitted(cells, 21) == "aaaa  cccc  eeee"
    assert fitted(cells, 15) == fitted(cells, 3) == "aaaa  eeee"  # of rank 0


def test_a_bar_is_full_at_the_end_only():
    assert [bar(done, 8, 4) for done in (0, 1, 2, 7, 8)] == [
        *("[    ]", "[    ]", "[#   ]", "[### ]", "[####]"),
    ]
    assert bar(9, 8, 4) == "[####]"
    assert bar(1, 2) == "[##########          ]"
