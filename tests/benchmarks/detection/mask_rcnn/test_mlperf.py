"""Mask R-CNN's MLPerf logs: what the official checkers say, and which recipes are refused."""

import json
import types
from typing import Any

import pytest
from mlperf_compliance import tags

from benchmarks.detection.mask_rcnn import mlperf
from common.errors import UserError
from configs import mask_rcnn, mlperf_mask_rcnn
from tests.engine.test_mlperf import complaints
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
    with open(tmp_path / "mlperf.log") as file:
        rows = [json.loads(line.removeprefix(":::MLLOG ")) for line in file]
    values = {row["key"]: row["value"] for row in rows}
    assert values["eval_accuracy"] == {"BBOX": 0.378, "SEGM": 0.34}
    _, peak, _, drops, _ = mlperf_mask_rcnn.RECIPES[recipe]
    assert values["opt_base_learning_rate"] == pytest.approx(peak)
    assert values["opt_learning_rate_decay_steps"] == [int(step) for step in drops.split(", ")]
    tensors = {row["metadata"]["tensor"] for row in rows if row["key"] == "weights_initialization"}
    assert len(tensors) == 21


def test_v05(tmp_path, clock):
    config = mlperf_config("mask_rcnn", **COUNTS, num_classes=80, mlperf={"format": "v0.5"})
    write_run(config, str(tmp_path), [scores(0.1, 0.1), scores(0.378, 0.34)], clock)
    with open(tmp_path / "mlperf.log") as file:
        text = file.read()
    wanted = tags.MASKRCNN_TAGS
    missing = {tag for tag in wanted if f" {tag}: " not in text and f" {tag}\n" not in text}
    assert missing == {"run_clear_caches"}
    assert '"box_AP": 0.378' in text and '"mask_AP": 0.34' in text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("base_learning_rate", 0.05, "multiples of 0.02"),
        ("learning_rate_decay_steps", "9000", "two drops"),
        ("learning_rate_decay_steps", "8, 11 epochs", "as steps"),
        ("learning_rate_schedule", "cosine", "wants 'step'"),
        ("optimizer", "adam", "'sgd' only"),
    ],
)
def test_the_closed_division_refuses(key, value, words, tmp_path, clock):
    config = mlperf_config("mlperf_mask_rcnn:128", **COUNTS, **{key: value})
    with pytest.raises(UserError, match=f"{key}.*{words}"):
        write_run(config, str(tmp_path), [scores(0.1, 0.1)], clock)


def subject(peak=0.02, batch=16, drops="60000, 80000", **keys) -> Any:
    recipe = {"train_batch_size": batch, "learning_rate_decay_steps": drops, "image_short": 800}
    recipe |= {"learning_rate_decay_factors": (0.1,), "learning_rate_schedule": "step"}
    recipe |= {"proposals_after_nms": 1000, "image_long": 1333, "warmup_from": 0.0}
    rate = types.SimpleNamespace(peak=peak, warmup_steps=500.0)
    recipe |= {"base_learning_rate": peak}
    return types.SimpleNamespace(recipe={**recipe, **keys}, learning_rate=rate)


@pytest.mark.parametrize(
    ("batch", "peak", "is_allowed"),
    [
        *((16, 0.02, True), (16, 0.04, True), (16, 0.03, False), (16, 0.01, False)),
        *((17, 0.01, False), (16, 1e-9, False), (8, 0.01, True), (15, 0.005, True)),
        *((8, 0.015, False), (8, 0.02, True), (8, 0.04, True), (8, 0.03, False)),
    ],
)
def test_rates_are_multiples_or_fractions(batch, peak, is_allowed):
    drops = ", ".join(str(round(step * 16 / batch)) for step in (60_000, 80_000))
    faults = list(mlperf._breaches(subject(peak, batch, drops)))
    assert len(faults) == (not is_allowed) and all("peak of" in fault for fault in faults)


@pytest.mark.parametrize(
    ("drops", "is_allowed"),
    [
        *(("7500, 10000", True), ("9000, 12000", True), ("9001, 11999", True)),
        *(("9000, 12002", False), ("9002, 12000", False), ("6750, 9000", False)),
        *(("9000", False), ("9000, 12000, 15000", False), ("9375, 12500", False)),
    ],
)
def test_drops_are_later_by_tenths(drops, is_allowed):
    """Of 128 images, from (60000, 80000) / 8 steps on."""
    assert len(list(mlperf._breaches(subject(0.16, 128, drops)))) == (not is_allowed)


@pytest.mark.parametrize(
    ("keys", "is_allowed"),
    [
        *(({}, True), ({"proposals_after_nms": 2000}, True), ({"image_long": 1334}, False)),
        *(({"learning_rate_decay_factors": (0.2,)}, False), ({"image_short": 801}, False)),
        *(({"proposals_after_nms": 1001}, False), ({"proposals_after_nms": 2001}, False)),
        ({"learning_rate_decay_factors": (0.1, 0.1)}, False),
    ],
    ids=str,
)
def test_other_values_of_the_closed_division(keys, is_allowed):
    assert len(list(mlperf._breaches(subject(**keys)))) == (not is_allowed)


def test_the_warm_up_begins_with_a_share_of_the_peak():
    assert mlperf._warmup_factor(subject(0.16, warmup_from=0.04)) == 0.25
    run = subject()
    assert mlperf._warmup_factor(run) == 1 / 500
    run.learning_rate.warmup_steps = 0.0
    assert mlperf._warmup_factor(run) == 1


@pytest.mark.parametrize(("flip", "probability"), [(True, 0.5), (False, 0.0)])
def test_the_tags_of_the_input(flip, probability):
    run: Any = subject()
    run.recipe = {**mask_rcnn.get_config().to_dict(), "random_flip": flip}
    values = mlperf._tags(run)
    assert values["input_mean_subtraction"] == [0.485, 0.456, 0.406]
    assert values["input_normalization_std"] == [0.229, 0.224, 0.225]
    assert values["random_flip_probability"] == probability
    assert values["input_random_flip"] is flip


def test_every_layer_of_the_reference_has_a_name():
    assert mlperf.tensor("box_head/dense2") == "ROI_BOX_FEATURE_EXTRACTOR_fc7"
    assert mlperf.tensor("pyramid/lateral2") == "FPN_inner_block1"
