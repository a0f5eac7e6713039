"""scripts/bench/input.py, made small: what it compares, not how fast."""

import pytest

from common.errors import UserError
from scripts.bench import input as bench_input


@pytest.mark.slow
def test_all_pipelines_are_measured(tiny_records, capsys):
    pytest.importorskip("torchvision")
    flags = [
        f"--data={tiny_records}",
        "--images=16",
        "--rounds=1",
        "--batches=1",
        "--batch=8",
        "--size=32",
    ]
    assert bench_input.main(flags) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == [*bench_input.WORKERS, *bench_input.OURS]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--data=/nowhere"], "no train records in '/nowhere'"),
        (["--data=x", "--images=16", "--batch=32"], "--images=16: must be at least a batch, 32"),
    ],
)
def test_mistakes_are_one_line(flags, says, monkeypatch):
    monkeypatch.setattr(bench_input.on_torch, "require", lambda *names: None)
    with pytest.raises(UserError, match=says):
        bench_input.main(flags)


def test_ratios_are_to_torchs_best():
    rates = {"torch's DataLoader, 0 workers": 64, "torch's DataLoader, 1 workers": 128}
    assert bench_input.table({**rates, "exact": 320}).splitlines()[2:] == [
        "| torch's DataLoader, 0 workers | 64 | 0.50 |",
        "| torch's DataLoader, 1 workers | 128 | 1.00 |",
        "| exact | 320 | 2.50 |",
    ]


def test_torch_reads_the_photos_of_ours(tiny_records, tmp_path):
    pytest.importorskip("torchvision")
    pytest.importorskip("torch").manual_seed(0)  # the crops, whose means differ
    bench_input.write(str(tmp_path), bench_input.first(tiny_records, 64))
    flags = bench_input._flags(["--data=x", "--size=32", "--batch=64"])
    images, labels = next(
        bench_input.pipeline("torch's DataLoader, 0 workers", str(tmp_path), flags)
    )
    ours = next(bench_input.pipeline("exact, reduced_decoding", str(tmp_path), flags))
    assert images.shape == (64, 3, 32, 32) and ours.shape == (64, 32, 32, 3)
    assert labels.max() < 10 and abs(float(images.mean()) - float(ours.mean())) < 0.7
