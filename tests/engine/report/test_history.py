"""The rows of metrics.jsonl: on disk at once, cut back, torn by a kill; the best step."""

import json
import math
import os
import re

import numpy as np
import pytest
import scipy.stats

from engine.report.history import (
    History,
    lower_is_better,
    other_best,
    share_interval,
    wilson_interval,
)
from engine.stopping import since_best

NAN = math.nan


def row(step, split="eval", **values):
    return {"split": split, "step": step, **values}


def lines(folder):
    """The rows of metrics.jsonl, which must be JSON to the letter."""
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def test_rows_are_on_disk_at_once_and_read_again(tmp_path):
    history = History(str(tmp_path), writes=True)
    added = [row(1, "train", loss=0.1), row(1, score=0), row(2, loss=1e-30, score=7)]
    for count, one in enumerate(added, 1):
        history.add(one)
        assert lines(tmp_path) == added[:count]
    again = History(str(tmp_path), writes=False)
    assert again.rows == history.rows == added
    again.add(row(3))
    again.cut(1)
    assert again.rows == added[:2]
    assert lines(tmp_path) == added


def test_a_score_that_comes_late_goes_to_its_step(tmp_path):
    """Scores in the background: how long they take does not decide where they stand."""
    history = History(str(tmp_path), writes=True)
    late = row(2, score=7)
    expected = [row(1, "train"), row(2, "train"), late, row(3, "train"), row(4, "train")]
    for one in [*(one for one in expected if one is not late), late]:
        history.add(one)
    history.add(row(5, "train"))
    assert lines(tmp_path) == history.rows == [*expected, row(5, "train")]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row(i))}\n" for i in (3, 1)))
    assert History(str(tmp_path), writes=False).rows == [row(1), row(3)]


def test_what_is_not_finite_is_null_and_nan(tmp_path):
    history = History(str(tmp_path), writes=True)
    history.add(row(1, loss=NAN, other=math.inf, score=1.0))
    expected = {**row(1), "loss": None, "other": None, "score": 1.0}
    assert lines(tmp_path) == [expected]
    history.cut(1)
    assert lines(tmp_path) == [expected]
    (again,) = History(str(tmp_path), writes=True).rows
    assert math.isnan(again.pop("loss")) and math.isnan(again.pop("other"))
    assert again == row(1, score=1.0)
    assert lines(tmp_path) == [expected]


@pytest.mark.parametrize("torn", [b'{"split": "eval", "st', b"{", b"\0\0\0\0", b"\xff\xfe{"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_torn_line_is_dropped_and_not_continued(torn, before, tmp_path):
    path, good = tmp_path / "metrics.jsonl", [row(i, loss=i / 3) for i in range(before)]
    path.write_bytes("".join(json.dumps(r) + "\n" for r in good).encode() + torn)
    was = path.read_bytes()
    assert History(str(tmp_path), writes=False).rows == good
    assert path.read_bytes() == was
    history = History(str(tmp_path), writes=True)
    assert history.rows == good
    history.add(row(9))
    assert lines(tmp_path) == [*good, row(9)]
    assert History(str(tmp_path), writes=False).rows == [*good, row(9)]


@pytest.mark.parametrize(
    "bad", ["{}", "[]", "7", '{"split": "eval"}', '{"split": "x", "step": 1}', "[" * 9999, "\0"]
)
def test_damaged_lines_are_dropped_and_the_others_are_kept(bad, tmp_path):
    path, good = tmp_path / "metrics.jsonl", [row(i, loss=i / 3) for i in range(4)]
    text = "".join(json.dumps(r) + "\n" for r in good[:2]) + bad + "\n"
    text += "".join(json.dumps(r) + "\n" for r in good[2:])
    path.write_text(text)
    assert History(str(tmp_path), writes=False).rows == good and path.read_text() == text
    assert History(str(tmp_path), writes=True).rows == lines(tmp_path) == good


def test_lost_evaluations_come_back(tmp_path):
    history = History(str(tmp_path / "a"), writes=False)
    rows = [row(2, "train", loss=1.0), row(4, "train", loss=0.5), row(4, score=0.5, loss=NAN)]
    for one in [*rows, row(8, "train", loss=0.2), row(8, score=0.75)]:
        history.add(one)
    saved = json.loads(json.dumps(history.evaluations()), parse_constant=pytest.fail)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps(row(8)) + "\n")
    restored = History(str(tmp_path), writes=True)
    assert restored.restore(saved) == 1 and restored.restore(saved) == 0
    assert [(r["split"], r["step"]) for r in restored.rows] == [
        ("train", 2),
        ("eval", 4),
        ("eval", 8),
    ]
    assert math.isnan(restored.scores()[4]["loss"]) and restored.best("score") == 4
    empty = tmp_path / "empty"
    empty.mkdir()
    deleted = History(str(empty), writes=True)
    assert deleted.restore(saved) == 2 and deleted.best("score") == 8
    assert [r["step"] for r in lines(empty)] == [4, 8]


def test_cut_forgets_what_comes_after(tmp_path):
    history = History(str(tmp_path), writes=True)
    history.cut(5)  # there is no file yet
    assert os.listdir(tmp_path) == []
    for step in (2, 4, 4, 5, 6, 8):
        history.add(row(step))
    history.cut(5)
    assert [r["step"] for r in history.rows] == [2, 4, 4, 5]
    assert lines(tmp_path) == history.rows
    history.add(row(7))
    assert [r["step"] for r in lines(tmp_path)] == [2, 4, 4, 5, 7]
    history.cut(-1)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({}, None),
        ({1: None, 2: None}, None),
        ({4: 0.5, 8: 0.7, 12: 0.6}, 8),
        ({4: 0.7, 8: 0.7, 12: 0.7}, 4),
        ({12: 0.7, 4: 0.7}, 4),
        ({4: None, 8: 0.1}, 8),
        ({4: NAN, 8: 0.1, 12: NAN}, 8),
        ({4: NAN}, None),
        ({4: -2, 8: -1}, 8),
    ],
)
def test_the_best_step(scores, best, tmp_path):
    history = History(str(tmp_path), writes=False)
    history.add(row(3, "train", score=99.0))
    for step, score in scores.items():
        history.add(row(step, other=-step, **({} if score is None else {"score": score})))
    assert history.best("score") == best


def test_the_best_loss_is_the_lowest(tmp_path):
    history = History(str(tmp_path), writes=False)
    for step, loss in enumerate([0.5, NAN, -0.1, -0.1, 0.2], 1):
        history.add(row(step, val_loss=loss, lossless=loss))
    assert (history.best("val_loss"), history.best("val_loss", among=[2, 5])) == (3, 5)
    assert history.best("lossless") == 1
    assert since_best(history, "val_loss", 5) == 2


@pytest.mark.parametrize(
    ("steps", "now", "says", "silent"),
    [
        ([2, 4], "score", "", "best"),
        ([4], "other", "now by other: step 4", "step 2"),
        ([2, 6], "other", r"step 6 \(step 4 was .* deleted\); step 2, .* by score", "none"),
        ([8], "other", r"none that is left \(step 4 was .* deleted\)", "step 2"),
        ([2, 6], "unknown", "no evaluation .* has this score; step 2, the best by", "better"),
    ],
)
def test_what_another_measure_means_is_told(steps, now, says, silent, tmp_path):
    history = History(str(tmp_path), writes=False)
    assert other_best(history, [], "score", now) == ""
    for step, score, other in ((2, 0.9, NAN), (4, 0.9, 0.7), (6, 0.3, 0.1)):
        history.add(row(step, score=score, other=other))
    text = other_best(history, steps, "score", now)
    assert re.search(says, text) and bool(text) == bool(says) and silent not in text


def test_evaluations_since_the_best_one(tmp_path):
    history = History(str(tmp_path), writes=False)
    assert since_best(history, "score", 9) == 0
    for step, score in ((2, NAN), (4, 0.5), (6, 0.7), (8, 0.6), (10, 0.7), (12, 0.9)):
        history.add(row(step, score=score))
    expected = {1: 0, 2: 1, 3: 1, 4: 0, 6: 0, 7: 0, 8: 1, 10: 2, 11: 2, 12: 0}
    assert {step: since_best(history, "score", step) for step in expected} == expected
    assert history.best("score", among=[4, 8]) == 8


@pytest.mark.parametrize(
    ("hits", "count"), [(5, 10), (36, 40), (20, 20), (0, 20), (1, 1), (1234, 1999)]
)
def test_wilsons_interval(hits, count):
    expected = scipy.stats.binomtest(hits, count).proportion_ci(0.95, "wilson")
    got = wilson_interval(hits / count, count)
    np.testing.assert_allclose(got, (expected.low, expected.high), atol=1e-7)


def test_only_few_examples_have_an_interval():
    assert share_interval(0.5, 10) == " (95 % interval 23.7 to 76.3)"
    assert share_interval(1, 1999) == " (95 % interval 99.8 to 100.0)"
    for share, count in ((0.5, 2000), (NAN, 10), (0.5, 0), (1.01, 10), (-0.01, 10)):
        assert share_interval(share, count) == ""


def test_only_losses_are_better_if_lower():
    names = ("loss", "val_loss", "lossless", "loss_scale", "f1/hair_loss", "accuracy")
    assert [lower_is_better(name) for name in names] == [True, True, *[False] * 4]
