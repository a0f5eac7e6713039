"""Classifies images with ResNets: joins `models`, `input_pipeline` and `ops.images`.

`benchmarks.base` explains each method.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import input_pipeline
import models
from benchmarks.base import HostBatch, Target, Terms, mean_scores
from benchmarks.resnet import architecture, losses, regularized
from benchmarks.resnet.architecture import Architecture
from benchmarks.resnet.regularized import Regularized
from benchmarks.resnet.sizes import size_remedies
from errors import ConfigError, DataError
from input_pipeline import Preprocessing
from keys import Count, NotNegative, Positive, Seed, Share, read
from ops import foreign as weight_files
from ops.images import labelled, manifest, pixels
from ops.images.input_spec import parse

if TYPE_CHECKING:
    from benchmarks.uses import Uses

IMAGENET = {"train": manifest.IMAGENET["train"], "eval": manifest.IMAGENET["validation"]}  # images
_QUALITIES = ("loss", "top_1_accuracy", "top_5_accuracy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Preprocessing, Architecture):
    """The config's keys that this benchmark reads; configs/resnet50.py explains them."""

    seed: Seed
    dataset: str
    data_dir: str
    train_files: str
    eval_files: str
    num_train_images: Count
    num_eval_images: Count
    num_label_classes: Annotated[int, "[0, 1e7]"]
    shuffle_buffer_size: Annotated[int, "[1, 1e9]"]
    input_streams: Annotated[int, "[1, 1e6]"]
    bn_statistics: Literal["batch", "frozen", "auto"] = "batch"
    head_learning_rate: Positive = 1.0
    class_weights: Literal["", "auto"] = ""
    label_smoothing: Share
    image_sizes: Sequence[Sequence[float]] = ()
    eval_flip: bool = False
    loss: Literal["softmax", "bce_sum", "bce_mean", "bce_binary"] = "softmax"
    augmentation: str = ""
    mixup: NotNegative = 0.0
    cutmix: NotNegative = 0.0
    random_erasing: Share = 0.0
    colout: Annotated[float, "[0, 1)"] = 0.0
    drop_path: Annotated[float, "[0, 1)"] = 0.0
    dropout: Annotated[float, "[0, 1)"] = 0.0
    head_bias_from_classes: bool = False
    repeats: Annotated[int, "[1, 1e6]"] = 1
    target: Share


def make(config: Any, cache_dir: str) -> ResNet:
    """Makes the benchmark; see `benchmarks.load`.

    Raises:
      ConfigError: a value cannot work.
    """
    settings = read(Settings, config)
    _check(settings)
    if settings.dataset == "fake":
        from benchmarks.resnet.input.fake import FakeImages

        return FakeImages(settings, cache_dir)
    return ResNet(settings, cache_dir)


def needs_data_dir(config: Any) -> bool:
    """Whether the data are a folder of records."""
    return config.dataset == "records"


# What `benchmarks.settle` takes from the model whose weights a run begins with.
MODEL_KEYS = (
    *("resnet_depth", "num_filters", "resnet_version", "deep_stem", "squeeze_excite", "max_pool"),
    *("space_to_depth", "input_spec", "blur_pool", "normalization"),
)
WHOLE_KEYS = ("num_label_classes", "image_size", "eval_image_size", "eval_flip")


def foreign_settings(path: str) -> tuple[dict[str, Any], list[tuple[str, str]]] | None:
    """The values of the keys above for a file of another library's weights; see `settle`."""
    from benchmarks.resnet.use import imports

    file = weight_files.find(path)
    return imports.read_settings(weight_files.read(file)) if file else None


def restored(values: dict[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """See `benchmarks.restored`: classes and pixels are those that the checkpoint has."""
    if head := manifest.get("tree", {}).get("model", {}).get("params/head/kernel"):
        values = values | {"num_label_classes": int(head.removesuffix("]").rpartition(",")[2])}
    spec = manifest.get("input_spec")
    if spec and parse(values.get("input_spec", "tensorflow")).at(spec["size"]).as_dict() != spec:
        values = values | {"input_spec": json.dumps(spec)}  # a name may have got another meaning
    return values


def _check(settings: Settings) -> None:
    """Refuses values that cannot work."""
    values, remedies = vars(settings), {}  # a remedy for each key with an invalid value
    if settings.preprocessing not in pixels.MODES:
        remedies["preprocessing"] = f"use one of {', '.join(map(repr, pixels.MODES))}"
    if settings.dataset == "fake":
        counts = ("num_train_images", "num_eval_images")
        remedies |= {key: "must be at least 1" for key in counts if values[key] < 1}
    if not re.fullmatch("records|fake|tfds:.+", settings.dataset):
        remedies["dataset"] = "use records, tfds:NAME or fake"
    if settings.class_weights and settings.dataset == "fake":
        remedies["class_weights"] = "dataset='fake' has no classes to count"
    remedies |= architecture.remedies(settings)
    remedies |= regularized.remedies(settings) | size_remedies(settings)
    if remedies:
        raise ConfigError("; ".join(f"config.{k}={values[k]!r}: {v}" for k, v in remedies.items()))
    try:
        parse(settings.input_spec)
    except DataError as error:
        raise ConfigError(f"config.input_spec={settings.input_spec!r:.80}: {error}") from None


class ResNet(Regularized):
    """A ResNet that classifies images."""

    proportions = ("top_1_accuracy", "top_5_accuracy")
    unit = "images"
    larger_windows = True
    advice = {
        "reading": "move the records closer (a bucket of this region, a faster disk), or raise "
        "--config.input_streams",
        "decoding": "set --config.preprocessing=fast, or --config.decoded_cache=256 if the hosts "
        "have the memory; else use a machine with more CPU cores, or store smaller images (not "
        "photos of many megapixels)",
    }

    def __init__(self, settings: Settings, cache_dir: str):
        super().__init__(settings, cache_dir)
        self.targets = (Target("top_1_accuracy", settings.target, percent=True),)
        self.bn_span = settings.bn_span
        self._dtype = architecture.PRECISIONS[settings.precision]

    # Data.

    @functools.cached_property
    def _train(self) -> labelled.Source:
        return self._open("train", self.settings.train_files)

    @functools.cached_property
    def _eval(self) -> labelled.Source:
        return self._open("eval", self.settings.eval_files)

    def _open(self, split: str, patterns: str) -> labelled.Source:
        settings = self.settings
        if settings.dataset == "records":
            index = f"{self.cache_dir}/{split}.json"
            source = labelled.open_records(settings.data_dir, patterns, self.classes, index, split)
        else:
            from benchmarks.resnet.input import tfds

            name = settings.dataset.removeprefix("tfds:")
            source = tfds.open_split(name, settings.data_dir, split, settings.num_label_classes)
        self.check_declared(split, source.shards)
        return source

    @functools.cached_property
    def classes(self) -> int:
        """The config's number of classes, else the data's, else ImageNet's 1,000."""
        settings = self.settings
        if settings.num_label_classes:
            return settings.num_label_classes
        if settings.dataset.startswith("tfds:"):
            return self._train.num_classes
        content = self.data_manifest
        return len(labelled.valid_labels(0, len(content.class_names) if content else 0))

    def source(self, split: str) -> labelled.Source:
        return self._train if split == "train" else self._eval

    @property
    def shuffled(self) -> int | None:
        """All examples are held where they are kept decoded."""
        return None if self.settings.decoded_cache else self.settings.shuffle_buffer_size

    @property
    def repeats(self) -> int:
        return self.settings.repeats

    def nominal_examples(self, split: str) -> int:
        return self.declared_examples(split) or IMAGENET[split]

    @functools.cached_property
    def data_manifest(self) -> manifest.DataManifest | None:
        settings = self.settings
        has_data = settings.dataset == "records" and settings.data_dir
        return manifest.load(settings.data_dir) if has_data else None

    @property
    def metadata(self) -> dict[str, Any]:
        names = list(self._train.class_names)
        return {"class_names": names, "input_spec": self.input_spec.as_dict()}

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        order = self.order(batch_size)
        streams = order.share(shard, num_shards)
        batches = input_pipeline.sized_batches(
            self._train, self.settings, order, streams, start_step, self.sizes
        )
        batches = self.drawn(batches, start_step)
        if not self.settings.class_weights:
            return batches
        weights = self.class_weights
        return ({**batch, "weight": weights[batch["label"]]} for batch in batches)

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        return input_pipeline.eval_batches(self._eval, self.settings, batch_size, shard, num_shards)

    # Forward pass, loss and score.

    @functools.cached_property
    def model(self) -> models.ResNet:
        return architecture.network(self.settings, self.classes)

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        size = self.settings.image_size
        inputs = jnp.zeros((1, size, size, 3), self._dtype)
        variables = self.model.init(rng, inputs, train=False)
        params: Any = variables["params"]
        if self.settings.head_bias_from_classes:  # every class begins at 1 / K, in "bce_*" too
            bias = jnp.full_like(params["head"]["bias"], -math.log(self.classes))
            params = {**params, "head": {**params["head"], "bias": bias}}
        return params, {k: v for k, v in variables.items() if k != "params"}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """The loss of `losses` with label smoothing and class weights; `rng` is not used.

        All that is random follows from the leaf "draw", so that it belongs to the example.
        """
        del rng
        images, flip, spec = batch["image"], batch["flip"], self.input_spec
        if self.settings.decoded_cache:
            name, size = input_pipeline.window_size(batch, self.settings.image_size)
            inputs = input_pipeline.crop(images, batch[name], flip, self._dtype, spec.at(size))
        else:
            images = self.augmented(images, batch)
            inputs = input_pipeline.normalize(images, flip, self._dtype, spec)
        inputs, labels, others, share = self.varied(inputs, batch)
        variables = {"params": params, **model_state}
        group = 1 if self.bn_span == 1 else jax.lax.axis_size("group")
        settings = self.settings
        apply = architecture.training_apply(
            self.model, settings.drop_path, settings.dropout, batch.get("draw")
        )
        if self.keeps_statistics(len(inputs) * group):
            logits: Any = apply(variables, inputs, train=False)
        else:
            logits, model_state = apply(variables, inputs, train=True, mutable=["batch_stats"])
        count, qualities = jnp.float32(len(logits)), self._qualities(logits, labels)
        qualities["loss"] = losses.cross_entropy(
            logits, labels, others, share, settings.label_smoothing, settings.loss
        )
        if self.settings.class_weights:  # their mean over the training images is 1
            qualities["loss"] *= batch["weight"]
        sums = {k: (jnp.sum(v), count) for k, v in qualities.items()}
        return {"cross_entropy": sums.pop("loss")}, sums, model_state

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Of each example the loss, whether its label is among the best, and its best classes."""
        logits = self.classify(params, model_state, batch["image"])["logits"]
        labels = batch["label"]
        best, top = jax.lax.top_k(logits, min(5, logits.shape[-1]))
        of_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return self._qualities(logits, labels) | {
            "id": batch["id"],
            "label": labels,
            "top": top,
            "probability": jnp.exp(best - total),
            "label_probability": jnp.exp(of_label - total)[:, 0],
        }

    def classify(self, params: Any, model_state: Any, images: jax.Array) -> dict[str, jax.Array]:
        """Logits, and the features that the last layer makes them from.

        Args:
          params: the parameters.
          model_state: the running statistics.
          images: uint8[b, size, size, 3] RGB of `input_spec`, as `ops.images.input_spec.prepare`
            makes them.

        Returns:
          {"logits": f32[b, K], "features": f32[b, F]}; with `eval_flip` the means over the image
          and its mirror image.
        """
        inputs = input_pipeline.normalize(images, None, self._dtype, self.input_spec)
        if self.settings.eval_flip:
            inputs = jnp.concatenate([inputs, inputs[:, :, ::-1]])

        def both(model: models.ResNet, inputs: jax.Array) -> dict[str, jax.Array]:
            features = model.features(inputs, train=False)
            if self.settings.eval_flip:  # the head is linear, so its mean is that of the logits
                features = jnp.mean(features.reshape(2, -1, features.shape[-1]), axis=0)
            return {"logits": model.head(features), "features": features}

        outputs: Any = self.model.apply({"params": params, **model_state}, inputs, method=both)
        return outputs

    def _qualities(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """f32[b] each: the loss, and 1 where the label is the best or among the five best."""
        targets = optax.smooth_labels(
            jax.nn.one_hot(labels, self.classes), self.settings.label_smoothing
        )
        _, best = jax.lax.top_k(logits, min(5, logits.shape[-1]))
        hit = best == labels[:, None]
        return {
            "loss": optax.softmax_cross_entropy(logits, targets),
            "top_1_accuracy": hit[:, 0].astype(jnp.float32),
            "top_5_accuracy": jnp.any(hit, axis=1).astype(jnp.float32),
        }

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        return mean_scores({name: row[name] for name in _QUALITIES} for row in rows)

    @property
    def uses(self) -> Uses:
        from benchmarks.resnet.use import ClassifierUses

        return ClassifierUses(self)
