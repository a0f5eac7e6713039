"""Mask R-CNN's MLPerf logs: what the official checkers say, and which recipes are refused."""

import types
from typing import Any

import pytest
from mlperf_compliance import tags

from benchmarks.detection.mask_rcnn import mlperf
from common.errors import UserError
from configs import mask_rcnn, mlperf_mask_rcnn
from tests.engine.test_mlperf import complaints, rows
from tests.helpers.mlperf_fixture import mlperf_config, write_run

COUNTS = {"num_train_images": 117_266, "num_eval_images": 5_000}


def scores(box, mask):
    return {"mAP": box, "mask_mAP": mask}


@pytest.mark.parametrize("recipe", mlperf_mask_rcnn.RECIPES)
def test_the_official_checkers_accept_the_log(recipe, tmp_path, clock):
    config = mlperf_config(f"mlperf_mask_rcnn:{recipe}", **COUNTS)
    write_run(config, str(tmp_path), [scores(0.38, 0.338), scores(0.378, 0.34)], clock)
    for ruleset in ("3.1.0",) if recipe == "8" else ("0.7.0", "1.1.0", "3.1.0"):
        assert complaints(tmp_path / "mlperf.log", ruleset) == []
    logged = rows(tmp_path / "mlperf.log")
    values = {row["key"]: row["value"] for row in logged}
    assert values["eval_accuracy"] == {"BBOX": 0.378, "SEGM": 0.34}
    _, peak, _, drops, _ = mlperf_mask_rcnn.RECIPES[recipe]
    assert values["opt_base_learning_rate"] == pytest.approx(peak)
    assert values["opt_learning_rate_decay_steps"] == [int(step) for step in drops.split(", ")]
    tensors = {
        row["metadata"]["tensor"] for row in logged if row["key"] == "weights_initialization"
    }
    assert len(tensors) == 21


def test_v05(tmp_path, clock):
    config = mlperf_config("mask_rcnn", **COUNTS, num_classes=80, mlperf={"format": "v0.5"})
    write_run(config, str(tmp_path), [scores(0.1, 0.1), scores(0.378, 0.34)], clock)
    text = (tmp_path / "mlperf.log").read_text()
    wanted = tags.MASKRCNN_TAGS
    missing = {tag for tag in wanted if f" {tag}: " not in text and f" {tag}\n" not in text}
    assert missing == {"run_clear_caches"}
    assert '"box_AP": 0.378' in text and '"mask_AP": 0.34' in text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("base_learning_rate", 0.05, "opt_base_learning_rate=0.05"),
        ("proposals_after_nms", 1001, "num_image_candidates=1001"),
        ("learning_rate_decay_steps", "9000", "'opt_learning_rate_decay_steps'"),
        ("learning_rate_decay_steps", "8, 11 epochs", "as steps"),
        ("learning_rate_schedule", "cosine", "wants 'step'"),
        ("optimizer", "adam", "'sgd' only"),
    ],
)
def test_the_closed_division_refuses(key, value, words, tmp_path, clock):
    config = mlperf_config("mlperf_mask_rcnn:128", **COUNTS, **{key: value})
    with pytest.raises(UserError) as caught:
        write_run(config, str(tmp_path), [scores(0.1, 0.1)], clock)
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_the_warm_up_begins_with_a_share_of_the_peak():
    for peak, steps, first, factor in (
        (0.16, 500, 0.04, 0.25),
        (0.02, 500, 0, 1 / 500),
        (1, 0, 0, 1),
    ):
        rate = types.SimpleNamespace(peak=peak, warmup_steps=steps)
        run: Any = types.SimpleNamespace(recipe={"warmup_from": first}, learning_rate=rate)
        assert mlperf._warmup_factor(run) == factor


@pytest.mark.parametrize(("flip", "probability"), [(True, 0.5), (False, 0.0)])
def test_the_tags_of_the_input(flip, probability):
    rate = types.SimpleNamespace(peak=0.02, warmup_steps=500.0)
    recipe = {**mask_rcnn.get_config().to_dict(), "random_flip": flip}
    run: Any = types.SimpleNamespace(recipe=recipe, learning_rate=rate)
    values = mlperf._tags(run)
    assert values["input_mean_subtraction"] == [0.485, 0.456, 0.406]
    assert values["input_normalization_std"] == [0.229, 0.224, 0.225]
    assert values["random_flip_probability"] == probability
    assert values["input_random_flip"] is flip


def test_every_layer_of_the_reference_has_a_name():
    assert mlperf.tensor("box_head/dense2") == "ROI_BOX_FEATURE_EXTRACTOR_fc7"
    assert mlperf.tensor("pyramid/lateral2") == "FPN_inner_block1"
