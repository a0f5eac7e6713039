"""What a folder's manifest.json spares the reader: counting, classes, names."""

import json
from typing import Any

import numpy as np
import pytest

import benchmarks
from benchmarks.resnet import records
from common.data import data_manifest
from common.errors import ConfigError, DataError
from tests.conftest import make_tiny_config


@pytest.fixture
def folder(tiny_records, tmp_path):
    """The tiny records with a manifest, in a folder of their own."""
    from pathlib import Path

    splits: dict[str, dict] = {"train": {"shards": []}, "validation": {"shards": []}}
    for path in sorted(Path(tiny_records).iterdir()):
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        split = splits[path.name.partition("-")[0]]
        count = records._scan_file(str(copy), 1, 4)["count"]
        row = {"name": path.name, "examples": count, "bytes": copy.stat().st_size}
        split["shards"].append(row)
    classes = [{"label": i + 1, "name": name} for i, name in enumerate(["ant", "bee", "cat", "dó"])]
    content = {"num_label_classes": 4, "classes": classes, "splits": splits}
    (tmp_path / data_manifest.FILE_NAME).write_text(json.dumps(content))
    return tmp_path


def make(folder, tmp_path_factory, **overrides) -> Any:
    config = make_tiny_config(str(folder), **{"num_label_classes": 0, **overrides})
    return benchmarks.load(config.lock(), str(tmp_path_factory.mktemp("cache")))


def test_classes_and_counts_without_reading_a_record(folder, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(records, "_scan_file", None)
    for data_dir in (str(folder), f"{folder}/"):
        benchmark = make(data_dir, tmp_path_factory)
        assert [benchmark.open(split) for split in ("train", "eval")] == [90, 23]
        assert benchmark.metadata["class_names"] == ["ant", "bee", "cat", "dó"]
        assert benchmark.model.num_classes == 4
        # A forecast does not open the data, and knows the scores of each class all the same.
        assert "recall/dó" in benchmark.score_names
        assert benchmark.score_names == make(data_dir, tmp_path_factory).score_names
    many = make(folder, tmp_path_factory, num_label_classes=51)
    assert not any("/" in name for name in many.score_names)
    more = make(folder, tmp_path_factory, num_label_classes=6)
    more.open("train")
    assert more.metadata["class_names"] == ["ant", "bee", "cat", "dó", "", ""]
    background = make(folder, tmp_path_factory, num_label_classes=1001)
    background.open("train")
    assert background.metadata["class_names"][:5] == ["", "ant", "bee", "cat", "dó"]


def test_a_check_counts_nevertheless(folder, tmp_path_factory):
    assert make(folder, tmp_path_factory).check("train") == []
    content = json.loads((folder / data_manifest.FILE_NAME).read_text())
    row = content["splits"]["train"]["shards"][1]
    row["examples"] += 1
    (folder / data_manifest.FILE_NAME).write_text(json.dumps(content))
    (line,) = make(folder, tmp_path_factory).check("train")
    assert f"{folder}/{row['name']}: {row['examples'] - 1} images" in line
    assert line.endswith(f"manifest.json there are {row['examples']}")
    data = bytearray((folder / row["name"]).read_bytes())
    data[200] ^= 1
    (folder / row["name"]).write_bytes(data)
    assert make(folder, tmp_path_factory).open("train") == 91
    with pytest.raises(DataError, match=f"{row['name']}, record 0"):
        make(folder, tmp_path_factory).check("train")


def test_fewer_classes_than_the_data_hold_are_refused(folder, tmp_path_factory):
    with pytest.raises(ConfigError, match=r"num_label_classes=3, but .* 4 classes: leave it at 0"):
        _ = make(folder, tmp_path_factory, num_label_classes=3).open("train")


def test_files_that_it_does_not_describe_are_read(folder, tmp_path_factory):
    first = min(folder.glob("train-*"))
    count = make(folder, tmp_path_factory, train_files=first.name).open("train")
    assert 0 < count < 90
    content = json.loads((folder / data_manifest.FILE_NAME).read_text())
    del content["splits"]["train"]["shards"][1]
    (folder / data_manifest.FILE_NAME).write_text(json.dumps(content))
    assert make(folder, tmp_path_factory).open("train") == 90


def weigh(folder, tmp_path_factory, counts=None, **overrides):
    """The class weights; `counts` go into the manifest as the images of each class to train."""
    content = json.loads((folder / data_manifest.FILE_NAME).read_text())
    for row, number in zip(content["classes"], counts or (), strict=bool(counts)):
        row["train"] = number
    (folder / data_manifest.FILE_NAME).write_text(json.dumps(content))
    benchmark = make(folder, tmp_path_factory, class_weights="auto", **overrides)
    benchmark.open("train")
    return benchmark.class_weights


COUNTS = (23, 23, 22, 22)  # of `tiny_records`


def test_class_weights_are_those_of_the_manifest_and_no_record_is_read(
    folder, tmp_path_factory, monkeypatch
):
    read = weigh(folder, tmp_path_factory)
    np.testing.assert_allclose(read, [90 / (4 * n) for n in COUNTS], rtol=1e-6)
    # A sum that is none of images is not of one class for each; the records decide.
    np.testing.assert_array_equal(weigh(folder, tmp_path_factory, (23, 23, 22, 23)), read)
    listed = weigh(folder, tmp_path_factory, COUNTS, train_fraction=0.5)
    assert 0.9 < np.max(np.abs(listed / read)) < 1.1 and not np.array_equal(listed, read)
    first = min(folder.glob("train-*")).name
    assert not np.array_equal(weigh(folder, tmp_path_factory, train_files=first), read)
    for path in folder.glob("train-*"):
        path.write_bytes(bytes(path.stat().st_size))  # of the size that is listed
    np.testing.assert_array_equal(weigh(folder, tmp_path_factory, COUNTS), read)
    with pytest.raises(ConfigError, match=r"class_weights='auto': 1 \(cat\) of 4 classes"):
        weigh(folder, tmp_path_factory, (45, 23, 0, 22))
    with pytest.raises(ConfigError, match="class_weights='auto': 997 "):
        weigh(folder, tmp_path_factory, COUNTS, num_label_classes=1001)
    with pytest.raises(DataError):  # the part's labels are read
        weigh(folder, tmp_path_factory, train_fraction=0.5)


@pytest.mark.parametrize("change", [b"", None, b"more"])
def test_a_file_of_another_size_than_it_lists_is_refused(change, folder, tmp_path_factory):
    """A copy that broke off ends between two records, too: nothing else would notice."""
    first = max(folder.glob("train-*"))
    data = first.read_bytes()
    first.write_bytes(change if change == b"" else data + change if change else data[:-100])
    with pytest.raises(DataError) as refused:
        _ = make(folder, tmp_path_factory).open("train")
    assert f"{first} has {first.stat().st_size:,} bytes" in str(refused.value)
    assert f"lists {len(data):,}" in str(refused.value) and "data_dir" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", '{"num_label_classes": 2, "classes": []}'])
def test_a_foreign_manifest_is_one_line(folder, text, tmp_path_factory):
    (folder / data_manifest.FILE_NAME).write_text(text)
    with pytest.raises(DataError, match=r"manifest.json was not written .* move it away"):
        _ = make(folder, tmp_path_factory).open("train")


def test_without_a_manifest_it_is_imagenet(tiny_records, tmp_path_factory):
    benchmark = make(tiny_records, tmp_path_factory)
    assert benchmark.model.num_classes == 1000
    assert make("", tmp_path_factory).model.num_classes == 1000  # to compile without data
