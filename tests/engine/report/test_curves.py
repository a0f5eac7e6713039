"""The picture of the learning curves: what is in it, and that it is replaced whole."""

import math
import os

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from engine.report import curves


def row(step, split="eval", **values):
    return {"split": split, "step": step, **values}


@pytest.fixture
def panels(monkeypatch, tmp_path):
    """Draws rows; returns {panel: {label: points}} of what is in the picture."""
    figures = []

    def keep(self, *args, **kwargs):
        figures.append(self)
        save(self, *args, **kwargs)

    def draw(rows, metrics=("top_1_accuracy",), width=1320):
        path = tmp_path / "curves.png"
        curves.draw(rows, str(path), "a title", metrics)
        assert os.listdir(tmp_path) == ["curves.png"]
        with Image.open(path) as picture:
            assert (picture.format, picture.size) == ("PNG", (width, 396))
            assert len(np.unique(np.asarray(picture.convert("L")))) > 10
        figure = figures.pop()
        assert figure.get_suptitle() == "a title"
        return {
            axes.get_title(): {
                str(line.get_label()): list(zip(*line.get_data(), strict=True))
                for line in axes.lines
            }
            for axes in figure.axes
        }

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", keep)
    return draw


def test_curves_show_every_quantity_in_its_panel(panels):
    rows = [
        row(1, "train", epoch=0.5, loss=3.0, aux_loss=1.0, learning_rate=0.1, gradient_norm=9.0),
        row(2, "train", epoch=1.0, loss=2.0, aux_loss=0.5, learning_rate=0.2, step_seconds=1.0),
        row(2, epoch=1.0, loss=2.5, top_1_accuracy=0.25, top_5_accuracy=0.5, seconds=3.0),
    ]
    assert panels(rows) == {
        "loss": {
            "train aux loss": [(0.5, 1.0), (1.0, 0.5)],
            "train loss": [(0.5, 3.0), (1.0, 2.0)],
            "eval loss": [(1.0, 2.5)],
        },
        "top 1 accuracy": {
            "eval top 1 accuracy": [(1.0, 0.25)],
            "eval top 5 accuracy": [(1.0, 0.5)],
        },
        "learning rate": {"train learning rate": [(0.5, 0.1), (1.0, 0.2)]},
    }


@pytest.mark.parametrize("metrics", [("hr_at_10",), ("box_ap", "mask_ap"), ("bleu",)])
def test_every_target_is_drawn(metrics, panels):
    rows = [row(2, epoch=1.0, loss=2.5) | dict.fromkeys(metrics, 0.5)]
    named = [metric.replace("_", " ") for metric in metrics]
    drawn = panels(rows, metrics)
    assert list(drawn) == ["loss", ", ".join(named), "learning rate"]
    assert drawn[", ".join(named)] == {f"eval {name}": [(1.0, 0.5)] for name in named}


def test_without_a_target_there_is_no_panel_for_one(panels):
    assert list(panels([], metrics=(), width=880)) == ["loss", "learning rate"]


def test_curves_of_a_step_evaluated_again_show_the_last(panels):
    rows = [row(s, epoch=e, loss=x) for s, e, x in ((4, 2.0, 9.0), (2, 1.0, 7.0), (4, 2.0, 3.0))]
    assert panels(rows)["loss"] == {"eval loss": [(1.0, 7.0), (2.0, 3.0)]}


def test_curves_of_nothing_and_of_what_is_not_finite(panels):
    assert panels([]) == {"loss": {}, "top 1 accuracy": {}, "learning rate": {}}
    strange = [math.nan, math.inf, 1.0, -math.inf]
    actual = panels([row(i, "train", epoch=float(i), loss=x) for i, x in enumerate(strange)])
    np.testing.assert_array_equal(actual["loss"]["train loss"], list(enumerate(strange)))


def test_a_picture_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    curves.draw([], str(path), "before")
    before = path.read_bytes()

    def half(self, data):
        with open(self, "wb") as file:
            file.write(data[:100])
        raise OSError("No space left")

    monkeypatch.setattr(type(curves.epath.Path(path)), "write_bytes", half)
    with pytest.raises(OSError, match="No space left"):
        curves.draw([row(1, epoch=1.0, loss=1.0)], str(path), "after")
    assert path.read_bytes() == before
