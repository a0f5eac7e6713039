"""ResNet image classification: glue between `models`, `input_pipeline` and the protocol."""

from __future__ import annotations

import dataclasses
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
    Spec,
    Target,
    Terms,
    mean_scores,
    read,
)
from errors import ConfigError
from ops import padding, records
from ops.files import sizes
from ops.images import labelled as image_records
from ops.images import manifest
from ops.images import pixels as images
from ops.order import Order

IMAGENET = {"train": records.IMAGENET["train"], "eval": records.IMAGENET["validation"]}  # images
_SAMPLED = 64  # files whose sizes say how large an example is
_PRECISIONS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config's keys that this benchmark reads; configs/resnet50.py says what they mean."""

    seed: int
    dataset: str
    data_dir: str
    train_files: str
    eval_files: str
    num_train_images: int
    num_eval_images: int
    num_label_classes: int
    image_size: int
    preprocessing: str
    decoded_cache: int
    crop_area_min: float
    random_flip: bool
    shuffle_buffer_size: int
    input_streams: int
    resnet_depth: int
    num_filters: int
    precision: str
    space_to_depth: bool
    bn_span: int | str
    bn_momentum: float
    batch_norm: str
    label_smoothing: float
    target: float

    @property
    def dtype(self) -> Any:
        """The dtype of activations."""
        return _PRECISIONS[self.precision]

    @property
    def is_fake(self) -> bool:
        """Whether the data are one random batch."""
        return self.dataset == "fake"

    @property
    def tfds_name(self) -> str:
        """The name of the TFDS set; "" for others."""
        return self.dataset.partition(":")[2]


def make(config: Any, cache_dir: str) -> ResNet:
    """Makes the benchmark; see `benchmarks.load`.

    Raises:
      ConfigError: a value cannot work.
    """
    settings = read(Settings, config)
    _check(settings)
    return ResNet(settings, cache_dir)


def needs_data_dir(config: Any) -> bool:
    """Whether the data are a folder of records."""
    return config.dataset == "records"


def _check(settings: Settings) -> None:
    """Refuses values that cannot work."""

    def refuse(key: str, reason: str) -> None:
        raise ConfigError(f"config.{key}={getattr(settings, key)!r}: {reason}")

    for key, known in (
        ("precision", _PRECISIONS),
        ("resnet_depth", models.DEPTHS),
        ("batch_norm", models.BATCH_NORMS),
        ("preprocessing", images.MODES),
    ):
        if getattr(settings, key) not in known:
            refuse(key, f"use one of {', '.join(map(repr, known))}")
    kind, name = settings.dataset.partition(":")[0], settings.tfds_name
    if kind not in ("records", "tfds", "fake") or (kind == "tfds") != bool(name):
        refuse("dataset", "use records, tfds:NAME or fake")
    for key in ("image_size", "num_filters", "input_streams", "shuffle_buffer_size"):
        if getattr(settings, key) < 1:
            refuse(key, "must be at least 1")
    if settings.num_label_classes < 0:
        refuse("num_label_classes", "must be at least 1, or 0 (as the data)")
    for key in ("num_train_images", "num_eval_images"):
        if settings.is_fake and getattr(settings, key) < 1:
            refuse(key, "must be at least 1 for dataset='fake'")
    for key in ("label_smoothing", "crop_area_min", "bn_momentum"):
        if not 0 <= getattr(settings, key) <= 1:
            refuse(key, "must be from 0 to 1")
    if settings.decoded_cache and settings.decoded_cache < settings.image_size:
        size = settings.image_size
        refuse(
            "decoded_cache",
            f"the side of the images kept, at least config.image_size={size}; or 0, which keeps "
            "none",
        )
    if settings.decoded_cache and settings.is_fake:
        refuse("decoded_cache", "dataset='fake' has nothing to decode")
    if settings.space_to_depth and settings.image_size % 2:
        refuse("image_size", "must be even for space_to_depth")


class ResNet(Benchmark):
    """The benchmark protocol for ResNet on images with one label each."""

    unit = "images"
    advice = {
        "reading": "move the records closer (a bucket of this region, a faster disk), or raise "
        "--config.input_streams",
        "decoding": "set --config.preprocessing=fast, or --config.decoded_cache=256 if the hosts "
        "have the memory; else use a machine with more CPU cores, or store smaller images (not "
        "photos of many megapixels)",
    }

    def __init__(self, settings: Settings, cache_dir: str):
        self._settings, self._cache = settings, cache_dir
        self.targets = (Target("top_1_accuracy", settings.target, percent=True),)
        self.bn_span, self._dtype = settings.bn_span, settings.dtype
        key = "decoded_cache" if settings.decoded_cache else "shuffle_buffer_size"
        remedy = f"set a smaller --config.{key}, or use more hosts"
        self.advice = {**self.advice, "memory": remedy}
        self._preprocessing = input_pipeline.Preprocessing(
            *(settings.image_size, settings.crop_area_min, settings.random_flip),
            *(settings.preprocessing, settings.decoded_cache),
        )

    @functools.cached_property
    def _model(self) -> models.ResNet:
        settings = self._settings
        return models.resnet(
            settings.resnet_depth,
            num_classes=self._classes,
            num_filters=settings.num_filters,
            dtype=self._dtype,
            bn_axes=() if settings.bn_span == 1 else ("group",),
            bn_momentum=settings.bn_momentum,
            batch_norm=settings.batch_norm,
            space_to_depth=settings.space_to_depth,
        )

    # Data.

    @functools.cached_property
    def _classes(self) -> int:
        """The config's number of classes, else the data's, else ImageNet's 1,000."""
        if self._settings.num_label_classes:
            return self._settings.num_label_classes
        if self._settings.dataset.startswith("tfds:"):
            return self._train.num_classes
        return len(self._manifest.class_names) if self._manifest else 1000

    @functools.cached_property
    def _manifest(self) -> manifest.DataManifest | None:
        settings = self._settings
        if settings.dataset != "records" or not settings.data_dir:
            return None
        found = manifest.load(settings.data_dir)
        if found and 0 < settings.num_label_classes < len(found.class_names):
            raise ConfigError(
                f"config.num_label_classes={settings.num_label_classes}, but {settings.data_dir} "
                f"holds {len(found.class_names)} classes: leave it at 0, which takes what the "
                "data hold"
            )
        return found

    @functools.cached_property
    def _train(self) -> image_records.Source:
        return self._open("train", self._settings.train_files, self._settings.num_train_images)

    @functools.cached_property
    def _eval(self) -> image_records.Source:
        return self._open("eval", self._settings.eval_files, self._settings.num_eval_images)

    def _open(self, split: str, files: str, expected: int) -> image_records.Source:
        settings = self._settings
        if name := settings.tfds_name:
            source = image_records.open_tfds(name, settings.data_dir, split)
            if settings.num_label_classes not in (0, source.num_classes):
                raise ConfigError(
                    f"config.num_label_classes={settings.num_label_classes}, but {name} has "
                    f"{source.num_classes}: leave it at 0, which takes what the data hold"
                )
        else:
            cache, described = f"{self._cache}/{split}.json", self._manifest
            source = image_records.open_records(
                settings.data_dir, files, self._classes, cache, split, described
            )
        if expected and expected != source.shards.total:
            raise ConfigError(
                f"config.num_{split}_images={expected:,}, but the {split} split has "
                f"{source.shards.total:,} in {len(source.shards.paths)} files: is it complete?"
            )
        return source

    def num_examples(self, split: str) -> int:
        if self._settings.is_fake:
            return self.declared_examples(split)
        return (self._train if split == "train" else self._eval).shards.total

    def declared_examples(self, split: str) -> int:
        settings = self._settings
        return settings.num_train_images if split == "train" else settings.num_eval_images

    def nominal_examples(self, split: str) -> int:
        return self.declared_examples(split) or IMAGENET[split]

    @property
    def metadata(self) -> dict[str, Any]:
        return {"class_names": [] if self._settings.is_fake else list(self._train.class_names)}

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        cached = self._settings.decoded_cache if split == "train" else 0
        size = cached or self._settings.image_size
        shapes = {"image": ((size, size, 3), np.uint8), "label": ((), np.int32)}
        shapes |= {"id": ((), np.int32)}
        shapes |= {"window": ((4,), np.float32)} if cached else {}
        shapes |= {"flip": ((), np.bool_)} if split == "train" else {"mask": ((), np.float32)}
        return ({k: jax.ShapeDtypeStruct((batch_size, *s), d) for k, (s, d) in shapes.items()},)

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        if self._settings.is_fake:
            fake = self._fake_batch("train", batch_size, shard, num_shards)
            while True:
                yield fake
        order = self._order(batch_size)
        yield from input_pipeline.train_batches(
            self._train, self._preprocessing, order, shard, num_shards, start_step
        )

    def _order(self, batch_size: int) -> Order:
        settings = self._settings
        buffer = None if settings.decoded_cache else settings.shuffle_buffer_size
        return Order.make(
            self._train.shards.counts, settings.seed, batch_size, settings.input_streams, buffer
        )

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        return (
            list(range(batch_size))
            if self._settings.is_fake
            else self._order(batch_size).batch_ids(step).tolist()
        )

    def describe(self, ids: list[int]) -> list[str]:
        return (
            ["made up"] * len(ids)
            if self._settings.is_fake
            else [self._train.shards.where(i) for i in ids]
        )

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        if not self._settings.is_fake:
            yield from input_pipeline.eval_batches(
                self._eval, self._preprocessing, batch_size, shard, num_shards
            )
            return
        fake = self._fake_batch("eval", batch_size, shard, num_shards)
        rows, total = batch_size // num_shards, self.num_examples("eval")
        for first in range(shard * rows, total + shard * rows, batch_size):
            mask = padding.mask(total - first, rows)
            yield fake if mask.all() else fake | {"mask": mask}

    def host_bytes(self, batch_size: int, num_shards: int) -> int:
        """Three blocks of records per stream, or all decoded; and eight batches."""
        size, buffer = self._settings.image_size, self._settings.shuffle_buffer_size
        cached = self._settings.decoded_cache
        decoded = 8 * batch_size * (cached or size) ** 2 * 3
        held = 0
        if cached:
            held = self._train.shards.total * cached**2 * 3
        elif not self._settings.is_fake:
            shards = self._train.shards
            every = -(-len(shards.paths) // _SAMPLED)  # a thousand requests to gs:// take seconds
            stored, count = sum(sizes(shards.paths[::every])), sum(shards.counts[::every])
            held = 3 * min(buffer, shards.total) * stored // max(count, 1)
        return (held + decoded) // num_shards

    def _fake_batch(self, split: str, batch_size: int, shard: int, num_shards: int) -> HostBatch:
        """Random images and labels; the loop keeps one that comes again on the device."""
        (spec,) = self.batch_spec(split, batch_size)
        draw = np.random.default_rng([self._settings.seed, split == "train"])
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
        size = self._settings.image_size
        inputs = jnp.zeros((1, size, size, 3), self._dtype)
        variables = self._model.init(rng, inputs, train=False)
        return variables["params"], {"batch_stats": variables["batch_stats"]}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """Softmax cross-entropy with label smoothing; `rng` is not used."""
        del rng
        pixels, flip = batch["image"], batch["flip"]
        if self._settings.decoded_cache:
            size = self._settings.image_size
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
        smoothing = self._settings.label_smoothing
        targets = optax.smooth_labels(jax.nn.one_hot(labels, self._classes), smoothing)
        return optax.softmax_cross_entropy(logits, targets)

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        return mean_scores(rows)


def _hits(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """f32[b] each: 1 where the label is the best, or among the five best, by score."""
    _, best = jax.lax.top_k(logits, min(5, logits.shape[-1]))
    hit = best == labels[:, None]
    return {
        "top_1_accuracy": hit[:, 0].astype(jnp.float32),
        "top_5_accuracy": jnp.any(hit, axis=1).astype(jnp.float32),
    }
