"""What detectors share, and the images of two orientations; SSD's tests have the rest."""

import io
import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from benchmarks.detection import exhibits
from benchmarks.detection.detector import Detector
from benchmarks.detection.mask_rcnn import MaskRcnn
from benchmarks.detection.mask_rcnn.settings import Settings
from benchmarks.detection.scoring import Scorer
from common.errors import CheckpointError, ConfigError
from common.keys import read_config
from configs import mask_rcnn, mask_rcnn_digits, ssd
from tests.conftest import adopt_values, opened

VALUES = {
    **{"num_classes": 0, "input_streams": 4, "shuffle_buffer_size": 32, "max_boxes": 4},
    **{"image_short": 24, "image_long": 32, "image_shape": (48, 64), "mask_size": 8, "seed": 1},
}


@pytest.fixture
def outliner(tiny_masks, tmp_path):
    return opened(make(tiny_masks, tmp_path, MaskRcnn), "eval")


@pytest.fixture
def detector(tiny_masks, tmp_path):
    return make(tiny_masks, tmp_path)


# Data and scores without a network.
Headless: Any = type("Headless", (Detector,), dict.fromkeys(Detector.__abstractmethods__))


def make(folder, cache, kind=Headless, **changed):
    config = mask_rcnn_digits.get_config()
    config.update({**VALUES, "data_dir": folder, **changed})
    return kind(read_config(Settings, config), str(cache))


def test_a_wrong_number_of_images_is_told_with_the_number_of_files(tiny_masks, tmp_path):
    words = "config.num_train_images=96, but the train split has 90 in 4 files: if these"
    with pytest.raises(ConfigError, match=words):
        make(tiny_masks, tmp_path, MaskRcnn, num_train_images=96).open("train")


def test_a_manifest_without_groups_spares_the_search_for_them(tiny_masks, tmp_path, monkeypatch):
    searched = []
    monkeypatch.setattr(
        "benchmarks.detection.detector.labels_and_groups", lambda *_: searched.append(True)
    )
    files = tmp_path / "data"
    shutil.copytree(tiny_masks, files)
    content = {"splits": {"train": {"shards": []}}, "classes": [], "num_label_classes": 0}
    names = sorted(path.name for path in files.glob("train-*"))
    rows = [{"name": name, "examples": 1} for name in names]
    for settings, count, searches in (
        ({}, len(rows), 0),
        ({"group": "x"}, len(rows), 1),
        (None, len(rows), 1),  # another program's
        ({}, 1, 1),  # of other files
    ):
        content["splits"]["train"]["shards"] = rows[:count]
        more = {} if settings is None else {"settings": settings}
        (files / "manifest.json").write_text(json.dumps(content | more))
        searched.clear()
        benchmark = make(str(files), tmp_path / "cache", MaskRcnn)
        found = benchmark.strata(benchmark.open_records(benchmark.split_files("train")))
        assert searches or found == (None, None)
        assert len(searched) == searches


@pytest.mark.long
def test_pictures_have_the_masks_of_both_orientations(outliner):
    rows = {
        "image_id": outliner.annotations.image_ids[:3].astype(np.int32),
        "score": np.full((3, 1), 0.9, np.float32),
        "class": np.ones((3, 1), np.int32),
        "boxes": np.tile(np.array([4, 5, 20, 30], np.float32), (3, 1, 1)),
        "masks": np.full((3, 1, 4, 4), 255, np.uint8),
    }
    exhibit = outliner.uses.exhibits(iter([rows]))[-1]
    assert len(exhibit.pictures) == 9 and "detections.png" in exhibit.files
    assert Image.open(io.BytesIO(exhibit.pictures[0].data)).format == "JPEG"
    artist = exhibits.Artist(outliner.annotations, outliner.source("eval"), {})
    shapes = {photo.pixels.shape for photo in artist.photos(outliner.annotations.image_ids[:9])}
    assert shapes == {(7 * 48, 7 * 64, 3), (7 * 64, 7 * 48, 3)}  # 480 // 64 is 7


def test_the_columns_of_the_same_rows_are_made_once(detector, monkeypatch):
    def rows(score: float) -> dict[str, np.ndarray]:
        return {
            "image_id": detector.annotations.image_ids[:1].astype(np.int32),
            "score": np.full((1, 1), score, np.float32),
            "class": np.ones((1, 1), np.int32),
            "boxes": np.zeros((1, 1, 4), np.float32),
        }

    made = []
    make_columns = Scorer.make
    monkeypatch.setattr(
        Scorer, "make", lambda self, rows: made.append(rows) or make_columns(self, rows)
    )
    first, second = rows(0.25), rows(0.75)
    for batches in ([first], [first], [second], [second, first], [second, first], [first]):
        scores = detector.scorer.columns(iter(batches))["score"].tolist()
        assert scores == [batch["score"].item() for batch in batches]
    assert len(made) == 4


def test_the_columns_of_detections(detector):
    """Rows without a score are padding; boxes are (x, y, width, height); classes count from 1."""
    ids = [number for number, _ in detector.annotations.categories]
    rows = {
        "image_id": np.array([7, 9], np.int32),
        "score": np.array([[0.75, 0.0], [0.25, 0.5]], np.float32),
        "class": np.array([[2, 1], [1, 3]], np.int32),
        "boxes": np.array([[[1, 2, 5, 9], [0] * 4], [[3, 4, 6, 6], [8, 1, 9, 7]]], np.float32),
    }
    found = detector.scorer.columns(iter([rows, {**rows, "score": rows["score"] * [[1], [0]]}]))
    assert {key: values.tolist() for key, values in found.items()} == {
        "image_id": [7, 9, 9, 7],
        "category_id": [ids[1], ids[0], ids[2], ids[1]],
        "score": [0.75, 0.25, 0.5, 0.75],
        "bbox": [[2, 1, 7, 4], [4, 3, 2, 3], [1, 8, 6, 1], [2, 1, 7, 4]],
    }


def test_the_number_of_classes_and_of_images(outliner, tiny_masks, tmp_path):
    own = len(outliner.annotations.categories)
    assert make(tiny_masks, tmp_path).classes == own != 80
    assert make("", tmp_path).classes == 80
    assert make("", tmp_path, num_classes=7).classes == 7
    assert make(tiny_masks, tmp_path, num_classes=7).classes == 7
    assert len(make(tiny_masks, tmp_path, num_classes=own).annotations.categories) == own
    for wrong in (1, own + 1):
        with pytest.raises(ConfigError, match=rf"config.num_classes={wrong}, but .* has {own} c"):
            _ = make(tiny_masks, tmp_path, num_classes=wrong).annotations
    none, some = make("", ""), make("", "", num_train_images=9, num_eval_images=5)
    assert [none.nominal_examples(split) for split in ("train", "eval")] == [117_266, 5_000]
    assert [some.nominal_examples(split) for split in ("train", "eval")] == [9, 5]


def test_a_backbone_is_complete_and_fits(tmp_path):
    detector = make("", tmp_path, resnet_stages=(1, 1), num_filters=2)

    def arrays(**shapes):
        return {name: np.full(shape, len(shape) + 0.5) for name, shape in shapes.items()}

    ours = {"backbone": arrays(a=(2, 3), b=(4,)), "head": arrays(c=(5,))}
    state = {"batch_stats": {"backbone": arrays(a=(6,))}}

    def adopt(params, stats):
        loaded = {"params": params, "model_state": {"batch_stats": stats}}
        return detector.adopt(ours, state, loaded)

    given = jax.tree.map(lambda x: x + 1, ours["backbone"])
    params, after = adopt(given, arrays(a=(6,)))
    jax.tree.map(np.testing.assert_array_equal, params["backbone"], given)
    assert (params["head"]["c"] == 1.5).all()
    assert (after["batch_stats"]["backbone"]["a"] == 1.5).all()
    with pytest.raises(CheckpointError, match=r"b is missing, .*resnet_stages=\(1, 1\)"):
        adopt(arrays(a=(2, 3)), arrays(a=(6,)))
    with pytest.raises(CheckpointError, match=r"b has the shape \(3,\), .* needs \(4,\)"):
        adopt(arrays(a=(2, 3), b=(3,)), arrays(a=(6,)))
    with pytest.raises(CheckpointError, match="is missing"):
        adopt(arrays(a=(2, 3)), {})


RESNETS = {mask_rcnn: {"resnet_depth": 50}, ssd: {"resnet_depth": 34}}
DETECTORS = pytest.mark.parametrize("module", RESNETS, ids=["mask_rcnn", "ssd"])


def begun(module, **values):
    """The values of a detector that begins with a ResNet."""
    config = module.get_config()
    config.init_from = "/resnet"
    own = {"num_label_classes": 1000, **RESNETS[module], **values}
    manifest = {"benchmark": "resnet", "config": own, "num_train_examples": 9}
    return adopt_values(config, manifest)


@DETECTORS
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("resnet_version", "2", "resnet_version='2'.* trained with --config.resnet_version=1.5"),
        ("resnet_depth", 101, "-101, whose stages have"),
        ("input_spec", "keras", "input_spec has mean="),
    ],
)
def test_a_resnet_that_is_no_backbone_is_refused(module, key, value, words):
    with pytest.raises(ConfigError, match=f"^config.init_from=/resnet is a ResNet.*{words}"):
        begun(module, **{key: value})
