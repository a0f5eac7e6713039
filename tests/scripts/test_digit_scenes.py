"""Images of digits over clutter: their annotations, their records, and what a second call does."""

import json

import numpy as np
import pytest
from PIL import Image

from ops.detection import outlines
from ops.detection.coco import Annotations
from scripts.data import digit_scenes, digits
from tests.scripts.test_data_coco import rows
from tests.scripts.test_prepare import contents
from tests.scripts.test_validate import check


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """A folder with 30 and 40 images."""
    folder = tmp_path_factory.mktemp("scenes") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digit_scenes, "COUNTS", {"train": 30, "val": 40})
        digit_scenes.main([f"--out={folder}"])
    return folder


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(digit_scenes, "COUNTS", {"train": 30, "val": 40})


@pytest.mark.parametrize("split", ["train", "val"])
def test_boxes_fit_the_ink_tightly_and_overlap_little(split, scenes):
    data = Annotations.load(str(scenes / "coco" / f"instances_{split}.json"), masks=True)
    assert [name for _, name in data.categories] == [str(digit) for digit in range(10)]
    ids = [number for number, _ in data.categories]
    assert ids == sorted(ids) and ids != list(range(ids[0], ids[0] + 10))
    assert len(data.image_ids) == len(list((scenes / "coco" / split).iterdir()))
    assert data.crowd.any() == (split == "val")
    numbers = np.bincount(data.rows[~data.crowd], minlength=len(data.image_ids))
    assert numbers.min() >= 1 and numbers.max() <= 6 and len(set(numbers)) > 3
    for outline, box, area in zip(data.outlines, data.boxes, data.areas, strict=True):
        ys, xs = np.nonzero(outlines.mask(outline, 128, 128))
        edges = [xs.min(), ys.min(), xs.max() + 1 - xs.min(), ys.max() + 1 - ys.min()]
        assert box.tolist() == edges and area == len(xs)
    heights = data.boxes[~data.crowd, 3] / 128
    assert 0.23 < heights.min() < 0.3 and 0.45 < heights.max() < 0.51
    low, high = data.boxes[:, :2], data.boxes[:, :2] + data.boxes[:, 2:]
    common = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    areas = data.boxes[:, 2] * data.boxes[:, 3]
    share = common.clip(0).prod(2) / np.minimum(areas[:, None], areas)
    same = (data.rows[:, None] == data.rows) & ~np.eye(len(areas), dtype=bool)
    assert share[same].max() <= 0.15 and (share[same] > 0).any()


def test_digits_stand_out_from_the_clutter(scenes):
    data = Annotations.load(str(scenes / "coco" / "instances_train.json"), masks=True)
    differences = []
    for row, outline in zip(data.rows, data.outlines, strict=True):
        with Image.open(scenes / "coco" / "train" / data.file_names[row]) as image:
            assert (image.size, image.mode) == ((128, 128), "RGB")
            pixels = np.asarray(image).astype(float)
        inside = outlines.mask(outline, 128, 128).astype(bool)
        differences.append(np.abs(pixels[inside].mean() - pixels[~inside].mean()))
    assert np.median(differences) > 50


def test_the_records_are_those_of_the_images(scenes, capsys):
    train, val = rows(scenes, "train"), rows(scenes, "val")
    assert (len(train), len(val)) == (30, 40)
    content = json.loads((scenes / "coco" / "instances_val.json").read_text())
    copied = json.loads((scenes / "instances_val2017.json").read_text())
    assert content == copied
    for image in content["images"]:
        data = (scenes / "coco" / "val" / image["file_name"]).read_bytes()
        assert val[image["id"]]["image/encoded"] == [data]
    code, report = check(scenes, capsys)
    assert code == 0 and report["errors"] == {}
    assert report["num_label_classes"] == 10


def test_a_second_call_does_nothing_and_mends_what_is_missing(scenes, tmp_path, capsys):
    before = contents(scenes)
    times = {path: path.stat().st_mtime_ns for path in scenes.rglob("*")}
    digit_scenes.main([f"--out={scenes}"])
    assert "already complete: 30 train and 40 val images are in" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in scenes.rglob("*")} == times
    digit_scenes.main([f"--out={tmp_path}"])  # the same bytes again
    assert contents(tmp_path) == before
    (tmp_path / "train-00000-of-00001.tfrecord").unlink()
    (tmp_path / "instances_val2017.json").unlink()
    digit_scenes.main([f"--out={tmp_path}"])
    assert "wrote: 30 train" in capsys.readouterr().out
    assert contents(tmp_path) == before


def test_held_out_digits_are_never_trained_on(tmp_path, monkeypatch):
    """With squares as training digits and bars as the others, no square is in validation."""
    _, kinds, split_rows = digits.load()
    everything = np.concatenate(list(split_rows.values()))
    assert sorted(everything) == list(range(len(kinds)))  # each row once
    images = np.zeros((len(kinds), 8, 8))
    images[split_rows["train"]] = 16
    images[split_rows["validation"], :, :2] = 16
    monkeypatch.setattr(digits, "load", lambda: (images, kinds, split_rows))
    digit_scenes.write_coco(str(tmp_path))
    for split, ratio in (("train", 1), ("val", 0.25)):
        data = Annotations.load(str(tmp_path / f"instances_{split}.json"))
        wide, tall = data.boxes[~data.crowd, 2:].T
        assert np.abs(wide / tall - ratio).max() < 0.06


def test_another_data_set_is_not_overwritten(tmp_path):
    (tmp_path / "train-00000-of-00002").write_bytes(b"photos")
    with pytest.raises(SystemExit, match="already holds train-00000-of-00002 of another data set"):
        digit_scenes.main([f"--out={tmp_path}"])
    assert contents(tmp_path) == {"train-00000-of-00002": b"photos"}
