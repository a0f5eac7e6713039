"""The report of a run: its figures against others' code, its page against hostile names."""

import csv
import dataclasses
import io
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from etils import epath
from sklearn import metrics

import run as runs
import train
from benchmarks.resnet.records import open_records
from benchmarks.resnet.use import classification, exhibits
from benchmarks.resnet.use.classification import Predictions
from engine.cluster import preemption
from errors import UserError
from modes import report, trained
from modes.report import charts, page
from modes.report.examine import Examined
from modes.report.record import Record, Speed
from ops.images import manifest
from tests.conftest import make_tiny_config
from tests.modes.test_trained import STORED
from tests.test_train import quick_compilation, stop_at_batch  # noqa: F401 (a fixture)

per_class: Any = metrics.precision_recall_fscore_support  # its stubs know less than it takes
macro_f1: Any = metrics.f1_score
ROOT = pathlib.Path(__file__).parents[2]
HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b</td>", "{{ 7*7 }}")


@pytest.fixture(scope="module")
def workdir(tiny_records, tmp_path_factory, quick_compilation):  # noqa: F811 (the fixture)
    """A run of 12 steps that was stopped in between, and resumed."""
    folder = str(tmp_path_factory.mktemp("runs") / "tiny")
    origin = {"file": "configs/digits.py", "changes": {"train_steps": ["15 epochs", "12"]}}
    settings = runs.read(make_tiny_config(tiny_records), folder, origin)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "_requested", None)
        preemption.listen(lambda *_: None)
        stop_at_batch(patch, "train_batches", 7)
        with pytest.raises(preemption.Preempted):
            train.train_and_evaluate(settings)
    for number, handler in before.items():
        signal.signal(number, handler)
    train.train_and_evaluate(settings)
    return folder


@pytest.fixture(scope="module")
def resumed(workdir):
    """The step at which the run was resumed."""
    first, second = trained.load(workdir).manifest["starts"]
    assert first["step"] == 0 < second["step"] < 12
    return second["step"]


@pytest.fixture(scope="module")
def written(workdir):
    """The folder of the report, as the command without --config writes it."""
    command = [sys.executable, "main.py", "--mode=report", f"--workdir={workdir}"]
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # the same scores as here
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout and "Traceback" not in done.stderr
    return pathlib.Path(workdir) / "report"


class Parsed(HTMLParser):
    """The tags, the attributes and the text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text = set(), [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += f" {data}"


def assert_harmless(html):
    """The page runs nothing and loads nothing."""
    parsed = Parsed(html)
    assert not parsed.tags & {"script", "link", "iframe", "object", "form", "a", "base"}
    for name, value in parsed.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "href") or value.startswith("data:image/")
    assert not re.search(r"https?:|url\(|@import", html)
    assert len(html) < 5e6
    return parsed


def metric_rows(workdir):
    return list(map(json.loads, pathlib.Path(workdir, "metrics.jsonl").read_text().splitlines()))


def table(data):
    return list(csv.reader(io.StringIO(data.decode())))


def test_what_is_written_is_said(tmp_path, capsys):
    files = {"report.html": b"x" * 1_750_000, "b.csv": b"1", "a.csv": b"2"}
    report._write(epath.Path(tmp_path / "run" / "report"), files)
    folder = tmp_path / "run" / "report"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    text = f"report: {folder}/report.html (1.8 MB)\n"
    assert capsys.readouterr().out == f"{text}  beside it: a.csv, b.csv\n"
    report._write(epath.Path(folder), {"report.html": files["report.html"]})
    assert capsys.readouterr().out == text


def test_the_page_says_what_the_run_was(written, workdir, resumed):
    parsed = assert_harmless((written / "report.html").read_text())
    last = [row for row in metric_rows(workdir) if row["split"] == "eval"][-1]
    text = " ".join(parsed.text.split())
    assert f"Top 1 accuracy {100 * last['top_1_accuracy']:.2f} %" in text
    assert "on 23 images" in text and "evaluated again on 23 images" in text
    assert "During training this checkpoint had" not in text  # the same score again
    assert f"resumed at step {resumed}" in text and "It trained for all of its 12 steps." in text
    assert "train_steps 15 epochs 12" in text and "All other values are those of" in text
    assert f"python predict.py photo.jpg folder/ --workdir={workdir}" in text
    assert "polyline" in parsed.tags and "svg" in parsed.tags


def test_the_files_agree_with_the_records_and_scikit_learn(written, workdir, tiny_records):
    names, *rows = table((written / "predictions.csv").read_bytes())
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    assert list(columns["label"]) == [f"n{i % 4}" for i in range(23)]
    right = [a == b for a, b in zip(columns["label"], columns["guess_1"], strict=True)]
    assert columns["correct"] == tuple(str(int(x)) for x in right)
    last = metric_rows(workdir)[-1]
    assert last["split"] == "eval" and np.mean(right) == last["top_1_accuracy"]
    shares = np.array([columns[f"probability_{i}"] for i in range(1, 5)], float)
    np.testing.assert_allclose(shares.sum(0), 1, atol=3e-6)
    assert (np.diff(shares, axis=0) <= 0).all()

    classes = [f"n{i}" for i in range(4)]
    head, *counts = table((written / "confusion.csv").read_bytes())
    wanted = metrics.confusion_matrix(columns["label"], columns["guess_1"], labels=classes)
    assert head[1:] == classes == [row[0] for row in counts]
    np.testing.assert_array_equal(np.array([row[1:] for row in counts], int), wanted)
    measured = per_class(columns["label"], columns["guess_1"], labels=classes, zero_division=np.nan)
    for row in table((written / "per_class.csv").read_bytes())[1:]:
        precision, recall, f1, support = (column[classes.index(row[0])] for column in measured)
        np.testing.assert_allclose([float(x) for x in row[2:5]], [precision, recall, f1], atol=1e-6)
        assert int(row[1]) == support


def random_predictions(classes, count, seed=0):
    """Predictions of `count` examples, half of them right."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(count, classes))
    labels = draw.integers(0, classes, count)
    logits[np.arange(count // 2), labels[: count // 2]] += 6
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    top = np.argsort(-shares, axis=1)[:, :5]
    best = np.take_along_axis(shares, top, 1)
    return Predictions(draw.integers(0, 23, count), labels, top, best, shares[range(count), labels])


@pytest.fixture(scope="module")
def source(tiny_records, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache") / "index.json")
    return open_records(tiny_records, "validation-*", 4, cache, "eval")


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_any_number_of_classes(classes, source, workdir):
    names = [f"{HOSTILE[i % 4]}{i}" for i in range(classes)]
    many = dataclasses.replace(source, num_classes=classes, class_names=tuple(names))
    predictions = random_predictions(classes, 3000)
    counts = [7] * classes
    content = manifest.DataManifest(tuple(names), {}, (), {}, tuple(counts), (("<b>", "{{ x }}"),))
    shown = exhibits.make(predictions, many, content)
    assert [one.title for one in shown][-1] == "Files left out of the data"
    assert (shown[0].matrix is None) == (classes > 50)
    measured = per_class(
        predictions.labels, predictions.guesses, labels=range(classes), zero_division=np.nan
    )
    rows = table(shown[1].files["per_class.csv"])[1:]
    known = np.flatnonzero(measured[3])
    assert len(rows) == len(known)
    f1 = [float(row[4]) for row in rows]
    assert f1 == sorted(f1)
    by_name = {row[0]: row for row in rows}
    for i in known:
        row = by_name[names[i]]
        np.testing.assert_allclose(
            [float(x) for x in row[2:5]], [m[i] for m in measured[:3]], atol=1e-6
        )
        assert row[5] == "7"
    assert shown[1].rows[-1][0] == "mean over classes"
    macro = macro_f1(
        predictions.labels, predictions.guesses, average="macro", labels=known, zero_division=0
    )
    assert shown[1].rows[-1][4] == f"{100 * macro:.1f}\u00a0%"
    html = page.render(record_of(workdir), Examined(12, 3000, {}, shown), None)
    parsed = assert_harmless(html)
    assert all(name in parsed.text for name in names[:3])
    assert "During training this checkpoint had" not in parsed.text


def record_of(workdir):
    return Record.read(trained.settings(workdir))


def test_a_file_name_is_only_text(source, workdir):
    picture = exhibits.make(random_predictions(4, 100), source, None)[3].pictures[0]
    assert re.fullmatch(r"\d+\.JPEG", picture.caption[-1])
    hostile = dataclasses.replace(picture, caption=[HOSTILE[1]], flag=HOSTILE[0])
    shown = [page.Exhibit(title=HOSTILE[0], text=HOSTILE[1], pictures=[hostile])]
    assert_harmless(page.render(record_of(workdir), Examined(12, 23, {}, shown), None))


def test_pictures_never_make_the_page_too_large(workdir):
    pictures = [page.Picture(bytes([i]) * 500_000, [f"picture {i}"]) for i in range(20)]
    shown = [page.Exhibit(title="many", pictures=pictures)]
    html = page.render(record_of(workdir), Examined(12, 23, {}, shown), None)
    assert 3e6 < len(html) < 5e6 and "picture 0" in html and "picture 19" not in html


def test_calibration_is_guos():
    draw = np.random.default_rng(1)
    confidence, correct = draw.uniform(0.1, 1, 500), draw.random(500) < 0.6
    confidence[:3] = 0.1, 0.5, 1.0
    wanted = 0.0
    for i in range(10):
        mine = [k for k in range(500) if i / 10 < confidence[k] <= (i + 1) / 10 + 1e-12]
        if mine:
            gap = np.mean([correct[k] for k in mine]) - np.mean([confidence[k] for k in mine])
            wanted += len(mine) / 500 * abs(gap)
    error, bins = classification.calibration(confidence, correct, 10)
    assert error == pytest.approx(wanted, abs=1e-9)
    assert sum(one.count for one in bins) == 500


def test_a_label_is_doubtful_where_the_model_is_as_sure_as_of_right_ones():
    predictions = Predictions(
        ids=np.arange(4),
        labels=np.array([0, 0, 1, 1]),
        top=np.array([[0, 1], [0, 1], [0, 1], [0, 1]]),
        probabilities=np.array([[0.9, 0.1], [0.7, 0.3], [0.85, 0.15], [0.75, 0.25]]),
        of_label=np.array([0.9, 0.7, 0.15, 0.25]),
    )  # class 0 has 0.8 on average for its own examples
    assert classification.doubtful_labels(predictions, 2).tolist() == [False, False, True, False]
    assert classification.worst_mistakes(predictions).tolist() == [2, 3]


def test_confused_pairs_are_the_commonest_mistakes():
    counts = np.array([[5, 2, 0], [7, 1, 1], [0, 0, 9]])
    assert classification.confused_pairs(counts, 2) == [(1, 0, 7), (0, 1, 2)]
    assert len(classification.confused_pairs(counts, 9)) == 3


def test_figures_of_speed_are_those_of_the_rows(workdir, resumed):
    rows = metric_rows(workdir)
    speed = Speed.of(record_of(workdir))
    trained_rows = [row for row in rows if row["split"] == "train"]
    assert [row["step"] for row in trained_rows] == [2, 4, 6, 8, 10, 12]
    cut = 2 * (resumed // 2) + 2  # the first row after the resume has fewer steps
    steps = [cut - resumed if row["step"] == cut else 2 for row in trained_rows]
    seconds = [row["step_seconds"] * n for row, n in zip(trained_rows, steps, strict=True)]
    assert speed.training == pytest.approx(sum(seconds))
    assert speed.chips == 8 and speed.unit == "images" and not math.isnan(speed.compiling)
    evaluated = [row["seconds"] for row in rows if row["split"] == "eval"]
    assert speed.evaluating == pytest.approx(sum(evaluated)) and min(evaluated) > 0
    total = speed.training + speed.evaluating + speed.compiling
    assert speed.chip_hours == pytest.approx(8 * total / 3600)


def test_a_checkpoint_knows_its_starts_and_its_recipe(workdir):
    facts = trained.load(workdir).manifest
    assert {start["chips"] for start in facts["starts"]} == {8}
    assert facts["recipe"] == {
        "file": "configs/digits.py",
        "changes": {"train_steps": ["15 epochs", "12"]},
    }


def test_another_run_stands_beside_it(workdir, tmp_path, capsys):
    copy = str(tmp_path / "other")
    shutil.copytree(workdir, copy)
    report.report(trained.settings(workdir), "best", copy)
    html = (pathlib.Path(workdir) / "report" / "report.html").read_text()
    text = Parsed(html).text
    assert "compared with other" in text and "best evaluation of other" in text
    assert "Differences between the runs" not in text  # there are none
    assert "report.html" in capsys.readouterr().out


def test_without_its_data_a_run_still_has_curves(tmp_path):
    """The stored run is of an older program; its data are gone."""
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    report.report(trained.settings(str(tmp_path / "run")), "latest", "")
    parsed = assert_harmless((tmp_path / "run" / "report" / "report.html").read_text())
    assert "The evaluation data cannot be read" in parsed.text and "svg" in parsed.tags
    assert "older program" in parsed.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("latest", "/nowhere"), "--compare=/nowhere"),
        (("7", ""), "--checkpoint=7"),
    ],
)
def test_mistakes_take_one_line(workdir, arguments, words):
    with pytest.raises(UserError, match=words) as caught:
        report.report(trained.settings(workdir), *arguments)
    assert "\n" not in str(caught.value)


def test_ticks_are_round_and_enclose_the_values():
    draw = np.random.default_rng(3)
    for _ in range(300):
        low = float(draw.normal() * 10 ** draw.uniform(-6, 6))
        high = low + float(abs(draw.normal()) * 10 ** draw.uniform(-6, 6))
        ticks = charts.ticks(low, high)
        step = ticks[1] - ticks[0]
        assert 2 <= len(ticks) <= 8
        assert ticks[0] <= low + 1e-6 * step and ticks[-1] >= high - 1e-6 * step
    assert charts.ticks(0.5, 0.5)[0] < 0.5 < charts.ticks(0.5, 0.5)[-1]
