"""Opening of records with boxes: what is kept, and one line for each fault."""

import json
import logging
import re

import numpy as np
import pytest

from benchmarks.detection import records
from benchmarks.detection.mask_rcnn import input_pipeline
from benchmarks.detection.mask_rcnn.aspect_ratio_groups import AspectRatioGroups
from benchmarks.records import RecordFiles
from common.errors import DataError
from common.tensorflow import tensorflow
from tests.benchmarks.detection.rows import encode, example, png, write

IDS = (1, 3, 17, 90)
BOX = (0.1, 0.2, 0.5, 0.7)


def good(number, boxes=(BOX,), labels=None, **changed):
    labels = [IDS[number % 4]] * len(boxes) if labels is None else labels
    return example(encode(), (12, 15), boxes, labels, str(number), **changed)


def opened(folder, split="train", patterns="train-*", ids=IDS, max_boxes=100, keep_empty=False):
    where = RecordFiles(str(folder), patterns, split, f"{folder}/cache/{split}.json")
    return records.open_records(where, ids, max_boxes, keep_empty=keep_empty)


def refusal(folder, *examples, split="train"):
    write(folder / "train-00000-of-00001.tfrecord", [good(0), *examples])
    with pytest.raises(DataError) as caught:
        opened(folder, split)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{folder}/train-00000-of-00001.tfrecord, record 1 ", "RECORD ")


def test_objects_of_a_record(tmp_path):
    boxes = [(-0.1, 0.2, 0.5, 1.25), (0.3, 0.3, 0.3, 0.9), BOX, (0.6, 0.5, 0.4, 0.9)]
    serialized = example(encode(), (12, 15), boxes, [90, 1, 3, 17], "7")
    objects = records.Source(None, IDS).objects(serialized)  # type: ignore[arg-type] (not read)
    expected = np.array([(0, 0.2, 0.5, 1), BOX], np.float32)
    np.testing.assert_array_equal(objects.boxes, expected)
    assert objects.classes.numpy().tolist() == [4, 2] and objects.classes.dtype == "int32"


# Which records have boxes: 9 of 14 in four files. One file has none, one is empty.
HAS_BOX = ((1, 0, 1, 1, 0), (0, 0), (), (1, 1, 1, 1, 0, 1, 1))


@pytest.fixture
def mixed(tmp_path):
    """Records of which some have no box, or none with an area; source_id counts all of them."""
    number = 0
    for file, rows in enumerate(HAS_BOX):
        examples = []
        for has_box in rows:
            boxes = [BOX] if has_box else [(0.2, 0.2, 0.2, 0.9)] * (number % 2)
            examples.append(good(number, boxes))
            number += 1
        write(tmp_path / f"train-{file:05d}-of-00004.tfrecord", examples)
    return tmp_path


def test_training_numbers_the_images_with_boxes(mixed, caplog):
    caplog.set_level(logging.INFO, "tpu_suite")
    source = opened(mixed)
    assert source.shards.counts == (3, 0, 0, 6)
    assert source.shards.left_out == ((1, 4), (0, 1), (), (4,))
    assert [record.getMessage() for record in caplog.records] == [
        "5 of 14 train images have no box and are left out"
    ]
    places = [source.shards.where(i).removeprefix(f"{mixed}/train-") for i in range(9)]
    records_kept = [(0, 0), (0, 2), (0, 3), *((3, i) for i in (0, 1, 2, 3, 5, 6))]
    assert places == [
        f"{file:05d}-of-00004.tfrecord, record {record} (counted from 0)"
        for file, record in records_kept
    ]


def test_images_without_objects_are_kept_and_those_without_a_box_are_not(mixed, caplog):
    caplog.set_level(logging.INFO, "tpu_suite")
    source = opened(mixed, keep_empty=True)
    # Of the five images without a box, those of odd numbers (1, 5 and 11) have an object.
    assert source.shards.counts == (4, 1, 0, 6)
    assert source.shards.left_out == ((1,), (0,), (), (4,))
    assert caplog.messages[0] == "3 of 14 train images have no box and are left out"
    assert caplog.messages[1].startswith("2 of 11 train images have no objects")


def test_evaluation_numbers_every_image(mixed):
    source = opened(mixed, "eval")
    assert source.shards.counts == (5, 2, 0, 7) and not any(source.shards.left_out)
    assert source.image_ids == tuple(range(14))


def described(folder, images, ids=(), **changed):
    """Writes two files of training images with boxes, and a manifest that says `images`."""
    shards = []
    for file, numbers in enumerate(((0, 1), (2, 3, 4))):
        path = folder / f"train-{file:05d}-of-00002.tfrecord"
        write(path, [good(i, [BOX] * (1 + i % 3)) for i in numbers])
        row = {"name": path.name, "examples": len(numbers), "bytes": path.stat().st_size}
        shards.append(row)
    content = {
        "num_label_classes": len(IDS),
        "splits": {"train": {"shards": shards, "boxes": {"per_image": images}}}
        | ({"val": {"shards": shards, "image_ids": ids}} if ids else {}),
        "classes": [{"label": k, "id": i, "name": f"c{i}"} for k, i in enumerate(IDS, 1)],
    }
    (folder / "manifest.json").write_text(json.dumps(content | changed))


def test_a_manifest_replaces_the_scan(tmp_path, monkeypatch, caplog):
    described(tmp_path, [0, 2, 2, 1])
    monkeypatch.setattr(records, "_scan_file", None)
    caplog.set_level(logging.INFO, "tpu_suite")
    source = opened(tmp_path, max_boxes=2)
    assert source.shards.counts == (2, 3) and not source.shards.left_out
    (message,) = caplog.messages  # nothing of images without a box
    assert message.startswith("1 of 5 train images have more than config.max_boxes=2 boxes")


def test_a_manifest_does_not_say_which_images_have_no_objects(tmp_path, monkeypatch):
    described(tmp_path, [1, 1, 2, 1])
    assert opened(tmp_path).shards.total == 5  # scanned: in truth each has a box
    monkeypatch.setattr(records, "_scan_file", None)
    source = opened(tmp_path, keep_empty=True)  # all are examples
    assert source.shards.counts == (2, 3) and not source.shards.left_out


def test_a_manifest_replaces_the_scan_of_the_evaluation(tmp_path, monkeypatch):
    described(tmp_path, [0, 2, 2, 1], ids=[0, 1, 2, 3, 4])
    scanned = opened(tmp_path, "eval", ids=(*IDS, 91))  # of other categories: not described
    monkeypatch.setattr(records, "_scan_file", None)
    source = opened(tmp_path, "eval")
    assert source.shards.counts == scanned.shards.counts and source.image_ids == scanned.image_ids
    described(tmp_path, [0, 2, 2, 1], ids=[0, 1, 2, 3, 0])
    with pytest.raises(DataError, match="image/source_id=0 is also"):
        opened(tmp_path, "eval")
    described(tmp_path, [0, 2, 2, 1], ids=[0, 1, 2, 3])
    with pytest.raises(TypeError):
        opened(tmp_path, "eval")


@pytest.mark.parametrize(("rows", "words"), [([good(0, [])], "none of the"), ([], "are empty")])
def test_no_image_with_a_box(rows, words, tmp_path):
    write(tmp_path / "train-0", rows)
    with pytest.raises(DataError, match=words):
        opened(tmp_path)


FAULTS = {
    "category 2 is none of the 4 in the annotations": good(1, labels=[2]),
    "its objects differ in number from key to key ([1, 2])": good(1, [BOX, BOX], xmax=[0.5]),
    "a box has the coordinate 57, far outside": good(1, [(0.1, 0.1, 57, 0.5)]),
    "it is not a JPEG, PNG, BMP or GIF image": example(b"RIFF", (12, 15), [BOX], [1]),
    "is damaged or not in the schema of detection records": good(1, height=None),
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_fault_is_named(words, tmp_path):
    message = refusal(tmp_path, FAULTS[words])
    assert message.startswith("RECORD ") and words in message


def test_an_image_id_to_evaluate_is_a_whole_number_of_32_bits(tmp_path):
    def named(name):
        return example(encode(), (12, 15), [BOX], [1], name)

    for name in ("", "139.jpg", "4294967296"):
        message = refusal(tmp_path, named(name), split="eval")
        assert message.startswith("RECORD ") and f"image/source_id={name!r} must be" in message
    opened(tmp_path)  # training does not need it
    message = refusal(tmp_path, named("4"), named("6"), named("4"), split="eval")
    assert message.startswith("RECORD ") and "image/source_id=4 is also" in message
    ids = ["-3", "0" * 20, "2147483647", "-2147483648", "000000000139"]
    rows = [named(name) for name in ids]
    write(tmp_path / "train-00000-of-00001.tfrecord", rows)
    source = opened(tmp_path, "eval")
    assert source.image_ids == (-3, 0, 2**31 - 1, -(2**31), 139)
    assert [int(records.read_image_id(row)) for row in rows] == list(source.image_ids)


# Masks and orientations.


def outlined(number, size=(12, 15), crowds=(0,), **changed):
    """A record with an object for each entry of `crowds`; None in `changed` removes its key."""
    more = {"crowds": crowds, "masks": [png(np.ones(size))] * len(crowds)} | changed
    more = {key: values for key, values in more.items() if values is not None}
    labels = [IDS[number % 4]] * len(crowds)
    return example(encode(*size), size, [BOX] * len(crowds), labels, str(number), **more)


def opened_outlined(folder, split="train", keep_empty=False):
    cache = f"{folder}/cache/{split}.json"
    where = RecordFiles(str(folder), "train-*", split, cache)
    return records.open_records(where, IDS, 100, True, keep_empty)


@pytest.fixture
def two_files(tmp_path):
    """Numbers 0 to 5, of which 1 and 3 are upright, 2 has only a crowd, and 5 no object."""
    upright = (15, 12)
    first = [outlined(0, (12, 12)), outlined(1, upright, (0, 1)), outlined(2, crowds=(1,))]
    second = [outlined(3, upright), outlined(4, crowds=(0, 1, 0)), outlined(5, crowds=())]
    write(tmp_path / "train-00000-of-00002.tfrecord", first)
    write(tmp_path / "train-00001-of-00002.tfrecord", second)
    return tmp_path


def numbers(source):
    """The number of each record of a source, in the order of the ids."""
    places = [source.shards.where(i) for i in range(source.shards.total)]
    found = [re.search(r"train-0000(.)-of.*record (.) ", place) for place in places]
    return [3 * int(match[1]) + int(match[2]) for match in found if match]


def test_wide_images_come_before_upright_ones(two_files, caplog):
    caplog.set_level(logging.INFO, "tpu_suite")
    groups = AspectRatioGroups.by_orientation(opened_outlined(two_files))
    assert caplog.records[0].getMessage() == "2 of 6 train images have no box and are left out"
    assert numbers(groups) == [0, 4, 1, 3] and groups.shards.total == 4
    assert [numbers(source) for source in groups.sources] == [[0, 4], [1, 3]]
    groups = AspectRatioGroups.by_orientation(opened_outlined(two_files, keep_empty=True))
    assert [numbers(source) for source in groups.sources] == [[0, 4, 5], [1, 3]]  # no crowd alone


def test_evaluation_has_every_image_by_orientation(two_files):
    groups = AspectRatioGroups.by_orientation(opened_outlined(two_files, "eval"))
    assert numbers(groups) == list(groups.image_ids) == [0, 2, 4, 5, 1, 3]
    assert [source.image_ids for source in groups.sources] == [(0, 2, 4, 5), (1, 3)]


def test_crowds_are_no_single_objects():
    boxes = [BOX, (0.3, 0.3, 0.3, 0.9), (0.2, 0.1, 0.4, 0.3), (0, 0, 1, 1)]
    masks = [png(np.ones((12, 15)) * (i != 2)) for i in range(4)]
    source = records.Source(None, IDS)  # type: ignore[arg-type] (not read)
    more = {"crowds": [0, 0, 0, 1], "masks": masks}
    serialized = example(encode(), (12, 15), boxes, [90, 1, 3, 17], "7", **more)
    objects = source.objects(serialized, crowds=False)
    np.testing.assert_array_equal(objects.boxes, np.array([BOX, boxes[2]], np.float32))
    assert objects.classes.numpy().tolist() == [4, 2]
    bits = input_pipeline.masks_of_record(serialized, 4).numpy()
    assert bits.tolist() == [[255, 255], [0, 0]]
    assert len(source.objects(serialized).classes) == 3
    del more["crowds"]
    serialized = example(encode(), (12, 15), boxes, [90, 1, 3, 17], "7", **more)
    assert len(source.objects(serialized, crowds=False).classes) == 3  # none is known
    assert input_pipeline.masks_of_record(serialized, 4).shape == (3, 2)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"masks": None}, "its objects have no masks: prepare the data with --masks"),
        ({"masks": [b""]}, "its objects differ in number from key to key ([1, 2])"),
        ({"crowds": [0, 1], "masks": [b""] * 3}, "differ in number from key to key ([2, 3])"),
    ],
)
def test_masks_that_are_missing(changed, words, tmp_path):
    rows = [outlined(0), outlined(1, **{"crowds": (0, 0), **changed})]
    write(tmp_path / "train-0", rows)
    with pytest.raises(DataError, match=r"train-0, record 1 \(counted from 0\)") as caught:
        opened_outlined(tmp_path)
    assert words in str(caught.value)
    opened_outlined(tmp_path, "eval")  # which has the outlines of the annotations
    with pytest.raises(tensorflow().errors.InvalidArgumentError, match="prepare the data with"):
        input_pipeline.masks_of_record(rows[1], 4)
