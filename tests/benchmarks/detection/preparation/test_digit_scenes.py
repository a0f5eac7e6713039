"""Images of digits over clutter: their annotations, their records, and what a second call does."""

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.detection import coco
from benchmarks.detection.coco import Annotations
from benchmarks.detection.preparation import digit_scenes
from common.errors import UserError
from common.preparation import sklearn_digits
from configs import mask_rcnn_digits, ssd_digits
from scripts import prepare
from tests.benchmarks.detection.preparation.test_coco import rows
from tests.benchmarks.resnet.preparation.test_imagenet import contents
from tests.helpers.preparation import check_data


@pytest.fixture(scope="module", autouse=True)
def few():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digit_scenes, "COUNTS", {"train": 30, "val": 40})
        yield


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """A folder with 30 and 40 images."""
    folder = tmp_path_factory.mktemp("scenes") / "out"
    prepare.make("digit_scenes", [f"--out={folder}"])
    return folder


@pytest.mark.parametrize("split", ["train", "val"])
def test_boxes_fit_the_ink_tightly_and_do_not_overlap(split, scenes):
    path = scenes / "coco" / f"instances_{split}.json"
    data = Annotations.load(str(path), masks=True)
    assert data.sizes.tolist()[:4] == [[128, 160], [128, 160], [160, 128], [128, 160]]
    for name, (height, width) in zip(data.file_names, data.sizes, strict=True):
        with Image.open(scenes / "coco" / split / name) as image:
            assert image.size == (width, height)
    assert data.categories == tuple(zip(digit_scenes.CATEGORY_IDS, "0123456789", strict=True))
    numbers = np.bincount(data.rows, minlength=len(data.image_ids))
    assert numbers.min() >= 1 and numbers.max() <= 6 and len(set(numbers)) > 3
    rows = zip(data.rows, data.outlines, data.boxes, data.areas, strict=True)
    for row, outline, box, area in rows:
        ys, xs = np.nonzero(coco.outline_mask(outline, *data.sizes[row]))
        edges = [xs.min(), ys.min(), xs.max() + 1 - xs.min(), ys.max() + 1 - ys.min()]
        assert box.tolist() == edges and area == len(xs)
    heights = data.boxes[:, 3]
    assert 29 < heights.min() < 36 and 58 < heights.max() < 66
    low, high = data.boxes[:, :2], data.boxes[:, :2] + data.boxes[:, 2:]
    assert high.max() > 140  # the digits use all of the longer side
    common = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    same = (data.rows[:, None] == data.rows) & ~np.eye(len(low), dtype=bool)
    assert common.min(2)[same].max() <= 0


def test_the_records_are_those_of_the_images(scenes, tmp_path):
    train, val = rows(scenes, "train"), rows(scenes, "val")
    assert (len(train), len(val)) == (30, 40)
    content = json.loads((scenes / "coco" / "instances_val.json").read_text())
    copied = json.loads((scenes / "instances_val2017.json").read_text())
    assert content == copied
    for image in content["images"]:
        data = (scenes / "coco" / "val" / image["file_name"]).read_bytes()
        assert val[image["id"]]["image/encoded"] == [data]
    for recipe in (ssd_digits, mask_rcnn_digits):
        assert check_data(recipe.get_config(), scenes, tmp_path) == (30, 40)


def test_a_second_call_does_nothing_and_writes_what_is_missing(scenes, tmp_path):
    before = contents(scenes)
    times = {path: path.stat().st_mtime_ns for path in scenes.rglob("*")}
    last = prepare.make("digit_scenes", [f"--out={scenes}"])
    assert last.startswith("already complete: 30 train and 40 val images are in")
    assert {path: path.stat().st_mtime_ns for path in scenes.rglob("*")} == times
    prepare.make("digit_scenes", [f"--out={tmp_path}"])  # the same bytes again
    assert contents(tmp_path) == before
    (tmp_path / "train-00000-of-00001.tfrecord").unlink()
    (tmp_path / "instances_val2017.json").unlink()
    assert "wrote: 30 train" in prepare.make("digit_scenes", [f"--out={tmp_path}"])
    assert contents(tmp_path) == before


def test_some_digits_are_the_categories(tmp_path, capsys):
    """And the records are of as many images as the command says; another choice replaces them."""
    last = prepare.make("digit_scenes", [f"--out={tmp_path}", "--digits=5-9", "--train_images=12"])
    assert last.startswith("wrote: 12 train and 40 val images are in")
    for split, count in (("train", 12), ("val", 40)):
        data = Annotations.load(str(tmp_path / "coco" / f"instances_{split}.json"))
        assert data.categories == tuple(
            (number, str(digit))
            for digit, number in enumerate(digit_scenes.CATEGORY_IDS)
            if digit >= 5
        )
        assert len(data.image_ids) == count
    args = [f"--out={tmp_path}", "--digits=0-4", "--train_images=12"]
    assert prepare.make("digit_scenes", args).startswith("wrote: 12 train")
    assert prepare.make("digit_scenes", args).startswith("already complete: 12 train")


# Of (split, number): the mean of each colour, the deviation of all, five pixels of green, and the
# category, box and area of each object. Other versions of NumPy or Pillow may differ.
GOLDEN: dict[Any, Any] = {
    ("train", 0): (
        *([127.270, 124.802, 123.066], 45.551, [122.50, 126.10, 106.33, 108.61, 157.77]),
        [
            (75, [94, 86, 24, 39], 426),
            (11, [107, 5, 21, 42], 581),
            (19, [135, 58, 24, 37], 388),
            (27, [8, 77, 31, 47], 589),
            (11, [52, 8, 29, 56], 1204),
        ],
    ),
    ("val", 2): (
        *([132.045, 132.386, 135.933], 41.371, [121.48, 92.20, 133.87, 146.78, 147.37]),
        [
            (11, [58, 38, 24, 39], 471),
            (19, [21, 69, 26, 48], 642),
            (67, [89, 17, 28, 54], 998),
            (51, [47, 121, 18, 35], 349),
        ],
    ),
}


@pytest.mark.parametrize("place", GOLDEN, ids=str)
def test_the_images_do_not_drift(place):
    split, number = place
    means, deviation, pixels, objects = GOLDEN[place]
    images, classes, split_rows = sklearn_digits.load()
    mine = split_rows["train" if split == "train" else "validation"]
    inks = [digit_scenes.ink(images[row]) for row in mine]
    image, annotations = digit_scenes.scene(split, number, inks, classes[mine])
    np.testing.assert_allclose(image.mean((0, 1)), means, atol=0.01)
    assert image.std() == pytest.approx(deviation, abs=0.01)
    np.testing.assert_allclose(image[5::50, 7::50, 1].ravel()[:5], pixels, atol=0.02)
    keys = ("category_id", "bbox", "area")
    assert [tuple(row[key] for key in keys) for row in annotations] == objects


def test_held_out_digits_are_never_trained_on(tmp_path, monkeypatch):
    """With squares as training digits and bars as the others, no square is in validation."""
    _, kinds, split_rows = sklearn_digits.load()
    everything = np.concatenate(list(split_rows.values()))
    assert sorted(everything) == list(range(len(kinds)))  # each row once
    images = np.zeros((len(kinds), 8, 8))
    images[split_rows["train"]] = 16
    images[split_rows["validation"], :, :2] = 16
    monkeypatch.setattr(sklearn_digits, "load", lambda: (images, kinds, split_rows))
    digit_scenes.write_coco(str(tmp_path), digit_scenes.COUNTS, {}, range(10))
    for split, ratio in (("train", 1), ("val", 0.25)):
        data = Annotations.load(str(tmp_path / f"instances_{split}.json"))
        wide, tall = data.boxes[:, 2:].T
        assert np.abs(wide / tall - ratio).max() < 0.06


def test_the_records_have_the_masks_of_the_annotations(scenes):
    data = Annotations.load(str(scenes / "coco" / "instances_val.json"), masks=True)
    val = rows(scenes, "val")
    for row, image_id in enumerate(data.image_ids):
        own = np.flatnonzero(data.rows == row)
        pngs = val[image_id]["image/object/mask"]
        assert len(pngs) == len(own)
        for number, mask in zip(own, pngs, strict=True):
            with Image.open(io.BytesIO(mask)) as image:
                expected = coco.outline_mask(data.outlines[number], *data.sizes[row])
                np.testing.assert_array_equal(np.asarray(image), expected)


def test_another_set_is_not_overwritten(tmp_path):
    (tmp_path / "train-00000-of-00001.tfrecord").touch()
    with pytest.raises(UserError, match="already holds train-00000-.* of another data set"):
        prepare.make("digit_scenes", [f"--out={tmp_path}"])
