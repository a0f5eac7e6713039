"""What is said of a law, its groups and what it cannot tell."""

import json
import math

import numpy as np
import pytest

from commands.scaling import summary
from commands.scaling.law import Unclear, fit
from commands.scaling.summary import Result


def curve(count):
    """A law with the ceiling 0.9 and the exponent 0.5."""
    return 0.9 - 0.6 * (count / 100) ** -0.5


ABOUT = {
    **{"metric": "top_1_accuracy", "percent": True, "target": 0.85, "unit": "pairs"},
    **{"per_example": 2.0, "evaluated": 10**6, "evaluated_unit": "rows", "left_out": []},
}


def results(score):
    """Parts of 50 to 3,200 examples, so of 100 to 6,400 pairs; "steady" never changes."""
    return [
        Result(
            *(2.0**-k, 0, 3200 >> k, score(2 * (3200 >> k)), 1),
            {"steady": (0.5, 1000), "rising": (score(6400 >> k), 10**6)},
            "",
        )
        for k in reversed(range(7))
    ]


def test_the_summary_is_the_laws():
    runs = results(curve)
    found = fit(summary.points(ABOUT, runs), ABOUT["evaluated"])
    content = json.loads(json.dumps(summary.describe(ABOUT, runs, found), allow_nan=False))
    for row, times in zip(content["expected"], (2, 4), strict=True):
        assert row["pairs"] == times * 6400
        assert row["median"] == pytest.approx(curve(times * 6400), abs=2e-3)
        assert row["low"] <= row["median"] <= row["high"]
    assert content["ceiling"]["median"] == pytest.approx(0.9, abs=3e-3)
    needed = 100 * (0.6 / 0.05) ** 2  # 14,400 pairs
    assert content["needed"]["median"] == pytest.approx(needed, rel=0.1)
    rising, steady = content["groups"]
    assert (rising["name"], steady["name"]) == ("rising", "steady")
    gain = curve(12_800) - curve(6400)
    assert rising["gain_of_twice"]["median"] == pytest.approx(gain, abs=2e-3)
    assert "gain_of_twice" not in steady and content["check"]["inside"]
    text = " ".join(summary.sentences(content))
    for word in ("90.", "14,000 pairs", "rising (+", "85.0 %"):
        assert word in text, word
    head, rows = summary.table(content)
    assert len(rows) == 9 and all(len(row) == len(head) for row in rows)
    assert rows[-2][0] == "2x" and rows[0][:3] == ["1/64", "0", "100"]


def test_a_target_above_the_ceiling_needs_more_than_anyone_can_tell():
    about, runs = {**ABOUT, "target": 0.97}, results(curve)
    found = fit(summary.points(about, runs), about["evaluated"])
    content = summary.describe(about, runs, found)
    assert content["needed"]["median"] is None
    assert f"more than {64 * 6400:,} pairs" in " ".join(summary.sentences(content))


def test_where_there_is_no_law_the_summary_says_why():
    flat = results(lambda count: 0.7)
    found = fit(summary.points(ABOUT, flat), ABOUT["evaluated"])
    assert isinstance(found, Unclear)
    content = summary.describe(ABOUT, flat, found)
    assert "expected" not in content and found.reason in summary.sentences(content)[0]
    assert len(summary.table(content)[1]) == 7


def test_repeats_have_one_size():
    """Groups of photos make parts of other seeds a little larger."""
    runs = [Result(0.5, seed, 100 + seed, 0.5, 1, {}, "") for seed in range(3)]
    assert {point.examples for point in summary.points(ABOUT, runs)} == {202}
    assert math.isclose(np.mean([point.score for point in summary.points(ABOUT, runs)]), 0.5)


def test_parts_in_words():
    fractions = (1 / 8, 0.3, 2 / 3, 1.0, 1 / 1000)
    assert [summary.part_name(x) for x in fractions] == ["1/8", "3/10", "2/3", "all", "1/1000"]
