"""What can go wrong with gs://: a run goes on, or says what is wrong in one line."""

import os
import shutil
import time

import pytest

import train
from common.errors import UserError
from engine.plan import read_settings
from tests.conftest import make_tiny_config
from tests.helpers.preparation import edit
from tests.test_gcs_training import assert_same_results, cloud, steps  # noqa: F401
from tests.test_train import at_batch, state_on_disk


def short_config(data_dir, **overrides):
    """Six steps, a checkpoint after each second, no evaluation before the end."""
    cadence = {"train_steps": "6", "steps_per_eval": "6", "steps_per_checkpoint": "2"}
    return make_tiny_config(data_dir, **{**cadence, **overrides})


def fails_with(config, workdir, *words):
    """The run ends with an error that main.py prints as one line."""
    with pytest.raises((UserError, OSError)) as caught:
        train.train_and_evaluate(read_settings(config, workdir))
    text = str(caught.value)
    assert len(text.splitlines()) == 1, text
    for word in words:
        assert word in text
    return text


@pytest.mark.long
def test_a_bad_day_changes_nothing(gcs, calm_run, cloud):  # noqa: F811
    data, workdir = cloud
    faults = [
        ("GET .*o/records/train-00000", {"status": 503, "times": 2}),  # the size of a file
        ("GET /bucket.*train-00001", {"status": 503, "times": 3}),
        ("GET /bucket.*train-00002", {"status": 429, "times": 3}),
        ("GET /bucket.*train-00003", {"cut_response": 3000, "times": 2}),
        ("GET /bucket.*validation-00000", {"reset": True, "times": 2}),
        ("GET .*prefix=records", {"status": 500}),
        ("GET .*/token", {"status": 503}),
        ("PUT .*name=some/run/metrics.jsonl", {"status": 503, "times": 2, "skip": 2}),
        ("PUT .*name=some/run/metrics.jsonl", {"lose_response": True}),
        ("POST .*name=some/run/metrics.jsonl", {"status": 429, "times": 3}),
        ("POST .*checkpoints/3/model/ocdbt.*/d/", {"status": 503}),
        ("POST .*checkpoints/4/model/.*manifest", {"lose_response": True}),
        ("POST .*checkpoints/6/optimizer/.*/d/", {"cut_request": 100}),
        ("PUT .*checkpoints/8/commit_success", {"reset": True, "times": 2}),
        ("DELETE .*checkpoints/3/model", {"lose_response": True, "times": 2}),
        ("PUT .*learning_curves", {"cut_request": 5000}),
        ("GET .*checkpoints/12/.*alt=media", {"cut_response": 20}),
    ]
    for pattern, kind in faults:
        gcs.fault(pattern, **kind)
    assert train.train_and_evaluate(read_settings(make_tiny_config(data), workdir)) == calm_run[1]
    struck = dict(zip([pattern for pattern, _ in faults], gcs.hits(), strict=True))
    assert all(struck.values()), struck
    assert_same_results(gcs, calm_run, workdir)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("none", ["/records", "storage.objects"]),
        ("missing", ["nobody-made-this/records", "bucket does not exist"]),
        ("unreadable file", ["train-00002-of-00004", "403", "a test wants it"]),
    ],
)
def test_data_that_cannot_be_read(mode, words, gcs, cloud):  # noqa: F811
    data, workdir = cloud
    if mode == "none":
        gcs.permit(data.removesuffix("/records"), "none")
    elif mode == "missing":
        data = "gs://nobody-made-this/records"
    else:
        gcs.fault("GET /bucket.*train-00002", status=403, times=-1)
    fails_with(short_config(data), workdir, *words)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("missing", ["no such bucket"]),
        ("none", ["storage.buckets.get"]),
        ("read", ["storage.objects.create"]),
        ("objects", ["storage.buckets.get"]),
    ],
)
def test_a_workdir_that_cannot_be_written(mode, words, gcs, tiny_records):
    bucket = "gs://nobody-made-this" if mode == "missing" else gcs.bucket(mode)
    fails_with(short_config(tiny_records), f"{bucket}/run", f"--workdir={bucket}/run", *words)


@pytest.mark.parametrize("first", ["checkpoint", pytest.param("metrics", marks=pytest.mark.slow)])
def test_a_workdir_that_becomes_read_only(first, gcs, tiny_records, monkeypatch):
    """The first to notice it is the save, or the line in metrics.jsonl before."""
    bucket = gcs.bucket()

    def freeze():
        while not steps(gcs, f"{bucket}/run"):  # batches are made ahead of the steps
            time.sleep(0.05)
        gcs.permit(bucket, "read")

    at_batch(monkeypatch, 20, freeze)
    log_every = {"checkpoint": "100", "metrics": "1"}[first]
    config = short_config(tiny_records, train_steps="30", log_step_count_steps=log_every)
    text = fails_with(config, f"{bucket}/run", f"{bucket}/run")
    # TensorFlow does not say why it cannot delete, if the checkpoint that is too many comes first.
    assert "does not have storage.objects." in text or "could not fully delete" in text
    assert state_on_disk(f"{bucket}/run", steps(gcs, f"{bucket}/run")[-1])  # it is whole


@pytest.mark.long
def test_a_shard_that_is_deleted_during_training(gcs, cloud, monkeypatch):  # noqa: F811
    data, workdir = cloud
    at_batch(monkeypatch, 2, lambda: gcs.delete(f"{data}/train-00001-of-00004"))
    config = make_tiny_config(data, train_steps="60", steps_per_checkpoint="2")
    fails_with(config, workdir, f"{data}/train-00001-of-00004")
    assert state_on_disk(workdir, steps(gcs, workdir)[-1])


def test_a_damaged_image_that_training_meets(gcs, tiny_records, tmp_path):
    """One line names the file and the record, and the checkpoint stays."""
    config = make_tiny_config(tiny_records, steps_per_checkpoint="1", steps_per_eval="12")
    benchmark = read_settings(config).load_benchmark(f"{tmp_path}/index")
    benchmark.open("train")
    batches = [benchmark.train_ids(16, step) for step in range(6)]
    (late, *_) = set(batches[5]) - set(sum(batches[:5], []))
    file, record = benchmark.describe_examples([late])[0].split(", ")
    folder = shutil.copytree(tiny_records, tmp_path / "records")

    def cut(feature):
        image = feature["image/encoded"].bytes_list.value
        image[0] = image[0][: len(image[0]) // 2]

    edit(folder / os.path.basename(file), cut, int(record.split()[1]))
    bucket = gcs.bucket()
    gcs.upload(str(folder), f"{bucket}/records")
    config.data_dir, workdir = f"{bucket}/records", f"{bucket}/run"
    name = f"{bucket}/records/{os.path.basename(file)}"
    fails_with(config, workdir, f"{name}, {record} cannot be used: Invalid JPEG data")
    assert state_on_disk(workdir, steps(gcs, workdir)[-1])
