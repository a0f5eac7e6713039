"""Several labels per picture: scores as sklearn has them, and a run from a table to predict.py."""

import contextlib
import csv
import dataclasses
import io
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

import benchmarks
import predict
import train
from benchmarks.resnet import labels
from benchmarks.resnet.input import regularisation
from benchmarks.resnet.preparation.examples import tf_example
from benchmarks.resnet.settings import Objective
from commands import export, report
from commands.export import formats
from common.data.shards import read_some
from common.errors import ConfigError, DataError
from engine import evaluate
from engine.checkpoint import model_source
from engine.plan import read_settings
from scripts import prepare
from tests.conftest import make_tiny_config, opened
from tests.helpers.preparation import place, write_shards

NAMES = ("blue", "green", "none", "red")  # "none" is rare and real: it stands beside others
SEVERAL = labels.SeveralLabels(4, Objective(loss="bce_sum", label_smoothing=0.0, target=0.0))
_draw = np.random.default_rng(0)
LOGITS = _draw.normal(size=(60, 4)).round(1).astype(np.float32)  # with equal ones
LABELS = _draw.random((60, 4)) < [0.5, 0.1, 0.0, 0.9]


def as_rows():
    columns = {"logits": LOGITS, "label": LABELS, "id": np.arange(60)}
    return [{name: x[i::3] for name, x in columns.items()} for i in range(3)]


def predicted():
    for row in as_rows():
        answers = SEVERAL.predicted(row["logits"], row["label"])
        yield {name: np.asarray(values) for name, values in answers.items()} | row


def test_scores_are_sklearns():
    present = [0, 1, 3]
    sklearn: Any = metrics  # its types are too narrow
    expected = sklearn.average_precision_score(LABELS[:, present], LOGITS[:, present], average=None)
    np.testing.assert_allclose(
        labels.average_precisions(LOGITS, LABELS), [*expected[:2], np.nan, expected[2]]
    )
    scores = SEVERAL.score(predicted(), ())
    np.testing.assert_allclose(scores["mAP"], expected.mean())
    found = LOGITS > 0
    with np.errstate(all="ignore"):
        f1 = sklearn.f1_score(LABELS, found, average="macro", zero_division=0)
    np.testing.assert_allclose(scores["macro_f1"], f1)
    np.testing.assert_allclose(scores["exact_match"], sklearn.accuracy_score(LABELS, found))
    groups = SEVERAL.group_scores(predicted(), ("a", "b", "", "a"))
    assert [*groups] == ["a (0)", "b", "a (3)"]
    assert groups["b"] == (pytest.approx(expected[1]), LABELS[:, 1].sum())


def test_nothing_to_find_has_no_score():
    rows = [row | {"label": np.zeros_like(row["label"])} for row in predicted()]
    assert np.isnan(SEVERAL.score(iter(rows), ())["mAP"]) and not SEVERAL.group_scores(
        iter(rows), ()
    )


def test_mixing_takes_the_labels_of_the_other_row():
    images = jnp.arange(3 * 4 * 4 * 3, dtype=jnp.float32).reshape(3, 4, 4, 3)
    hot: Any = np.array([[1, 0], [0, 0], [1, 1]], bool)
    mixed = regularisation.mix(images, hot, jnp.arange(3), mixup=0.5, cutmix=0.0)
    assert mixed.others is not None
    np.testing.assert_array_equal(mixed.others, hot[[2, 0, 1]])


# --- A small set: the channels that are bright are the labels.


def picture(hot, seed):
    pixels = np.random.default_rng(seed).normal(60, 20, (20, 24, 3))
    pixels += 120 * np.array([hot[3], hot[1], hot[0]])
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()


def drawn(count):
    rows = np.random.default_rng(3).random((count, 4)) < [0.4, 0.4, 0.1, 0.4]
    return rows.astype(int)


@pytest.fixture(scope="module")
def tiny_labels(tmp_path_factory):
    """Records of 120 pictures with 0 to 4 of 4 labels, made from a table with one-hot columns."""
    folder = tmp_path_factory.mktemp("photos")
    hot = drawn(120)
    lines = [f"{i}.jpg,{','.join(map(str, row))}" for i, row in enumerate(hot)]
    table = "\n".join([f"file,{','.join(NAMES)}", *lines])
    files = {f"p/{i}.jpg": picture(row, i) for i, row in enumerate(hot)}
    place(folder, files | {"t.csv": table})
    out = tmp_path_factory.mktemp("records")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        prepare.prepare_path([str(folder), f"--out={out}", "--untimed"])
    return str(out), said.getvalue(), str(folder)


KEYS = {"num_label_classes": 0, "loss": "bce_sum", "label_smoothing": 0.0}


@pytest.fixture(scope="module")
def run(tiny_labels, tmp_path_factory):
    """(workdir, scores) of a run with all that mixes pictures."""
    workdir = str(tmp_path_factory.mktemp("several"))
    length = {"train_steps": "60", "steps_per_eval": "30"}
    config = make_tiny_config(tiny_labels[0], **KEYS, **length, bn_span=0, mixup=0.1)
    return workdir, train.train_and_evaluate(read_settings(config, workdir))


def test_prepare_says_what_it_found_and_writes_the_command(tiny_labels):
    out, said, _ = tiny_labels
    hot = drawn(120)
    counts = hot.sum(axis=1)
    assert "several of 4 labels each (labels in columns blue, green, none, red, one each)" in said
    assert f"4 labels, 0 to {counts.max()} per photo, {counts.mean():.2f} on average" in said
    assert f"{(counts == 0).sum()} of 120 photos have none" in said
    assert "left out" not in said and said.splitlines()[-1].count("--config.loss=bce_sum") == 1
    with open(f"{out}/manifest.json") as file:
        content = json.load(file)
    assert content["labels"] == "several" and content["num_label_classes"] == 4
    found = {row["name"]: row["train"] + row["validation"] for row in content["classes"]}
    assert found == dict(zip(NAMES, hot.sum(axis=0).tolist(), strict=True))
    # Each label gives its share, and so do pictures without one.
    assert all(row["validation"] >= 1 for row in content["classes"])


def test_batches_have_the_labels_of_the_table(tiny_labels):
    benchmark: Any = opened(benchmarks.load(make_tiny_config(tiny_labels[0], **KEYS).lock(), ""))
    hot = drawn(120)
    (batch,) = benchmark.eval_batches(128, 0, 1)
    source, seen = benchmark.source("eval"), 0
    for i, label, mask in zip(batch["id"], batch["label"], batch["mask"], strict=True):
        if mask:
            (_, name), seen = source.image(*read_some(source.shards, [int(i)])), seen + 1
            np.testing.assert_array_equal(label, hot[int(name.split(".")[0])].astype(bool))
    assert seen == benchmark.num_examples("eval") and batch["label"].dtype == bool
    spec = benchmark.batch_spec("train", 16)[0]["label"]
    first = next(benchmark.train_batches(16, 0, 1, 0))["label"]
    assert (spec.shape, spec.dtype) == (first.shape, first.dtype) == ((16, 4), np.bool_)
    assert benchmark.strata(source)[0] is None


def test_a_run_learns_the_labels_and_eval_and_report_show_it(run, capsys):
    """Three of the labels can be seen; by chance, the best is the share of the pictures: 0.33."""
    workdir, scores = run
    assert scores["mAP"] > 0.6 and scores["exact_match"] > 0.7
    assert {"macro_f1", "exact_match", "loss"} <= {*scores}
    manifest = model_source.peek(workdir)
    assert manifest is not None
    assert (manifest["labels"], manifest["target_metric"]) == ("several", "mAP")
    settings = model_source.settings(workdir)
    again = evaluate.evaluate(settings, "latest", 0)
    assert again["mAP"] == pytest.approx(scores["mAP"])
    report.report(settings, "latest")
    page = pathlib.Path(workdir, "report", "report.html").read_text()
    assert "Labels missed" in page and "Best hits" in page and "average precision" in page
    with open(f"{workdir}/report/per_class.csv") as file:
        table = {row["label"]: row for row in csv.DictReader(file)}
    mean = np.mean([float(row["average precision"]) for row in table.values()])
    assert mean == pytest.approx(scores["mAP"], abs=1e-5)
    with open(f"{workdir}/report/predictions.csv") as file:
        rows = list(csv.DictReader(file))
    assert np.mean([float(row["exact"]) for row in rows]) == pytest.approx(scores["exact_match"])
    capsys.readouterr()


def test_predict_writes_the_labels_above_the_threshold(run, tiny_labels, tmp_path, capsys):
    workdir, hot = run[0], drawn(120)
    call = [f"{tiny_labels[2]}/p", f"--workdir={workdir}"]
    found = {}
    for threshold in (0.5, 0.9):
        flags = [f"--out={tmp_path}/p.json", f"--threshold={threshold}"]
        assert predict.main([*call, *flags]) == 0
        with open(f"{tmp_path}/p.json") as file:
            rows = json.load(file)
        assert all(x["probability"] > threshold for row in rows for x in row["predictions"])
        for row in rows:
            name = row["path"].rpartition("/")[2], threshold
            found[name] = {x["label"] for x in row["predictions"]}
    right = sum(("red" in found[f"{i}.jpg", 0.5]) == bool(row[3]) for i, row in enumerate(hot))
    assert len(rows) == 120 and right > 90
    assert all(found[name, 0.9] <= found[name, 0.5] for name, _ in found)
    assert any(not names for names in found.values())
    assert predict.main([*call, f"--out={tmp_path}/p.csv"]) == 0
    with open(f"{tmp_path}/p.csv") as file:
        for row in csv.DictReader(file):
            names = {*filter(None, row["labels"].split("|"))}
            assert names == found[row["path"].rpartition("/")[2], 0.5]
    capsys.readouterr()


@pytest.mark.long
def test_exports_answer_with_sigmoids(run, tmp_path, capsys):
    export.run(run[0], "latest", "onnx,savedmodel", str(tmp_path / "out"))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    answer = formats.read("onnx", f"{tmp_path}/out/model.onnx")({"images": pixels})
    expected = 1 / (1 + np.exp(-answer["logits"].astype(np.float64)))
    np.testing.assert_allclose(answer["probabilities"], expected, rtol=1e-5)
    served = formats.read("savedmodel", f"{tmp_path}/out/savedmodel")
    result = served({"image_bytes": [picture((1, 0, 0, 1), 7)]})
    assert "classes" not in result and result["probabilities"].shape == (1, 4)
    logits = formats.read("savedmodel", f"{tmp_path}/out/savedmodel", "images")({"images": pixels})
    np.testing.assert_allclose(logits["logits"], answer["logits"], rtol=1e-4, atol=1e-5)
    assert (tmp_path / "out" / "labels.txt").read_text().split() == [*NAMES]
    assert "1 / (1 + exp(-logit))" in (tmp_path / "out" / "README.md").read_text()
    capsys.readouterr()


def test_a_part_of_the_data_has_the_same_labels(tiny_labels):
    config = make_tiny_config(tiny_labels[0], **KEYS, train_fraction=0.25)
    benchmark: Any = opened(benchmarks.load(config.lock(), ""), "train")
    assert benchmark.labels.name == "several" and benchmark.source("train").several


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"class_weights": "auto"}, "class_weights='auto'.*set --config.class_weights=''"),
        ({"labels": "one"}, "labels='one', but .*have several.*'auto'"),
    ],
)
def test_keys_that_do_not_fit_the_data_are_refused(values, words, tiny_labels):
    config = make_tiny_config(tiny_labels[0], **{**KEYS, **values})
    with pytest.raises(ConfigError, match=f"config.{words}"):
        benchmarks.load(config.lock(), "").open("train")


def test_the_data_say_the_score_and_the_loss(tiny_labels):
    config = make_tiny_config(tiny_labels[0], **{**KEYS, "loss": "softmax"})
    benchmark: Any = benchmarks.load(config.lock(), "")
    assert benchmark.targets[0].metric == "mAP"  # before the data are opened, for the curves
    benchmark.open("train")
    assert "bce_sum" in benchmark.run_notes(64, True)[0] and benchmark.labels.loss == "bce_sum"


def test_a_model_of_several_labels_refuses_data_of_one(run, tiny_records, tmp_path):
    config = make_tiny_config(tiny_records, **{**KEYS, "labels": "several"})
    benchmark: Any = opened(benchmarks.load(config.lock(), ""), "eval")
    assert benchmark.source("eval").several
    config = make_tiny_config(tiny_records, init_from=run[0], init_without="")
    with pytest.raises(DataError, match="labels: 'several' in the checkpoint, 'one' in the data"):
        train.train_and_evaluate(read_settings(config, str(tmp_path)))


def test_records_of_others_are_read_without_a_manifest(tmp_path):
    """Their names are collected, and a label out of range is an error, before and in training."""
    sets = [(1, 3), (), (2,), (1, 2, 3)] * 4
    names = "abc"
    rows = [
        tf_example(picture((1, 0, 0, 1), i), x, [names[k - 1] for k in x], f"{i}.jpg", (20, 24))
        for i, x in enumerate(sets)
    ]
    write_shards(str(tmp_path), "train", rows, 2)
    keys: dict[str, Any] = {**KEYS, "labels": "several"}
    benchmark: Any = benchmarks.load(
        make_tiny_config(str(tmp_path), **{**keys, "num_label_classes": 3}).lock(), ""
    )
    benchmark.open("train")
    assert benchmark.source("train").class_names == ("a", "b", "c")
    batch = next(benchmark.train_batches(16, 0, 1, 0))
    for i, hot in zip(batch["id"].tolist(), batch["label"], strict=True):
        assert tuple(np.flatnonzero(hot) + 1) == sets[i]
    few = benchmarks.load(
        make_tiny_config(str(tmp_path), **{**keys, "num_label_classes": 2}).lock(), ""
    )
    with pytest.raises(DataError, match="its label is 3, outside 1..2"):
        few.open("train")
    source = dataclasses.replace(benchmark.source("train"), num_classes=2)
    with pytest.raises(DataError, match="record .*cannot be used"):
        benchmark.decode_all(source)
