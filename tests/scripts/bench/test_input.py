"""scripts/bench/input.py, made small: what it compares, not how fast."""

import io
import itertools
import types

import numpy as np
import pytest
from PIL import Image

import input_pipeline
from common.data.shards import tensorflow
from engine import environment
from input_pipeline import Preprocessing
from scripts.bench import input as bench_input


def test_the_photos_are_different_and_as_large_as_said():
    jpegs = bench_input.cut(8)
    assert len(set(jpegs)) == 8
    assert {Image.open(io.BytesIO(photo)).size for photo in jpegs} == {(500, 375)}
    assert 90e3 < np.mean([len(photo) for photo in jpegs]) < 130e3


def test_the_baseline_does_what_ours_does(tmp_path):
    """The same window, kernel and normalisation in evaluation; the order of both is the files'."""
    bench_input.write(str(tmp_path), bench_input.cut(8))
    source, examples = bench_input.open_both(str(tmp_path))
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
    crop = bench_input.flax_image(tf.constant(bench_input.cut(1)[0]), 64, True)
    assert crop.shape == (64, 64, 3) and crop.dtype == tf.float32


@pytest.mark.slow
def test_all_pipelines_are_measured(capsys):
    flags = ["--images=16", "--rounds=1", "--batches=1", "--batch=8", "--size=32"]
    assert bench_input.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = {
        name: cells for name, *cells in ([c.strip() for c in x.split("|")[1:-1]] for x in lines)
    }
    assert list(rows) == list(bench_input.PIPELINES)
    assert rows["flax's example"][1] == rows["flax's example, eval"][1] == "1.00"
    errors = {name: float(rmse) for name, (_, _, rmse, _) in rows.items() if rmse}
    assert 0 < errors["fast"] < errors["exact"]


def test_who_has_which_environment(monkeypatch):
    """Ours that of a run of main.py, the baseline the user's."""
    monkeypatch.setattr(bench_input, "USER", {"GCS_REQUEST_IDLE_TIMEOUT_SECS": "7"})
    ours, flax = (bench_input.environment_of(name) for name in ("fast", "flax's example"))
    assert ours.keys() - flax.keys() == environment.DEFAULTS.keys() - flax.keys()
    assert ours["TF_CPU_ALLOCATOR_USE_BFC"] == "1" and "TF_ENABLE_ONEDNN_OPTS" not in flax
    assert ours["GCS_REQUEST_IDLE_TIMEOUT_SECS"] == "7"


@pytest.mark.parametrize(("end", "code"), [("kill -9 $$", -9), ("exit 0", 0)])
def test_a_pipeline_that_dies_is_named(end, code, monkeypatch, tmp_path):
    dying = tmp_path / "python"
    dying.write_text(f"#!/bin/sh\n{end}\n")
    dying.chmod(0o755)
    monkeypatch.setattr(bench_input.sys, "executable", str(dying))
    flags = bench_input._flags(["--only=fast"])
    with pytest.raises(SystemExit, match=f"^ERROR: the process of .* ended with exit code {code}$"):
        bench_input.measure(str(tmp_path), flags)


def test_pipelines_take_turns_and_the_seconds_are_of_a_batch(monkeypatch):
    def server(name, *_):
        turns = itertools.count(len(name))
        return types.SimpleNamespace(
            **{"name": name, "answer": lambda: None, "stop": lambda: None},
            turn=lambda: next(turns),
        )

    monkeypatch.setattr(bench_input, "Server", server)
    flags = bench_input._flags(["--only=fast", "--rounds=2", "--batches=5"])
    names = ["flax's example", "fast", "flax's example, eval", "fast, eval"]
    expected = {name: [len(name) / 5, (len(name) + 1) / 5] for name in names}
    assert bench_input.measure("folder", flags) == expected


def test_a_process_answers_each_line_with_its_seconds(monkeypatch):
    seconds, batches, answers = iter([1.0, 3.0, 10.0, 15.0]), iter(range(100)), io.StringIO()
    clock_ends = iter([0.0, 7.0, 9.0])
    clock = types.SimpleNamespace(process_time=lambda: next(seconds), monotonic=lambda: 6.0)
    monkeypatch.setattr(bench_input, "pipeline", lambda *_: batches)
    monkeypatch.setattr(bench_input, "settle", lambda spent: next(clock_ends))
    monkeypatch.setattr(bench_input, "time", clock)
    alone = types.SimpleNamespace(Process=lambda: types.SimpleNamespace(children=list))
    monkeypatch.setattr(bench_input, "psutil", alone)  # pytest may have children
    monkeypatch.setattr(bench_input.sys, "stdin", io.StringIO("go\ngo\n"))
    monkeypatch.setattr(bench_input.sys, "stdout", answers)
    assert bench_input.main(["--serve=fast", "--batches=3"]) == 0
    assert answers.getvalue() == "0 0\n2.0 1.0\n5.0 3.0\n"
    assert next(batches) == 1 + 2 * 3


def test_rates_and_ratios():
    seconds = {"flax's example": [0.4, 0.6], "fast": [0.0625, 0.0625]}
    seconds |= {"flax's example, eval": [1.0, 1.0], "fast, eval": [0.5, 1.1]}
    assert bench_input.table(seconds, 128, {"fast": (1.25, 46.2)}).splitlines() == [
        "| pipeline | images per CPU second | ratio | RMSE of 255 | PSNR, dB |",
        "| --- | --- | --- | --- | --- |",
        "| flax's example | 256 | 1.00 |  |  |",
        "| fast | 2,048 | 8.00 (6.40 to 9.60) | 1.2 | 46.2 |",
        "| flax's example, eval | 128 | 1.00 |  |  |",
        "| fast, eval | 160 | no verdict: 0.91 to 2.00 |  |  |",
    ]


def test_errors_are_those_of_pillows_crop(monkeypatch):
    windows = []

    def crops(encoded, window, size):
        photo = Image.open(io.BytesIO(encoded))
        y, x, height, width = (int(side) for side in window)
        windows.append((height, width))
        part = photo.crop((x, y, x + width, y + height))
        best = np.asarray(part.resize((size, size), Image.Resampling.BICUBIC), float)
        return {"three": best + 3, "best": best + 1e-9}

    monkeypatch.setattr(bench_input, "_crops", crops)
    errors = bench_input.quality(bench_input.cut(4), 48)
    assert errors["three"][0] == pytest.approx(3, abs=0.2)  # Pillow reads beyond a crop
    expected = 20 * np.log10(255 / errors["three"][0])
    assert errors["three"][1] == pytest.approx(expected)
    assert errors["best"][0] < 1
    areas = [height * width / (375 * 500) for height, width in windows]
    assert len(set(windows)) == 4 and 0.07 < min(areas) < 0.9


def test_every_pipeline_crops_the_same_window():
    errors = bench_input.quality(bench_input.cut(3), 64)
    assert set(errors) == {"flax's example", "exact", "fast"}
    assert all(10 < rmse < 15 for rmse, _ in errors.values()), errors


def test_the_baselines_window_and_arithmetic(monkeypatch):
    """The crop of Inception: Szegedy et al. 2014 (arXiv:1409.4842), as flax's example has it."""
    tf, asked = tensorflow(), []
    (encoded,) = bench_input.cut(1)

    def window(shape, **arguments):
        asked.append({k: v for k, v in arguments.items() if k != "bounding_boxes"})
        asked.append((shape.numpy().tolist(), arguments["bounding_boxes"].numpy().tolist()))
        return tf.constant([10, 20, 0]), tf.constant([30, 40, -1]), None

    monkeypatch.setattr(tf.image, "sample_distorted_bounding_box", window)
    monkeypatch.setattr(tf.image, "random_flip_left_right", lambda image: image)
    result = bench_input.flax_image(tf.constant(encoded), 24, True).numpy()
    assert asked == [
        {
            **{"min_object_covered": 0.1, "aspect_ratio_range": (0.75, 1.3333333333333333)},
            **{"area_range": (0.08, 1.0), "max_attempts": 10},
            "use_image_if_no_bounding_boxes": True,
        },
        ([375, 500, 3], [[[0, 0, 1, 1]]]),
    ]
    pixels = tf.io.decode_jpeg(encoded)[10:40, 20:60]
    expected = tf.image.resize(pixels, [24, 24], method="bicubic").numpy()
    expected = (expected - [123.675, 116.28, 103.53]) / [58.395, 57.12, 57.375]
    np.testing.assert_allclose(result, expected, atol=0.2)  # of decoding a part of the JPEG
    assert np.abs(result - expected).mean() < 0.02


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--data=/nowhere"], "no train records in '/nowhere'"),
        (["--only=fats"], "--only=fats: no pipeline of flax"),
        (["--images=16", "--batch=32"], "--images=16: must be at least a batch, 32"),
    ],
)
def test_slips_are_one_line(flags, says):
    with pytest.raises(SystemExit, match=f"^ERROR: {says}"):
        bench_input.main(flags)


class Recorder:
    """Stands for a tf.data.Dataset: notes what it is asked for."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *given, **named: self.calls.append((name, given, named)) or self


@pytest.mark.parametrize("train", [True, False])
def test_the_baseline_reads_as_flaxs_example(train):
    """One shuffle buffer of 2,000 examples, and 48 threads."""
    examples = Recorder()
    bench_input.flax_batches(examples, 4, lambda image: image, train)
    (_, (options,), _), *calls = examples.calls
    assert options.threading.private_threadpool_size == 48
    named = {name: (given, more) for name, given, more in calls}
    assert named["batch"] == ((4,), {"drop_remainder": True}) and named["repeat"] == ((), {})
    assert named.get("shuffle") == (((2000,), {"seed": 0}) if train else None)
    order = ["repeat", "shuffle", "map", "batch"] if train else ["map", "batch", "repeat"]
    assert [name for name, *_ in calls] == [*order, "prefetch", "as_numpy_iterator"]


def test_the_clocks_ratios_are_to_torchs_best():
    seconds = {"torch's DataLoader, 0 workers": [np.array([2.0, 2.0])]}
    seconds |= {"torch's DataLoader, 1 workers": [np.array([2.0, 0.5]), np.array([2.0, 1.5])]}
    seconds |= {"exact": [np.array([0.8, 0.4])]}
    assert bench_input.clock_table(seconds, 128).splitlines()[2:] == [
        "| torch's DataLoader, 0 workers | 64 | 0.50 | 64 |",
        "| torch's DataLoader, 1 workers | 128 | 1.00 | 64 |",
        "| exact | 320 | 2.50 | 160 |",
    ]


def test_torch_reads_the_photos_of_ours(tmp_path):
    pytest.importorskip("torchvision")
    pytest.importorskip("torch").manual_seed(0)  # the crops, whose means differ
    bench_input.write(str(tmp_path), bench_input.cut(64), "torch")
    flags = bench_input._flags(["--peer=torch", "--size=32", "--batch=64"])
    images, labels = next(
        bench_input.pipeline("torch's DataLoader, 0 workers", str(tmp_path), flags)
    )
    ours = next(bench_input.pipeline("exact, reduced_decoding", str(tmp_path), flags))
    assert images.shape == (64, 3, 32, 32) and ours.shape == (64, 32, 32, 3)
    assert labels.max() < 10 and abs(float(images.mean()) - float(ours.mean())) < 0.7
