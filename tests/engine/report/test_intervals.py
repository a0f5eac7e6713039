"""What a run reports of a log interval: the row of metrics.jsonl and the line on the terminal."""

import numpy as np
import pytest

from engine.report import intervals
from engine.report.intervals import Intervals, Outlook


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
def make(clock, monkeypatch):
    """Makes (intervals, reporter) of a run of 400 steps of 32 images; 320 images are an epoch."""

    class Bottleneck:
        def __init__(self, advice):
            self.advice = advice

        def interval(self, seconds, feed):
            return {"input_wait": 0.25, "decode": float("nan")}, "the input is slow"

    monkeypatch.setattr(intervals, "Bottleneck", Bottleneck)

    def of(**changes):
        facts = {"total_steps": 400, "batch_size": 32, "num_examples": 320, "unit": "images"}
        facts |= {"throughput": None, "chips": 4, "learning_rate": lambda step: 0.1 * step}
        facts |= {"next_evaluation": None, "advice": {}, **changes}
        reporter = Reporter()
        return Intervals(reporter, None, Outlook(**facts), 100), reporter  # type: ignore

    return of


def totals(bad_step=0, **sums):
    return {"bad_step": np.int32(bad_step), **{k: np.float32(v) for k, v in sums.items()}}


def test_an_interval_is_reported_with_its_means_rates_and_the_time_left(make, clock, caplog):
    kept, reporter = make()
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


def test_a_throughput_of_its_own_replaces_the_examples(make, clock):
    kept, reporter = make(
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


def test_an_interval_with_a_step_that_was_not_finite_is_only_returned(make):
    kept, reporter = make()
    kept.close(110, totals(7, loss=(1.0, 1.0)))
    assert int(kept.report()["bad_step"]) == 7
    assert reporter.rows == []


def test_a_long_line_keeps_100_columns_and_what_matters(make, clock):
    """Mask R-CNN's losses and a long run; metrics.jsonl has what the line drops."""
    losses = ("loss", "rpn_score_loss", "rpn_box_loss", "class_loss", "box_loss", "mask_loss")
    kept, reporter = make(total_steps=1_112_590, num_examples=32)
    clock.seconds += 10.0
    kept.close(101, totals(**dict.fromkeys(losses, (1.0, 1.0))))
    kept.report()
    (line,) = reporter.lines
    assert len(line) <= 100
    for part in ("step 101/1,112,590  ", "  loss 1.0000  ", "images/s", "input wait", " left"):
        assert part in line
    assert reporter.rows[0].keys() > {*losses, "learning_rate", "step_seconds", "epoch"}


def test_a_terminal_shows_a_bar_between_two_lines(make, clock):
    kept, reporter = make()
    clock.seconds += 10.0
    kept.close(110, totals(loss=(1.0, 1.0)))
    kept.report()
    kept.show_progress(300)
    assert reporter.lives == ["[###############     ]  75%  step 300/400  1:40 left"]


@pytest.mark.parametrize(("backend", "where"), [("cpu", "on this CPU a step"), ("tpu", ": a step")])
def test_a_line_comes_after_a_minute_where_the_first_report_is_far(
    make, clock, monkeypatch, backend, where
):
    """The newest step still runs: after 64 s, 7 steps are done."""
    monkeypatch.setattr(intervals.jax, "default_backend", lambda: backend)
    kept, reporter = make()
    for step in range(101, 113):
        clock.seconds += 8.0
        kept.show_progress(step)
    [line] = reporter.lines
    assert line.startswith("step 107/400") and where in line
    assert "about 9.1 s, the run 1.0 hours" in line
    assert not reporter.rows


def test_a_fast_run_has_no_such_line(make, clock):
    kept, reporter = make()
    clock.seconds += 50.0
    kept.show_progress(150)
    kept.close(150, totals(loss=(150.0, 50.0)))
    kept.report()
    said = len(reporter.lines)
    clock.seconds += 90.0
    kept.show_progress(151)
    assert len(reporter.lines) == said
