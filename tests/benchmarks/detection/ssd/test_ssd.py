"""SSD's glue: scores, files about the predictions, and mistakes in a config."""

import dataclasses
import importlib
import io
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import benchmarks
from benchmarks.detection.scoring import NAMES
from common.errors import UserError
from tests.conftest import opened


def make(data_dir, **overrides) -> Any:
    config = importlib.import_module("configs.ssd_digits").get_config()
    config.update({"data_dir": data_dir, "num_classes": 0, "image_size": 32, **overrides})
    return benchmarks.load(config.lock(), "")


def perfect_rows(benchmark):
    """What a perfect detector predicts, in batches of 8 with the real rows only."""
    truth = benchmark.annotations
    ids = [number for number, _ in truth.categories]
    for batch in benchmark.eval_batches(8, 0, 1):
        real = batch["mask"] > 0
        rows = {
            "image_id": batch["image_id"][real],
            "boxes": np.zeros((real.sum(), 9, 4), np.float32),
            "score": np.zeros((real.sum(), 9), np.float32),
            "class": np.ones((real.sum(), 9), np.int32),
        }
        for i, image_id in enumerate(rows["image_id"]):
            mine = np.flatnonzero(truth.image_ids[truth.rows] == image_id)
            for k, number in enumerate(m for m in mine if not truth.crowd[m]):
                x, y, w, h = truth.boxes[number]
                rows["boxes"][i, k] = y, x, y + h, x + w
                rows["score"][i, k] = 0.9
                rows["class"][i, k] = 1 + ids.index(truth.category_ids[number])
        yield rows


def test_a_perfect_detector_scores_1(tiny_scenes):
    benchmark = opened(make(tiny_scenes))
    scores = benchmark.score(perfect_rows(benchmark))
    assert set(scores) <= set(NAMES)
    assert scores["mAP"] == scores["AP50"] == pytest.approx(1)


@pytest.mark.long
def test_exhibits_are_coco_s_own_form_and_pictures(tiny_scenes):
    """Names with dollars, which are no formulas."""
    benchmark = opened(make(tiny_scenes))
    names = tuple((number, r"$\foo$") for number, _ in benchmark.annotations.categories)
    benchmark.annotations = dataclasses.replace(benchmark.annotations, categories=names)
    shown = benchmark.uses.exhibits(perfect_rows(benchmark))[-1]
    files = shown.files
    assert len(shown.pictures) == 9 and all(one.wide for one in shown.pictures)
    found = json.loads(files["detections.json"])
    truth = benchmark.annotations
    assert len(found) == int((~truth.crowd).sum())
    assert sorted(found[0]) == ["bbox", "category_id", "image_id", "score"]
    wanted = {
        (int(truth.image_ids[r]), tuple(box))
        for r, box in zip(truth.rows, truth.boxes, strict=True)
    }
    assert {(row["image_id"], tuple(np.round(row["bbox"], 3))) for row in found} <= wanted
    drawn = Image.open(io.BytesIO(files["detections.png"]))
    assert drawn.format == "PNG" and min(drawn.size) > 300


def test_detections_outlive_a_picture_that_cannot_be_drawn(tiny_scenes, monkeypatch, caplog):
    def fail(*_):
        raise ValueError("no font")

    monkeypatch.setattr("benchmarks.detection.exhibits.Artist.draw", fail)
    benchmark = opened(make(tiny_scenes))
    exhibit = benchmark.uses.exhibits(perfect_rows(benchmark))[-1]
    files = exhibit.files
    assert not exhibit.pictures and "no font" in exhibit.text
    assert list(files) == ["detections.json"] and json.loads(files["detections.json"])
    assert "Detections cannot be drawn (no font)" in caplog.text


class Outputs:
    """Stands for the network: one map of outputs, whatever the images are."""

    def __init__(self, outputs):
        self.outputs = outputs

    def apply(self, variables, images, *, train):
        return self.outputs


def test_one_default_box_of_one_class_is_found():
    keys = {"num_classes": 4, "precision": "float32", "max_detections": 2, "min_score": 0.5}
    benchmark = make("", **keys, random_flip=False, box_sides=(6, 10, 14, 20))
    side = benchmark._anchors[:, 2:] - benchmark._anchors[:, :2]
    inside = (benchmark._anchors >= 0).all(1) & (benchmark._anchors <= 1).all(1)
    number = int(np.flatnonzero(inside & (side[:, 0] < side[:, 1]))[0])
    outputs = np.zeros((2, len(benchmark._anchors), 16), np.float32)
    outputs[..., 0] = 9  # the background; columns 1 to 4 are the classes, 5 to 8 the deltas
    outputs[..., 9:] = 7  # of the TPU's rows
    outputs[:, number, 3] = 20
    benchmark.__dict__["_model"] = Outputs([jnp.asarray(outputs)])
    pixels = np.array([[40, 80], [60, 30]], np.float32)
    images = np.zeros((2, 32, 32, 3), np.uint8)
    batch = {"image": images, "size": pixels, "image_id": np.arange(2)}
    rows = jax.jit(benchmark.predict)({}, {}, batch)
    expected = benchmark._anchors[number] * np.tile(pixels, 2)
    np.testing.assert_allclose(rows["boxes"][:, 0], expected, rtol=1e-5)
    assert rows["class"][:, 0].tolist() == [3, 3] and rows["score"][:, 1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"box_sides": (8, 14)}, r"config.box_sides=\(8, 14\): .* 4 entries"),
        ({"box_steps": (8,)}, "config.box_steps=.* 3 entries .* config.extra_filters"),
        ({"resnet_stages": (1, 1)}, "config.resnet_stages=.* 3 entries"),
        ({"extra_paddings": (0, 0), "image_size": 16}, "config.image_size=16"),
        ({"image_size": 7}, r"config.box_steps=.* config.image_size=7 .*\(7, 7, 7"),
        ({"image_size": 24}, "config.box_sides=.* config.image_size=24"),
    ],
)
def test_mistakes_in_the_config(overrides, words):
    with pytest.raises(UserError, match=words):
        make("", **overrides)


def test_annotations_of_other_images(tiny_scenes, tmp_path):
    with open(f"{tiny_scenes}/instances_val2017.json") as file:
        content = json.load(file)
    content["images"][0]["id"] = 999
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != 1]
    other = tmp_path / "instances_other.json"
    other.write_text(json.dumps(content))
    benchmark = make(tiny_scenes, eval_annotations=str(other))
    with pytest.raises(UserError, match=rf"val-.*\({other}\) differ in 2 images, .* id 1,"):
        benchmark.open("eval")
