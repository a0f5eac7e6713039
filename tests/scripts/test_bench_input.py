"""scripts/bench/input.py and loop.py, made small: what they compare, not how fast."""

import io
import itertools
import json

import numpy as np
import pytest
from PIL import Image

import input_pipeline
from engine import environment
from input_pipeline import Preprocessing
from ops.shards import tensorflow
from scripts.bench import input as bench_input
from scripts.bench import loop as bench_loop
from scripts.bench import photos
from scripts.bench import step as bench_step


def test_the_photos_are_different_and_as_large_as_said():
    jpegs = photos.cut(8)
    assert len(set(jpegs)) == 8
    assert {Image.open(io.BytesIO(photo)).size for photo in jpegs} == {(500, 375)}
    assert 90e3 < np.mean([len(photo) for photo in jpegs]) < 130e3


def test_the_baseline_does_what_ours_does(tmp_path):
    """The same window, kernel and normalisation in evaluation; the order of both is the files'."""
    photos.write(str(tmp_path), photos.cut(8))
    source, examples = photos.open_both(str(tmp_path))
    assert source.shards.total == 8
    tf = tensorflow()
    ours = next(input_pipeline.eval_batches(source, Preprocessing(224, 0.08, True), 8, 0, 1))
    theirs = {
        int(e["label"]): bench_input.flax_image(e["image"], 224, False).numpy() for e in examples
    }
    for label, pixels in zip(ours["label"].tolist(), ours["image"], strict=True):
        expected = np.asarray(input_pipeline.normalize(pixels[None], None, "float32"))[0]
        # 8-bit rounding, and TensorFlow's fast DCT in the baseline.
        assert np.abs(theirs[label] - expected).mean() < 0.05
    crop = bench_input.flax_image(tf.constant(photos.cut(1)[0]), 64, True)
    assert crop.shape == (64, 64, 3) and crop.dtype == tf.float32


@pytest.mark.slow
def test_all_pipelines_are_measured(capsys):
    flags = ["--images=16", "--rounds=1", "--batches=1", "--batch=8", "--size=32", "--cache=48"]
    assert bench_input.main([*flags, "--json"]) == 0
    rows = {row["pipeline"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert len(rows) == 10 and all(row["rate"] > 0 for row in rows.values())
    assert rows["flax's example"]["ratio"] == rows["flax's example, eval"]["ratio"] == 1
    # At a fraction of the photo's size what counts is antialias, which only the device does.
    assert 0 < rows["in memory"]["rmse"] < rows["fast"]["rmse"] < rows["exact"]["rmse"]


def test_who_has_which_environment(monkeypatch):
    """Ours that of a run of main.py, the baseline the user's."""
    monkeypatch.setattr(bench_input, "USER", {"GCS_REQUEST_IDLE_TIMEOUT_SECS": "7"})
    ours, flax = (bench_input.environment_of(name, False) for name in ("fast", "flax's example"))
    assert ours.keys() - flax.keys() == environment.DEFAULTS.keys() - flax.keys()
    assert ours["TF_CPU_ALLOCATOR_USE_BFC"] == "1" and "TF_ENABLE_ONEDNN_OPTS" not in flax
    assert ours["GCS_REQUEST_IDLE_TIMEOUT_SECS"] == "7"
    assert bench_input.environment_of("fast", True) == flax


def test_a_pipeline_that_dies_is_named(monkeypatch, tmp_path, capfd):
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho 'no memory left' >&2\nkill -9 $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(bench_input.sys, "executable", str(dying))
    flags = bench_input._flags(["--only=fast"])
    with pytest.raises(SystemExit, match="^ERROR: the process of .* ended with signal 9$"):
        bench_input.measure(str(tmp_path), flags)
    assert "no memory left" in capfd.readouterr().err


@pytest.mark.slow
def test_own_records_and_a_table(tiny_records, capsys):
    flags = [f"--data={tiny_records}", "--images=16", "--rounds=1", "--batches=1", "--batch=8"]
    assert bench_input.main([*flags, "--size=16", "--only=fast"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][:3] == ["pipeline", "images per CPU second", "ratio"]
    assert {row[0] for row in cells[2:]} == {
        *("flax's example", "fast", "flax's example, eval", "fast, eval")
    }


@pytest.mark.parametrize(
    ("bench", "flags", "says"),
    [
        (bench_loop, ["--set", "nokey=3"], "--set nokey=3: the config has no key 'nokey'"),
        (bench_step, ["--set", "seed=x"], "--set seed=x: the value must have the type of 0"),
        (bench_input, ["--data=/nowhere"], "no train records in '/nowhere'"),
        (bench_input, ["--only=fats"], "--only=fats: no pipeline has this name; there are flax"),
        (bench_input, ["--images=16", "--batch=32"], "--images=16: must be at least a batch, 32"),
    ],
)
def test_slips_are_one_line(bench, flags, says):
    with pytest.raises(SystemExit, match=f"^ERROR: {says}"):
        bench.main(flags)


@pytest.mark.slow
def test_the_loop_is_measured(capsys):
    flags = ["--steps=20", "--rounds=1", "--set", "num_eval_images=64", "--json"]
    assert bench_loop.main(flags) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures.keys() == bench_loop._ROWS.keys()
    assert all(value > 0 for value in figures.values())
    assert figures["whole_save"] >= figures["first_save"]
    table = bench_loop.table(figures, "cpu").splitlines()
    assert len(table) == 2 + len(figures) and all(line.count("|") == 3 for line in table)


def test_flax_batches_repeat(tmp_path):
    photos.write(str(tmp_path), photos.cut(8))
    _, examples = photos.open_both(str(tmp_path))
    tf = tensorflow()
    stream = bench_input.flax_batches(examples, 4, lambda e: tf.strings.length(e), True)
    assert len(list(itertools.islice(stream, 3))) == 3
