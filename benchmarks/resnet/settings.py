"""The config's keys that the ResNet benchmark reads, in groups; configs/resnet50.py explains them.

A group goes to the part that reads it. In the config all keys are on one level.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from benchmarks.resnet import architecture, sizes
from benchmarks.resnet.architecture import Architecture
from benchmarks.resnet.input import augment
from common.errors import ConfigError, DataError
from common.images.input_spec import parse_spec
from common.keys import Count, Positive, Seed, Share
from input_pipeline import KERNELS, Preprocessing

# What `benchmarks.adopted_values` takes from the model whose weights a run begins with.
MODEL_KEYS = (
    "resnet_depth",
    "num_filters",
    "resnet_version",
    "deep_stem",
    "squeeze_excite",
    "max_pool",
    "space_to_depth",
    "input_spec",
    "blur_pool",
    "stage1_projection",
)
WHOLE_KEYS = ("num_label_classes", "image_size", "eval_image_size", "eval_flip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Which images are read, and in which order."""

    dataset: str
    data_dir: str
    train_files: str
    eval_files: str
    num_train_images: Count
    num_eval_images: Count
    num_label_classes: Annotated[int, "[0, 1e7]"]
    seed: Seed
    shuffle_buffer_size: Annotated[int, "[1, 1e9]"]
    input_streams: Annotated[int, "[1, 1e6]"]
    repeats: Annotated[int, "[1, 1e6]"] = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regularisation:
    """How training images, their labels and the network are disturbed at random."""

    augmentation: str = ""
    mixup: Annotated[float, "[0, 10]"] = 0.0  # as far as the table of the draws is exact
    cutmix: Annotated[float, "[0, 10]"] = 0.0
    random_erasing: Share = 0.0
    drop_path: Annotated[float, "[0, 1)"] = 0.0
    dropout: Annotated[float, "[0, 1)"] = 0.0

    @property
    def is_used(self) -> bool:
        """Whether there is any; training batches then have the leaf "draw"."""
        return any(vars(self).values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss, the score, and how the head and the statistics of BatchNorm change."""

    loss: Literal["softmax", "bce_sum", "bce_mean", "bce_binary"] = "softmax"
    label_smoothing: Share
    class_weights: Literal["", "auto"] = ""
    bn_statistics: Literal["batch", "frozen", "auto"] = "batch"
    head_learning_rate: Positive = 1.0
    head_bias_from_classes: bool = False
    eval_flip: bool = False
    target: Share


@dataclasses.dataclass(frozen=True)
class Settings:
    """All groups."""

    data: Data
    images: Preprocessing
    model: Architecture
    regularisation: Regularisation
    objective: Objective


def check_settings(settings: Settings) -> None:
    """Raises ConfigError, with a fix for each key, if values cannot work."""
    errors = dict(_fixes(settings)) | architecture.fixes(settings.model)
    if errors:
        groups = vars(settings).values()
        values = {key: value for group in groups for key, value in vars(group).items()}
        raise ConfigError("; ".join(f"config.{k}={values[k]!r}: {v}" for k, v in errors.items()))
    try:
        parse_spec(settings.images.input_spec)
    except DataError as error:
        text = settings.images.input_spec
        raise ConfigError(f"config.input_spec={text!r:.80}: {error}") from None


def _fixes(settings: Settings) -> Iterator[tuple[str, str]]:
    """The keys about data, images and training whose values cannot work, each with a fix."""
    data, images, model = settings.data, settings.images, settings.model
    keys = settings.regularisation
    if data.dataset == "fake" and settings.objective.class_weights:
        yield "class_weights", "dataset='fake' has no classes to count"
    if not re.fullmatch("records|fake|tfds:.+", data.dataset):
        yield "dataset", "use records, tfds:NAME or fake"
    if images.preprocessing not in KERNELS:
        yield "preprocessing", f"use one of {', '.join(map(repr, KERNELS))}"
    if fix := sizes.fix(images.image_sizes):
        yield "image_sizes", fix
    elif model.space_to_depth:
        for key in ("image_size", "eval_image_size"):
            if getattr(images, key) % 2:
                yield key, "must be even for space_to_depth"
        if any(side % 2 for _, side in images.image_sizes):
            yield "image_sizes", "must be even for space_to_depth"
    if model.batch_norm == "gram" and (model.blur_pool or keys.drop_path):
        yield "batch_norm", "has no form with blur_pool or drop_path; use 'plain'"
    if keys.augmentation:
        try:
            augment.Policy.parse(keys.augmentation)
        except ValueError as error:
            yield "augmentation", str(error)


def restored(values: dict[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint, with the number of classes and the input that it stores."""
    if head := manifest.get("tree", {}).get("model", {}).get("params/head/kernel"):
        values = values | {"num_label_classes": int(head.removesuffix("]").rpartition(",")[2])}
    if spec := manifest.get("input_spec"):
        named = parse_spec(values.get("input_spec", "tensorflow")).at(spec["size"])
        if named.as_dict() != spec:  # a name may have got another meaning
            values = values | {"input_spec": json.dumps(spec)}
    return values
