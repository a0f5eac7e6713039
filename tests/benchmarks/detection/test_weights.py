"""Detectors' own checkpoints of other libraries, ResNets as backbones, and old SSDs' pooling."""

import dataclasses
import functools
import importlib
import json
import types
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import benchmarks
from benchmarks.detection import weights
from benchmarks.detection.mask_rcnn import weights as torchvision
from benchmarks.detection.ssd import weights as reference
from common.errors import CheckpointError, ConfigError, DataError
from common.foreign import files, resnets
from common.foreign.files import Foreign
from common.trees import by_name
from configs import finetune, mask_rcnn, small, ssd
from tests.conftest import adopt_values

SMALL = {"num_filters": 2, "pyramid_filters": 4, "box_features": (6, 5), "mask_features": (3,) * 4}


def shapes(benchmark):
    params, state = jax.eval_shape(benchmark.init, jax.random.key(0))
    return {k: tuple(x.shape) for k, x in by_name({"params": params, "model_state": state}).items()}


def written(module, shapes, draw, **values):
    """A detector's random arrays, by the names and in the layouts of another library."""
    arrays = {}
    for path, shape in shapes.items():
        arrays |= module.theirs(path, draw.normal(size=shape).astype(np.float32), values)
    return arrays


def read(module, arrays, **own):
    """(our arrays, keys, remarks) of a file with these arrays."""
    found, values, remarks = weights.described(module, source(arrays))
    shaped = shapes(load(ssd if module is reference else mask_rcnn, **own))
    layout = functools.partial(module.theirs, values=values)
    return files.adapt("m.pth", found, shaped, layout), values, remarks


def load(module, **values) -> Any:
    config = module.get_config()
    config.update(values)
    return benchmarks.load(config.lock(), "")


@pytest.fixture(scope="module")
def masks():
    """Arrays with torchvision's names, of a small Mask R-CNN of COCO's 91 classes."""
    draw, own = np.random.default_rng(0), shapes(load(mask_rcnn, num_classes=90, **SMALL))
    return written(torchvision, own, draw, pyramid_filters=4, box_pool=7)


def source(arrays, sha256="0"):
    return Foreign("m.pth", "PyTorch", sha256, arrays)


def saved(arrays, folder):
    """The path of a file with these arrays."""
    path = str(folder / "model.safetensors")
    safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path)
    return path


@pytest.mark.parametrize(
    ("sha256", "epsilon", "remarked"), [("0", 1e-5, ["bn_epsilon"]), ("bf2d0c1e55", 0, [])]
)
def test_the_settings_of_torchvision_s_mask_rcnn(sha256, epsilon, remarked, masks):
    values, remarks = torchvision.read_settings(source(masks, sha256))
    assert values.items() >= {**SMALL, "num_classes": 90, "class_numbers": "ids"}.items()
    assert values["resnet_stages"] == (3, 4, 6, 3) and values["anchor_grid"] == "corners"
    assert values["box_pool"] == 7 and values["bn_epsilon"] == epsilon
    assert [key for _, key in remarks] == remarked


def test_torchvision_s_names_before_0_13(masks):
    former = {
        name.replace("rpn.head.conv.0.0", "rpn.head.conv")
        .replace("mask_head.0.0", "mask_head.mask_fcn1")
        .replace("inner_blocks.2.0", "inner_blocks.2"): array
        for name, array in masks.items()
    }
    assert former.keys() != masks.keys()
    assert weights.described(torchvision, source(former))[0].keys() == masks.keys()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rpn.head.conv.1.0.weight": np.zeros(2)}, "maskrcnn_resnet50_fpn_v2, whose pyramid and"),
        ({"roi_heads.mask_predictor.mask_fcn_logits.weight": None}, "without masks"),
        ({"roi_heads.box_head.fc6.weight": None}, "incomplete: it lacks .*fc6"),
        ({f"backbone.body.layer3.{i}.conv1.weight": None for i in range(6)}, "lacks a stage of"),
        ({"backbone.body.bn1.bias": np.zeros(3, "f")}, r"bn1.bias \[3\] instead of \[2\]"),
    ],
)
def test_other_files_are_refused(masks, change, words):
    arrays = {k: v for k, v in (masks | change).items() if v is not None}
    with pytest.raises(DataError, match=words) as refused:
        read(torchvision, arrays, num_classes=90, **SMALL)
    assert "\n" not in str(refused.value)


def test_a_file_becomes_a_model_and_a_start(masks, tmp_path):
    """With COCO's class numbers for use as it is; a new training has its own classes."""
    half = {k: v.astype(ml_dtypes.bfloat16) if v.ndim == 2 else v for k, v in masks.items()}
    path = saved(half, tmp_path)
    config = mask_rcnn.get_config()
    assert adopt_values(config, path, whole=True)["anchor_grid"] == "corners"
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
    adopt_values(config, path)
    assert (config.max_pool, config.anchor_grid, config.num_classes) == ("torch", "corners", 7)
    tuned: Any = benchmarks.load(config.lock(), "")
    ours: Any = jax.eval_shape(tuned.init, jax.random.key(0))
    loaded = tuned.uses.read_foreign(path)
    params, _ = tuned.adopt(*ours, {"params": loaded.params, "model_state": loaded.model_state})
    assert isinstance(params["pyramid"]["lateral2"]["kernel"], np.ndarray)
    assert params["box_head"]["class"]["kernel"].shape == (5, 8)


def test_the_heads_of_the_reference_s_ssd():
    """A convolution of deltas and one of classes, both with the shapes of the boxes last."""
    sizes = {"num_filters": 4, "extra_squeezed": (2,) * 5, "extra_filters": (8, 8, 4, 4, 4)}
    benchmark = load(ssd, num_classes=2, **sizes)
    own = shapes(benchmark)
    arrays = written(reference, own, np.random.default_rng(0), num_classes=2)
    arrays |= {"loc.0.bias": np.arange(16.0), "conf.0.bias": 100 + np.arange(12.0)}
    found, values, _ = read(reference, arrays, num_classes=2, **sizes)
    assert {k: v.shape for k, v in found.items()} == own
    bias = found["params/head1/bias"].reshape(4, 7)  # a row for each of the four shapes
    np.testing.assert_array_equal(bias[1], [5, 1, 13, 9, 101, 105, 109])
    assert values.items() >= {"num_classes": 2, "clip_boxes": False, **sizes}.items()
    assert (values["max_pool"], values["resnet_stages"]) == ("torch", (3, 4, 6))
    assert {"model.layer1.0.weight", "model.layer2.0.5.bn2.running_var"} <= {*arrays}
    assert {"additional_blocks.4.2.bias", "model.layer1.5.0.downsample.1.weight"} <= {*arrays}


def resnet(folder, depth, family=None, **beside):
    """Writes a small ResNet as `family` names it, else as torchvision; returns path and params."""
    made = load(importlib.import_module("configs.resnet50"), resnet_depth=depth, num_filters=4)
    draw = np.random.default_rng(1)
    params, state = jax.tree.map(
        lambda x: draw.normal(size=x.shape).astype(np.float32),
        jax.eval_shape(made.init, jax.random.key(0)),
    )
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return saved(resnets.names(params, state, family), folder), params


SMALL_SSD = types.SimpleNamespace(get_config=small.RECIPES["ssd"])
TIMM = {"input_size": [3, 224, 224], "interpolation": "bicubic", "crop_pct": 0.95}
V1 = {"model_type": "resnet", "downsample_in_bottleneck": True}
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


@pytest.mark.parametrize(
    ("module", "depth", "family", "config", "words"),
    [
        (ssd, 34, None, {}, ""),
        (mask_rcnn, 50, None, {"architecture": "resnet50", "pretrained_cfg": TIMM | IMAGENET}, ""),
        (ssd, 34, resnets.HUGGING_FACE, {"model_type": "resnet"}, ""),
        (mask_rcnn, 50, resnets.HUGGING_FACE, {"model_type": "resnet"}, ""),
        (ssd, 18, None, {}, "is a ResNet-18, whose stages have .* give a ResNet-34$"),
        (SMALL_SSD, 50, None, {}, "is a ResNet-50, whose .* give a ResNet-10 or -18 or -34$"),
        (mask_rcnn, 50, resnets.HUGGING_FACE, V1, "resnet_version='1', which is not a backbone"),
    ],
)
def test_a_file_of_a_resnet_is_a_backbone(
    module, depth, family, config, words, tmp_path, monkeypatch
):
    """The start reads the file once."""
    parsed, read = [], files._read_file
    monkeypatch.setattr(files, "_read_file", lambda file: parsed.append(file) or read(file))
    path, params = resnet(tmp_path, depth, family, config=config)
    config = module.get_config()
    config.update({"init_from": path, "num_filters": 4})
    if words:
        with pytest.raises(ConfigError, match=words):
            adopt_values(config, path)
        return
    assert adopt_values(config, path) == {"max_pool": "torch"}
    detector: Any = benchmarks.load(config.lock(), "")
    loaded = detector.uses.read_foreign(path)
    assert len(parsed) == 1
    ours: Any = jax.eval_shape(detector.init, jax.random.key(0))
    taken, _ = detector.adopt(*ours, {"params": loaded.params, "model_state": loaded.model_state})
    kernel = taken["backbone"]["stage2_block1"]["conv_proj"]["kernel"]
    np.testing.assert_array_equal(kernel, params["stage2_block1"]["conv_proj"]["kernel"])


BASIC = {"resnet_stages": (2, 2, 2), "num_filters": 4}
ALL = {"resnet_stages": (2, 2, 2, 2), "num_filters": 4, "resnet_bottleneck": False}


@pytest.mark.parametrize(
    ("recipes", "name", "depth", "sizes"),
    [
        (small, "ssd", 18, BASIC),
        (finetune, "ssd", 18, BASIC),
        (finetune, "mask_rcnn", 18, ALL),
        (small, "mask_rcnn", 50, {"resnet_stages": (3, 4, 6), "resnet_bottleneck": True}),
    ],
)
def test_the_backbone_follows_a_resnet(recipes, name, depth, sizes, tmp_path):
    """Sizes that the user types stay, and then the arrays do not fit."""
    path, params = resnet(tmp_path, depth)
    config = recipes.get_config(name)
    adopt_values(config, path)
    assert {key: config[key] for key in sizes} == sizes
    detector: Any = benchmarks.load(config, "")
    loaded = detector.uses.read_foreign(path)
    loaded = {"params": loaded.params, "model_state": loaded.model_state}
    taken = detector.adopt(*jax.eval_shape(detector.init, jax.random.key(0)), loaded)[0]
    kernel = taken["backbone"]["stage3_block2"]["conv1"]["kernel"]
    np.testing.assert_array_equal(kernel, params["stage3_block2"]["conv1"]["kernel"])

    config.num_filters = 8
    detector = benchmarks.load(config, "")
    with pytest.raises(CheckpointError, match=r"has the shape .*, the backbone needs [^\n]*$"):
        detector.adopt(*jax.eval_shape(detector.init, jax.random.key(0)), loaded)


def test_files_that_a_detector_cannot_take(masks, tmp_path):
    """Those of another detector, of other sizes, and of neither a detector nor a ResNet."""
    path = saved(masks, tmp_path)
    with pytest.raises(DataError, match=r"is torchvision's .* --config=configs/mask_rcnn.py takes"):
        adopt_values(ssd.get_config(), path)
    with pytest.raises(DataError, match="it has other shapes: backbone"):
        load(mask_rcnn).uses.read_foreign(path)
    path = saved({"x": np.zeros(2, np.float32)}, tmp_path)
    with pytest.raises(DataError, match="holds no ResNet of .*; nor is it MLPerf's reference SSD"):
        load(ssd).uses.read_foreign(path)


def test_classes_that_are_numbered_by_category(tiny_scenes, tmp_path):
    """Class 12 is the category 12; those between are unused, and their detections are dropped."""
    benchmark = load(ssd, data_dir=tiny_scenes, num_classes=90, class_numbers="ids")
    benchmark.open("eval")
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
