"""SSD in MLPerf: its rules, its data, and what the logs say about a run.

Keys of 'mllog' are those of mlperf-logging's rulesets 0.7.0 to 1.1.0, the last ones that know this
detector: from 2.0.0 on `ssd` is another model on other data. Keys of 'v0.5' are the tags of
mlperf_compliance 0.0.10. Tensors have the names of ruleset 1.1.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.detection.detector import COCO
from benchmarks.detection.ssd.settings import Maps
from benchmarks.mlperf import Entry, Facts, Run, check_closed, check_optimizer, rows
from common.keys import read_config
from common.trees import by_name

ENTRY = Entry(
    name="ssd",
    recipe="configs/mlperf_ssd.py:1024",
    targets={"mllog": {"mAP": 0.23}, "v0.5": {"mAP": 0.212}},
    declares={"num_train_images": COCO["train"], "num_eval_images": COCO["eval"]},
    counts={
        "mllog": {"train_samples": COCO["train"], "eval_samples": COCO["eval"]},
        "v0.5": {"input_size": COCO["train"], "eval_size": COCO["eval"]},
    },
    variable="MLP_PATH_GCS_SSD",
    meaning="the folder of COCO's train-* and val-* records, with instances_val2017.json",
    files=(
        ("train-*",),
        ("val-*",),
        ("instances_val*.json", "raw-data/annotations/instances_val*.json"),
    ),
    init_variable="MLP_GCS_RESNET_CHECKPOINT",
    init_meaning="SSD's ResNet-34 of ImageNet: a workdir, or a file or name of weights",
    init_default="gs://download.tensorflow.org/models/mlperf/v0.5.0/resnet34_ssd_checkpoint",
    runs=5,
    # Of the rules of 2019 and 2020, and every fifth one more for runs that need longer.
    evaluations={"mllog": (40, *range(50, 121, 5))},
    ruleset="1.1.0",
    logs_seed=False,
    success_is_bool=True,
)
_KINDS = {"kernel": "weight", "scale": "gamma", "bias": "beta"}


def facts(run: Run) -> Facts:
    """What the log of a run says about SSD.

    Raises:
      ConfigError: the rules of the form or of the closed division forbid a value.
    """
    check_optimizer(run, "SSD", "sgd")
    return Facts(rows(run, _keys, _tags), [tensor(name) for name in by_name(run.params)])


def tensor(name: str) -> str:
    """MLPerf's name of a parameter such as "backbone/stage2_block1/conv_proj/kernel"."""
    *block, layer, kind = name.split("/")
    if block[:1] != ["backbone"]:
        suffix = "weight" if kind == "kernel" else "bias"
        match = re.fullmatch(r"(head|extra)(\d+)(?:_conv(\d))?", layer)
        assert match is not None, name
        number = int(match[2]) - 1
        if match[1] == "head":
            return f"ssd0_convpredictor{number}_conv0_{suffix}"
        return f"ssd0_expand_{'trans_' if match[3] == '1' else ''}conv{number}_{suffix}"
    kind, sort = _KINDS[kind], "conv" if layer.startswith("conv") else "batchnorm"
    if layer in ("conv_stem", "bn_stem"):
        return f"ssd0_resnetmlperf0_{sort}0_{kind}"
    stage, unit = map(int, re.findall(r"\d+", block[1]))
    if layer.endswith("_proj"):  # of a stage's first block, after its two convolutions
        number = 2
    else:
        number = 2 * (unit - 1) + int(layer[-1]) - 1 + (stage > 1 and unit > 1)
    return f"ssd0_resnetmlperf0_stage{stage}_{sort}{number}_{kind}"


def _keys(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'mllog'."""
    recipe, rate = run.recipe, run.learning_rate
    check_closed(run, _breaches(run))
    return {
        "model_bn_span": run.norm_examples,
        "max_samples": recipe["max_samples"],
        "opt_base_learning_rate": rate.peak,
        "opt_weight_decay": recipe["weight_decay"],
        "opt_learning_rate_warmup_factor": recipe["warmup_from"],
        "opt_learning_rate_warmup_steps": round(rate.warmup_steps),
        "opt_learning_rate_decay_boundary_epochs": list(recipe["learning_rate_decay_epochs"]),
    }


def _breaches(run: Run) -> Iterator[str]:
    """The values that the closed division forbids from ruleset 0.7 on, each with the fix."""
    recipe = run.recipe
    drops = tuple(recipe["learning_rate_decay_epochs"])
    factors = [drop / first for drop, first in zip(drops, (40, 50), strict=False)]
    fits = [math.isclose(10 * f, round(10 * f), abs_tol=1e-9) for f in factors]
    if len(drops) != 2 or not all(fits) or recipe["learning_rate_decay_steps"]:
        yield (
            f"config.learning_rate_decay_epochs={drops}: the closed division has two boundaries, "
            "40 and 50 epochs or both times 1.1, 1.2 and so on"
        )
    if recipe["max_samples"] not in (1, 50):
        yield f"config.max_samples={recipe['max_samples']}: the closed division has 1 or 50"


def _tags(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'v0.5', in the order of its tags."""
    recipe, rate = run.recipe, run.learning_rate
    boxes = read_config(Maps, recipe).layout
    return {
        "input_size": run.examples["train"],
        "input_batch_size": recipe["train_batch_size"],
        "input_order": None,
        "input_shard": recipe["shuffle_buffer_size"],
        "input_bn_span": run.norm_examples,
        "backbone": "resnet34",
        "feature_sizes": list(boxes.feature_sizes),
        "steps": list(recipe["box_steps"]),
        "scales": list(recipe["box_sides"]),
        "aspect_ratios": [list(ratios) for ratios in boxes.aspect_ratios],
        "num_defaults_per_cell": list(boxes.boxes_per_cell),
        "loc_conf_out_channels": [4 * recipe["num_filters"], *recipe["extra_filters"]],
        "num_default_boxes": boxes.count,
        "nms_threshold": recipe["nms_iou"],
        "nms_max_detections": recipe["max_detections"],
        "num_cropping_iterations": recipe["max_samples"],
        "random_flip_probability": 0.5 if recipe["random_flip"] else 0.0,
        "data_normalization_mean": [0.485, 0.456, 0.406],
        "data_normalization_std": [0.229, 0.224, 0.225],
        "opt_name": "momentum",
        "opt_learning_rate": rate.peak,
        "opt_momentum": recipe["momentum"],
        "opt_weight_decay": recipe["weight_decay"],
        "opt_learning_rate_warmup_steps": round(rate.warmup_steps),
        "eval_target": recipe["target"],
    }
