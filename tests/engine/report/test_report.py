"""What a run says: rows, clocks, the terminal, TensorBoard, learning curves, profiles."""

import io
import json
import logging
import math
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from engine.report import writers as report
from engine.report.writers import History, Profiler, Progress, Reporter
from errors import OutputError

NAN = math.nan


def row(step, split="eval", **values):
    return {"split": split, "step": step, **values}


def lines(folder):
    """The rows of metrics.jsonl, which must be JSON to the letter."""
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


# History.


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


@pytest.mark.parametrize(
    "torn",
    ['{"split": "eval", "st', "{", "\0\0\0\0", b"\xff\xfe{", '{"a": 1}\n{"b"\n{"c": 2}\n'],
)
@pytest.mark.parametrize("before", [0, 2])
def test_a_torn_line_is_dropped_and_not_continued(torn, before, tmp_path):
    path, good = tmp_path / "metrics.jsonl", [row(i, loss=i / 3) for i in range(before)]
    torn = torn.encode() if isinstance(torn, str) else torn
    path.write_bytes("".join(json.dumps(r) + "\n" for r in good).encode() + torn)
    kept = good + ([{"a": 1}] if b"a" in torn and b"\n" in torn else [])
    was = path.read_bytes()
    assert History(str(tmp_path), writes=False).rows == kept
    assert path.read_bytes() == was
    history = History(str(tmp_path), writes=True)
    assert history.rows == kept
    history.add(row(9))
    assert lines(tmp_path) == [*kept, row(9)]
    assert History(str(tmp_path), writes=False).rows == [*kept, row(9)]


def test_a_whole_line_without_its_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1)))
    History(str(tmp_path), writes=True).add(row(2))
    assert lines(tmp_path) == [row(1), row(2)]


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


def test_scores_are_what_the_benchmark_gave(tmp_path):
    history = History(str(tmp_path), writes=False)
    history.add(row(4, "train", loss=3.0))
    known = {"epoch": 1.5, "examples": 10, "seconds": 2.0}
    history.add(row(4, loss=0.5, top_1_accuracy=0.25, **known))
    history.add(row(8, loss=0.75, **known))
    history.add(row(8, loss=0.25, **known))
    assert history.scores() == {4: {"loss": 0.5, "top_1_accuracy": 0.25}, 8: {"loss": 0.25}}


# Progress.


@pytest.fixture
def clock(monkeypatch):
    """A clock to be set by hand."""
    now = types.SimpleNamespace(seconds=5000.0)
    monkeypatch.setattr(report.time, "monotonic", lambda: now.seconds)
    return now


def test_windows_leave_pauses_out(clock):
    progress = Progress(100, 400)
    assert math.isnan(progress.remaining(100))
    clock.seconds += 12.0
    progress.pause(1.5)
    progress.pause(0.5)
    assert progress.window(120) == (pytest.approx(10.0), 20)
    assert progress.remaining(120) == pytest.approx(280 * 0.5)
    clock.seconds += 8.0
    assert progress.window(130) == (pytest.approx(8.0), 10)
    assert progress.remaining(130) == pytest.approx(270 * 0.8)
    assert progress.remaining(400) == 0


def test_what_is_left_includes_evaluations(clock):
    progress = Progress(0, 50)
    clock.seconds += 10.0
    progress.window(10)
    progress.evals_left, progress.eval_seconds = 3, 7.0
    assert progress.remaining(10) == pytest.approx(40 * 1.0 + 21.0)
    assert progress.remaining(20) == pytest.approx(30 * 1.0 + 21.0)


def test_odd_windows_stay_finite(clock):
    progress = Progress(0, 50)
    seconds, steps = progress.window(0)  # no step, no time
    assert 0 < seconds < 1e-6 and steps == 1
    clock.seconds += 1.0
    progress.pause(3.0)  # clocks differ by a little
    assert progress.window(1)[0] > 0


# In words.


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (245, "4:05"),
        (3599.7, "1:00:00"),
        (3723, "1:02:03"),
        (100 * 3600, "100:00:00"),
        (NAN, "?"),
        (math.inf, "?"),
    ],
)
def test_duration(seconds, words):
    assert report.duration(seconds) == words


def test_numbers_and_quantities():
    assert report.number("top_1_accuracy", 0.76543) == "76.54 %"
    assert report.number("accuracy", 1.0) == "100.00 %"
    assert report.number("loss", 2.34567) == "2.3457"
    assert report.quantity("top_5_accuracy", 0.5) == "top 5 accuracy 50.00 %"
    assert report.quantity("loss", NAN) == "loss nan"


# The reporter.


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
    found = {
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
    assert found == expected
    assert sorted(os.listdir(tmp_path)) == ["eval"]
    names = sorted(os.listdir(folder))
    assert names[0].startswith("events.out.tfevents")
    assert names[1:] == ["learning_curves.png", "metrics.jsonl"]


def test_events_that_cannot_be_written_are_one_line(tmp_path, monkeypatch, caplog):
    from clu import metric_writers

    class Full(metric_writers.MultiWriter):
        def write_scalars(self, step, scalars):
            raise OSError("No space left\nin the house")

    monkeypatch.setattr(metric_writers, "SummaryWriter", lambda folder: Full([]))
    reporter = Reporter(str(tmp_path))
    text = f"cannot write TensorBoard events in {tmp_path}: No space left"
    with pytest.raises(OutputError) as told:
        for step in range(1000):  # it happens in a thread: one of the next rows tells
            reporter.train({"step": step, "epoch": 0.0}, "")
    assert str(told.value) == text
    caplog.clear()
    reporter.close()
    assert [r.getMessage() for r in caplog.records if r.name == "tpu_suite"] in ([], [text])


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


def test_parameters_are_listed(tmp_path):
    reporter = Reporter(str(tmp_path))
    params = {"stem": {"kernel": np.zeros((7, 7, 3, 64))}, "bias": np.zeros(1000)}
    assert reporter.overview(params) == "10,408 parameters in 2 arrays"
    table = (tmp_path / "parameters.txt").read_text()
    assert "stem/kernel" in table
    assert "(7, 7, 3, 64)" in table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_live_line_makes_way(clock, monkeypatch, tmp_path):
    screen, wipe = Terminal(), "\r\x1b[K"
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "20")
    log = types.SimpleNamespace(info=lambda form, text: screen.write(form % text + "\n"))
    monkeypatch.setattr(report, "_log", log)
    reporter = Reporter(str(tmp_path))
    reporter.say("one")
    reporter.live("a")
    clock.seconds += 0.4
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


def test_no_live_line_in_a_file(tmp_path, monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    reporter = Reporter(str(tmp_path))
    reporter.live("a")
    reporter.say("b")
    reporter.close()
    assert file.getvalue() == ""


def test_tensorflow_waits_for_the_first_row(tmp_path):
    program = """
import sys
sys.modules["tensorflow"] = None  # importing it now raises ImportError
from engine.report import Reporter
reporter = Reporter(sys.argv[1])
reporter.overview({})
reporter.live("live")
reporter.say("text")
print("so far", flush=True)
try:
    reporter.train({"step": 1, "epoch": 0.0}, "")
except ImportError:
    print("wanted")
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    root = pathlib.Path(report.__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert (done.stdout, done.returncode) == ("so far\nwanted\n", 0), done.stderr
    assert [r["step"] for r in lines(tmp_path)] == [1]


# Profiles.


@pytest.mark.parametrize("steps", ["5", "5:", ":5", "5:5", "9:5", "-3:5", "a:b", "1:2:3", " "])
def test_a_bad_profile_is_refused_by_key_and_value(steps, tmp_path):
    with pytest.raises(OutputError) as told:
        Profiler(steps, str(tmp_path))
    said = f"config.profile_steps={steps!r} is not begin:end, such as 100:110"
    assert str(told.value) == said


def profiled(profiler, monkeypatch, first, last):
    """What a run of the steps [first, last) does: traced steps, where it starts, what it says."""
    calls, said, traced, running = [], {}, [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: running.append(path))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(running.pop()))
    for step in range(first, last):
        profiler.before(step)
        traced += [step] * len(running)
        if text := profiler.after(step + 1, ()):
            said[step + 1] = text
    profiler.close()
    profiler.close()
    assert not running
    return traced, len(calls), said


@pytest.mark.parametrize(
    ("steps", "run", "traced"),
    [
        ("", (0, 9), []),
        ("3:5", (0, 9), [3, 4]),
        ("0:1", (0, 9), [0]),
        ("3:5", (4, 9), [4]),
        ("3:5", (5, 9), []),
        ("3:50", (0, 6), [3, 4, 5]),
    ],
)
def test_the_steps_that_are_traced(steps, run, traced, monkeypatch, tmp_path):
    found, stops, said = profiled(Profiler(steps, str(tmp_path)), monkeypatch, *run)
    assert (found, stops) == (traced, bool(traced))
    end = traced[-1] + 1 if traced and traced[-1] == 4 or traced == [0] else None
    text = f"profile of steps {steps}: tensorboard --logdir {tmp_path}"
    assert said == ({end: text} if end else {})
