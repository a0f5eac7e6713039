"""What detectors share, with masks and two orientations; SSD's tests have the rest."""

import io
import types

import jax
import numpy as np
import pytest
from PIL import Image

import benchmarks
from benchmarks.detector import Detector
from benchmarks.mask_rcnn import input_pipeline
from benchmarks.mask_rcnn.input_pipeline import Preprocessing
from configs import mask_rcnn, ssd
from errors import ConfigError
from ops.detection import picture

SETTINGS = {
    **{"seed": 1, "train_files": "train-*", "eval_files": "val-*", "num_train_images": 0},
    **{"eval_annotations": "instances_val*.json", "num_eval_images": 0, "num_classes": 0},
    **{"shuffle_buffer_size": 32, "input_streams": 4, "max_boxes": 4},
}


class Outliner(Detector):
    """A detector without a network."""

    reads_masks = True
    image_key = "image_shape"

    def batch_spec(self, split, batch_size):
        del split
        images = [(batch_size, 48, 64, 3), (batch_size, 64, 48, 3)]
        return tuple({"image": jax.ShapeDtypeStruct(shape, np.uint8)} for shape in images)

    def eval_batches(self, batch_size, shard, num_shards):
        preprocessing = Preprocessing(
            image_short=24,
            image_long=32,
            image_shape=(48, 64),
            max_boxes=4,
            mask_size=8,
            random_flip=False,
        )
        return input_pipeline.eval_batches(self._eval, preprocessing, batch_size, shard, num_shards)

    def _shown(self, batch, i):
        return input_pipeline.shown(batch, i)


@pytest.fixture
def outliner(tiny_masks, tmp_path):
    return make(tiny_masks, tmp_path)


def make(folder, cache, **changed):
    settings = {**SETTINGS, "data_dir": folder, **changed}
    return Outliner(types.SimpleNamespace(**settings), str(cache))


def test_examples_are_numbered_over_both_orientations(outliner):
    assert (outliner.num_examples("train"), outliner.num_examples("eval")) == (90, 23)
    wide, upright = outliner.source("train").pools
    assert (wide.shards.total, upright.shards.total) == (60, 30)
    batches = [outliner.train_ids(10, step) for step in range(9)]
    assert sorted(sum(batches, [])) == list(range(90))
    assert sum(min(batch) >= 60 for batch in batches) == 3
    for i, place in zip((0, 60), outliner.describe([0, 60]), strict=True):
        pool = wide if i == 0 else upright
        assert place == pool.shards.where(0)


def test_the_annotations_have_outlines(outliner):
    assert len(outliner._annotations.outlines) == len(outliner._annotations.rows) > 20


def test_a_wrong_number_of_images_is_told_with_the_number_of_files(tiny_masks, tmp_path):
    words = "config.num_train_images=96, but the train split has 90 in 4 files"
    with pytest.raises(ConfigError, match=words):
        make(tiny_masks, tmp_path, num_train_images=96).num_examples("train")


def test_a_host_s_memory(outliner, tiny_masks, tmp_path, monkeypatch):
    """As much as the same records need that are not told apart by orientation."""
    batches = 8 * 16 * 48 * 64 * 3 // 2
    assert outliner.host_bytes("eval", 16, 2) == {("eval_batch_size", "image_shape"): batches}
    both = outliner.host_bytes("train", 16, 2)
    assert both[("train_batch_size", "image_shape")] == batches
    monkeypatch.setattr(Outliner, "batch_spec", lambda *_: ({},))
    one = make(tiny_masks, tmp_path).held_bytes(2)
    assert both[("shuffle_buffer_size",)] == one > 1000


def test_pictures_are_drawn_without_padding(outliner, monkeypatch):
    ids = outliner._annotations.image_ids[:3].astype(np.int32)
    rows = {
        "image_id": ids,
        "score": np.full((3, 1), 0.9, np.float32),
        "class": np.ones((3, 1), np.int32),
        "boxes": np.tile(np.array([4, 5, 20, 30], np.float32), (3, 1, 1)),
    }
    shown = []
    draw = picture.draw
    monkeypatch.setattr(picture, "draw", lambda some: shown.append(some) or draw(some))
    (exhibit,) = outliner.exhibits(iter([rows]))
    assert len(exhibit.pictures) == 9 and "detections.png" in exhibit.files
    drawn = Image.open(io.BytesIO(exhibit.pictures[0].data))
    assert drawn.format == "PNG"
    for example in shown[-1]:
        assert example.image.shape == (24, 32, 3) and example.size == (48, 64)
        assert example.image.all(axis=-1).mean() > 0.9  # padding is black


def test_the_columns_of_the_same_rows_are_made_once(outliner, monkeypatch):
    def rows(score: float) -> dict[str, np.ndarray]:
        return {
            "image_id": outliner._annotations.image_ids[:1].astype(np.int32),
            "score": np.full((1, 1), score, np.float32),
            "class": np.ones((1, 1), np.int32),
            "boxes": np.zeros((1, 1, 4), np.float32),
        }

    made = []
    make_columns = Outliner._columns
    monkeypatch.setattr(
        Outliner, "_columns", lambda self, rows: made.append(rows) or make_columns(self, rows)
    )
    first, second = rows(0.25), rows(0.75)
    for batches in ([first], [first], [second], [second, first], [second, first], [first]):
        scores = outliner.columns(iter(batches))["score"].tolist()
        assert scores == [batch["score"].item() for batch in batches]
    assert len(made) == 4


RESNETS = {mask_rcnn: {"resnet_depth": 50}, ssd: {"resnet_depth": 34}}
DETECTORS = pytest.mark.parametrize("module", RESNETS, ids=["mask_rcnn", "ssd"])


def begun(module, **values):
    """The notes on a detector that begins with a ResNet, and the detector's config."""
    config = module.get_config()
    config.init_from = "/resnet"
    own = {"num_label_classes": 1000, **RESNETS[module], **values}
    manifest = {"benchmark": "resnet", "config": own}
    return benchmarks.settle(config, manifest, (), whole=False), config


@DETECTORS
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("resnet_version", "2", "resnet_version='2'.* trained with --config.resnet_version=1.5"),
        ("resnet_version", "1", "resnet_version='1'"),
        ("deep_stem", True, "deep_stem=True"),
        ("squeeze_excite", 0.0625, "squeeze_excite=0.0625"),
        ("blur_pool", True, "blur_pool=True"),
        ("resnet_depth", 101, "-101, whose stages have"),
        ("input_spec", "keras", "input_spec has mean="),
        ("input_spec", "big_vision", "but a detector gives its backbone .123.675"),
    ],
)
def test_a_resnet_that_is_no_backbone_is_refused(module, key, value, words):
    with pytest.raises(ConfigError, match=f"^config.init_from=/resnet is a ResNet.*{words}"):
        begun(module, **{key: value})


@DETECTORS
def test_the_crops_of_a_backbone_do_not_matter(module):
    notes, _ = begun(module, max_pool="torch", input_spec="torchvision_v2")
    assert not any("input_spec" in note for note in notes)


def test_the_padding_of_a_backbone_is_followed_or_remarked():
    notes, config = begun(mask_rcnn, max_pool="torch")
    assert len(notes) == 1 and config.max_pool == "torch"
    (note,), _ = begun(ssd, max_pool="same")
    assert "max_pool='same', and the detector pads as 'torch' does" in note
    assert begun(ssd, max_pool="torch")[0] == []
