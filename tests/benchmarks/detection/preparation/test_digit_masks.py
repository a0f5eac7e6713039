"""Outlined digits over clutter: their orientations, their boxes, and the masks in the records."""

import io

import numpy as np
import pytest
from PIL import Image

from benchmarks.detection import outlines, records
from benchmarks.detection.coco import Annotations
from benchmarks.detection.preparation import digit_scenes
from errors import UserError
from scripts import prepare
from tests.benchmarks.detection.preparation.test_coco import rows
from tests.preparation import check


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """A folder with 31 and 40 images."""
    folder = tmp_path_factory.mktemp("masks") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digit_scenes, "COUNTS", {"train": 31, "val": 40})
        prepare.make("digit_masks", [f"--out={folder}"])
    return folder


@pytest.mark.parametrize("split", ["train", "val"])
def test_boxes_fit_the_ink_in_both_orientations(split, scenes):
    data = Annotations.load(str(scenes / "coco" / f"instances_{split}.json"), masks=True)
    sizes = [tuple(size) for size in data.sizes.tolist()]
    assert set(sizes) == {(128, 160), (160, 128)}
    assert 0.6 < np.mean([height < width for height, width in sizes]) < 0.72
    for name, (height, width) in zip(data.file_names, sizes, strict=True):
        with Image.open(scenes / "coco" / split / name) as image:
            assert image.size == (width, height)
    beyond = np.zeros(2, bool)  # the digits use all of the longer side
    for row, outline, box in zip(data.rows, data.outlines, data.boxes, strict=True):
        ys, xs = np.nonzero(outlines.mask(outline, *sizes[row]))
        edges = [xs.min(), ys.min(), xs.max() + 1 - xs.min(), ys.max() + 1 - ys.min()]
        assert box.tolist() == edges
        beyond |= [ys.max() > 140, xs.max() > 140]
    assert beyond.all() and data.crowd.any() == (split == "val")


def test_the_records_have_the_masks_of_the_annotations(scenes, capsys):
    data = Annotations.load(str(scenes / "coco" / "instances_val.json"), masks=True)
    val = rows(scenes, "val")
    for row, image_id in enumerate(data.image_ids):
        own = np.flatnonzero(data.rows == row)
        masks = val[image_id]["image/object/mask"]
        assert len(masks) == len(own)
        for number, mask in zip(own, masks, strict=True):
            with Image.open(io.BytesIO(mask)) as image:
                expected = outlines.mask(data.outlines[number], *data.sizes[row])
                np.testing.assert_array_equal(np.asarray(image), expected)
    code, report = check(scenes, capsys)
    assert code == 0 and report["errors"] == {} and report["num_label_classes"] == 10


def test_training_opens_them(scenes, tmp_path):
    source = records.open_records(
        *(str(scenes), "train-*", digit_scenes.CATEGORY_IDS, 16, str(tmp_path / "c"), "train"),
        masks=True,
        by_orientation=True,
    )
    assert [pool.shards.total for pool in source.pools] == [21, 10]


def test_the_other_set_is_not_overwritten(scenes, monkeypatch):
    monkeypatch.setattr(digit_scenes, "COUNTS", {"train": 31, "val": 40})
    with pytest.raises(UserError, match="already holds train-00000-.* of another data set"):
        prepare.make("digit_scenes", [f"--out={scenes}"])
