"""What MLPerf's logs say about a run of ResNet."""

import dataclasses
import types
from typing import Any

import numpy as np
import pytest

from benchmarks import mlperf as seam
from benchmarks.resnet import mlperf
from common.errors import ConfigError
from configs import resnet50

# 1,000 images in batches of 64: 15.625 steps per epoch.
RATE: Any = types.SimpleNamespace(peak=1.6, warmup_steps=10.0, decay_steps=90.0)
POLYNOMIAL: dict[str, Any] = {"learning_rate_schedule": "polynomial", "end_learning_rate": 1e-4}
LARS = {**POLYNOMIAL, "optimizer": "lars", "lars_epsilon": 0.0, "polynomial_power": 2.0}
SGD = {**POLYNOMIAL, "optimizer": "sgd", "polynomial_power": 1.0}


def subject(recipe, form="mllog", **changes: Any) -> seam.Run:
    values = resnet50.get_config().to_dict()
    values |= {"train_batch_size": 64, "train_steps": "8 epochs", "weight_decay": 2e-4, **recipe}
    run = seam.Run(
        form=form,
        recipe=values,
        examples={"train": 1000, "eval": 50},
        steps=100,
        learning_rate=RATE,
        norm_examples=32,
        params={"head": {"bias": np.zeros(2)}, "conv_stem": {"kernel": np.zeros(2)}},
    )
    return dataclasses.replace(run, **changes)


def test_the_names_of_the_reference():
    assert mlperf.facts(subject(LARS)).tensors == ["conv0_weight", "fc1_bias"]
    names = {
        "head/kernel": "fc1_weight",
        "head/bias": "fc1_bias",
        "bn_stem/scale": "bn0_gamma",
        "bn_stem/bias": "bn0_beta",
        "stage1_block2/conv1/kernel": "stage1_unit2_conv1_weight",
        "stage3_block1/conv_proj/kernel": "stage3_unit1_conv1sc_weight",
        "stage3_block1/bn_proj/scale": "stage3_unit1_bnsc_gamma",
    }
    assert {name: mlperf.tensor(name) for name in names} == names


@pytest.mark.parametrize(
    ("length", "steps", "expected"),
    [
        ("8 epochs", 128, 15.625),
        ("128", 128, 16),  # the last batch of each of eight epochs is filled up
        ("126", 126, 15.75),  # of some of them
        ("129", 129, 15.625),
        ("124", 124, 15.625),
    ],
)
def test_steps_of_an_epoch(length, steps, expected):
    run = subject({**LARS, "train_steps": length, "schedule_epochs": 8}, steps=steps)
    assert mlperf.steps_per_epoch(run) == expected == mlperf.facts(run).steps_per_epoch


def test_the_keys_of_lars():
    assert mlperf._keys(subject({**LARS, "momentum": 0.9})) == {
        "opt_name": "lars",
        "model_bn_span": 32,
        "lars_opt_base_learning_rate": 1.6,
        "lars_opt_momentum": 0.9,
        "lars_opt_weight_decay": 2e-4,
        "lars_opt_end_learning_rate": 1e-4,
        "lars_opt_learning_rate_decay_poly_power": 2.0,
        "lars_opt_learning_rate_decay_steps": 90.0,
        "lars_opt_learning_rate_warmup_epochs": 0.64,
        "lars_epsilon": 0.0,
    }


def test_the_keys_of_sgd():
    rate = types.SimpleNamespace(peak=0.25, warmup_steps=31.25 / 3, decay_steps=0.0)
    steps = {**SGD, "momentum": 0.9, "learning_rate_schedule": "steps"}
    expected = {
        "opt_name": "sgd",
        "model_bn_span": 32,
        "sgd_opt_base_learning_rate": 0.25,
        "sgd_opt_momentum": 0.9,
        "sgd_opt_weight_decay": 2e-4,
        "opt_learning_rate_warmup_epochs": 0.666667,
    }
    assert mlperf._keys(subject(steps, learning_rate=rate)) == expected
    expected |= {
        "sgd_opt_end_learning_rate": 1e-4,
        "sgd_opt_learning_rate_decay_poly_power": 1.0,
        "sgd_opt_learning_rate_decay_steps": 0.0,
    }
    assert mlperf._keys(subject({**SGD, "momentum": 0.9}, learning_rate=rate)) == expected


def test_the_tags_of_v05():
    keys = {"seed": 7, "momentum": 0.9, "image_size": 224, "crop_area_min": 0.08, "target": 0.749}
    keys |= {"shuffle_buffer_size": 99, "random_flip": True}
    rate = types.SimpleNamespace(peak=0.4, warmup_steps=78.4, decay_steps=0.0)
    run = subject({**SGD, **keys}, "v0.5", learning_rate=rate)
    assert mlperf.facts(run).values == {
        "run_set_random_seed": 7,
        "input_batch_size": 64,
        "preproc_num_train_examples": 1000,
        "preproc_num_eval_examples": 50,
        "input_size": 1000,
        "input_order": None,
        "input_shard": 99,
        "input_bn_span": 32,
        "eval_target": 0.749,
        "eval_offset": None,
        "input_central_crop": [224, 224],
        "input_crop_uses_bboxes": False,
        "input_distorted_crop_min_object_covered": 0.1,
        "input_distorted_crop_aspect_ratio_range": [0.75, 1.3333333333333333],
        "input_distorted_crop_area_range": [0.08, 1.0],
        "input_distorted_crop_max_attempts": 10,
        "input_mean_subtraction": [123.675, 116.28, 103.53],
        "input_random_flip": True,
        "input_resize": [224, 224],
        "input_resize_aspect_preserving": {"min": 256},
        "model_hp_loss_fn": "categorical_cross_entropy",
        "model_l2_regularization": 2e-4,
        "model_exclude_bn_from_l2": True,
        "opt_name": "stochastic_gradient_descent_with_momentum",
        "opt_learning_rate": 0.4,
        "opt_learning_rate_warmup_steps": 78,
        "opt_momentum": 0.9,
    }
    with pytest.raises(ConfigError, match="^config.optimizer='lars': MLPerf's v0.5 had 'sgd'"):
        mlperf.facts(subject(LARS, "v0.5"))
