"""The config's keys that the ResNet benchmark reads, in groups; configs/resnet50.py explains them.

A group checks its values and goes to the part that reads it; `Settings` checks what depends on
several groups. In the config all keys are on one level.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import input_pipeline
import models
from benchmarks.resnet.input import augment
from common.errors import ConfigError, DataError
from common.images.input_spec import parse_spec
from common.keys import Count, Positive, Seed, Share
from common.tensorflow import tensorflow


def fix_sizes(pairs: Sequence[Sequence[float]]) -> str:
    """What to do about pairs (fraction of the run, pixels) that cannot work; "" if they can."""
    if any(len(pair) != 2 for pair in pairs):
        return "use pairs (fraction, pixels) such as ((0, 128), (0.4, 160), (0.8, 224))"
    fractions, sides = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if fractions and (fractions[0] != 0 or fractions[-1] >= 1):
        return "the fractions begin with 0 and stay below 1"
    if any(later <= one for one, later in itertools.pairwise(fractions)):
        return "each fraction must be larger than the one before"
    if any(side != int(side) or not 1 <= side <= 16384 for side in sides):
        return "pixels are integers, 1 to 16384"
    return ""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sides of the training images in a run of `total` steps: `config.image_sizes`.

    Training on small images first and on large ones at the end reaches nearly the same accuracy in
    less time (Howard 2018, fast.ai's DAWNBench entry; Tan and Le 2021, EfficientNetV2,
    arXiv:2104.00298). A run compiles its step once for each size.
    """

    starts: tuple[int, ...]  # the first step of each side, from 0; ascending
    pixels: tuple[int, ...]
    total: int

    @classmethod
    def plan(cls, pairs: Sequence[Sequence[float]], total: int) -> Self:
        """Rounds the pairs (fraction of the run, pixels) to steps of a run of `total` steps."""
        starts = tuple(round(fraction * total) for fraction, _ in pairs)
        return cls(starts, tuple(int(side) for _, side in pairs), total)

    def on_host(self, step: Any) -> Any:
        """The side int32[] at a step int64[], tensors of TensorFlow."""
        tf = tensorflow()
        begun = tf.reduce_sum(tf.cast(tf.constant(self.starts, tf.int64) <= step, tf.int32))
        return tf.constant(self.pixels, tf.int32)[begun - 1]

    def steps(self, pixels: int) -> int:
        """How many steps of the run have this side."""
        ends = (*self.starts[1:], self.total)
        stages = zip(self.pixels, self.starts, ends, strict=True)
        return sum(end - start for side, start, end in stages if side == pixels)

    def note(self) -> str:
        """The sizes in words, with steps counted from 1."""
        pairs = zip(self.pixels[1:], self.starts[1:], strict=True)
        later = "".join(f", {side} from step {start + 1:,}" for side, start in pairs)
        return f"training images have {self.pixels[0]} pixels{later}"


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
# What words of `config.augmentation` stand for, besides the random crops and flips of all three.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "light": {"augmentation": ""},
    "medium": {"augmentation": "trivialaugment"},
    "strong": {
        "augmentation": "trivialaugment",
        "random_erasing": 0.25,
        "mixup": 0.2,
        "cutmix": 1.0,
    },
}
WHOLE_KEYS = ("num_label_classes", "labels", "image_size", "eval_image_size", "eval_flip")


def _refuse(group: Any, faults: Mapping[str, str]) -> None:
    """Raises ConfigError if there are faults: a fix by the key whose value cannot work."""
    if faults:
        rows = (f"config.{key}={getattr(group, key)!r}: {fix}" for key, fix in faults.items())
        raise ConfigError("; ".join(rows))


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
    labels: Literal["auto", "one", "several"] = "auto"  # that a picture has
    seed: Seed
    shuffle_buffer_size: Annotated[int, "[1, 1e9]"]
    input_streams: Annotated[int, "[1, 1e6]"]
    repeats: Annotated[int, "[1, 1e6]"] = 1

    def __post_init__(self):
        if not re.fullmatch("records|fake|tfds:.+", self.dataset):
            _refuse(self, {"dataset": "use records, tfds:NAME or fake"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing(input_pipeline.Preprocessing):
    """How an image becomes [image_size, image_size, 3]."""

    image_size: Annotated[int, "[1, 16384]"]
    eval_image_size: Annotated[int, "[0, 16384]"] = 0  # of evaluation; 0 = image_size
    # From fractions of the run on: ((0, 128), (0.4, 160)); () = image_size for all images.
    image_sizes: Annotated[Sequence[Sequence[float]], "[0, 100]"] = ()
    crop_area_min: Annotated[float, "(0, 1]"]  # the smallest share of the area in a training crop
    random_flip: bool  # whether training images are mirrored at random
    preprocessing: str = "exact"  # one of `input_pipeline.KERNELS`
    input_spec: str = "tensorflow"  # what `input_spec.parse_spec` reads
    reduced_decoding: bool = False  # whether large JPEGs are decoded at 1/2, 1/4 or 1/8

    def __post_init__(self):
        faults = {}
        if self.preprocessing not in input_pipeline.KERNELS:
            faults["preprocessing"] = f"use one of {', '.join(map(repr, input_pipeline.KERNELS))}"
        if fix := fix_sizes(self.image_sizes):
            faults["image_sizes"] = fix
        _refuse(self, faults)
        try:
            parse_spec(self.input_spec)
        except DataError as error:
            raise ConfigError(f"config.input_spec={self.input_spec!r:.80}: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """The network."""

    resnet_depth: int
    # "1": bottlenecks stride in the first convolution, as Keras has it; "2": pre-activation
    resnet_version: Literal["1.5", "1", "2"] = "1.5"
    deep_stem: bool = False
    squeeze_excite: Share = 0.0
    max_pool: Literal["same", "torch", "conv"] = "same"
    num_filters: Annotated[int, "[1, 4096]"]
    precision: Literal["bfloat16", "float32"]
    space_to_depth: bool
    blur_pool: bool = False
    stage1_projection: bool = False
    bn_span: Annotated[int, "[0, 1e6]"] | str
    bn_momentum: Share
    batch_norm: Literal["gram", "plain"]
    kernels: Literal["xla", "pallas"] = "xla"

    def __post_init__(self):
        faults = {}
        if self.resnet_depth not in models.DEPTHS:
            faults["resnet_depth"] = f"use one of {', '.join(map(str, models.DEPTHS))}"
        if self.resnet_version == "2" and (self.deep_stem or self.squeeze_excite):
            faults["resnet_version"] = "has neither deep_stem nor squeeze_excite; use '1.5' or '1'"
        if self.resnet_version == "2" and self.max_pool == "conv":
            faults["max_pool"] = "has no form with resnet_version='2'; use 'same' or 'torch'"
        if self.deep_stem and self.space_to_depth:
            faults["deep_stem"] = "has no form with space_to_depth; set one of them to False"
        if self.deep_stem and self.num_filters < 2:
            faults["num_filters"] = "must be at least 2 for deep_stem"
        has_variant = self.resnet_version != "1.5" or self.max_pool == "conv" or self.blur_pool
        has_variant |= bool(self.deep_stem or self.squeeze_excite)
        has_kernel = self.resnet_depth >= 50 and self.batch_norm == "gram" and not has_variant
        if self.kernels == "pallas" and not has_kernel:
            faults["kernels"] = (
                "needs bottlenecks (50 layers or more), batch_norm='gram' and no variant; use 'xla'"
            )
        _refuse(self, faults)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regularisation:
    """How training images are augmented, and the network and its labels regularised, at random."""

    augmentation: str = ""
    mixup: Annotated[float, "[0, 10]"] = 0.0  # as far as the table of the draws is exact
    cutmix: Annotated[float, "[0, 10]"] = 0.0
    random_erasing: Share = 0.0
    drop_path: Annotated[float, "[0, 1)"] = 0.0
    dropout: Annotated[float, "[0, 1)"] = 0.0

    def __post_init__(self):
        if self.augmentation and self.augmentation not in PRESETS:
            try:
                augment.Policy.parse(self.augmentation)
            except ValueError as error:
                _refuse(self, {"augmentation": str(error)})

    @property
    def spelled_out(self) -> "Regularisation":
        """The same with the values of a preset; other keys that are not 0 keep their values."""
        own = {key: value for key, value in vars(self).items() if value and key != "augmentation"}
        return dataclasses.replace(self, **{**PRESETS.get(self.augmentation, {}), **own})

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

    def __post_init__(self):
        images, model = self.images, self.model
        if self.data.dataset == "fake" and self.objective.class_weights:
            fix = "dataset='fake' has no classes to count"
            _refuse(self.objective, {"class_weights": fix})
        if model.space_to_depth:
            odd = [key for key in ("image_size", "eval_image_size") if getattr(images, key) % 2]
            odd += ["image_sizes"] * any(side % 2 for _, side in images.image_sizes)
            _refuse(images, dict.fromkeys(odd, "must be even for space_to_depth"))
        if model.batch_norm == "gram" and (model.blur_pool or self.regularisation.drop_path):
            fix = "has no form with blur_pool or drop_path; use 'plain'"
            _refuse(model, {"batch_norm": fix})


def restored(values: dict[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint, with the classes, labels and input that it stores."""
    if labels := manifest.get("labels"):
        values = values | {"labels": labels}
    if head := manifest.get("tree", {}).get("model", {}).get("params/head/kernel"):
        values = values | {"num_label_classes": int(head.removesuffix("]").rpartition(",")[2])}
    if spec := manifest.get("input_spec"):
        named = parse_spec(values.get("input_spec", "tensorflow")).at(spec["size"])
        if named.as_dict() != spec:  # a name may have got another meaning
            values = values | {"input_spec": json.dumps(spec)}
    return values
