"""Mask R-CNN's MLPerf logs: what the official checkers say, and which recipes are refused."""

import pytest
from mlperf_compliance import tags

from common.errors import UserError
from configs import mlperf_mask_rcnn
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
