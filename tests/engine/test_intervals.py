"""What a run reports of a log interval: its row, its line, the time left, the warning about input.

The warning: when it comes, and which part it names.
"""

import math
import types
from typing import Any

import numpy as np
import pytest

from engine import intervals
from engine.intervals import Bottleneck, Intervals, Progress


class Reporter:
    """Keeps what it is given."""

    def __init__(self):
        self.rows, self.lines, self.lives = [], [], []

    def train(self, row, text):
        self.rows.append(row)
        self.lines.append(text)

    def say(self, text):
        self.lines.append(text)

    def live(self, text):
        self.lives.append(text)

    def quantity(self, name, value):
        return f"{name.replace('_', ' ')} {value:.4f}"


@pytest.fixture
def make_intervals(clock, monkeypatch):
    """Makes (intervals, reporter) of a run of 400 steps of 32 images; 320 images are an epoch."""

    class Bottleneck:
        def __init__(self, advice):
            self.advice = advice

        def interval(self, seconds, feed):
            return {"input_wait": 0.25, "decode": float("nan")}, "the input is slow"

    monkeypatch.setattr(intervals, "Bottleneck", Bottleneck)

    def of(total_steps=400, num_examples=320, throughput=None, chips=4, next_evaluation=None):
        monkeypatch.setattr(intervals, "num_chips", lambda mesh: chips)
        known = types.SimpleNamespace
        benchmark = known(unit="images", throughput=throughput, input_advice={})
        settings = known(train_batch_size=32)
        run: Any = known(benchmark=benchmark, settings=settings, mesh=None, metrics=("accuracy",))
        steps = {"total_steps": total_steps, "learning_rate": lambda step: 0.1 * step}
        every = known(next_after=next_evaluation)
        plan: Any = known(num_examples=num_examples, eval_every=every, **steps)
        reporter: Any = Reporter()
        evaluating = next_evaluation is not None
        feed: Any = None
        return Intervals(reporter, feed, run, plan, 100, evaluating), reporter

    return of


def totals(bad_step=0, **sums):
    return {"bad_step": np.int32(bad_step), **{k: np.float32(v) for k, v in sums.items()}}


def test_an_interval_is_reported_with_its_means_rates_and_the_time_left(
    make_intervals, clock, caplog
):
    kept, reporter = make_intervals()
    assert kept.report() is None
    clock.seconds += 12.0
    kept.pause(2.0)
    sums = totals(loss=(64.0, 32.0), top_1_accuracy=(8.0, 32.0), gradient_norm=(5.0, 1.0))
    kept.close(120, {**sums, "empty": (np.float32(0), np.float32(0))})
    assert int(kept.report()["bad_step"]) == 0
    assert kept.report() is None  # only once
    (row,) = reporter.rows
    assert row == {
        "step": 120,
        "epoch": 12.0,
        "loss": 2.0,
        "top_1_accuracy": 0.25,
        "gradient_norm": 5.0,
        "learning_rate": pytest.approx(11.9),  # of the last step, which is 119 from 0
        "images_per_second": pytest.approx(64.0),
        "images_per_second_per_chip": pytest.approx(16.0),
        "step_seconds": pytest.approx(0.5),
        "input_wait": 0.25,
        "eta_seconds": pytest.approx(140.0),
    }
    assert reporter.lines == [
        "step 120/400  epoch 12.00  loss 2.0000  top 1 0.2500  64 images/s  "
        "input wait 25%  2:20 left"
    ]
    assert caplog.messages == ["the input is slow"]


def test_a_throughput_of_its_own_replaces_the_examples(make_intervals, clock):
    kept, reporter = make_intervals(
        throughput=("tokens", "tokens"), chips=2, next_evaluation=lambda step: None
    )
    clock.seconds += 10.0
    kept.pause(3.0, evaluated=True)
    clock.seconds += 3.0
    kept.close(110, totals(loss=(3.0, 2.0), tokens=(700.0, 500.0)))
    kept.report()
    (row,) = reporter.rows
    assert (row["tokens_per_second"], row["tokens_per_second_per_chip"]) == (50.0, 25.0)
    assert row["eta_seconds"] == pytest.approx(290 * 1.0 + 3.0)  # one evaluation is left
    assert "tokens/s" in reporter.lines[0] and "tokens 1.4" not in reporter.lines[0]


def test_nothing_is_computed_when_an_interval_is_reported(make_intervals, clock, monkeypatch):
    """By then the next step runs, and the answer would come after it."""
    kept, reporter = make_intervals()
    asked = []
    monkeypatch.setattr(
        kept, "_learning_rate", lambda step: asked.append(int(step)) or np.float32(0.5)
    )
    kept.close(110, totals(loss=(1.0, 1.0)))
    assert asked == [109]
    kept.report()
    assert asked == [109] and reporter.rows[0]["learning_rate"] == 0.5


def test_an_interval_with_a_step_that_was_not_finite_is_only_returned(make_intervals):
    kept, reporter = make_intervals()
    kept.close(110, totals(7, loss=(1.0, 1.0)))
    assert int(kept.report()["bad_step"]) == 7
    assert reporter.rows == []


def test_a_terminal_shows_a_bar_between_two_lines(make_intervals, clock):
    kept, reporter = make_intervals()
    clock.seconds += 10.0
    kept.close(110, totals(loss=(1.0, 1.0)))
    kept.report()
    kept.show_progress(300)
    assert reporter.lives == ["[###############     ]  75%  step 300/400  1:40 left"]


@pytest.mark.parametrize(("backend", "where"), [("cpu", "on this CPU a step"), ("tpu", ": a step")])
def test_a_line_comes_after_a_minute_where_the_first_report_is_far(
    make_intervals, clock, monkeypatch, backend, where
):
    """The newest step still runs: after 64 s, 7 steps are done."""
    monkeypatch.setattr(intervals.jax, "default_backend", lambda: backend)
    kept, reporter = make_intervals()
    for step in range(101, 113):
        clock.seconds += 8.0
        kept.show_progress(step)
    [line] = reporter.lines
    assert line.startswith("step 107/400") and where in line
    assert "about 9.1 s, the run 1.0 hours" in line
    assert not reporter.rows


# The warning about input.


class Run:
    """Intervals of 10 s on a host with 8 decoding threads."""

    def __init__(self):
        self.clocks: Any = types.SimpleNamespace(waited=0.0, copied=0.0, worked=0.0)
        self.bottleneck = Bottleneck({"decoding": "buy time"}, threads=8)

    def interval(self, waited, copied=0.0, worked=0.0):
        self.clocks.waited += waited
        self.clocks.copied += copied
        self.clocks.worked += worked
        return self.bottleneck.interval(10.0, self.clocks)


def test_shares_are_of_each_interval():
    run = Run()
    expected = {"input_wait": 0.1, "input_transfer": 0.05, "decode_busy": 0.5}
    for _ in range(2):
        shares, warning = run.interval(1.0, 0.5, 40.0)
        assert shares == pytest.approx(expected) and not warning


@pytest.mark.parametrize(
    ("clocks", "part"),
    [
        ({"copied": 3.0, "worked": 78.0}, "transfer"),
        ({"copied": 2.0, "worked": 78.0}, "decoding"),  # half of the wait is not most of it
        ({"copied": 0.1, "worked": 78.0}, "decoding"),
        ({"copied": 0.1, "worked": 40.0}, "reading"),  # busy for half of the time
        ({"copied": 0.1, "worked": 8.0}, "reading"),
        ({"copied": 0.1, "worked": math.nan}, "input"),
    ],
)
def test_the_slow_part_is_named(clocks, part):
    run = Run()
    warnings = [run.interval(4.0, **clocks)[1] for _ in range(3)]
    assert warnings[:2] == ["", ""]
    assert warnings[2].startswith(f"WARNING input-bound: {part}. The devices waited for input 40%")
    assert warnings[2].endswith({"decoding": "Fix: buy time"}.get(part, warnings[2][-20:]))
    assert len(warnings[2].splitlines()) == 1


def test_it_takes_several_slow_intervals_in_a_row_and_is_not_said_again_and_again():
    run = Run()
    assert not any(run.interval(waited)[1] for waited in [3, 3, 2] * 20)  # a fifth is not slow
    warnings = [bool(run.interval(3.0)[1]) for _ in range(299)]
    assert [i + 1 for i, warned in enumerate(warnings) if warned] == [3, 30]
    assert run.interval(3.0)[1]


# The time left, and the line.


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_seconds_of_a_step_without_pauses(clock, steps):
    """A window without a step counts as one step, and one without time is no division by zero."""
    clocked = Progress(5, 100)
    assert math.isnan(clocked.remaining(5))
    clock.seconds += 14.0
    clocked.pause(2.0)
    assert clocked.so_far(5 + steps) == (12.0, 12.0 / max(steps, 1))
    assert clocked.window(5 + steps) == (12.0, max(steps, 1))
    clocked.evals_left, clocked.eval_seconds = 3, 7.0
    assert clocked.remaining(60) == 40 * 12.0 / max(steps, 1) + 21
    seconds, done = clocked.window(20)
    assert 0 < seconds < 1e-6 and done == 15 - steps


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
