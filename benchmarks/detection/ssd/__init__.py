"""SSD, a one-stage detector (Liu et al. 2015, arXiv:1512.02325), on data in COCO's form.

This file joins the other files of this folder into a benchmark: `input_pipeline` crops and
augments, `anchors` has the default boxes, `models` the network, `losses` the loss.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import HostBatch, Spec, Target, Terms
from benchmarks.detection import boxes, detector, nms
from benchmarks.detection.detector import Detector
from benchmarks.detection.images import normalize
from benchmarks.detection.ssd import anchors, input_pipeline, losses, models
from benchmarks.detection.ssd.input_pipeline import Preprocessing
from errors import ConfigError
from keys import Count, Seed, Share, read
from models import BatchNorm
from ops.layers import gram_basic, gram_resnet

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


FOLLOWS, check_followed = detector.FOLLOWS, detector.check_followed


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


class Ssd(Detector):
    """An SSD that finds objects in images."""

    larger_windows = True

    def __init__(self, settings: Settings, cache_dir: str):
        super().__init__(settings, cache_dir)
        self.targets = (Target("mAP", settings.target),)
        self.bn_span, self._dtype = settings.bn_span, _PRECISIONS[settings.precision]
        self._layout = layout(vars(settings))
        self._anchors = anchors.corners(anchors.default_boxes(self._layout)).astype(np.float32)

    @property
    def adopted(self) -> str:
        settings = self.settings
        return (
            "--config=configs/resnet50.py --config.resnet_depth=34 (or the ResNet of basic blocks "
            f"that config.resnet_stages={settings.resnet_stages} and "
            f"config.num_filters={settings.num_filters} describe), or of an SSD"
        )

    # Data.

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        settings = self.settings
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
            self._train, self.settings, order, shard, num_shards, start_step
        )

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        return input_pipeline.eval_batches(self._eval, self.settings, batch_size, shard, num_shards)

    # Forward pass and loss.

    @functools.cached_property
    def _model(self) -> models.SSD:
        settings = self.settings
        backbone = models.backbone(
            settings.resnet_stages,
            num_filters=settings.num_filters,
            dtype=self._dtype,
            norm=functools.partial(
                BatchNorm,
                momentum=settings.bn_momentum,
                axis_name=None if settings.bn_span == 1 else "group",
            ),
        )
        if settings.batch_norm == "gram":
            backbone = gram_resnet.compose(
                backbone, gram_basic.stem, gram_basic.BasicBlock, models.PADDING
            )
        extras, per_cell = _extras(vars(settings)), self._layout.boxes_per_cell
        return models.SSD(backbone, extras, per_cell, self._classes)

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        size = self.settings.image_size
        variables = self._model.init(rng, jnp.zeros((1, size, size, 3), self._dtype), train=False)
        return variables["params"], {"batch_stats": variables["batch_stats"]}

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
            self.settings.random_flip,
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
        settings = self.settings
        images = normalize(batch["image"], self._dtype)
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
