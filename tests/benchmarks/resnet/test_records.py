"""Data with faults end in one clear line, which names the file and the record; and TFDS."""

import itertools
from typing import Any

import numpy as np
import pytest

import input_pipeline
from benchmarks.records import RecordFiles
from benchmarks.resnet import records
from common.data.order import Order
from common.data.shards import Shards
from common.errors import DataError
from common.preparation import schema
from common.tensorflow import tensorflow
from input_pipeline import Preprocessing, Source
from tests import test_input_pipeline as pipeline

PREPROCESSING = Preprocessing(8, 0.08, True)


def encode(height=12, width=15, file_format="JPEG"):
    return pipeline.encode(pipeline.noise(height, width), file_format)


def example(encoded=None, label=None, **texts):
    """A serialized tf.train.Example; `texts` are of image/class."""
    feature = {f"image/class/{key}": schema.strings([value]) for key, value in texts.items()}
    if label is not None:
        feature["image/class/label"] = schema.ints([label])
    if encoded is not None:
        feature["image/encoded"] = schema.strings([encoded])
    return schema.serialize(feature)


def write(path, rows):
    """Writes a file; returns where each record begins, and the end."""
    with tensorflow().io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            writer.write(row)
    return np.cumsum([0, *(16 + len(row) for row in rows)]).tolist()


def good(count):
    return [example(encode(), i % 5 + 1) for i in range(count)]


def open_train(folder, patterns="train-*", classes=5):
    cache = f"{folder}/cache/train.json"
    return records.open_records(RecordFiles(str(folder), patterns, "train", cache), classes)


def unchecked(folder, counts, classes=5):
    """A Source of files that are taken to hold so many records."""
    paths = tuple(str(folder / f"train-{i}") for i in range(len(counts)))
    return Source(Shards(paths, counts), "image/encoded", "image/class/label", 1, classes, ())


def train(source, steps=12, hosts=1):
    """The labels of some steps, over all hosts."""
    order, labels = Order.make(source.shards.counts, 0, 4, 2, 8), []
    for host in range(hosts):
        batches = input_pipeline.train_batches(
            source, PREPROCESSING, order, order.share(host, hosts), 0
        )
        labels += [batch["label"] for batch in itertools.islice(batches, steps)]
    return np.concatenate(labels)


def evaluate(source, hosts=1):
    """The labels of an evaluation, over all hosts, padding removed."""
    labels = []
    for host in range(hosts):
        for batch in input_pipeline.eval_batches(source, PREPROCESSING, 4, host, hosts):
            labels.append(batch["label"][batch["mask"] == 1])
    return np.concatenate(labels)


def fault(work, *arguments, **settings):
    """The one line that `work` fails with."""
    with pytest.raises(DataError) as caught:
        work(*arguments, **settings)
    (line,) = str(caught.value).splitlines()
    assert "{{" not in line and "[Op:" not in line  # no names of TensorFlow's insides
    assert len(line) < 600
    return line


@pytest.fixture
def folder(tmp_path):
    """train-0 with 6 good records and train-1 with 5."""
    write(tmp_path / "train-0", good(6))
    write(tmp_path / "train-1", good(5))
    return tmp_path


def test_good_records(folder):
    source = open_train(folder)
    assert source.shards.counts == (6, 5) and source.shards.total == 11
    assert source.num_classes == 5 and source.class_names == ()
    assert sorted(evaluate(source)) == sorted([0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4])
    assert set(train(source)) == set(range(5))


def test_empty_files(folder):
    (folder / "train-0").write_bytes(b"")
    source = open_train(folder)
    assert source.shards.counts == (0, 5)
    assert len(evaluate(source)) == 5 and len(train(source)) == 48
    (folder / "train-1").write_bytes(b"")
    line = fault(open_train, folder)
    assert line == f"no train records: the 2 files {folder}/train-0 ... are empty"


# What is wrong -> the record, or its image and label; what counting says, and what reading says.
UNUSABLE = {
    "no image": ((None, 1), "image/encoded", "image/encoded"),
    "no label": ((encode(), None), "image/class/label", "image/class/label"),
    "label 6": ((encode(), 6), "its label is 6, outside 1..5", "its label is 6, outside 1..5"),
    "label 0": ((encode(), 0), "0, outside 1..5; labels count from 1", "its label is 0, outside"),
    "text": ((b"hello", 1), "is not a JPEG, PNG, BMP or GIF", "Unknown image file format"),
    "not an example": (b"\xff\xfe\xfd" * 9, "not a tf.train.Example", "not a tf.train.Example"),
    "JPEG cut": ((encode(200, 300)[:3000], 1), None, "Invalid JPEG data"),
    "PNG cut": ((encode(20, 20, "PNG")[:400], 1), None, "Invalid PNG data"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_unusable_record(folder, what):
    record, counting, reading = UNUSABLE[what]
    row = record if isinstance(record, bytes) else example(*record)
    write(folder / "train-1", [*good(3), row, *good(1)])
    place = f"{folder}/train-1, record 3 (counted from 0)"
    if counting is None:  # pixels are not decoded to count
        assert open_train(folder).shards.counts == (6, 5)
    else:
        line = fault(open_train, folder)
        assert line.startswith(place) and counting in line
        assert not (folder / "cache" / "train.json").exists()
    for work in (train, evaluate):
        line = fault(work, unchecked(folder, (6, 5)))
        assert line.startswith(place) and reading in line


def test_fault_after_the_first_chunk_of_counting(folder):
    write(folder / "train-1", [*(good(1) * 300), b"\xff\xff", *good(1)])
    assert fault(open_train, folder).startswith(f"{folder}/train-1, record 300 (counted from 0)")
    write(folder / "train-1", [*(good(1) * 299), example(encode(), 7)])
    assert fault(open_train, folder).startswith(f"{folder}/train-1, record 299 (counted from 0)")


# Bytes of train-1 changed after it was written: (of the bytes and record 3's beginning) -> bytes.
DAMAGES = {
    "byte of a record": lambda raw, at: raw[: at + 40] + bytes([raw[at + 40] ^ 1]) + raw[at + 41 :],
    "cut in a record": lambda raw, at: raw[: at + 100],
    "cut in a length": lambda raw, at: raw[: at + 5],
    "cut after a record": lambda raw, at: raw[:at],
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_file(folder, what):
    rows = good(5)
    at = write(folder / "train-1", rows)[3]
    source = open_train(folder)
    raw = (folder / "train-1").read_bytes()
    (folder / "train-1").write_bytes(DAMAGES[what](raw, at))
    place = f"{folder}/train-1, record 3 (counted from 0)"
    for work in (train, evaluate):
        line = fault(work, source)
        assert line.startswith(place) and " cannot be used: " in line
        if what in ("cut in a length", "cut after a record"):
            assert "fewer records" in line
    assert fault(evaluate, source, hosts=2).startswith(place)
    if what.startswith("cut"):
        if what == "cut after a record":
            assert open_train(folder).shards.counts == (6, 3)
        else:
            assert fault(open_train, folder).startswith(place)
    else:  # the size is as it was, and so are the counts; a new start elsewhere reads it all
        (folder / "cache" / "train.json").unlink()
        assert fault(open_train, folder).startswith(place)


def test_file_that_has_gone(folder):
    source = open_train(folder)
    (folder / "train-1").unlink()
    for work in (train, evaluate):
        line = fault(work, source)
        assert line.startswith(f"{folder}/train-1, record 0") and "No such file" in line


def test_background_class(folder):
    write(folder / "train-0", [example(encode(), label) for label in (0, 7, 1000)])
    write(folder / "train-1", [example(encode(), 5, text=b"five")])
    source = open_train(folder, classes=1001)  # labels as stored
    assert source.label_offset == 0 and evaluate(source).tolist() == [0, 7, 1000, 5]
    assert source.class_names[5] == "five" and len(source.class_names) == 1001
    # The same files counted for 1000 classes: what was kept for 1001 does not serve.
    assert fault(open_train, folder, classes=1000).startswith(f"{folder}/train-0, record 0 ")


def test_class_names(folder, monkeypatch):
    rows = [
        example(encode(), 2, synset=b"n02", text=b"goldfish, Carassius"),
        example(encode(), 5, synset=b"n05"),
        example(encode(), 4, text=b"h\xc3\xa9ron"),
    ]
    write(folder / "train-1", rows)
    names = ("", "goldfish, Carassius", "", "héron", "n05")
    first = open_train(folder)
    assert first.class_names == names
    monkeypatch.setattr(records, "_scan_file", None)
    assert open_train(folder) == first  # from the cache


# TFDS: sets prepared here, and opened by name from their folder, as a user's would be.

COUNTS = {"train": 20, "test": 7}


def tfds_images(number):
    draw = np.random.default_rng(number)
    return np.full((5 + number % 4, 7, 3), draw.integers(0, 256, 3), np.uint8)


def prepare(folder, name, splits, labelled=True):
    """Builds a set of 3 shards per split; example i of a split has label i % 3."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.registered import skip_registration

    features: dict[str, Any] = {"image": tfds.features.Image(encoding_format="png")}
    if labelled:
        features["label"] = tfds.features.ClassLabel(names=["ant", "bee", "cat"])

    def info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def generate(self, split):
        for i in range(COUNTS[split]):
            label = {"label": i % 3} if labelled else {}
            yield i, {"image": tfds_images(i), **label}

    with skip_registration():
        made = type(
            name,
            (tfds.core.GeneratorBasedBuilder,),
            {
                "VERSION": tfds.core.Version("1.0.0"),
                "_info": info,
                "_split_generators": lambda self, _: {s: generate(self, s) for s in splits},
                "_generate_examples": generate,
            },
        )
        builder = made(data_dir=str(folder))
        config = tfds.download.DownloadConfig(num_shards=3)
        builder.download_and_prepare(download_config=config)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    prepare(folder, "TinyPets", ["train", "test"])
    prepare(folder, "TrainOnly", ["train"])
    prepare(folder, "Unlabelled", ["train"], labelled=False)
    return str(folder)


@pytest.mark.long
def test_tfds(prepared):
    for split, count in (("train", 20), ("eval", 7)):
        source = records.open_tfds("tiny_pets", prepared, split)
        assert records.open_tfds("tiny_pets:1.0.0", prepared, split) == source
        assert len(source.shards.paths) == 3 and source.shards.total == count
        assert source.num_classes == 3 and source.class_names == ("ant", "bee", "cat")
        labels = sorted(i % 3 for i in range(count))
        assert sorted(evaluate(source)) == labels
        assert sorted(train(source, steps=5)) == labels or split == "eval"
        colours = {(i % 3, *tfds_images(i)[0, 0].tolist()) for i in range(count)}
        (batch,) = input_pipeline.eval_batches(source, PREPROCESSING, count, 0, 1)
        pairs = zip(batch["label"].tolist(), batch["image"][:, 3, 3].tolist(), strict=True)
        assert {(label, *colour) for label, colour in pairs} == colours


def test_tfds_faults(prepared):
    open_tfds = records.open_tfds
    for name in ("no_such_set", "tiny_pets:9.9.9"):
        assert f"config.dataset='tfds:{name}'" in fault(open_tfds, name, prepared, "train")
    line = fault(open_tfds, "mnist", prepared, "train")  # known, but not prepared
    assert line.endswith(f"tfds build mnist --data_dir={prepared}")
    assert "found: ['train']" in fault(open_tfds, "train_only", prepared, "eval")
    assert "features are ['image']" in fault(open_tfds, "unlabelled", prepared, "train")
