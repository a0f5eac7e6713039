"""Whole runs with data and results on gs://, killed at any moment, against a calm one on disk."""

import json
import os
import signal
import time

import pytest

import train
from engine import evaluate
from engine.plan import read_settings
from tests.conftest import make_tiny_config
from tests.test_main import TINY, command, started
from tests.test_train import assert_same_state, state_on_disk, timeless
from tests.test_train import rows as rows_on_disk

COMMITTED = "commit_success.txt"


def rows(gcs, workdir):
    return [json.loads(line) for line in gcs.read(f"{workdir}/metrics.jsonl").splitlines()]


def steps(gcs, workdir):
    """The complete checkpoints: those with the file by which Orbax commits on gs://."""
    names = (name.split("/") for name in gcs.names(f"{workdir}/checkpoints"))
    return sorted(int(parts[0]) for parts in names if parts[1:] == [COMMITTED])


@pytest.fixture
def cloud(gcs, tiny_records):
    """(folder of the records, workdir) on gs://, in two buckets."""
    data = gcs.bucket("read")
    gcs.upload(tiny_records, f"{data}/records")
    return f"{data}/records", f"{gcs.bucket()}/some/run"


def assert_same_results(gcs, calm_run, workdir):
    """All that the run on disk left lies in the workdir on gs://, and nothing else."""
    on_disk, _ = calm_run
    assert_same_state(state_on_disk(on_disk, 12), state_on_disk(workdir, 12))
    assert timeless(rows(gcs, workdir)) == timeless(rows_on_disk(on_disk))
    saved = sorted(map(int, os.listdir(os.path.join(on_disk, "checkpoints"))))
    assert steps(gcs, workdir) == saved
    names = gcs.names(workdir)
    left = {name.split("/")[1] for name in names if name.startswith("checkpoints/")} - {""}
    assert sorted(map(int, left)) == saved
    for name in ("learning_curves.png", "config.json", "parameters.txt"):
        assert len(gcs.read(f"{workdir}/{name}")) > 100, name
    assert {"data_index/train.json", "data_index/eval.json"} <= set(names)
    assert any("tfevents" in name for name in names)
    assert not [name for name in names if name.endswith((".part", ".write_test"))]


@pytest.mark.long
@pytest.mark.parametrize(
    ("upload", "skip", "resumed"),
    [
        ("PUT .*checkpoints/6/commit_success", 0, 4),
        pytest.param("POST .*checkpoints/8/model/ocdbt.*/d/", 1, 6, marks=pytest.mark.slow),
        pytest.param("POST .*checkpoints/3/optimizer/manifest", 0, 0, marks=pytest.mark.slow),
        pytest.param("PUT .*/metrics.jsonl&", 4, 4, marks=pytest.mark.slow),
        pytest.param("DELETE .*checkpoints/3/manifest/metadata", 0, 8, marks=pytest.mark.slow),
    ],
    ids=["commit", "data", "manifest", "metrics", "clean-up"],
)
def test_kill_9_in_the_middle_of_a_request(upload, skip, resumed, gcs, calm_run, cloud, caplog):
    """The request waits at the server; the process dies; the same command goes on.

    The checkpoints on gs:// are evaluated then as those on disk are.
    """
    data, workdir = cloud
    gcs.fault(upload, skip=skip, delay=600.0)
    process = started(command(f"--workdir={workdir}", **TINY, data_dir=data))
    while process.poll() is None and gcs.hits() == [0]:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert gcs.hits() == [1], output
    gcs.clear_faults()
    complete = steps(gcs, workdir)
    assert max(complete, default=0) >= resumed
    if "checkpoints/6" in upload:
        assert any(name.startswith("6/") for name in gcs.names(f"{workdir}/checkpoints"))
        assert 6 not in complete
    with caplog.at_level("INFO", logger="tpu_suite"):
        assert (
            train.train_and_evaluate(read_settings(make_tiny_config(data), workdir)) == calm_run[1]
        )
    if complete:
        assert f"resuming at step {complete[-1]} " in caplog.text
    assert_same_results(gcs, calm_run, workdir)
    again = read_settings(make_tiny_config(data), workdir)
    assert evaluate.evaluate(again, "latest", 0.0) == pytest.approx(calm_run[1], rel=1e-5)
    assert evaluate.evaluate(again, "best", 0.0)
    assert "eval/metrics.jsonl" in gcs.names(workdir)
