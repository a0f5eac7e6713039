"""Detectors' own checkpoints of other libraries, ResNets as backbones, and old SSDs' pooling."""

import dataclasses
import importlib
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import benchmarks
from benchmarks import settling
from benchmarks.detection.mask_rcnn import weights as torchvision
from benchmarks.detection.ssd import weights as reference
from configs import mask_rcnn, ssd
from engine import weights as saved
from errors import ConfigError, DataError
from modes import importing
from ops.foreign.files import Foreign
from ops.trees import by_name

SMALL = {"num_filters": 2, "pyramid_filters": 4, "box_features": (6, 5), "mask_features": (3,) * 4}


def shapes(benchmark):
    params, state = jax.eval_shape(benchmark.init, jax.random.key(0))
    return {k: tuple(x.shape) for k, x in by_name({"params": params, "model_state": state}).items()}


def load(module, **values) -> Any:
    config = module.get_config()
    config.update(values)
    return benchmarks.load(config.lock(), "")


@pytest.fixture(scope="module")
def masks():
    """Arrays with torchvision's names, of a small Mask R-CNN of COCO's 91 classes."""
    draw, own = np.random.default_rng(0), shapes(load(mask_rcnn, num_classes=90, **SMALL))
    theirs = {torchvision.name(k): torchvision._theirs(k, shape) for k, shape in own.items()}
    arrays = {k: draw.normal(size=shape).astype(np.float32) for k, shape in theirs.items()}
    return arrays | {"backbone.body.bn1.num_batches_tracked": np.int64(3)}


def source(arrays, sha256="0"):
    return Foreign("m.pth", "PyTorch", sha256, arrays, {}, ())


def test_the_settings_of_torchvision_s_mask_rcnn(masks):
    values, remarks = torchvision.read_settings(source(masks))
    assert values.items() >= {**SMALL, "num_classes": 90, "class_numbers": "ids"}.items()
    assert values["resnet_stages"] == (3, 4, 6, 3) and values["anchor_grid"] == "corners"
    assert values["box_pool"] == 7 and values["bn_epsilon"] == 1e-5 and "bn_epsilon" in remarks[0]
    values, remarks = torchvision.read_settings(source(masks, "bf2d0c1e55"))
    assert values["bn_epsilon"] == 0 and remarks == []


def test_torchvision_s_names_before_0_13(masks):
    former = {
        name.replace("rpn.head.conv.0.0", "rpn.head.conv")
        .replace("mask_head.0.0", "mask_head.mask_fcn1")
        .replace("inner_blocks.2.0", "inner_blocks.2"): array
        for name, array in masks.items()
    }
    assert former.keys() != masks.keys()
    today = torchvision.arrays_of(source(former))
    assert today.keys() == {k for k in masks if "tracked" not in k}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rpn.head.conv.1.0.weight": np.zeros(2)}, "maskrcnn_resnet50_fpn_v2, whose pyramid and"),
        ({"roi_heads.mask_predictor.mask_fcn_logits.weight": None}, "without masks"),
        ({"roi_heads.box_head.fc6.weight": None}, "no complete torchvision's Mask R-CNN"),
        ({"backbone.body.layer3.0.bn1.bias": None}, "it lacks backbone.body.layer3.0.bn1.bias"),
        ({"extra": np.zeros(2)}, "unknown arrays: extra"),
        ({"backbone.body.bn1.bias": np.zeros(3, "f")}, r"bn1.bias \[3\] instead of \[2\]"),
        ({"backbone.body.bn1.bias": np.zeros(2, "i4")}, "whole numbers, in backbone.body.bn1"),
        ({"backbone.body.bn1.bias": np.full(2, np.nan)}, "bn1.bias has values that are not finite"),
    ],
)
def test_other_files_are_refused(masks, change, words):
    file = source({k: v for k, v in (masks | change).items() if v is not None})
    with pytest.raises(DataError, match=words) as refused:
        values, _ = torchvision.read_settings(file)
        keys = {key: values[key] for key in (*SMALL, "num_classes")}
        torchvision.translate(file, shapes(load(mask_rcnn, **keys)))
    assert "\n" not in str(refused.value)


def test_a_file_becomes_a_model_and_a_start(masks, tmp_path):
    """With COCO's class numbers for use as it is; a new training has its own classes."""
    path = str(tmp_path / "m.safetensors")
    half = {k: v.astype(ml_dtypes.bfloat16) if v.ndim == 2 else v for k, v in masks.items()}
    safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in half.items()}, path)
    config = mask_rcnn.get_config()
    notes = settling.settle(config, path, (), whole=True)
    assert "config.anchor_grid='corners' instead of 'centres', as the weights want it" in notes
    benchmark: Any = benchmarks.load(config.lock(), "")
    imported = benchmark.uses.read_foreign(path)
    assert imported.metadata["imported"]["format"] == "safetensors" and "90 classes" in imported[4]
    found = by_name({"params": imported.params, "model_state": imported.model_state})
    assert {k: v.shape for k, v in found.items()} == shapes(benchmark)
    stem = masks["backbone.body.conv1.weight"]
    np.testing.assert_array_equal(
        found["params/backbone/conv_stem/kernel"][1, 2, 0], stem[:, 0, 1, 2]
    )
    config = mask_rcnn.get_config()
    config.update({**SMALL, "num_classes": 7})
    settling.settle(config, path, (), whole=False)
    assert (config.max_pool, config.anchor_grid, config.num_classes) == ("torch", "corners", 7)
    tuned: Any = benchmarks.load(config.lock(), "")
    ours: Any = jax.eval_shape(tuned.init, jax.random.key(0))
    loaded = tuned.uses.read_foreign(path)
    params, _ = tuned.adopt(*ours, {"params": loaded.params, "model_state": loaded.model_state})
    assert isinstance(params["pyramid"]["lateral2"]["kernel"], np.ndarray)
    assert params["box_head"]["class"]["kernel"].shape == (5, 8)


def test_the_heads_of_the_reference_s_ssd():
    """A convolution of codes and one of classes, both with the shapes of the boxes last."""
    benchmark = load(ssd, num_classes=2)
    own = {k: v for k, v in shapes(benchmark).items() if "head1" in k}
    codes, logits = np.arange(16.0), 100 + np.arange(12.0)
    arrays = {"loc.0.bias": codes, "conf.0.bias": logits}
    arrays |= {f"{k[:-5]}.weight": np.ones((len(v), 256, 3, 3)) for k, v in [*arrays.items()]}
    found = reference.translate(source(arrays), {k: own[k] for k in own})
    bias = found["params/head1/bias"].reshape(4, 7)  # a row for each of the four shapes
    np.testing.assert_array_equal(bias[1], [5, 1, 13, 9, 101, 105, 109])
    assert found["params/head1/kernel"].shape == (3, 3, 256, 28)
    values, _ = reference.read_settings(source(arrays))
    keys = ("num_classes", "max_pool", "clip_boxes")
    assert [values[key] for key in keys] == [2, "torch", False]
    names = [name for path in shapes(benchmark) for name in reference.names(path)]
    assert len({*names}) == len(names)
    assert {"model.layer1.0.weight", "model.layer2.0.5.bn2.running_var"} <= {*names}
    assert {"additional_blocks.4.2.bias", "model.layer1.5.0.downsample.1.weight"} <= {*names}


@pytest.mark.parametrize(
    ("module", "depth", "words"),
    [(ssd, 34, ""), (mask_rcnn, 50, ""), (ssd, 18, "is a ResNet-18, whose stages have")],
)
def test_a_file_of_a_resnet_is_a_backbone(module, depth, words, tmp_path):
    from ops.foreign.resnets import names

    made = load(importlib.import_module("configs.resnet50"), resnet_depth=depth, num_filters=4)
    draw = np.random.default_rng(1)
    params, state = jax.tree.map(
        lambda x: draw.normal(size=x.shape).astype(np.float32),
        jax.eval_shape(made.init, jax.random.key(0)),
    )
    path = str(tmp_path / "resnet.safetensors")
    theirs = {k: np.ascontiguousarray(v) for k, v in names(params, state).items()}
    safetensors.numpy.save_file(theirs, path)
    config = module.get_config()
    config.update({"init_from": path, "num_filters": 4})
    if words:
        with pytest.raises(ConfigError, match=words):
            settling.settle(config, path, (), whole=False)
        return
    notes = settling.settle(config, path, (), whole=False)
    assert notes == ["config.max_pool='torch' instead of 'same', as the weights want it"]
    detector: Any = benchmarks.load(config.lock(), "")
    loaded = detector.uses.read_foreign(path)
    ours: Any = jax.eval_shape(detector.init, jax.random.key(0))
    taken, _ = detector.adopt(*ours, {"params": loaded.params, "model_state": loaded.model_state})
    kernel = taken["backbone"]["stage2_block1"]["conv_proj"]["kernel"]
    np.testing.assert_array_equal(kernel, params["stage2_block1"]["conv_proj"]["kernel"])


def test_what_is_no_file_of_weights(tmp_path):
    benchmark, path = load(ssd), str(tmp_path / "x.safetensors")
    assert benchmark.uses.read_foreign("/nowhere") is None
    safetensors.numpy.save_file({"x": np.zeros(2, np.float32)}, path)
    with pytest.raises(DataError, match="holds no ResNet of .*; nor is it the SSD of MLPerf's"):
        benchmark.uses.read_foreign(path)


# SSDs before config.max_pool existed.


def old(**values):
    config = {k: v for k, v in ssd.get_config().to_dict().items() if k != "max_pool"}
    return {"benchmark": "ssd", "config": {**config, **values}, "step": 5}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("given", [False, True])
def test_an_old_ssd_goes_on_with_its_pooling(mode, given, monkeypatch):
    monkeypatch.setattr(saved, "peek", lambda path: old())
    config = ssd.get_config()
    assert config.max_pool == "same"  # Google's
    notes = importing.settle(config, "/workdir", mode, ["max_pool"] if given else [])
    assert config.max_pool == ("same" if given else "torch") and bool(notes) != given
    monkeypatch.setattr(saved, "peek", lambda path: old(max_pool="same"))
    config.max_pool = "torch"
    importing.settle(config, "/workdir", mode, [])
    assert config.max_pool == ("same" if mode == "eval" else "torch")


def test_the_manifest_of_an_old_ssd_describes_its_pooling():
    values = settling.restored(old())
    assert values["max_pool"] == "torch" and settling.is_older(old())
    assert not settling.is_older(old(max_pool="same"))
    assert load(ssd, **values).settings.backbone.pool_padding == ((1, 1), (1, 1))


def test_classes_that_are_numbered_by_category(tiny_scenes, tmp_path):
    """Class 12 is the category 12; those between are unused, and their detections are dropped."""
    benchmark = load(ssd, data_dir=tiny_scenes, num_classes=90, class_numbers="ids")
    names = dict(benchmark.categories)
    assert len(names) == 90 and names[12] == "blue" and names[4] == ""
    assert benchmark.source("eval").category_ids == tuple(range(1, 91))
    rows = {
        "image_id": benchmark.annotations.image_ids[:1].astype(np.int32),
        "score": np.array([[0.9, 0.8]], np.float32),
        "class": np.array([[12, 4]], np.int32),
        "boxes": np.ones((1, 2, 4), np.float32),
    }
    assert benchmark.scorer.columns(iter([rows]))["category_id"].tolist() == [12]
    keys = dataclasses.replace(benchmark.settings.data, num_classes=89)
    fewer = type(benchmark)(dataclasses.replace(benchmark.settings, data=keys), str(tmp_path))
    with pytest.raises(ConfigError, match="config.num_classes=89 .*a category of id 90"):
        _ = fewer.annotations
