"""What the logs of MLPerf say of a ResNet: names, hyperparameters and v0.5's topology.

Keys are those of mlperf-logging's rulesets 0.7.0 to 4.0.0, tags those of mlperf_compliance 0.0.10;
tensors are called as in MLPerf's reference implementation.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

_LAYERS = {"conv_stem": "conv0", "bn_stem": "bn0"}
_KINDS = {"kernel": "weight", "scale": "gamma", "bias": "beta"}
Rows = list[tuple[str, Any]]


def shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """{"stage1_block1/conv1/kernel": (1, 1, 64, 64), ...} of arrays or ShapeDtypeStructs."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def tensors(params: Any) -> list[str]:
    """The reference's name of every parameter of a `models.ResNet`; 161 for ResNet-50."""
    return [_tensor(name) for name in shapes(params)]


def _tensor(name: str) -> str:
    *block, layer, kind = name.split("/")
    if layer == "head":
        return f"fc1_{kind.replace('kernel', 'weight')}"
    if not block:
        return f"{_LAYERS[layer]}_{_KINDS[kind]}"
    unit = block[0].replace("_block", "_unit")
    return (
        f"{unit}_{layer.replace('conv_proj', 'conv1sc').replace('bn_proj', 'bnsc')}_{_KINDS[kind]}"
    )


@dataclasses.dataclass
class Run:
    """One run; the attributes are those of `benchmarks.base.Benchmark.mlperf`."""

    config: Any
    steps: int
    rate: Any
    span: int
    params: Any

    def keys(self) -> Rows:
        """Hyperparameters for `:::MLLOG`.

        Raises:
          ValueError: the closed division forbids a value; the message is one line.
        """
        config = self.config
        if config.mlperf.division == "closed" and (found := "; ".join(self._breaches())):
            raise ValueError(f"{found} (or give --config.mlperf.division=open)")
        name, schedule = config.optimizer, config.learning_rate_schedule
        rows: Rows = [("opt_name", name), ("model_bn_span", self.span)]
        rows += [
            (f"{name}_opt_base_learning_rate", self.rate.peak),
            (f"{name}_opt_momentum", config.momentum),
            (f"{name}_opt_weight_decay", config.weight_decay),
        ]
        if schedule == "polynomial":
            rows += [
                (f"{name}_opt_end_learning_rate", config.end_learning_rate),
                (f"{name}_opt_learning_rate_decay_poly_power", config.polynomial_power),
                (f"{name}_opt_learning_rate_decay_steps", self.rate.decay_steps),
            ]
        epochs = round(self.rate.warmup_steps / self.steps_per_epoch, 6)
        prefix = "lars_" if name == "lars" else ""  # as the rules have it
        rows += [(f"{prefix}opt_learning_rate_warmup_epochs", epochs)]
        return rows + ([("lars_epsilon", config.lars_epsilon)] if name == "lars" else [])

    def _breaches(self) -> Iterator[str]:
        """What the closed division of the rules from 0.7 on forbids, with what it has."""
        config, lars = self.config, self.config.optimizer == "lars"
        if config.optimizer not in ("sgd", "lars"):
            yield f"config.optimizer={config.optimizer!r}: the closed division has 'sgd' and 'lars'"
        if config.learning_rate_schedule != "polynomial":
            yield (
                f"config.learning_rate_schedule={config.learning_rate_schedule!r}: the closed "
                "division has 'polynomial'; config.mlperf.format='v0.5' has steps"
            )
        power = math.log2(config.weight_decay / 1e-4) if config.weight_decay > 0 else 0.5
        for key, allowed, meaning in (
            ("weight_decay", power.is_integer(), "1e-4 times a power of two, such as 5e-5 or 2e-4"),
            ("end_learning_rate", config.end_learning_rate == 1e-4, "1e-4"),
            ("polynomial_power", not lars or config.polynomial_power == 2, "2 for 'lars'"),
            ("lars_epsilon", not lars or config.lars_epsilon == 0, "0"),
        ):
            if not allowed:
                yield f"config.{key}={config[key]}: the closed division has {meaning}"
        peak = self.rate.peak
        # As the checker computes it, rounding and all: it has no 0.7.
        if config.optimizer == "sgd" and not (peak / 0.001).is_integer():
            yield (
                f"config.base_learning_rate={config.base_learning_rate}: with 'sgd' the closed "
                f"division has rates of whole thousandths, and the highest here is {peak:g}"
            )

    def tags(self) -> Rows:
        """What v0.5 wants to know, in the order of its logs.

        Raises:
          ValueError: it is not SGD's; the message is one line.
        """
        config = self.config
        if config.optimizer != "sgd":
            raise ValueError(
                f"config.optimizer={config.optimizer!r}: MLPerf's v0.5 had 'sgd' only for ResNet; "
                "give --config=configs/mlperf_resnet50.py:v0.5"
            )
        size, crop = config.image_size, round(config.image_size / 0.875)
        return [
            ("run_set_random_seed", config.seed),
            ("input_batch_size", config.train_batch_size),
            ("preproc_num_train_examples", config.num_train_images),
            ("preproc_num_eval_examples", config.num_eval_images),
            ("input_size", config.num_train_images),
            ("input_order", None),
            ("input_shard", config.shuffle_buffer_size),
            ("input_bn_span", self.span),
            ("eval_target", config.target),
            ("eval_offset", None),
            ("input_central_crop", [size, size]),
            ("input_crop_uses_bboxes", False),
            ("input_distorted_crop_min_object_covered", 0.1),
            ("input_distorted_crop_aspect_ratio_range", [3 / 4, 4 / 3]),
            ("input_distorted_crop_area_range", [config.crop_area_min, 1.0]),
            ("input_distorted_crop_max_attempts", 10),
            ("input_mean_subtraction", [123.675, 116.28, 103.53]),
            ("input_random_flip", config.random_flip),
            ("input_resize", [size, size]),
            ("input_resize_aspect_preserving", {"min": crop}),
            *topology(self.params, size, config.bn_momentum),
            ("model_hp_loss_fn", "categorical_cross_entropy"),
            ("model_l2_regularization", config.weight_decay),
            ("model_exclude_bn_from_l2", True),
            ("opt_name", "stochastic_gradient_descent_with_momentum"),
            ("opt_learning_rate", self.rate.peak),
            ("opt_learning_rate_warmup_steps", round(self.rate.warmup_steps)),
            ("opt_momentum", config.momentum),
        ]

    @property
    def steps_per_epoch(self) -> float:
        """Not a whole number; a recipe in steps may fill up the last batch of some epochs."""
        images = self.config.num_train_images / self.config.train_batch_size
        if not str(self.config.train_steps).isdecimal():
            return images
        own = self.steps / self.config.schedule_epochs
        return own if images <= own <= math.ceil(images) else images


def topology(params: Any, side: int, momentum: float) -> Rows:
    """The layers in order with the shapes [height, width, channels] of their activations.

    Args:
      params: a `models.ResNet`'s.
      side: of the square images.
      momentum: BatchNorm's.
    """
    found = shapes(params)
    rows: Rows = [("model_hp_initial_shape", _shape(side, 3))]
    packed = found["conv_stem/kernel"][2] == 12  # space to depth
    rows += _layer(found, "conv_stem", *((_half(side), 1) if packed else (side, 2)), momentum)
    side, channels = _half(side), found["conv_stem/kernel"][-1]
    rows += [("model_hp_relu", _shape(side, channels))]
    rows += [("model_hp_initial_max_pool", _arrow(side, channels, _half(side), channels))]
    side = _half(side)
    named = {match[0] for name in found if (match := re.match(r"stage\d+_block\d+", name))}
    for block in sorted(named, key=lambda name: [int(i) for i in re.findall(r"\d+", name)]):
        stride = 2 if block.endswith("_block1") and block != "stage1_block1" else 1
        rows += _block(found, block, side, stride, momentum)
        side = _half(side) if stride == 2 else side
    classes = found["head/kernel"][-1]
    return [
        *rows,
        ("model_hp_final_shape", f"({classes})"),
        ("model_hp_dense", classes),
    ]


def _block(
    found: dict[str, tuple[int, ...]], block: str, side: int, stride: int, momentum: float
) -> Rows:
    """A residual block of activations [side, side, ...]."""
    count = sum(bool(re.match(rf"{block}/conv\d/", name)) for name in found)
    strided = count - 1  # v1.5: the 3x3 in the middle of three, or the first of two
    first, last = found[f"{block}/conv1/kernel"], found[f"{block}/conv{count}/kernel"]
    into = _half(side) if stride == 2 else side
    kind = "bottleneck_block" if count == 3 else "building_block"
    rows: Rows = [
        ("model_hp_begin_block", {"block_type": kind}),
        ("model_hp_resnet_topology", f" Block Input: {_shape(side, first[2])}"),
    ]
    if f"{block}/conv_proj/kernel" in found:
        rows += [("model_hp_projection_shortcut", _arrow(side, first[2], into, last[3]))]
        rows += _layer(found, f"{block}/conv_proj", side, stride, momentum)
    at = side
    for i in range(1, count + 1):
        rows += _layer(found, f"{block}/conv{i}", at, stride if i == strided else 1, momentum)
        at = into if i >= strided else at
        if i < count:
            rows += [("model_hp_relu", _shape(at, found[f"{block}/conv{i}/kernel"][3]))]
    return [
        *rows,
        ("model_hp_shorcut_add", _shape(into, last[3])),  # the tag is spelled so
        ("model_hp_relu", _shape(into, last[3])),
        ("model_hp_end_block", f" Block Output: {_shape(into, last[3])}"),
    ]


def _layer(
    found: dict[str, tuple[int, ...]], conv: str, side: int, stride: int, momentum: float
) -> Rows:
    """A convolution of activations [side, side, ...], and its BatchNorm."""
    channels, filters = found[f"{conv}/kernel"][2:]
    into = _half(side) if stride == 2 else side
    about = {"stride": stride, "filters": filters}
    about |= {"initializer": "truncated_normal", "use_bias": False}
    norm = {"shape": _shape(into, filters), "momentum": momentum, "epsilon": 1e-5}
    norm |= {"center": True, "scale": True, "training": True}
    return [
        ("model_hp_conv2d_fixed_padding", _arrow(side, channels, into, filters)),
        ("model_hp_conv2d_fixed_padding", about),
        ("model_hp_batch_norm", norm),
    ]


def _half(side: int) -> int:
    return (side + 1) // 2


def _shape(side: int, channels: int) -> str:
    return f"({side}, {side}, {channels})"


def _arrow(side: int, channels: int, into: int, filters: int) -> str:
    return f"{_shape(side, channels)} -> {_shape(into, filters)}"
