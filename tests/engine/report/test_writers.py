"""What a run reports: rows everywhere, the terminal, TensorBoard, profiles, curves, wandb.

wandb is a stand-in which finds the writers of events as the package does. Its faults never reach
the run.
"""

import contextlib
import io
import logging
import math
import os
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from common import palette
from common.errors import OutputError
from engine.report import writers
from engine.report.writers import Profiler, Reporter
from tests.engine.report.test_history import lines, row

NAN = math.nan
WANDB_RECIPE = {"benchmark": "resnet", "seed": 3}


def test_numbers_and_quantities(tmp_path):
    """Per cent is a fact of the targets, and of scores of their kind."""
    reporter = Reporter(str(tmp_path), percent={"top_1_accuracy"})
    assert reporter.number("top_1_accuracy", 0.76543) == "76.54 %"
    assert reporter.number("loss", 2.34567) == "2.3457"
    assert reporter.quantity("top_5_accuracy", 0.5) == "top 5 accuracy 50.00 %"
    assert reporter.quantity("loss", NAN) == "loss nan"
    reporter = Reporter(str(tmp_path), metrics=["mAP"], proportions={"pixel_accuracy"})
    assert reporter.quantity("mAP", NAN) == "mAP not defined"
    assert reporter.quantity("pixel_accuracy", 0.5) == "pixel accuracy 0.5000"
    interval = "(95 % interval 9.5 to 90.5)"
    assert reporter.quantity("pixel_accuracy", 0.5, 2) == f"pixel accuracy 0.5000 {interval}"


def test_the_same_rows_everywhere(tmp_path, caplog):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorflow import make_ndarray

    reporter = Reporter(str(tmp_path), subdir="eval", title="title")
    folder = tmp_path / "eval"
    given = [
        row(2, "train", epoch=0.5, loss=1.25, images_per_second=1e6),
        row(4, "train", epoch=1.0, loss=0.1, images_per_second=3.0),
        row(4, epoch=1.0, loss=0.3, top_1_accuracy=0.625, examples=23),
    ]
    with caplog.at_level(logging.INFO, logger="tpu_suite"):
        for one in given:
            rest = {k: v for k, v in one.items() if k != "split"}
            getattr(reporter, one["split"])(rest, f"{one['split']} of step {one['step']}")
            assert lines(folder)[-1] == one
    reporter.close()
    reporter.close()
    assert lines(folder) == reporter.history.rows == given
    assert caplog.messages == ["train of step 2", "train of step 4", "eval of step 4"]
    events = EventAccumulator(str(folder))
    events.Reload()
    events_by_key = {
        (tag, event.step): make_ndarray(event.tensor_proto).item()
        for tag in events.Tags()["tensors"]
        for event in events.Tensors(tag)
    }
    expected = {
        (f"{one['split']}/{key}", one["step"]): np.float32(value)
        for one in given
        for key, value in one.items()
        if key not in ("split", "step")
    }
    assert events_by_key == expected
    assert sorted(os.listdir(tmp_path)) == ["eval"]
    names = sorted(os.listdir(folder))
    assert names[0].startswith("events.out.tfevents")
    assert names[1:] == ["learning_curves.png", "metrics.jsonl"]


def test_tensorboard_shows_no_lost_steps(tmp_path):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    starts = ((0, (2, 4, 6)), (4, (6, 8)), (8, ()), (6, (8,)))
    for number, (resumed, steps) in enumerate(starts):
        reporter = Reporter(str(tmp_path))
        if resumed:
            reporter.cut(resumed)
        for step in steps:
            reporter.train({"step": step, "loss": step + resumed}, "")
        reporter.close()
        for path in tmp_path.glob("*.tfevents.1*"):  # as if each second took long: they give names
            path.rename(str(path).replace("tfevents.1", f"tfevents.0{number}"))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Tensors("train/loss")] == [2, 4, 6, 8]


def test_events_that_cannot_be_written_are_one_line(tmp_path, monkeypatch, caplog):
    from clu import metric_writers

    class Full(metric_writers.MultiWriter):
        def write_scalars(self, step, scalars):
            raise OSError("No space left\nin the house")

    monkeypatch.setattr(metric_writers, "SummaryWriter", lambda folder: Full([]))
    reporter = Reporter(str(tmp_path))
    text = f"cannot write TensorBoard events in {tmp_path}: No space left"
    with pytest.raises(OutputError) as caught:
        for step in range(1000):  # it happens in a thread: one of the next rows tells
            reporter.train({"step": step, "epoch": 0.0}, "")
    assert str(caught.value) == text
    for error in (OutputError, KeyError):  # at the end, and after another error
        reporter = Reporter(str(tmp_path / error.__name__))
        reporter.train({"step": 1, "epoch": 0.0}, "")
        caplog.clear()
        with pytest.raises(error) as caught, contextlib.ExitStack() as exits:
            exits.callback(reporter.close)
            if error is KeyError:
                raise KeyError
        logged = [r.getMessage() for r in caplog.records if r.name == "tpu_suite"]
        assert [text.partition(":")[2] for text in logged or [str(caught.value)]] == [
            " No space left"
        ]
        assert bool(logged) == (error is KeyError)


def test_other_processes_write_nothing(tmp_path, monkeypatch, caplog, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    reporter = Reporter(str(tmp_path))
    with caplog.at_level(logging.INFO, logger="tpu_suite"):
        reporter.train({"step": 1, "epoch": 0.1, "loss": 1.0}, "text")
        reporter.eval({"step": 1, "epoch": 0.1, "loss": 1.0}, "text")
        reporter.live("live")
        reporter.say("text")
    assert reporter.overview({"w": np.zeros((2, 3))}) == "6 parameters in 1 arrays"
    reporter.history.cut(0)
    reporter.close()
    assert os.listdir(tmp_path) == []
    assert caplog.messages == ["text"] * 3  # for the host's own log; main.py keeps the terminal
    assert capsys.readouterr().out == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_live_line_makes_way(clock, monkeypatch, tmp_path):
    screen, wipe = Terminal(), "\r\x1b[K"
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "20")
    log = types.SimpleNamespace(info=lambda form, text: screen.write(form % text + "\n"))
    monkeypatch.setattr(writers, "_log", log)
    reporter = Reporter(str(tmp_path))
    reporter.say("one")
    reporter.live("a")
    clock.seconds += 0.5
    reporter.live("b")  # too soon
    clock.seconds += 0.2
    reporter.live("c" * 30)
    reporter.say("two")
    reporter.say("three")
    reporter.live("d")
    reporter.close()
    reporter.close()
    shown = f"one\n{wipe}a{wipe}{'c' * 19}{wipe}two\nthree\n{wipe}d{wipe}"
    assert screen.getvalue() == shown


# Profiles.


@pytest.mark.parametrize("steps", ["5", "5:", ":5", "5:5", "-3:5", "a:b", "1:2:3", "40:50"])
def test_a_bad_profile_is_refused_by_key_and_value(steps, tmp_path):
    with pytest.raises(OutputError, match=f"config.profile_steps='{steps}'"):
        Profiler(steps, str(tmp_path)).check(40)


def profiled(profiler, monkeypatch, first, last):
    """What a run of the steps [first, last) does: traced steps, where it starts, what it says."""
    calls, messages, traced, running = [], {}, [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: running.append(path))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(running.pop()))
    for step in range(first, last):
        profiler.before(step)
        traced += [step] * len(running)
        if text := profiler.after(step + 1, ()):
            messages[step + 1] = text
    profiler.close()
    profiler.close()
    assert not running
    return traced, len(calls), messages


@pytest.mark.parametrize(
    ("steps", "run", "traced"),
    [
        ("3:5", (0, 9), [3, 4]),
        ("0:1", (0, 9), [0]),
        ("3:5", (4, 9), [4]),
        ("3:5", (5, 9), []),
        ("3:50", (0, 6), [3, 4, 5]),
    ],
)
def test_the_steps_that_are_traced(steps, run, traced, monkeypatch, tmp_path):
    windows, stops, messages = profiled(Profiler(steps, str(tmp_path)), monkeypatch, *run)
    assert (windows, stops) == (traced, bool(traced))
    end = traced[-1] + 1 if traced and traced[-1] == 4 or traced == [0] else None
    text = f"profile of steps {steps}: tensorboard --logdir {tmp_path}"
    assert messages == ({end: text} if end else {})


# Curves.


@pytest.fixture
def figures(monkeypatch):
    """Draws rows; the figures that were saved."""
    figures, save = [], Figure.savefig

    def keep(self, *args, **kwargs):
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.fixture
def panels(figures):
    """Draws rows; returns {panel: {label: points}} of what is in the picture."""

    def draw(rows, metrics=("top_1_accuracy",), width=1320):
        data = writers.draw_curves(rows, "a title", metrics, ())
        with Image.open(io.BytesIO(data)) as picture:
            assert (picture.format, picture.size) == ("PNG", (width, 396))
            assert len(np.unique(np.asarray(picture.convert("L")))) > 10
        figure = figures[-1]
        assert figure.get_suptitle() == "a title"
        return {
            axes.get_title(): {
                str(line.get_label()): list(zip(*line.get_data(), strict=True))
                for line in axes.lines
            }
            for axes in figure.axes
        }

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


def test_the_scores_of_one_class_are_drawn_only_if_asked_for(panels):
    scores: Any = {"macro_f1": 0.4, "f1/hair_loss": 0.5, "recall/b_accuracy": 0.6}
    rows = [row(2, epoch=1.0, loss=2.5, top_1_accuracy=0.25, **scores)]
    accuracy = ["eval top 1 accuracy"]
    by_loss = {name: [*curves] for name, curves in panels(rows, ("loss", "top_1_accuracy")).items()}
    assert by_loss == {"loss": ["eval loss"], "top 1 accuracy": accuracy, "learning rate": []}
    by_class = panels(rows, ("f1/hair_loss", "top_1_accuracy"))
    assert [*by_class["f1/hair loss, top 1 accuracy"]] == ["eval f1/hair loss", *accuracy]


def test_curves_of_a_step_evaluated_again_show_the_last(panels):
    rows = [row(s, epoch=e, loss=x) for s, e, x in ((4, 2.0, 9.0), (2, 1.0, 7.0), (4, 2.0, 3.0))]
    assert panels(rows)["loss"] == {"eval loss": [(1.0, 7.0), (2.0, 3.0)]}


def test_curves_of_nothing_and_of_what_is_not_finite(panels):
    assert panels([]) == {"loss": {}, "top 1 accuracy": {}, "learning rate": {}}
    strange = [math.nan, math.inf, 1.0, -math.inf]
    actual = panels([row(i, "train", epoch=float(i), loss=x) for i, x in enumerate(strange)])
    np.testing.assert_array_equal(actual["loss"]["train loss"], list(enumerate(strange)))


@pytest.mark.parametrize(
    ("epochs", "steps", "unit", "ticks"),
    [
        (1, 7, "epoch", ["0", "1"]),
        (2, 9, "epoch", ["0", "1", "2"]),
        (5, 50, "epoch", ["0", "1", "2", "3", "4", "5"]),
        (12.5, 50, "epoch", ["0", "2", "4", "6", "8", "10", "12"]),
        (25, 50, "epoch", ["0", "5", "10", "15", "20", "25"]),
        (100, 500, "epoch", ["0", "20", "40", "60", "80", "100"]),
        (0.4, 10**6, "step", ["0", "200k", "400k", "600k", "800k", "1M"]),
        (0.001, 1, "step", ["0", "1"]),
    ],
)
def test_the_axis_has_whole_epochs_or_steps(figures, epochs, steps, unit, ticks):
    """A panel whose only point is the last evaluation, too."""
    rows = [
        row(int(part * steps), "train", epoch=part * epochs, loss=1.0) for part in (0.5, 0.75, 1)
    ]
    rows.append(row(steps, epoch=epochs, top_1_accuracy=0.5))
    writers.draw_curves(rows, "", ["top_1_accuracy"], ())
    for axes in figures[-1].axes:
        low, high = axes.get_xlim()
        labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        assert [label.get_text() for x, label in labels if low <= x <= high] == ticks
        assert axes.get_xlabel() == unit


def test_the_colour_is_the_split_and_the_style_the_quantity(figures):
    scores = {"loss": 1.0, "top_1_accuracy": 0.5, "top_5_accuracy": 0.75}
    rows = [row(s, split, epoch=s, **scores) for s in (1, 2) for split in ("train", "eval")]
    writers.draw_curves(rows, "", ["top_1_accuracy"], ["top_1_accuracy"])
    colours, styles = {}, {}
    for line in [line for axes in figures[-1].axes for line in axes.lines]:
        split, _, quantity = line.get_label().partition(" ")
        colours.setdefault(split, set()).add(line.get_color())
        styles.setdefault(quantity, set()).add(line.get_linestyle())
    assert colours == {"train": {palette.TRAIN}, "eval": {palette.EVAL}}
    assert styles["top 1 accuracy"] == {"-"} and styles["top 5 accuracy"] == {"--"}
    loss, scores, _ = figures[-1].axes
    texts = [[label.get_text() for label in axes.get_yticklabels()] for axes in (loss, scores)]
    assert "50.0 %" in texts[1] and not any("%" in text for text in texts[0])


# wandb.


@pytest.fixture
def wandb(monkeypatch):
    """The stand-in; `calls` is what it was asked to do."""
    from tensorflow.python.ops import gen_summary_ops

    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    module, make = types.ModuleType("wandb"), gen_summary_ops.create_summary_file_writer
    calls = []

    def patch(root_logdir):
        def writer(*args, **kwargs):
            calls.append(("events", kwargs["logdir"].numpy().decode()))
            return make(*args, **kwargs)

        calls.append(("patch", root_logdir))
        monkeypatch.setattr(gen_summary_ops, "create_summary_file_writer", writer)

    def init(**options):
        calls.append(("init", options))
        finish = lambda exit_code: calls.append(("finish", exit_code))  # noqa: E731
        return types.SimpleNamespace(id=options["id"] or "new", finish=finish)

    tensorboard = types.SimpleNamespace(patch=patch)
    vars(module).update(calls=calls, init=init, tensorboard=tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def write_row(workdir):
    reporter = Reporter(workdir)
    reporter.train({"step": 1, "loss": 2.0}, "")
    reporter.close()


def test_wandb_follows_the_events_of_the_run_and_of_its_resumption(wandb, tmp_path, capsys):
    workdir = str(tmp_path / "run_7")
    (tmp_path / "run_7").mkdir()
    with writers.synced_to_wandb(workdir, WANDB_RECIPE):
        write_row(workdir)
    (patch, init, events, finish) = wandb.calls
    assert (patch, events, finish) == (("patch", workdir), ("events", workdir), ("finish", 0))
    options = init[1]
    assert options["sync_tensorboard"]
    assert (options["project"], options["name"], options["config"]) == (
        "resnet",
        "run_7",
        WANDB_RECIPE,
    )
    assert (options["id"], options["resume"], options["dir"]) == (None, "allow", workdir)
    wandb.calls.clear()
    with pytest.raises(KeyError), writers.synced_to_wandb(workdir, WANDB_RECIPE):
        raise KeyError
    assert wandb.calls[1][1]["id"] == "new"
    assert wandb.calls[-1] == ("finish", 1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("place", ["import", "patch", "init", "finish"])
def test_a_failing_wandb_is_one_line(place, wandb, tmp_path, capsys, monkeypatch):
    def fail(**_):
        raise ValueError("no key\nand more")

    if place == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    elif place == "patch":
        wandb.tensorboard.patch = fail
    else:
        run = types.SimpleNamespace(id="x", finish=fail)
        wandb.init = fail if place == "init" else lambda **_: run
    with writers.synced_to_wandb(str(tmp_path), WANDB_RECIPE):
        write_row(str(tmp_path))
    (line,) = capsys.readouterr().out.splitlines()
    reason = ": pip install -r requirements-wandb.txt; " if place == "import" else ": no key; "
    assert line.startswith("NOTE config.tracker=wandb: ") and reason in line
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "like"),
    [
        *[("top_1_accuracy", True), ("top_5_accuracy", True), ("accuracy", True), ("f1/a", True)],
        *[("accuracy_loss", False), ("x/accuracy", False), ("f1/b", False), ("a", False)],
    ],
)
def test_metrics_of_one_kind_end_in_the_same_word(name, like):
    assert writers.is_like(name, ("top_1_accuracy", "f1/a")) == like
