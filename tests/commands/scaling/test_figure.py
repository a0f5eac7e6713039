"""Tests of the picture of a law."""

import functools
import io
import math

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from commands.scaling import figure
from commands.scaling.law import Law, Point, fit

_draw = functools.partial(figure.draw, title="Flowers", unit="photos", metric="top_1_accuracy")


def _points(*scores):
    return [Point(367 * 2**i, score, 0) for i, score in enumerate(scores)]


def _texts(drawn):
    """All texts of a figure, without empty ones."""
    return [text for x in drawn.findobj(Text) if (text := x.get_text())]


def test_law_is_drawn_with_what_more_photos_bring(tmp_path):
    points = [*_points(0.71, 0.79, 0.84, 0.88), Point(367, 0.69, 1)]
    law = fit(points, 734)
    assert isinstance(law, Law)
    path = tmp_path / "scaling.png"
    drawn = _draw(str(path), points, law, percent=True, target=0.925)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.size == (990, 616)
    axes = drawn.axes[0]
    assert axes.get_xlabel() == "training photos"
    assert axes.get_ylabel() == "top 1 accuracy"
    texts = _texts(drawn)
    assert {"Flowers", "367", "2,936", "5,872", "11,744", "80.0 %", "target 92.5 %"} <= set(texts)
    for times in (2, 4):
        expected = law.score(times * 2936)
        low, median, high = (
            f"{100 * x:.1f}" for x in (expected.low, expected.median, expected.high)
        )
        assert f"{times}x\n{median} %\n{low}–{high} %" in texts
    assert any(text.startswith(f"ceiling {100 * law.ceiling.median:.1f} %") for text in texts)
    runs = next(line for line in axes.lines if line.get_label() == "measured runs").get_xydata()
    assert sorted(map(tuple, np.asarray(runs))) == sorted((p.examples, p.score) for p in points)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert left < 367 and right > 11_744
    assert bottom < 0.69 and max(0.925, law.score(11_744).high) < top


@pytest.mark.parametrize("scores", [(0.71, 0.79, 0.84, 0.88), (0.01, 0.02, 0.028, 0.035)])
def test_texts_do_not_cover_what_is_drawn(scores):
    points = _points(*scores)
    law = fit(points, 5000)
    assert isinstance(law, Law)
    drawn = _draw(io.BytesIO(), points, law)
    axes = drawn.axes[0]
    marks = [text.get_window_extent() for text in axes.texts]
    assert len(marks) == 2
    assert not marks[0].overlaps(marks[1])
    for times, box in zip((2, 4), marks, strict=True):
        n = times * points[-1].examples
        assert box.y1 < axes.transData.transform((n, law.score(n).low))[1]
        assert axes.bbox.x0 < box.x0 < box.x1 < axes.bbox.x1
    for text in drawn.findobj(Text):
        if isinstance(text, Text) and text.get_text():
            box = text.get_window_extent()
            assert drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1


def test_a_fraction_is_not_shown_in_per_cent():
    points = _points(0.12, 0.16, 0.20, 0.235)
    texts = _texts(_draw(io.BytesIO(), points, fit(points, 1000)))
    assert not any("%" in text for text in texts if "80 %" not in text and "(80 %)" not in text)


@pytest.mark.parametrize(
    "scores",
    [(0.912, 0.915, 0.909, 0.917), (0.8, 0.7, 0.65, 0.6), (0.5, math.nan, 0.6), (0.5, 0.6), ()],
)
def test_unclear_points_are_drawn_with_the_reason(scores):
    points, file = _points(*scores), io.BytesIO()
    law = fit(points, 500)
    drawn = _draw(file, points, law)
    assert file.getvalue().startswith(b"\x89PNG")
    axes = drawn.axes[0]
    title = axes.get_title(loc="left")
    assert not isinstance(law, Law) and law.reason in " ".join(title.split())
    assert not any("2x" in text for text in _texts(drawn))
    for text in drawn.findobj(Text):
        assert isinstance(text, Text) and text.get_window_extent().x1 <= drawn.bbox.x1
    bottom, top = axes.get_ylim()
    assert all(bottom < score < top for score in scores if math.isfinite(score))
    if not scores:  # an empty picture has all scores
        assert (bottom, top) == pytest.approx((-0.06, 1.06))
