"""ResNet image classification: glue between `models`, `input_pipeline` and the protocol."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import input_pipeline
import models
from benchmarks.base import (
    Benchmark,
    HostBatch,
    Mlperf,
    Rate,
    Spec,
    Target,
    Terms,
    mean_scores,
)
from benchmarks.resnet import mlperf as mlperf_resnet
from errors import ConfigError
from ops import padding
from ops.files import sizes
from ops.images import labelled as image_records
from ops.images import manifest
from ops.images import pixels as images
from ops.order import Order

_IMAGENET = {"train": 1_281_167, "eval": 50_000}  # images; Russakovsky et al. 2015
_SAMPLED = 64  # files whose sizes say how large an example is
_PRECISIONS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


def make(config: Any, cache_dir: str) -> ResNet:
    """See `benchmarks.load`.

    Raises:
      ConfigError: a value cannot work.
    """
    if config.precision not in _PRECISIONS:
        known = " or ".join(_PRECISIONS)
        raise ConfigError(f"config.precision={config.precision!r}: use {known}")
    kind, _, name = config.dataset.partition(":")
    if kind not in ("records", "tfds", "fake") or (kind == "tfds") != bool(name):
        raise ConfigError(f"config.dataset={config.dataset!r}: use records, tfds:NAME or fake")
    for key in ("image_size", "num_filters", "input_streams", "shuffle_buffer_size"):
        if config[key] < 1:
            raise ConfigError(f"config.{key}={config[key]}: must be at least 1")
    if config.num_label_classes < 0:
        classes = config.num_label_classes
        raise ConfigError(f"config.num_label_classes={classes}: must be at least 1, or 0 (as data)")
    if config.resnet_depth not in models.DEPTHS:
        known = ", ".join(map(str, models.DEPTHS))
        raise ConfigError(f"config.resnet_depth={config.resnet_depth}: use one of {known}")
    for key in ("num_train_images", "num_eval_images"):
        if kind == "fake" and config[key] < 1:
            raise ConfigError(f"config.{key}={config[key]}: must be at least 1 for dataset='fake'")
    for key in ("label_smoothing", "crop_area_min", "bn_momentum"):
        if not 0 <= config[key] <= 1:
            raise ConfigError(f"config.{key}={config[key]}: must be from 0 to 1")
    if config.batch_norm not in models.BATCH_NORMS:
        known = " or ".join(models.BATCH_NORMS)
        raise ConfigError(f"config.batch_norm={config.batch_norm!r}: use {known}")
    if config.preprocessing not in images.MODES:
        known = " or ".join(map(repr, images.MODES))
        raise ConfigError(f"config.preprocessing={config.preprocessing!r}: use {known}")
    if config.decoded_cache and config.decoded_cache < config.image_size:
        raise ConfigError(
            f"config.decoded_cache={config.decoded_cache}: the side of the images kept, at least "
            f"config.image_size={config.image_size}; or 0, which keeps none"
        )
    if config.decoded_cache and kind == "fake":
        side = config.decoded_cache
        raise ConfigError(f"config.decoded_cache={side}: dataset='fake' has nothing to decode")
    if config.space_to_depth and config.image_size % 2:
        raise ConfigError(f"config.image_size={config.image_size}: must be even for space_to_depth")
    return ResNet(config, cache_dir)


class ResNet(Benchmark):
    """The benchmark protocol for ResNet on images with one label each."""

    unit = "images"

    def __init__(self, config: Any, cache_dir: str):
        self.target = Target("top_1_accuracy", config.target)
        self.bn_span = config.bn_span
        self._config, self._cache = config, cache_dir
        self._dtype = _PRECISIONS[config.precision]
        self._preprocessing = input_pipeline.Preprocessing(
            *(config.image_size, config.crop_area_min, config.random_flip),
            *(config.preprocessing, config.decoded_cache),
        )

    @functools.cached_property
    def _model(self) -> models.ResNet:
        config = self._config
        return models.resnet(
            config.resnet_depth,
            num_classes=self._classes,
            num_filters=config.num_filters,
            dtype=self._dtype,
            bn_axes=() if config.bn_span == 1 else ("group",),
            bn_momentum=config.bn_momentum,
            batch_norm=config.batch_norm,
            space_to_depth=config.space_to_depth,
        )

    # Data.

    @functools.cached_property
    def _classes(self) -> int:
        """The config's number of classes, else the data's, else ImageNet's 1,000."""
        if self._config.num_label_classes:
            return self._config.num_label_classes
        if self._config.dataset.startswith("tfds:"):
            return self._train.num_classes
        return len(self._manifest.class_names) if self._manifest else 1000

    @functools.cached_property
    def _manifest(self) -> manifest.DataManifest | None:
        config = self._config
        if config.dataset != "records" or not config.data_dir:
            return None
        found = manifest.load(config.data_dir)
        if found and 0 < config.num_label_classes < len(found.class_names):
            raise ConfigError(
                f"config.num_label_classes={config.num_label_classes}, but {config.data_dir} holds "
                f"{len(found.class_names)} classes: leave it at 0, which takes what the data hold"
            )
        return found

    @functools.cached_property
    def _train(self) -> image_records.Source:
        return self._open("train", self._config.train_files, self._config.num_train_images)

    @functools.cached_property
    def _eval(self) -> image_records.Source:
        return self._open("eval", self._config.eval_files, self._config.num_eval_images)

    def _open(self, split: str, files: str, expected: int) -> image_records.Source:
        config = self._config
        kind, _, name = config.dataset.partition(":")
        if kind == "tfds":
            source = image_records.open_tfds(name, config.data_dir, split)
            if config.num_label_classes not in (0, source.num_classes):
                raise ConfigError(
                    f"config.num_label_classes={config.num_label_classes}, but {name} has "
                    f"{source.num_classes}: leave it at 0, which takes what the data hold"
                )
        else:
            cache, described = f"{self._cache}/{split}.json", self._manifest
            source = image_records.open_records(
                config.data_dir, files, self._classes, cache, split, described
            )
        if expected and expected != source.shards.total:
            raise ConfigError(
                f"config.num_{split}_images={expected:,}, but the {split} split has "
                f"{source.shards.total:,} in {len(source.shards.paths)} files: is it complete?"
            )
        return source

    @property
    def _fake(self) -> bool:
        return self._config.dataset == "fake"

    @property
    def num_train_examples(self) -> int:
        return self._config.num_train_images if self._fake else self._train.shards.total

    @property
    def num_eval_examples(self) -> int:
        return self._config.num_eval_images if self._fake else self._eval.shards.total

    def declared_examples(self, split: str) -> int:
        return self._config[f"num_{split}_images"]

    def nominal_examples(self, split: str) -> int:
        return self.declared_examples(split) or _IMAGENET[split]

    @property
    def metadata(self) -> dict[str, Any]:
        return {"class_names": [] if self._fake else list(self._train.class_names)}

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        cached = self._config.decoded_cache if split == "train" else 0
        size = cached or self._config.image_size
        shapes = {"image": ((size, size, 3), np.uint8), "label": ((), np.int32)}
        shapes |= {"id": ((), np.int32)}
        shapes |= {"window": ((4,), np.float32)} if cached else {}
        shapes |= {"flip": ((), np.bool_)} if split == "train" else {"mask": ((), np.float32)}
        return ({k: jax.ShapeDtypeStruct((batch_size, *s), d) for k, (s, d) in shapes.items()},)

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        if self._fake:
            fake = self._fake_batch("train", batch_size, shard, num_shards)
            while True:
                yield fake
        order = self._order(batch_size)
        yield from input_pipeline.train_batches(
            self._train, self._preprocessing, order, shard, num_shards, start_step
        )

    def _order(self, batch_size: int) -> Order:
        config = self._config
        buffer = None if config.decoded_cache else config.shuffle_buffer_size
        return Order.make(
            self._train.shards.counts, config.seed, batch_size, config.input_streams, buffer
        )

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        return (
            list(range(batch_size))
            if self._fake
            else self._order(batch_size).batch_ids(step).tolist()
        )

    def places(self, ids: list[int]) -> list[str]:
        return ["made up"] * len(ids) if self._fake else [self._train.shards.where(i) for i in ids]

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        if not self._fake:
            yield from input_pipeline.eval_batches(
                self._eval, self._preprocessing, batch_size, shard, num_shards
            )
            return
        fake = self._fake_batch("eval", batch_size, shard, num_shards)
        share = batch_size // num_shards
        for first in range(shard * share, self.num_eval_examples + shard * share, batch_size):
            mask = padding.mask(self.num_eval_examples - first, share)
            yield fake if mask.all() else fake | {"mask": mask}

    def host_bytes(self, batch_size: int, num_shards: int) -> int:
        """Three blocks of records per stream, or all decoded; and eight batches."""
        size, buffer = self._config.image_size, self._config.shuffle_buffer_size
        cached = self._config.decoded_cache
        decoded = 8 * batch_size * (cached or size) ** 2 * 3
        held = 0
        if cached:
            held = self._train.shards.total * cached**2 * 3
        elif not self._fake:
            shards = self._train.shards
            every = -(-len(shards.paths) // _SAMPLED)  # a thousand requests to gs:// take seconds
            stored, count = sum(sizes(shards.paths[::every])), sum(shards.counts[::every])
            held = 3 * min(buffer, shards.total) * stored // max(count, 1)
        return (held + decoded) // num_shards

    def _fake_batch(self, split: str, batch_size: int, shard: int, num_shards: int) -> HostBatch:
        """Random images and labels; the loop keeps one that comes again on the device."""
        (spec,) = self.batch_spec(split, batch_size)
        draw = np.random.default_rng([self._config.seed, split == "train"])
        whole: HostBatch = {
            "image": draw.integers(0, 256, spec["image"].shape, np.uint8),
            "label": draw.integers(0, self._classes, batch_size, np.int32),
            "id": np.arange(batch_size, dtype=np.int32),
            "flip": draw.integers(0, 2, batch_size).astype(np.bool_),
            "mask": np.ones(batch_size, np.float32),
        }
        share = batch_size // num_shards
        return {k: whole[k][shard * share : (shard + 1) * share] for k in spec}

    # Forward pass, loss and score.

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        size = self._config.image_size
        inputs = jnp.zeros((1, size, size, 3), self._dtype)
        variables = self._model.init(rng, inputs, train=False)
        return variables["params"], {"batch_stats": variables["batch_stats"]}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """Softmax cross-entropy with label smoothing; `rng` is not used."""
        del rng
        pixels, flip = batch["image"], batch["flip"]
        if self._config.decoded_cache:
            size = self._config.image_size
            inputs = input_pipeline.crop(pixels, batch["window"], flip, size, self._dtype)
        else:
            inputs = input_pipeline.normalize(pixels, flip, self._dtype)
        logits, model_state = self._model.apply(
            {"params": params, **model_state}, inputs, train=True, mutable=["batch_stats"]
        )
        entropy = self._entropy(logits, batch["label"])
        count = jnp.float32(len(entropy))
        metrics = {k: (jnp.sum(v), count) for k, v in _hits(logits, batch["label"]).items()}
        return {"cross_entropy": (jnp.sum(entropy), count)}, metrics, model_state

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The loss and whether the label is among the top 1 and 5, of each example."""
        inputs = input_pipeline.normalize(batch["image"], None, self._dtype)
        logits: Any = self._model.apply({"params": params, **model_state}, inputs, train=False)
        return {"loss": self._entropy(logits, batch["label"]), **_hits(logits, batch["label"])}

    def _entropy(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        smoothing = self._config.label_smoothing
        targets = optax.smooth_labels(jax.nn.one_hot(labels, self._classes), smoothing)
        return optax.softmax_cross_entropy(logits, targets)

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        return mean_scores(rows)

    def mlperf(self, form: str, steps: int, rate: Rate, norm_examples: int, params: Any) -> Mlperf:
        run = mlperf_resnet.Run(self._config, steps, rate, norm_examples, params)
        try:
            values = run.tags() if form == "v0.5" else run.keys()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        target = 0.749 if form == "v0.5" else 0.759  # the rules of 2018, and from 2019 on
        return Mlperf("resnet", target, values, mlperf_resnet.tensors(params), run.steps_per_epoch)


def _hits(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """f32[b] each: 1 where the label is the best, or among the five best, by score."""
    _, best = jax.lax.top_k(logits, min(5, logits.shape[-1]))
    hit = best == labels[:, None]
    return {
        "top_1_accuracy": hit[:, 0].astype(jnp.float32),
        "top_5_accuracy": jnp.any(hit, axis=1).astype(jnp.float32),
    }
