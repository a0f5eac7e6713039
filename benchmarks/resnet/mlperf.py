"""ResNet-50 in MLPerf: its rules, its data, and what the logs say about a run.

Keys of 'mllog' come from mlperf-logging's rulesets 0.7.0 to 4.0.0, keys of 'v0.5' from the tags of
mlperf_compliance 0.0.10 without the shapes of the layers. Tensors have the names of MLPerf's
reference implementation.
"""

import math
from typing import Any

from benchmarks.mlperf import Entry, Facts, Run
from benchmarks.resnet.records import IMAGENET_COUNTS
from common.errors import ConfigError
from common.images import input_spec
from common.trees import by_name

ENTRY = Entry(
    name="resnet",
    recipe="configs/mlperf_resnet50.py:1632",
    targets={"mllog": {"top_1_accuracy": 0.759}, "v0.5": {"top_1_accuracy": 0.749}},
    declares={
        "num_train_images": IMAGENET_COUNTS["train"],
        "num_eval_images": IMAGENET_COUNTS["eval"],
    },
    variable="MLP_PATH_GCS_IMAGENET",
    meaning="the folder of ImageNet's train-* and validation-* records",
    files=(("train-*", "train/train-*"), ("validation-*", "validation/validation-*")),
    runs=5,
    ruleset="4.0.0",
)
_LAYERS = {"conv_stem": "conv0", "bn_stem": "bn0"}
_LEAVES = {"kernel": "weight", "scale": "gamma", "bias": "beta"}


def facts(run: Run) -> Facts:
    """What the log of a run says about a ResNet."""
    values = _tags(run) if run.form == "v0.5" else _keys(run)
    tensors = [tensor(name) for name in by_name(run.params)]
    return Facts(values, tensors=tensors, steps_per_epoch=steps_per_epoch(run))


def tensor(name: str) -> str:
    """The reference's name of a parameter such as "stage1_block1/conv1/kernel"."""
    *block, layer, leaf = name.split("/")
    if layer == "head":
        return f"fc1_{leaf.replace('kernel', 'weight')}"
    if not block:
        return f"{_LAYERS.get(layer, layer)}_{_LEAVES[leaf]}"
    unit = block[0].replace("_block", "_unit")
    layer = layer.replace("conv_proj", "conv1sc").replace("bn_proj", "bnsc")
    return f"{unit}_{layer}_{_LEAVES[leaf]}"


def steps_per_epoch(run: Run) -> float:
    """Steps of one epoch of the log, rarely an integer.

    A recipe whose length is in steps may round an epoch up to complete batches. Then its number of
    steps is taken, if it is the smallest that holds all images.
    """
    recipe, exact = run.recipe, run.examples["train"] / run.recipe["train_batch_size"]
    if not str(recipe["train_steps"]).isdecimal():
        return exact
    filled = run.steps / recipe["schedule_epochs"]
    return filled if exact <= filled <= math.ceil(exact) else exact


def _keys(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'mllog'."""
    recipe, rate, name = run.recipe, run.learning_rate, run.recipe["optimizer"]
    keys = {
        "opt_name": name,
        "model_bn_span": run.norm_examples,
        f"{name}_opt_base_learning_rate": rate.peak,
        f"{name}_opt_momentum": recipe["momentum"],
        f"{name}_opt_weight_decay": recipe["weight_decay"],
    }
    if recipe["learning_rate_schedule"] == "polynomial":
        keys |= {
            f"{name}_opt_end_learning_rate": recipe["end_learning_rate"],
            f"{name}_opt_learning_rate_decay_poly_power": recipe["polynomial_power"],
            f"{name}_opt_learning_rate_decay_steps": rate.decay_steps,
        }
    prefix = "lars_" if name == "lars" else ""  # the rules name the key of 'sgd' without a prefix
    epochs = round(rate.warmup_steps / steps_per_epoch(run), 6)
    keys[f"{prefix}opt_learning_rate_warmup_epochs"] = epochs
    return keys | ({"lars_epsilon": recipe["lars_epsilon"]} if name == "lars" else {})


def _tags(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'v0.5', in the order of its logs."""
    recipe, rate = run.recipe, run.learning_rate
    if recipe["optimizer"] != "sgd":
        raise ConfigError(
            f"config.optimizer={recipe['optimizer']!r}: MLPerf's v0.5 had 'sgd' only for ResNet; "
            "give --config=configs/mlperf_resnet50.py:v0.5"
        )
    size = recipe["image_size"]
    return {
        "run_set_random_seed": recipe["seed"],
        "input_batch_size": recipe["train_batch_size"],
        "preproc_num_train_examples": run.examples["train"],
        "preproc_num_eval_examples": run.examples["eval"],
        "input_size": run.examples["train"],
        "input_order": None,
        "input_shard": recipe["shuffle_buffer_size"],
        "input_bn_span": run.norm_examples,
        "eval_target": recipe["target"],
        "eval_offset": None,
        "input_central_crop": [size, size],
        "input_crop_uses_bboxes": False,
        "input_distorted_crop_min_object_covered": 0.1,
        "input_distorted_crop_aspect_ratio_range": [3 / 4, 4 / 3],
        "input_distorted_crop_area_range": [recipe["crop_area_min"], 1.0],
        "input_distorted_crop_max_attempts": 10,
        "input_mean_subtraction": [*input_spec.IMAGENET[0]],
        "input_random_flip": recipe["random_flip"],
        "input_resize": [size, size],
        "input_resize_aspect_preserving": {"min": round(size / 0.875)},
        "model_hp_loss_fn": "categorical_cross_entropy",
        "model_l2_regularization": recipe["weight_decay"],
        "model_exclude_bn_from_l2": True,
        "opt_name": "stochastic_gradient_descent_with_momentum",
        "opt_learning_rate": rate.peak,
        "opt_learning_rate_warmup_steps": round(rate.warmup_steps),
        "opt_momentum": recipe["momentum"],
    }
