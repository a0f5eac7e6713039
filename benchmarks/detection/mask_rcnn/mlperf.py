"""Mask R-CNN in MLPerf: its rules, its data, and what the logs say about a run.

Keys of 'mllog' come from mlperf-logging's rulesets 0.7.0 to 3.1.0. Keys of 'v0.5' are the tags
of mlperf_compliance 0.0.10. Tensors have the names of ruleset 1.1.0.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.detection.detector import COCO
from benchmarks.mlperf import Entry, Facts, Run, check_optimizer, drop_steps
from common.images.input_spec import IMAGENET_UNIT
from common.trees import by_name

_NAMES = {"mllog": ("BBOX", "SEGM"), "v0.5": ("box_AP", "mask_AP")}
_TARGETS = {"mAP": 0.377, "mask_mAP": 0.339}


def _evaluation(scores: Mapping[str, float], form: str) -> dict[str, float]:
    return dict(zip(_NAMES[form], (scores[metric] for metric in _TARGETS), strict=True))


ENTRY = Entry(
    name="maskrcnn",
    recipe="configs/mlperf_mask_rcnn.py:128",
    targets=dict.fromkeys(_NAMES, _TARGETS),
    declares={"num_train_images": COCO["train"], "num_eval_images": COCO["eval"]},
    variable="MLP_PATH_GCS_MASKRCNN",
    meaning="the folder of COCO's train-* and val-* records with masks, and instances_val2017.json",
    files=(
        ("train-*",),
        ("val-*",),
        ("instances_val*.json", "raw-data/annotations/instances_val*.json"),
    ),
    init_variable="MLP_GCS_RESNET_CHECKPOINT",
    init_meaning="a ResNet-50 trained on ImageNet: a workdir, or a file or name of weights",
    init_default="gs://cloud-tpu-artifacts/resnet/resnet-nhwc-2018-02-07/model.ckpt-112603",
    init_yields=True,
    runs=5,
    ruleset="3.1.0",
    evaluation=_evaluation,
    success_is_bool=True,
)
# Layers by MLPerf's names, in which the reference initialises weights; the backbone is loaded.
_LAYERS = {
    **{f"pyramid/lateral{level}": f"FPN_inner_block{level - 1}" for level in range(2, 6)},
    **{f"pyramid/output{level}": f"FPN_layer_block{level - 1}" for level in range(2, 6)},
    "proposal_head/conv": "RPNHead_conv",
    "proposal_head/score": "RPNHead_cls",
    "proposal_head/code": "RPNHead_bbox",
    **{f"box_head/dense{i}": f"ROI_BOX_FEATURE_EXTRACTOR_fc{5 + i}" for i in (1, 2)},
    "box_head/class": "ROI_BOX_PREDICTOR_cls",
    "box_head/code": "ROI_BOX_PREDICTOR_bbox",
    **{f"mask_head/conv{i}": f"ROI_MASK_FEATURE_EXTRACTOR_fcn{i}" for i in range(1, 5)},
    "mask_head/upsampled": "ROI_MASK_PREDICTOR_fcn5",
    "mask_head/mask": "ROI_MASK_PREDICTOR_fcn_logits",
}


def facts(run: Run) -> Facts:
    """The values of Mask R-CNN in the log of a run."""
    check_optimizer(run, "Mask R-CNN", "sgd")
    layers = dict.fromkeys(name.rpartition("/")[0] for name in by_name(run.params))
    tensors = [_LAYERS.get(name, name) for name in layers if not name.startswith("backbone/")]
    return Facts(_tags(run) if run.form == "v0.5" else _keys(run), tensors=tensors)


def _keys(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'mllog'."""
    recipe, rate, first = run.recipe, run.learning_rate, run.recipe["warmup_from"]
    # The first rate as a share of the peak; one step's share where the warm-up begins at 0.
    factor = first / rate.peak if first else 1 / max(rate.warmup_steps, 1)
    return {
        "opt_base_learning_rate": rate.peak,
        "opt_learning_rate_warmup_steps": round(rate.warmup_steps),
        "opt_learning_rate_warmup_factor": factor,
        "opt_learning_rate_decay_factor": recipe["learning_rate_decay_factors"][0],
        "opt_learning_rate_decay_steps": drop_steps(run, "Mask R-CNN"),
        "num_image_candidates": recipe["proposals_after_nms"],
        "min_image_size": recipe["image_short"],
        "max_image_size": recipe["image_long"],
    }


def _tags(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'v0.5', in the order of its tags."""
    recipe, rate = run.recipe, run.learning_rate
    return {
        "run_set_random_seed": recipe["seed"],
        "input_batch_size": recipe["train_batch_size"],
        "batch_size_test": recipe["eval_batch_size"],
        "input_order": None,
        "input_shard": recipe["shuffle_buffer_size"],
        "input_mean_subtraction": [*IMAGENET_UNIT[0]],
        "input_normalization_std": [*IMAGENET_UNIT[1]],
        "input_resize": "bilinear",
        "input_resize_aspect_preserving": True,
        "min_image_size": recipe["image_short"],
        "max_image_size": recipe["image_long"],
        "input_random_flip": recipe["random_flip"],
        "random_flip_probability": 0.5 if recipe["random_flip"] else 0.0,
        "backbone": "resnet50",
        "aspect_ratios": list(recipe["anchor_ratios"]),
        "foreground_iou_threshold": recipe["anchor_positive_iou"],
        "background_iou_threshold": recipe["anchor_negative_iou"],
        "nms_threshold": recipe["proposal_nms_iou"],
        "nms_max_detections": recipe["max_detections"],
        "rpn_pre_nms_top_n_train": recipe["proposals_before_nms"],
        "rpn_pre_nms_top_n_test": recipe["eval_proposals_before_nms"],
        "rpn_post_nms_top_n_train": recipe["proposals_after_nms"],
        "rpn_post_nms_top_n_test": recipe["eval_proposals_after_nms"],
        "opt_name": "sgd_momentum",
        "opt_learning_rate": rate.peak,
        "opt_momentum": recipe["momentum"],
        "opt_weight_decay": recipe["weight_decay"],
        "eval_target": {"box_AP": recipe["target"], "mask_AP": recipe["mask_target"]},
    }
