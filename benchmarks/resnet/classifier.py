"""The classifier: a benchmark of `models.ResNet` on labelled images, with its loss and score.

`benchmarks.base` explains each method.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import input_pipeline
import models
from benchmarks.base import BATCH_NORM_AXIS, Group, HostBatch, Identity, Spec, Stage, Target, Terms
from benchmarks.records import RecordBenchmark, RecordFiles, labels_and_groups
from benchmarks.resnet import architecture, losses, records
from benchmarks.resnet.input import regularisation
from benchmarks.resnet.input.regularisation import Mixed
from benchmarks.resnet.labels import Labels, OneLabel, SeveralLabels
from benchmarks.resnet.settings import Data, Settings, Sizes
from benchmarks.resnet.use import ClassifierUses
from benchmarks.uses import Uses
from common import foreign
from common.data.data_manifest import DataManifest
from common.data.decoding import Reader
from common.data.order import Order
from common.errors import ConfigError
from common.images import pixels
from common.images.input_spec import InputSpec
from common.tensorflow import tensorflow
from input_pipeline import Source

_FEW_IMAGES = 2_000  # below this number, new statistics are worse than those of the first model
_FEW_SHARED = 10  # images that share statistics: below, these are too noisy
# CPU time per training image, fitted to measurements at 128, 160 and 224 pixels on two
# cores: (for each image, for each of its pixels after resizing).
_MICROSECONDS = {"exact": (1500.0, 0.018), "fast": (1430.0, 0.0077)}


class ImageClassifier(RecordBenchmark[Source]):
    """A ResNet that classifies images."""

    unit = "images"
    nominal_sizes = records.IMAGENET_COUNTS
    larger_windows = True
    input_advice = {
        "reading": "move the records closer (a bucket of this region, a faster disk), or raise "
        "--config.input_streams",
        "decoding": "set --config.preprocessing=fast, or use a machine with more CPU cores; if "
        "photos have many megapixels, store smaller ones (--max_side=512 of scripts.prepare), or "
        "set --config.reduced_decoding=True",
    }
    class_weights: np.ndarray | None = None  # of `config.class_weights` in the loss, f32[K]

    def __init__(self, settings: Settings, cache_dir: str):
        super().__init__()
        self.settings, self.cache_dir = settings, cache_dir
        self.bn_span = settings.model.bn_span
        self._regularisation = settings.regularisation.spelled_out
        rate = settings.objective.head_learning_rate
        decayed, others = Group(decayed=True, rate=rate), Group(rate=rate)
        self.groups = {**self.groups, "head decayed": decayed, "head not decayed": others}
        self._dtype = architecture.PRECISIONS[settings.model.precision]
        self._sizes: Sizes | None = None

    # Data.

    @property
    def keys(self) -> Data:
        return self.settings.data

    def open_records(self, where: RecordFiles) -> Source:
        keys, number = self.keys, self.keys.num_label_classes
        if keys.dataset == "records":
            return records.open_records(where, number, self.labels.name == "several")
        name = keys.dataset.removeprefix("tfds:")
        return records.open_tfds(name, keys.data_dir, where.split, number)

    def open(self, split: str) -> int:
        """Also weighs the classes; an empty class has no weight and is refused.

        ConfigError if the data have another kind of labels than the config says.
        """
        content, keys = self._content, self.keys
        if content and content.labels != self.labels.name:
            raise ConfigError(
                f"config.labels={keys.labels!r}, but pictures of {keys.data_dir} have "
                f"{content.labels} (its manifest.json): leave it at 'auto'"
            )
        count, weighs = super().open(split), self.settings.objective.class_weights
        if split == "train" and weighs and self.class_weights is None:
            cache = f"{self.cache_dir}/labels.json"
            self.class_weights = records.class_weights(self.source("train"), self.keys, cache)
        return count

    def strata(self, source: Source) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The classes, of photos that have one, and the groups of photos that belong together."""
        key = "" if source.several else source.label_key
        return labels_and_groups(source.shards, f"{self.cache_dir}/labels.json", key)

    def decode_all(self, source: Source) -> None:
        def decode(serialized: Any, only_jpeg: bool) -> dict[str, Any]:
            encoded, label = source.parse(serialized)
            image = pixels.decode(encoded, only_jpeg=only_jpeg)
            return {"label": label, "size": tensorflow().shape(image)[:2]}

        Reader(source.shards, pixels.jpegs_first(decode), source.check).decode_all()

    @functools.cached_property
    def _content(self) -> DataManifest | None:
        """The data manifest, read when somebody asks for the first time."""
        return records.load_data_manifest(self.keys)

    @functools.cached_property
    def classes(self) -> int:
        """The config's number of classes, else the data's, else ImageNet's 1,000."""
        if self.keys.num_label_classes:
            return self.keys.num_label_classes
        if self.keys.dataset.startswith("tfds:"):
            source = self._sources.get("train") or self.open_records(self.split_files("train"))
            return source.num_classes
        content = self._content
        return len(records.valid_labels(0, len(content.class_names) if content else 0))

    @functools.cached_property
    def labels(self) -> Labels:
        """How many labels a picture has: as the config says, else as the data do, else one."""
        return self._kind(self.classes, self.settings.objective)

    @property
    def _kind(self) -> type[Labels]:
        name = self.keys.labels
        if name == "auto":
            name = self._content.labels if self._content else "one"
        return SeveralLabels if name == "several" else OneLabel

    @functools.cached_property
    def targets(self) -> tuple[Target, ...]:  # type: ignore[override] (a property)
        return (Target(self._kind.metric, self.settings.objective.target, percent=True),)

    @functools.cached_property
    def proportions(self) -> tuple[str, ...]:  # type: ignore[override] (a property)
        return self._kind.proportions

    @property
    def metadata(self) -> dict[str, Any]:
        return {**self._meaning("train"), "input_spec": self.input_spec.as_dict()}

    def _meaning(self, split: str) -> dict[str, Any]:
        names = list(self.source(split).class_names)
        return {"class_names": names, "labels": self.labels.name}

    def identity(self, split: str) -> Identity:
        return super().identity(split)._replace(meaning=self._meaning(split))

    @property
    def input_spec(self) -> InputSpec:
        """How an image becomes what the model expects, at the size of evaluation."""
        return self.settings.images.spec

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        images, settings = self.settings.images, self.settings
        sides: tuple[int, ...] = (images.spec.size,)
        leaves: dict[str, Any] = {"id": np.int32}
        if split == "eval":
            leaves["mask"] = np.float32
        else:
            sides = images.sides
            leaves["flip"] = np.bool_
            if settings.objective.class_weights:
                leaves["weight"] = np.float32
            if self._regularisation.is_used:
                leaves["draw"] = np.int32
        scalars = {k: jax.ShapeDtypeStruct((batch_size,), dtype) for k, dtype in leaves.items()}
        rest = {"label": self.labels.leaf(batch_size), **scalars}
        shapes = [(batch_size, side, side, 3) for side in sides]
        return tuple({"image": jax.ShapeDtypeStruct(x, np.uint8), **rest} for x in shapes)

    def order(self, batch_size: int) -> Order:
        keys, counts = self.keys, self.source("train").shards.counts
        buffer, streams = keys.shuffle_buffer_size, keys.input_streams
        return Order.make(counts, keys.seed, batch_size, streams, buffer, keys.repeats)

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        source, images, order = self.source("train"), self.settings.images, self.order(batch_size)
        streams = order.share(shard, num_shards)
        size_at = self.sizes.on_host if self.sizes else None
        stream = input_pipeline.train_batches(source, images, order, streams, start_step, size_at)
        if self._regularisation.is_used:
            stream = regularisation.add_draws(stream, self.keys.seed, start_step)
        if (weights := self.class_weights) is None:
            return stream
        return ({**batch, "weight": weights[batch["label"]]} for batch in stream)

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        source, images = self.source("eval"), self.settings.images
        return input_pipeline.eval_batches(source, images, batch_size, shard, num_shards)

    def fake_batch(self, spec: Spec, draw: np.random.Generator) -> HostBatch:
        size = spec["image"].shape
        return {
            "image": draw.integers(0, 256, size, np.uint8),
            "label": self.labels.draw(size[0], draw),
            "flip": draw.integers(0, 2, size[0]),
        }

    # Forward pass, loss and score.

    @functools.cached_property
    def model(self) -> models.ResNet:
        """The network."""
        return architecture.network(self.settings.model, self.classes)

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        size = self.settings.images.image_size
        inputs = jnp.zeros((1, size, size, 3), self._dtype)
        variables = self.model.init(rng, inputs, train=False)
        params: Any = variables["params"]
        if self.settings.objective.head_bias_from_classes:  # every class begins at 1 / K
            bias = jnp.full_like(params["head"]["bias"], -math.log(self.classes))
            params = {**params, "head": {**params["head"], "bias": bias}}
        return params, {k: v for k, v in variables.items() if k != "params"}

    def label(self, path: str) -> str:
        return f"head {super().label(path)}" if path.startswith("head/") else super().label(path)

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """The cross-entropy of a batch, the accuracies, and the new statistics of BatchNorm.

        `rng` is not used: all that is random follows from the leaf "draw", so that it belongs to
        the example.
        """
        del rng
        inputs, own, others, share = self._inputs(batch)
        variables = {"params": params, **model_state}
        group = 1 if self.bn_span == 1 else jax.lax.axis_size(BATCH_NORM_AXIS)
        disturbed = self._regularisation
        apply = architecture.training_apply(
            self.model, disturbed.drop_path, disturbed.dropout, batch.get("draw")
        )
        if self.keeps_statistics(len(inputs) * group):
            logits: Any = apply(variables, inputs, train=False)
        else:
            logits, model_state = apply(variables, inputs, train=True, mutable=["batch_stats"])
        keys, count = self.settings.objective, jnp.float32(len(logits))
        terms = losses.cross_entropy(
            logits, own, others, share, keys.label_smoothing, self.labels.loss
        )
        if keys.class_weights:  # their mean over the training images is 1
            terms *= batch["weight"]
        metrics = self.labels.metrics(logits, own)
        sums = {name: (jnp.sum(values), count) for name, values in metrics.items()}
        return {"cross_entropy": (jnp.sum(terms), count)}, sums, model_state

    def _inputs(self, batch: Mapping[str, jax.Array]) -> Mixed:
        """The images of a training batch for the network, [b, h, w, 3], and their labels."""
        images, keys = batch["image"], self._regularisation
        if keys.augmentation:
            images = regularisation.augment_images(keys.augmentation, images, batch["draw"])
        images = input_pipeline.normalize(images, batch["flip"], self._dtype, self.input_spec)
        if not keys.is_used:
            return Mixed(images, batch["label"], None, None)
        labels, seeds = batch["label"], batch["draw"]
        if keys.random_erasing:
            images = regularisation.erase(images, seeds, keys.random_erasing)
        return regularisation.mix(images, labels, seeds, mixup=keys.mixup, cutmix=keys.cutmix)

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        logits = self.classify(params, model_state, batch["image"])["logits"]
        predicted = self.labels.predicted(logits, batch["label"])
        return {**predicted, "id": batch["id"], "label": batch["label"]}

    def classify(self, params: Any, model_state: Any, images: jax.Array) -> dict[str, jax.Array]:
        """{"logits": f32[b, K], "features": f32[b, F], the head's input} of RGB images.

        `images` uint8[b, size, size, 3] are as `common.images.input_spec.prepare_image` makes them.
        With `eval_flip` both are the means over the image and its mirror image.
        """
        inputs, is_doubled = self.eval_inputs(images), self.settings.objective.eval_flip

        def both(model: models.ResNet, inputs: jax.Array) -> dict[str, jax.Array]:
            features = model.features(inputs, train=False)
            if is_doubled:  # the head is linear, so its mean is that of the logits
                features = jnp.mean(features.reshape(2, -1, features.shape[-1]), axis=0)
            return {"logits": model.head(features), "features": features}

        outputs: Any = self.model.apply({"params": params, **model_state}, inputs, method=both)
        return outputs

    def eval_inputs(self, images: jax.Array) -> jax.Array:
        """Images uint8[b, h, w, 3] as the network takes them, with `eval_flip` mirrored, too."""
        inputs = input_pipeline.normalize(images, None, self._dtype, self.input_spec)
        doubled = self.settings.objective.eval_flip
        return jnp.concatenate([inputs, inputs[:, :, ::-1]]) if doubled else inputs

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        return self.labels.score(rows, self._shown_classes)

    @property
    def score_names(self) -> tuple[str, ...]:
        return self.labels.score_names(self._shown_classes)

    @property
    def _shown_classes(self) -> list[str]:
        return records.shown_classes(self._sources.get("eval"), self.keys, self.classes)

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        return {name: scores[name] for name in self.labels.headline}

    def group_scores(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, tuple[float, int]]:
        return self.labels.group_scores(rows, self.source("eval").class_names)

    @property
    def uses(self) -> Uses:
        return ClassifierUses(self)

    # What it may have besides.

    def keeps_statistics(self, norm_examples: int) -> bool:
        """Whether training uses BatchNorm's running statistics and never updates them."""
        chosen = self.settings.objective.bn_statistics
        if chosen != "auto":
            return chosen == "frozen"
        count = self.num_examples if "train" in self._sources else self.nominal_examples
        return count("train") < _FEW_IMAGES or norm_examples < _FEW_SHARED

    @property
    def published(self) -> str:
        return foreign.RESNET.format(depth=min(max(self.settings.model.resnet_depth, 18), 152))

    def check_random_start(self, norm_examples: int) -> None:
        """Refuses "frozen" and "auto", whose statistics or rates need a trained model."""
        if (chosen := self.settings.objective.bn_statistics) != "batch":
            raise ConfigError(
                f"config.bn_statistics={chosen!r} keeps the statistics of config.init_from, which "
                f"names no model: give --config.init_from={self.published} or the workdir of a "
                "run; or, to train from random weights, --config.bn_statistics=batch"
            )

    def run_notes(self, norm_examples: int, evaluating: bool) -> list[str]:
        del evaluating
        notes = []
        if (loss := self.labels.loss) != (asked := self.settings.objective.loss):
            notes.append(f"the loss is {loss!r}: config.loss={asked!r} is for one label per image")
        if self.keeps_statistics(norm_examples):
            notes.append("BatchNorm keeps the statistics of config.init_from")
        if self.class_weights is not None:
            names, weights = self.source("train").class_names, self.class_weights
            low, high = (
                f"{weights[i]:.3g} ({records.class_name(names, i)})"
                for i in (weights.argmin(), weights.argmax())
            )
            notes.append(f"the loss weighs classes from {low} to {high}")
        return [*notes, self.sizes.note()] if self.sizes else notes

    @property
    def sizes(self) -> Sizes | None:
        """The size of the training images at each step; None where it is always `image_size`."""
        if self.settings.images.image_sizes and not self._sizes:
            raise RuntimeError("image_sizes are parts of a run: its length must be planned first")
        return self._sizes

    def set_total_steps(self, total_steps: int) -> None:
        if pairs := self.settings.images.image_sizes:
            self._sizes = Sizes.plan(pairs, total_steps)

    def stages(self) -> tuple[Stage, ...]:
        if not (sizes := self.sizes):
            return ()
        sides = self.settings.images.sides
        return tuple(Stage(f"{side} pixels", sizes.steps(side)) for side in sides)

    def input_rates(self) -> tuple[Mapping[str, float], ...]:
        """The images per second that docs/performance.md gives for JPEGs of 500 x 375 pixels."""
        costs = _MICROSECONDS.items()
        return tuple(
            {mode: 1e6 / (image + pixel * side**2) for mode, (image, pixel) in costs}
            for side in self.settings.images.sides
        )

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """Eight batches; to train, three blocks of records per stream as well."""
        largest = max(spec["image"].size for spec in self.batch_spec(split, 1))
        key = "image_sizes" if split == "train" else "eval_image_size"
        keys = f"{split}_batch_size", key if getattr(self.settings.images, key) else "image_size"
        needed: dict[tuple[str, ...], int] = {keys: 8 * batch_size * largest // num_shards}
        if split == "train":
            needed[("shuffle_buffer_size",)] = self.held_bytes(num_shards)
        return needed
