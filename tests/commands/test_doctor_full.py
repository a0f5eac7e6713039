"""--mode=doctor --full: records of each family, the index that a run reads; kinds of weights."""

import importlib
import json
import shutil
from typing import Any

import numpy as np
import pytest

import benchmarks
from commands import doctor
from common.foreign import resnets
from engine.cluster.hosts import ProcessGroup
from engine.plan import read_settings
from tests.benchmarks.resnet.use.test_tensorflow_weights import arrays_of, saved
from tests.benchmarks.test_benchmarks import TINY
from tests.common.foreign.test_resnets import variables
from tests.conftest import make_tiny_config, resolved
from tests.helpers.preparation import edit
from tests.helpers.pth import old_pth, tensor, write_pth


@pytest.fixture
def records(request, tmp_path, capsys, monkeypatch):
    """Checks a copy of a family's data, changed by `spoil(folder)`: (config, findings)."""

    def check(name, spoil=lambda folder: None, hosts=None):
        tiny, folder = TINY[name], tmp_path / "data"
        if not folder.exists():
            shutil.copytree(request.getfixturevalue(tiny.data), folder)
        spoil(folder)
        config = importlib.import_module(tiny.config).get_config()
        config.update({**tiny.overrides, "data_dir": str(folder)})
        monkeypatch.setattr(doctor, "_CHECKS", {"records": doctor._records})
        capsys.readouterr()
        doctor.run(read_settings(config, str(tmp_path / "run")), True, True, hosts)
        return config, json.loads(capsys.readouterr().out)

    return check


GNMT = [f"benchmarks.translation.gnmt.loader.read_{form}" for form in ("text", "records")]


@pytest.mark.parametrize("name", sorted(TINY))
def test_a_run_reads_the_index_and_counts_nothing(name, records, tmp_path, monkeypatch):
    config, findings = records(name)
    assert not any(row["status"] == "fail" for row in findings), findings
    findings = [row for row in findings if " split is fit: read all " in row["text"]]
    assert [row["status"] for row in findings] == ["ok", "ok"]
    for reader in ("common.data.caches.count_records", "benchmarks.ncf.ratings.read", *GNMT):
        monkeypatch.setattr(reader, None)
    benchmark = benchmarks.load(config, str(tmp_path / "run" / "data_index"))
    for split, row in zip(("train", "eval"), findings, strict=True):
        assert f"read all {benchmark.open(split):,} {benchmark.unit}" in row["text"]


def damage(path):
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)


def cut(feature):
    image = feature["image/encoded"].bytes_list.value
    image[0] = image[0][: len(image[0]) // 2]


def text(key, value):
    return lambda feature: feature[key].bytes_list.value.__setitem__(0, value)


def number(key, value):
    return lambda feature: feature[key].int64_list.value.__setitem__(0, value)


def corner(value):
    return lambda feature: feature["image/object/bbox/xmax"].float_list.value.__setitem__(0, value)


def drop(key):
    return lambda feature: feature.pop(key)


NAME = "image/filename"
TRAIN = {
    "resnet": "train-00001-of-00004",
    "ssd": "train-00002-of-00004.tfrecord",
    "transformer": "toy_packed-train-00001-of-00004",
}
FAULTS: Any = [
    ("resnet", damage, "is damaged"),
    ("resnet", number("image/class/label", 5), "its label is 5, outside 1..4"),
    ("resnet", number("image/class/label", 0), "its label is 0, outside 1..4; labels count"),
    ("resnet", drop("image/class/label"), "image/class/label"),
    ("resnet", text("image/encoded", b"<html>"), "is not a JPEG"),
    ("resnet", cut, "Invalid JPEG data"),
    ("ssd", damage, "is damaged"),
    ("ssd", number("image/object/class/label", 4), "category 4 is none of the 4"),
    ("ssd", drop("image/height"), "image/height"),
    ("ssd", corner(40.0), "a box has the coordinate 40"),
    ("ssd", number("image/height", 7), "image/height and image/width are not the size"),
    ("transformer", damage, "is damaged"),
    ("transformer", number("inputs", 99), "inputs has the id 99"),
    ("transformer", drop("targets"), "it has no targets"),
]


@pytest.mark.parametrize(("name", "change", "message"), FAULTS)
def test_a_fault_is_named_with_file_and_record(name, change, message, records):
    """The other split is fit, and is said to be."""

    def spoil(folder):
        change(folder / file) if change is damage else edit(folder / file, change)

    file = TRAIN[name]
    _, (train, evaluation, *_) = records(name, spoil)
    assert (train["status"], evaluation["status"]) == ("fail", "ok")
    assert f"{file}, record 0" in train["text"] and message in train["text"]
    assert train["fix"]


@pytest.mark.parametrize(
    ("name", "file", "lines", "message"),
    [
        ("gnmt", "train.tok.clean.bpe.32000.de", "a\n", "train.tok.clean.bpe.32000.de 1"),
        ("ncf", "ratings.csv", "userId,movieId,rating,timestamp\n1,one,3,4\n", "ratings.csv"),
        ("languages", "texts.tsv", None, "texts.tsv"),
    ],
)
def test_what_is_no_record_is_read_too(name, file, lines, message, records):
    def spoil(folder):
        (folder / file).write_text(lines) if lines else (folder / file).unlink()

    _, findings = records(name, spoil)
    assert findings[0]["status"] == "fail" and message in findings[0]["text"]


def test_a_record_that_was_damaged_after_the_index_was_written(records):
    file = TRAIN["resnet"]
    assert [row["status"] for row in records("resnet")[1]] == ["ok", "ok"]
    _, findings = records("resnet", lambda folder: damage(folder / file))
    assert findings[0]["status"] == "fail" and file in findings[0]["text"]


def test_the_first_of_several_hosts_reads_for_all(records):
    for host, number in ((0, 2), (1, 0)):
        group = ProcessGroup("127.0.0.1:1", 2, host, ("a", "b"))
        assert len(records("languages", hosts=(group, {}))[1]) == number


def test_a_detectors_annotations_are_looked_at(records):
    def spoil(folder):
        path = folder / "instances_val2017.json"
        content = json.loads(path.read_text())
        for row in content["annotations"]:
            row["iscrowd"] = 1
        path.write_text(json.dumps(content))

    _, findings = records("ssd", spoil)
    warnings = [row["text"] for row in findings if row["status"] == "warn"]
    assert len(warnings) == 1 and "are crowds (iscrowd 1)" in warnings[0]


def pytorch(folder, is_old):
    """A narrow ResNet-18 for 4 classes."""
    params, state = variables(18, num_classes=4)
    arrays = {k: np.ascontiguousarray(v) for k, v in resnets.names(params, state).items()}
    content = {name: tensor(name, array) for name, array in arrays.items()}
    path = folder / "x.pth"
    if is_old:
        path.write_bytes(old_pth(content, arrays))
        return str(path)
    return write_pth(path, content, arrays)


def tensorflow(folder, form):
    saved(folder / "x.ckpt", arrays_of(18, projects=True), form)
    return f"{folder}/x.ckpt"


FILES = {
    "PyTorch": lambda folder: pytorch(folder, False),
    "PyTorch before 1.6": lambda folder: pytorch(folder, True),
    "TensorFlow V1": lambda folder: tensorflow(folder, 1),
    "TensorFlow V2": lambda folder: tensorflow(folder, 2),
}


@pytest.mark.parametrize("kind", FILES)
def test_the_doctor_reads_what_training_reads(kind, tiny_records, tmp_path, monkeypatch, capsys):
    path = FILES[kind](tmp_path)
    monkeypatch.setattr(doctor, "_CHECKS", {"initial weights": doctor._initial_weights})
    config = make_tiny_config(tiny_records, init_from=path)
    settings, _ = resolved(config, f"{tmp_path}/run", "doctor")
    assert doctor.run(settings, True) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["status"] == "ok" and row["text"].startswith(f"{path}: "), row["text"]
    assert "arrays taken, " in row["text"] and " 0 left" in row["text"]
