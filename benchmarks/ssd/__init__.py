"""SSD, a one-stage detector (Liu et al. 2015, arXiv:1512.02325), on data in COCO's form.

This file joins the other files of this folder into a benchmark: `input_pipeline` crops and
augments, `anchors` has the default boxes, `models` the network, `losses` the loss.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import Exhibit, HostBatch, Picture, Spec, Target, Terms
from benchmarks.sharded import Sharded
from benchmarks.ssd import anchors, input_pipeline, losses, models
from benchmarks.ssd.input_pipeline import Preprocessing
from errors import CheckpointError, ConfigError, DataError, one_line
from input_pipeline import normalize
from keys import Count, Seed, Share, read
from ops import files
from ops.detection import boxes, coco, nms, records
from ops.trees import by_name

_log = logging.getLogger("tpu_suite")

COCO = {"train": 117_266, "eval": 5_000, "classes": 80}  # of 2017; training images with boxes
_PRECISIONS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
Channels = Annotated[int, "[1, 65536]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Preprocessing):
    """The config's keys that this benchmark reads; configs/ssd.py explains them."""

    seed: Seed
    data_dir: str
    train_files: str
    eval_files: str
    eval_annotations: str
    num_train_images: Count
    num_eval_images: Count
    num_classes: Annotated[int, "[0, 1e6]"]
    shuffle_buffer_size: Annotated[int, "[1, 1e9]"]
    input_streams: Annotated[int, "[1, 1e6]"]
    resnet_stages: Sequence[Annotated[int, "[1, 1000]"]]
    num_filters: Annotated[int, "[1, 4096]"]
    precision: Literal["bfloat16", "float32"]
    bn_span: Annotated[int, "[0, 1e6]"] | str
    bn_momentum: Share
    batch_norm: Literal["gram", "plain"]
    extra_squeezed: Sequence[Channels]
    extra_filters: Sequence[Channels]
    extra_strides: Sequence[Annotated[int, "[1, 2]"]]
    extra_paddings: Sequence[Annotated[int, "[0, 1]"]]
    box_steps: Sequence[Annotated[float, "(0, 4096]"]]
    box_sides: Sequence[Annotated[float, "(0, 4096]"]]
    box_ratios: Sequence[Annotated[int, "[1, 10]"]]
    min_score: Share
    nms_iou: Share
    max_detections: Annotated[int, "[1, 10000]"]
    target: Share


def make(config: Any, cache_dir: str) -> Ssd:
    """Makes the benchmark; see `benchmarks.load`.

    Raises:
      ConfigError: a value cannot work.
    """
    settings = read(Settings, config)
    _check(settings)
    return Ssd(settings, cache_dir)


def _check(settings: Settings) -> None:
    """Refuses lists of values whose lengths do not fit."""
    extras = len(settings.extra_filters)
    lengths = {"resnet_stages": 3}
    lengths |= {f"extra_{key}": extras for key in ("squeezed", "strides", "paddings")}
    lengths |= {"box_steps": extras + 1, "box_ratios": extras + 1, "box_sides": extras + 2}
    for key, length in lengths.items():
        if len(values := getattr(settings, key)) != length:
            reason = f"for the {extras} layers of config.extra_filters"
            reason = "for the stages before the extra layers" if key == "resnet_stages" else reason
            raise ConfigError(f"config.{key}={values}: must have {length} entries {reason}")
    if min(layout(vars(settings)).feature_sizes) < 1:
        raise ConfigError(
            f"config.image_size={settings.image_size}: no pixel is left of the last map; use "
            "larger images, or fewer extra layers"
        )


def _extras(values: Mapping[str, Any]) -> tuple[models.Extra, ...]:
    keys = ("squeezed", "filters", "strides", "paddings")
    columns = [values[f"extra_{key}"] for key in keys]
    return tuple(models.Extra(*column) for column in zip(*columns, strict=True))


def layout(values: Mapping[str, Any]) -> anchors.Layout:
    """The maps and default boxes that the config's keys describe; `values` are by key."""
    return anchors.Layout(
        values["image_size"],
        models.sides(values["image_size"], _extras(values)),
        values["box_steps"],
        values["box_sides"],
        [range(2, ratio + 1) for ratio in values["box_ratios"]],
    )


class Ssd(Sharded):
    """An SSD that finds objects in images."""

    unit = "images"
    use = "python main.py --mode=eval writes its detections and draws some of them"
    scores_in_background = True  # COCO's score of 5,000 images takes about 4 minutes
    advice = {
        "reading": "move the records closer (a bucket of this region, a faster disk), or raise "
        "--config.input_streams",
        "decoding": "use a machine with more CPU cores, or store smaller images",
    }

    def __init__(self, settings: Settings, cache_dir: str):
        self._settings, self._cache_dir = settings, cache_dir
        self.targets = (Target("mAP", settings.target),)
        self.bn_span, self._dtype = settings.bn_span, _PRECISIONS[settings.precision]
        self._layout = layout(vars(settings))
        self._anchors = anchors.corners(anchors.default_boxes(self._layout)).astype(np.float32)

    # Data.

    @functools.cached_property
    def _annotations(self) -> coco.Annotations:
        """The true boxes of the evaluation, and with them the categories."""
        settings, key = self._settings, "eval_annotations"
        path = files.find_one(settings.data_dir, settings.eval_annotations, "annotations", key)
        annotations = coco.Annotations.load(path)
        if settings.num_classes not in (0, count := len(annotations.categories)):
            raise ConfigError(
                f"config.num_classes={settings.num_classes}, but {path} has {count} "
                "categories: leave it at 0, which takes the number of the data"
            )
        return annotations

    @functools.cached_property
    def _train(self) -> records.Source:
        return self._open("train", self._settings.train_files)

    @functools.cached_property
    def _eval(self) -> records.Source:
        source = self._open("eval", self._settings.eval_files)
        annotations, ids = self._annotations, set(self._annotations.image_ids.tolist())
        if odd := ids ^ set(source.image_ids):
            records_path, odd_one = source.shards.paths[0], min(odd)
            side = "the annotations" if odd_one in ids else "the records"
            raise DataError(
                f"the eval records ({records_path} ...) and the annotations ({annotations.path}) "
                f"differ in {len(odd):,} images, such as the id {odd_one}, which only {side} have: "
                "they must be of one data set, and complete"
            )
        return source

    def _open(self, split: str, patterns: str) -> records.Source:
        settings = self._settings
        ids = tuple(category for category, _ in self._annotations.categories)
        index = f"{self._cache_dir}/{split}.json"
        source = records.open_records(
            settings.data_dir, patterns, ids, settings.max_boxes, index, split
        )
        self.check_declared(split, source.shards)
        return source

    @functools.cached_property
    def _classes(self) -> int:
        """The config's number of classes, else the data's, else COCO's 80."""
        settings = self._settings
        if settings.num_classes or not settings.data_dir:
            return settings.num_classes or COCO["classes"]
        return len(self._annotations.categories)

    def source(self, split: str) -> records.Source:
        return self._train if split == "train" else self._eval

    def nominal_examples(self, split: str) -> int:
        return self.declared_examples(split) or COCO[split]

    @property
    def metadata(self) -> dict[str, Any]:
        return {"categories": [list(category) for category in self._annotations.categories]}

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        settings = self._settings
        size, objects = settings.image_size, settings.max_boxes
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {"image": ((size, size, 3), np.uint8)}
        shapes |= {"id": ((), np.int32)}
        if split == "train":
            shapes |= {"boxes": ((objects, 4), np.float32), "classes": ((objects,), np.int32)}
            shapes |= {"augment": ((), np.int32)}
        else:
            shapes |= {"image_id": ((), np.int32), "size": ((2,), np.float32)}
            shapes |= {"mask": ((), np.float32)}
        return ({k: jax.ShapeDtypeStruct((batch_size, *s), d) for k, (s, d) in shapes.items()},)

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        order = self.order(batch_size)
        return input_pipeline.train_batches(
            self._train, self._settings, order, shard, num_shards, start_step
        )

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        return input_pipeline.eval_batches(
            self._eval, self._settings, batch_size, shard, num_shards
        )

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """Eight batches; to train, three blocks of records per stream as well."""
        settings = self._settings
        batch_bytes = batch_size * settings.image_size**2 * 3
        batches = {(f"{split}_batch_size", "image_size"): 8 * batch_bytes // num_shards}
        if split == "eval":
            return batches
        return batches | {("shuffle_buffer_size",): self.held_bytes(num_shards)}

    # Forward pass, loss and score.

    @functools.cached_property
    def _model(self) -> models.SSD:
        settings = self._settings
        backbone = models.backbone(
            settings.resnet_stages,
            num_filters=settings.num_filters,
            dtype=self._dtype,
            bn_axes=() if settings.bn_span == 1 else ("group",),
            bn_momentum=settings.bn_momentum,
            batch_norm=settings.batch_norm,
        )
        extras, per_cell = _extras(vars(settings)), self._layout.boxes_per_cell
        return models.SSD(backbone, extras, per_cell, self._classes)

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        size = self._settings.image_size
        variables = self._model.init(rng, jnp.zeros((1, size, size, 3), self._dtype), train=False)
        return variables["params"], {"batch_stats": variables["batch_stats"]}

    def adopt(self, params: Any, model_state: Any, loaded: Any) -> tuple[Any, Any]:
        """Takes another SSD's arrays, or those of a ResNet for the backbone.

        Raises:
          CheckpointError: an array of the backbone is missing or of another shape.
        """
        if "backbone" not in loaded["params"]:
            loaded = {
                "params": {"backbone": loaded["params"]},
                "model_state": {
                    kind: {"backbone": arrays} for kind, arrays in loaded["model_state"].items()
                },
            }
        adopted = super().adopt(params, model_state, loaded)
        theirs, ours = _backbone(loaded), {"params": adopted[0], "model_state": adopted[1]}
        for name, mine in _backbone(ours).items():
            if (other := theirs.get(name)) is None or other.shape != mine.shape:
                has = "is missing" if other is None else f"has the shape {other.shape}"
                raise CheckpointError(
                    f"{name} {has}, the backbone needs {mine.shape}: give a workdir of "
                    "--config=configs/resnet50.py --config.resnet_depth=34 (or the ResNet of "
                    f"basic blocks that config.resnet_stages={self._settings.resnet_stages} and "
                    f"config.num_filters={self._settings.num_filters} describe), or of an SSD"
                )
        return adopted

    def label(self, path: str) -> str:
        """All parameters are decayed, as in MLPerf's reference."""
        del path
        return "decayed"

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """The mean over images of both parts of SSD's loss; `rng` is not used."""
        del rng
        images, true = input_pipeline.augment(
            batch["image"],
            batch["boxes"],
            batch["augment"],
            self._settings.random_flip,
            self._dtype,
        )
        outputs, model_state = self._model.apply(
            {"params": params, **model_state}, images, train=True, mutable=["batch_stats"]
        )
        codes, truth = models.codes(outputs, 1 + self._classes), (true, batch["classes"])
        box_loss, class_loss = losses.detection_loss(
            codes, outputs, *truth, self._anchors, 1 + self._classes
        )
        count = jnp.float32(len(images))
        terms = {
            "box_loss": (jnp.sum(box_loss), count),
            "class_loss": (jnp.sum(class_loss), count),
        }
        return terms, {}, model_state

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The best detections of each image, in pixels of the original; score 0 is padding."""
        settings = self._settings
        images = normalize(batch["image"], None, self._dtype)
        outputs: Any = self._model.apply({"params": params, **model_state}, images, train=False)
        codes, logits = models.join(outputs, 1 + self._classes)
        found = nms.best(
            boxes.clip(boxes.decode(codes, self._anchors), 1, 1),
            jax.nn.softmax(logits)[..., 1:],
            settings.min_score,
            settings.nms_iou,
            settings.max_detections,
        )
        pixels = jnp.tile(batch["size"], 2)[:, None]
        kept = {name: found[name] for name in ("score", "class")}
        return kept | {"boxes": found["boxes"] * pixels, "image_id": batch["image_id"]}

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """COCO's average precisions and recalls."""
        return coco.score(self._annotations, self._columns(rows))

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        """The average precisions, without those of sizes that no object has."""
        return {name: scores[name] for name in coco.PRECISIONS if scores[name] >= 0}

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """The first images with their detections; detections.json in COCO's form."""
        from benchmarks.ssd import picture
        from ops.detection.picture import draw

        columns = self._columns(rows)
        pictures: list[Picture] = []
        files = {"detections.json": coco.to_json(columns)}
        text = (
            "The first images to evaluate, whatever their result: what the model found, and beside "
            f"it the true boxes. Detections with a score below {picture.MIN_SCORE} are not drawn; "
            "detections.json has all of them."
        )
        try:
            first = next(self.eval_batches(picture.COUNT, 0, 1))
            examples = picture.examples(first, columns, self._annotations)
            pictures = [Picture(draw([example]), (), wide=True) for example in examples]
            files["detections.png"] = draw(examples)
        except Exception as error:  # of drawing; the detections are worth more than their picture
            text = f"The detections cannot be drawn: {one_line(error)}."
            _log.warning("no detections.png: it cannot be drawn (%s)", one_line(error))
        return [Exhibit(title="Detections", text=text, pictures=pictures, files=files)]

    def _columns(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The detections of all images as `coco.score` takes them."""
        ids = np.asarray([category for category, _ in self._annotations.categories])
        parts = []
        for row in rows:
            image, place = np.nonzero(row["score"] > 0)
            y0, x0, y1, x1 = np.moveaxis(row["boxes"][image, place].astype(np.float64), -1, 0)
            parts.append(
                {
                    "image_id": row["image_id"][image],
                    "category_id": ids[row["class"][image, place] - 1],
                    "score": row["score"][image, place],
                    "bbox": np.stack([x0, y0, x1 - x0, y1 - y0], axis=1),
                }
            )
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _backbone(model: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the backbone by name, "params/backbone/conv_stem/kernel" and so on first."""
    named = by_name(model)
    names = sorted(named, key=lambda name: name.startswith("model_state"))
    return {name: named[name] for name in names if "/backbone/" in name}
