"""The report of a run: its figures against others' code, its page against hostile names."""

import csv
import dataclasses
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

import train
from benchmarks import base
from benchmarks.records import RecordFiles
from benchmarks.resnet.records import open_records
from benchmarks.resnet.use import exhibits
from benchmarks.resnet.use.exhibits import Photos, Predictions
from commands import report
from commands.report import page
from commands.report.record import Examined, Record
from common.errors import UserError
from common.images.input_spec import NAMED
from engine.checkpoint import model_source
from engine.cluster import preemption
from engine.plan import read_settings
from tests.conftest import make_tiny_config
from tests.test_train import stop_at_batch

per_class: Any = metrics.precision_recall_fscore_support  # its stubs know less than it takes
macro_f1: Any = metrics.f1_score
ROOT = pathlib.Path(__file__).parents[3]
HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b</td>", "{{ 7*7 }}")


@pytest.fixture(scope="module")
def workdir(tiny_records, tmp_path_factory):
    """A run of 12 steps that was stopped in between, and resumed."""
    folder = str(tmp_path_factory.mktemp("runs") / "tiny")
    origin = {"file": "configs/digits.py", "changes": {"train_steps": ["15 epochs", "12"]}}
    settings = read_settings(make_tiny_config(tiny_records), folder, origin)
    before = {number: signal.getsignal(number) for number in preemption.stop_signals()}
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
    first, second = model_source.load(workdir).manifest["starts"]
    assert first["step"] == 0 < second["step"] < 12
    return second["step"]


@pytest.fixture(scope="module")
def written(workdir):
    """The folder of the report, as the command without --config writes it."""
    command = [sys.executable, "main.py", "--mode=report", f"--workdir={workdir}"]
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # the same scores as here
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = pathlib.Path(workdir) / "report"
    assert f"report: {folder}/report.html (" in done.stdout and "Traceback" not in done.stderr
    files = "  more files: confusion.csv, per_class.csv, predictions.csv\n"
    assert done.stdout.endswith(f" MB)\n{files}")
    return folder


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


@pytest.mark.long
def test_the_page_says_what_the_run_was(written, workdir, resumed):
    parsed = assert_harmless((written / "report.html").read_text())
    last = [row for row in metric_rows(workdir) if row["split"] == "eval"][-1]
    text = " ".join(parsed.text.split())
    assert f"Top 1 accuracy {100 * last['top_1_accuracy']:.2f} %" in text
    assert f"top 5 accuracy {100 * last['top_5_accuracy']:.2f} %" in text
    assert "on 23 images" in text and "evaluated again on 23 images" in text
    assert "During training this checkpoint had" not in text  # the same score again
    assert f"resumed at step {resumed}" in text and "It trained for all of its 12 steps." in text
    assert "train_steps 15 epochs 12" in text and "All other values are from" in text
    assert f"python predict.py photo.jpg folder/ --workdir={workdir}" in text
    assert ("alt", "Learning curves") in parsed.attributes
    # The model sees 16 pixels as one cell: no heat map is beside a picture.
    assert ("class", "pictures wide") not in parsed.attributes
    pictures = [value for _, value in parsed.attributes if value.startswith("data:image/")]
    hits = round(23 * last["top_1_accuracy"])
    assert len(pictures) == 1 + 23 - hits + min(hits, 12)  # the first are the learning curves


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
    return open_records(RecordFiles(tiny_records, "validation-*", "eval", cache), 4)


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_any_number_of_classes(classes, source, workdir):
    names = [f"{HOSTILE[i % 4]}{i}" for i in range(classes)]
    many = dataclasses.replace(source, num_classes=classes, class_names=tuple(names))
    predictions = random_predictions(classes, 3000)
    shown = exhibits.make(predictions, Photos(many, NAMED["tensorflow"]))
    known = {"labels": range(classes), "zero_division": np.nan}
    measured = per_class(predictions.labels, predictions.guesses, **known)
    rows = table(shown[0].files["per_class.csv"])[1:]
    known = np.flatnonzero(measured[3])
    assert len(rows) == len(known)
    f1 = [float(row[4]) for row in rows]
    assert f1 == sorted(f1)
    by_name = {row[0]: row for row in rows}
    for i in known:
        row = by_name[names[i]]
        expected = [column[i] for column in measured[:3]]
        np.testing.assert_allclose([float(x) for x in row[2:5]], expected, atol=1e-6)
    assert shown[0].rows[-1][0] == "mean over classes"
    # Of all classes that are labels or guesses, as the score `macro_f1`.
    macro = macro_f1(predictions.labels, predictions.guesses, average="macro", zero_division=0)
    assert shown[0].rows[-1][4] == f"{100 * macro:.1f}\u00a0%"
    html = page.render(record_of(workdir), Examined(12, 3000, {}, shown))
    parsed = assert_harmless(html)
    assert all(row[0] in parsed.text for row in shown[0].rows[:3])
    assert "During training this checkpoint had" not in parsed.text


def record_of(workdir):
    return Record.read(model_source.settings(workdir))


def test_a_file_name_is_only_text(source, workdir):
    photos = Photos(source, NAMED["tensorflow"])
    pictures = exhibits.make(random_predictions(4, 100), photos)[1].pictures
    guesses = [float(re.sub(r".*, |\u00a0%", "", each.caption[0])) for each in pictures]
    assert len(set(guesses)) > 9 and guesses == sorted(guesses, reverse=True)  # the worst first
    picture = pictures[0]
    assert re.fullmatch(r"\d+\.JPEG", picture.caption[-1])
    hostile = picture._replace(caption=[HOSTILE[1]], flag=HOSTILE[0])
    shown = [page.Exhibit(title=HOSTILE[0], text=HOSTILE[1], pictures=[hostile])]
    assert_harmless(page.render(record_of(workdir), Examined(12, 23, {}, shown)))


def test_heat_maps_are_beside_the_worst_mistakes_and_the_best_hits(source):
    asked = []

    def heat(encoded, classes):
        asked.append((encoded, classes))
        return np.ones((len(encoded), 8, 8), np.float32)

    predictions, spec = random_predictions(4, 100), NAMED["tensorflow"].at(8)
    _, mistakes, hits = exhibits.make(predictions, Photos(source, spec, heat))
    ((encoded, classes),) = asked  # all at once
    best = np.argsort(-predictions.probabilities[:, 0], kind="stable")
    right = best[predictions.correct[best]][:12]
    assert classes[24:].tolist() == predictions.guesses[right].tolist()
    assert (len(mistakes.pictures), len(hits.pictures), len(encoded)) == (24, 12, 36)
    captions = [picture.caption[0].split(", ")[0] for picture in hits.pictures]
    assert captions == [source.class_names[label] for label in predictions.labels[right]]
    for picture, data in zip((*mistakes.pictures, *hits.pictures), encoded, strict=True):
        photo, both = (np.asarray(Image.open(io.BytesIO(x)), int) for x in (data, picture.data))
        photo = photo.repeat(8, axis=0).repeat(8, axis=1)  # 24 pixels are enlarged to 192
        height, width, _ = photo.shape
        assert picture.wide and both.shape == (height, 2 * width + 4, 3)
        assert np.abs(both[:, :width] - photo).mean() < 20  # a JPEG of noise
        inside = both[height // 2, width + 4 + width // 2]
        assert inside[0] > inside[2] + 20  # as warm as can be


def test_pictures_never_make_the_page_too_large(workdir):
    pictures = [page.Picture(bytes([i]) * 500_000, [f"picture {i}"]) for i in range(20)]
    shown = [page.Exhibit(title="many", pictures=pictures)]
    html = page.render(record_of(workdir), Examined(12, 23, {}, shown))
    assert 3e6 < len(html) < 5e6 and "picture 0" in html and "picture 19" not in html


@pytest.mark.parametrize("known", [True, False])
def test_figures_of_speed_are_those_of_the_rows(known, workdir):
    rows, record = metric_rows(workdir), record_of(workdir)
    if not known:
        starts = [start | {"seconds": 0.0} for start in record.starts]
        record = dataclasses.replace(record, starts=starts)
    shown = dict(page.speed_rows(record))
    rate = np.median([row["images_per_second"] for row in rows if row["split"] == "train"])
    assert shown["throughput, median"] == f"{rate:,.0f} images/s"
    assert ("chip hours" in shown) == known


def test_without_its_data_a_run_still_has_curves(workdir, tmp_path, monkeypatch):
    # As a detector's, which takes the scores by name.
    monkeypatch.setattr(base.Benchmark, "headline", lambda self, scores: {"mAP": scores["mAP"]})
    copy = shutil.copytree(workdir, tmp_path / "run")
    path = max(copy.glob("checkpoints/*/manifest/metadata"), key=lambda p: int(p.parts[-3]))
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "config": {**facts["config"], "data_dir": "/gone"}}))
    report.report(model_source.settings(str(tmp_path / "run")), "latest")
    parsed = assert_harmless((tmp_path / "run" / "report" / "report.html").read_text())
    assert "This report shows no predictions. " in parsed.text and "/gone" in parsed.text
    assert ("alt", "Learning curves") in parsed.attributes


@pytest.mark.usefixtures("nothing_held_out")
def test_a_model_that_was_not_evaluated_has_no_verdict(workdir, tmp_path):
    copy = shutil.copytree(workdir, tmp_path / "run")
    trained = [row for row in metric_rows(copy) if row["split"] == "train"]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trained))
    for path in copy.glob("checkpoints/*/manifest/metadata"):
        facts = json.loads(path.read_text())
        path.write_text(json.dumps({**facts, "evaluations": []}))
    settings = model_source.settings(str(copy))
    report.report(dataclasses.replace(settings, steps_of="/runs/first"), "latest")
    parsed = assert_harmless((copy / "report" / "report.html").read_text())
    assert "config.hold_out=0" in parsed.text and "/runs/first" in parsed.text
    for word in ("accuracy", "target", "evaluated again", "no data", "not defined"):
        assert word not in parsed.text.partition("All ")[0], word
    assert ("alt", "Learning curves") in parsed.attributes


@pytest.mark.parametrize(
    "key",
    [
        *("benchmark", "config", "num_train_examples", "class_names", "input_spec", "recipe"),
        *("evaluations", "versions", "data", "imported", "starts", "target_metric"),
    ],
)
def test_what_a_manifest_may_lack(key, workdir, tmp_path, monkeypatch):
    copy = shutil.copytree(workdir, tmp_path / "run")
    path = max(copy.glob("checkpoints/*/manifest/metadata"), key=lambda p: int(p.parts[-3]))
    facts = json.loads(path.read_text())
    monkeypatch.setattr(page, "_curves", lambda record: b"")
    path.write_text(json.dumps({name: value for name, value in facts.items() if name != key}))
    try:
        record = Record.read(model_source.settings(str(copy)))
        assert_harmless(page.render(record, Examined(12)))
    except UserError as error:
        assert "\n" not in str(error) and f"no {key}" in str(error)


def test_rows_may_lack_values(workdir, tmp_path):
    copy = shutil.copytree(workdir, tmp_path / "run")
    rows = metric_rows(copy)
    firsts = [next(row for row in rows if row["split"] == split) for split in ("train", "eval")]
    lacking = [{k: v for k, v in row.items() if k != key} for row in firsts for key in row]
    lines = "".join(json.dumps(row) + "\n" for row in [*lacking, *rows])
    (copy / "metrics.jsonl").write_text(lines)
    record = Record.read(model_source.settings(str(copy)))
    assert_harmless(page.render(record, Examined(12)))
    assert "throughput, median" in dict(page.speed_rows(record))
