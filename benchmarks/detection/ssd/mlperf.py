"""SSD in MLPerf: its rules, its data, and what the logs say about a run.

Keys of 'mllog' come from mlperf-logging's rulesets 0.7.0 to 1.1.0, the last ones that know this
detector: from 2.0.0 on `ssd` is another model on other data. Keys of 'v0.5' are the tags of
mlperf_compliance 0.0.10. Tensors have the names of ruleset 1.1.0.
"""

import re
from typing import Any

from benchmarks.detection.detector import COCO
from benchmarks.detection.ssd.settings import Maps
from benchmarks.mlperf import Entry, Facts, Run, check_optimizer
from common.images.input_spec import IMAGENET_UNIT
from common.keys import read_config
from common.trees import by_name

ENTRY = Entry(
    name="ssd",
    recipe="configs/mlperf_ssd.py:1024",
    targets={"mllog": {"mAP": 0.23}, "v0.5": {"mAP": 0.212}},
    declares={"num_train_images": COCO["train"], "num_eval_images": COCO["eval"]},
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
    ruleset="1.1.0",
    success_is_bool=True,
)
_LEAVES = {"kernel": "weight", "scale": "gamma", "bias": "beta"}


def facts(run: Run) -> Facts:
    """The values of SSD in the log of a run."""
    check_optimizer(run, "SSD", "sgd")
    values = _tags(run) if run.form == "v0.5" else _keys(run)
    return Facts(values, tensors=[tensor(name) for name in by_name(run.params)])


def tensor(name: str) -> str:
    """MLPerf's name of a parameter such as "backbone/stage2_block1/conv_proj/kernel"."""
    *block, layer, leaf = name.split("/")
    if block[:1] != ["backbone"]:
        suffix = "weight" if leaf == "kernel" else "bias"
        match = re.fullmatch(r"(head|extra)(\d+)(?:_conv(\d))?", layer)
        assert match is not None, name
        number = int(match[2]) - 1
        if match[1] == "head":
            return f"ssd0_convpredictor{number}_conv0_{suffix}"
        return f"ssd0_expand_{'trans_' if match[3] == '1' else ''}conv{number}_{suffix}"
    leaf, kind = _LEAVES[leaf], "conv" if layer.startswith("conv") else "batchnorm"
    if layer in ("conv_stem", "bn_stem"):
        return f"ssd0_resnetmlperf0_{kind}0_{leaf}"
    stage, unit = map(int, re.findall(r"\d+", block[1]))
    if layer.endswith("_proj"):  # in a stage's first block, after its two convolutions
        number = 2
    else:
        number = 2 * (unit - 1) + int(layer[-1]) - 1 + (stage > 1 and unit > 1)
    return f"ssd0_resnetmlperf0_stage{stage}_{kind}{number}_{leaf}"


def _keys(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'mllog'."""
    recipe, rate = run.recipe, run.learning_rate
    return {
        "model_bn_span": run.norm_examples,
        "max_samples": recipe["max_samples"],
        "opt_base_learning_rate": rate.peak,
        "opt_weight_decay": recipe["weight_decay"],
        "opt_learning_rate_warmup_factor": recipe["warmup_from"],
        "opt_learning_rate_warmup_steps": round(rate.warmup_steps),
        "opt_learning_rate_decay_boundary_epochs": list(recipe["learning_rate_decay_epochs"]),
    }


def _tags(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'v0.5', in the order of its tags."""
    recipe, rate = run.recipe, run.learning_rate
    default_boxes = read_config(Maps, recipe).default_boxes
    return {
        "input_size": run.examples["train"],
        "input_batch_size": recipe["train_batch_size"],
        "input_order": None,
        "input_shard": recipe["shuffle_buffer_size"],
        "input_bn_span": run.norm_examples,
        "backbone": "resnet34",
        "feature_sizes": list(default_boxes.feature_sizes),
        "steps": list(recipe["box_steps"]),
        "scales": list(recipe["box_sides"]),
        "aspect_ratios": [list(ratios) for ratios in default_boxes.aspect_ratios],
        "num_defaults_per_cell": list(default_boxes.boxes_per_cell),
        "loc_conf_out_channels": [4 * recipe["num_filters"], *recipe["extra_filters"]],
        "num_default_boxes": len(default_boxes.boxes()),
        "nms_threshold": recipe["nms_iou"],
        "nms_max_detections": recipe["max_detections"],
        "num_cropping_iterations": recipe["max_samples"],
        "random_flip_probability": 0.5 if recipe["random_flip"] else 0.0,
        "data_normalization_mean": [*IMAGENET_UNIT[0]],
        "data_normalization_std": [*IMAGENET_UNIT[1]],
        "opt_name": "momentum",
        "opt_learning_rate": rate.peak,
        "opt_momentum": recipe["momentum"],
        "opt_weight_decay": recipe["weight_decay"],
        "opt_learning_rate_warmup_steps": round(rate.warmup_steps),
        "eval_target": recipe["target"],
    }
