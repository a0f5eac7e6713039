"""scripts/bench/input.py, made small: what it compares, not how fast."""

import io

import numpy as np
import pytest
from PIL import Image

from common.errors import UserError
from scripts.bench import input as bench_input


def test_the_photos_are_different_and_as_large_as_said():
    jpegs = bench_input.cut(8)
    assert len(set(jpegs)) == 8
    assert {Image.open(io.BytesIO(photo)).size for photo in jpegs} == {(500, 375)}
    assert 90e3 < np.mean([len(photo) for photo in jpegs]) < 130e3


@pytest.mark.slow
def test_all_pipelines_are_measured(capsys):
    pytest.importorskip("torchvision")
    flags = ["--images=16", "--rounds=1", "--batches=1", "--batch=8", "--size=32"]
    assert bench_input.main(flags) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == [*bench_input.WORKERS, *bench_input.OURS]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows)


class Dying:
    """Stands for `serve`, whose process ends at once."""

    def __call__(self, *_):
        raise SystemExit(7)


def test_a_pipeline_that_dies_is_named(monkeypatch):
    monkeypatch.setattr(bench_input, "serve", Dying())
    server = bench_input.Server("fast", "folder", bench_input._flags([]))
    with pytest.raises(SystemExit, match="^ERROR: the process of 'fast' ended with exit code 7$"):
        server.answer()


def test_pipelines_take_turns_and_the_seconds_are_of_a_batch(monkeypatch):
    turns = []

    class Server:
        def __init__(self, name, *_):
            self.name = name

        def ask(self):
            turns.append(self.name)

        def answer(self):
            return np.array([len(turns), 2.0 * len(turns)])

        def stop(self):
            pass

    monkeypatch.setattr(bench_input, "WORKERS", {"torch": 0})
    monkeypatch.setattr(bench_input, "OURS", {"fast": {}})
    monkeypatch.setattr(bench_input, "Server", Server)
    seconds = bench_input.measure("folder", bench_input._flags(["--rounds=2", "--batches=5"]))
    assert turns == ["torch", "fast"] * 2
    assert [turn.tolist() for turn in seconds["fast"]] == [[0.4, 0.8], [0.8, 1.6]]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--data=/nowhere"], "no train records in '/nowhere'"),
        (["--images=16", "--batch=32"], "--images=16: must be at least a batch, 32"),
    ],
)
def test_mistakes_are_one_line(flags, says, monkeypatch):
    monkeypatch.setattr(bench_input.on_torch, "require", lambda *names: None)
    with pytest.raises(UserError, match=says):
        bench_input.main(flags)


def test_ratios_are_to_torchs_best():
    seconds = {"torch's DataLoader, 0 workers": [np.array([2.0, 2.0])]}
    seconds |= {"torch's DataLoader, 1 workers": [np.array([2.0, 0.5]), np.array([2.0, 1.5])]}
    seconds |= {"exact": [np.array([0.8, 0.4])]}
    assert bench_input.table(seconds, 128).splitlines()[2:] == [
        "| torch's DataLoader, 0 workers | 64 | 0.50 | 64 |",
        "| torch's DataLoader, 1 workers | 128 | 1.00 | 64 |",
        "| exact | 320 | 2.50 | 160 |",
    ]


def test_torch_reads_the_photos_of_ours(tmp_path):
    pytest.importorskip("torchvision")
    pytest.importorskip("torch").manual_seed(0)  # the crops, whose means differ
    bench_input.write(str(tmp_path), bench_input.cut(64))
    flags = bench_input._flags(["--size=32", "--batch=64"])
    images, labels = next(
        bench_input.pipeline("torch's DataLoader, 0 workers", str(tmp_path), flags)
    )
    ours = next(bench_input.pipeline("exact, reduced_decoding", str(tmp_path), flags))
    assert images.shape == (64, 3, 32, 32) and ours.shape == (64, 32, 32, 3)
    assert labels.max() < 10 and abs(float(images.mean()) - float(ours.mean())) < 0.7
