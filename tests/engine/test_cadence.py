"""Durations and when they are due: units, rounding, lists, drift, resuming, clocks, messages."""

import types
from fractions import Fraction
from typing import Any

import pytest

from common.errors import ConfigError
from engine.cadence import Every, list_to_steps, stretched, to_steps

IMAGENET: dict[str, Any] = {"batch_size": 1024, "num_examples": 1_281_167}
STEPS_PER_EPOCH = Fraction(1_281_167, 1024)


def _steps(duration, **others):
    return to_steps(duration, name="train_steps", **(IMAGENET | others))


def _every(duration, **others):
    return Every.parse(duration, name="eval_every", **(IMAGENET | others))


def first_due(every, count):
    """The first `count` steps that are due."""
    steps = [every.next_after(0)]
    while len(steps) < count:
        steps.append(every.next_after(steps[-1]))
    return steps


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        (112_590, 112_590),
        (2**31 - 1, 2**31 - 1),
        ("500steps", 500),
        ("1e3 steps", 1000),
        ("90 epochs", 112_603),  # 112,602.6; the sheet's 112,590 is 90 * floor(1251.14)
        ("1 epoch", 1251),
        ("2.5 epochs", 3128),  # 3127.85
        (".5 epoch", 626),  # 625.57
        ("1e6 examples", 977),  # 976.6
        ("1.28e2 examples", 1),  # 0.125: never rounded to nothing
        ("1e-6 epochs", 1),
    ],
)
def test_to_steps(duration, steps):
    assert _steps(duration) == steps


@pytest.mark.parametrize("off", [0, "0", "", " ", "0 epochs", "0.0 examples"])
def test_zero_is_off_only_where_allowed(off):
    assert _steps(off, allow_off=True) == 0
    with pytest.raises(ConfigError, match="^train_steps=.* must be positive; accepted: "):
        _steps(off)
    every = _every(off)
    assert not every.by_clock and not _every("0 seconds").by_clock
    assert every.next_after(0) is None
    assert not any(every.due(step) for step in range(5000))


@pytest.mark.parametrize(
    "bad", ["abc", "5 weeks", -5, "2.5 steps", "1,000", "1e999999 steps", 2**31, "60 s", "1, 2 s"]
)
def test_what_is_no_number_of_steps_is_refused_with_the_key(bad):
    with pytest.raises(ConfigError, match=f"^train_steps={bad!r} "):
        _steps(bad)


@pytest.mark.parametrize("bad", ["abc", -5, "1,000, 2,000", "1, , 2 epochs", "0, 5", "5, 6 min"])
def test_what_is_never_due_is_refused_with_the_key(bad):
    with pytest.raises(ConfigError, match="^eval_every="):
        _every(bad)


@pytest.mark.parametrize(("period", "offset"), [("5 min", "3"), ("", "3"), ("8, 9 epochs", "3")])
def test_an_offset_needs_a_period_in_steps(period, offset):
    with pytest.raises(ConfigError, match=f"^eval_offset='{offset}' .*steps_per_eval"):
        _every(period).since(offset, name="eval_offset", **IMAGENET)


def test_an_offset_is_when_it_is_due_first():
    every = _every("4 steps").since("3 steps", name="eval_offset", **IMAGENET)
    assert [step for step in range(16) if every.due(step)] == [3, 7, 11, 15]
    assert [every.next_after(step) for step in (0, 2, 3, 6, 7)] == [3, 3, 7, 7, 11]
    late = _every("2 steps").since(7, name="eval_offset", **IMAGENET)  # more than a period
    assert [step for step in range(13) if late.due(step)] == [7, 9, 11]
    epochs = _every("4 epochs").since("3 epochs", name="eval_offset", **IMAGENET)
    expected = [round((3 + 4 * k) * STEPS_PER_EPOCH) for k in range(200)]
    assert first_due(epochs, 200) == expected


def test_an_offset_of_less_than_a_step_is_the_first_step_and_none_changes_nothing():
    every = _every("4 steps").since("1 example", name="eval_offset", **IMAGENET)
    assert [step for step in range(10) if every.due(step)] == [1, 5, 9]
    for every in map(_every, ("4 epochs", "", "5 min")):
        for offset in ("", 0, "0 epochs"):
            assert every.since(offset, name="eval_offset", **IMAGENET) is every


# --- Lists.

SSD = "32, 42.7, 48, 53.3, 58.7, 64 epochs"  # MLPerf v0.5


@pytest.mark.parametrize(
    ("durations", "steps"),
    [
        # An epoch has 1251.14 steps.
        (SSD, (40036, 53424, 60055, 66686, 73442, 80073)),
        ("1000, 2000", (1000, 2000)),
        ("1e3, 2000 steps", (1000, 2000)),
        ("2000, 1 epoch, 1000", (2000, 1251, 1000)),
        ("10 epochs, 1e6, 1e7 examples", (12_511, 977, 9766)),
        ("9000", (9000,)),
        ("7, 7", (7, 7)),
    ],
)
def test_lists_of_durations(durations, steps):
    assert list_to_steps(durations, name="eval_every", **IMAGENET) == list(steps)
    every = _every(durations)
    if len(steps) > 1:
        assert [step for step in range(81_000) if every.due(step)] == sorted(set(steps))
    assert not every.by_clock


# --- Periods.


@pytest.mark.parametrize(
    ("duration", "batch_size", "num_examples"),
    [
        ("1 epoch", 1024, 1_281_167),
        ("1 epoch", 2, 5),  # 2.5 steps: every second one is a tie
        ("1 epoch", 2, 1),  # half a step
        ("1 epoch", 10, 13),
        ("0.1 epochs", 7, 100),
        ("1 example", 4, 100),
        ("100 examples", 64, 100),
        ("7", 3, 100),
    ],
)
def test_due_and_next_after_agree_with_the_definition(duration, batch_size, num_examples):
    every = _every(duration, batch_size=batch_size, num_examples=num_examples)
    amount, unit = (duration.split() + ["steps"])[:2]
    one = {"ep": Fraction(num_examples, batch_size), "ex": Fraction(1, batch_size)}
    period = Fraction(amount) * one.get(unit[:2], 1)
    last = 3000
    expected = {round(k * period) for k in range(1, int((last + 2) / period) + 2)} - {0}
    assert {step for step in range(last) if every.due(step)} == {s for s in expected if s < last}
    for step in range(0, last - 2000, 3):
        assert every.next_after(step) == min(s for s in expected if s > step)


def test_a_resumed_run_decides_the_same():
    uninterrupted = _every("0.01 epochs")
    decisions = [uninterrupted.due(step) for step in range(1, 400)]
    resumed = _every("0.01 epochs")
    assert [resumed.due(step) for step in range(250, 400)] == decisions[249:]
    assert [resumed.due(step) for step in range(399, 0, -1)] == decisions[::-1]
    assert sum(decisions) == 31  # 12.51 steps each
    steps = [13, 399, 26, 25, 0, 26, 38, 37, 398, 38]  # forwards, back, and again
    due = [step > 0 and decisions[step - 1] for step in steps]
    assert [resumed.due(step) for step in steps] == due


def test_a_list_is_due_at_its_entries_and_then_never():
    every = _every("9, 4, 6 steps")
    assert [step for step in range(12) if every.due(step)] == [4, 6, 9]
    assert [step for step in (9, 11, 4, 6, 0) if every.due(step)] == [9, 4, 6]
    next_steps = [every.next_after(step) for step in range(11)]
    assert next_steps == [4, 4, 4, 4, 6, 6, 9, 9, 9, None, None]


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [(f"90{space}{unit}", 90) for space in ("", " ") for unit in ("s", "sec", "second", "seconds")]
    + [(f"2 {unit}", 120) for unit in ("min", "minute", "minutes")]
    + [("1.5h", 5400), ("1 hour", 3600), ("2 hours", 7200), ("0.5 s", 0.5)],
)
def test_by_clock(duration, seconds):
    clock = types.SimpleNamespace(now=1000.0)
    every = _every(duration, clock=lambda: clock.now)
    assert every.by_clock
    assert every.next_after(0) is None
    assert not every.due(1)
    clock.now = 1000.0 + 0.99 * seconds
    assert not every.due(2)
    clock.now = 1000.0 + seconds
    assert every.due(3)
    assert not every.due(4)
    # From when it was last due, not on a grid: one long pause is one event.
    clock.now += 10.5 * seconds
    assert every.due(5)
    clock.now += 0.9 * seconds
    assert not every.due(6)
    clock.now += 0.2 * seconds
    assert every.due(7)


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        ("90 epochs", "180 epochs"),
        ("0.5 epoch", "1 epochs"),
        ("32, 42.7, 48 epochs", "64, 85.4, 96 epochs"),
        *((same, same) for same in (1000, "1000", "", 0, "4e6 examples", "10 min", "some time")),
    ],
)
def test_epochs_are_stretched(duration, expected):
    assert stretched(duration, 2.0) == expected
