"""SSD, a one-stage detector (Liu et al. 2015, arXiv:1512.02325), on data in COCO's form.

This file joins the other files of this folder into a benchmark: `input_pipeline` crops and
augments, `models` has the network and its default boxes, `losses` the loss.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import BATCH_NORM_AXIS, HostBatch, Model, Terms
from benchmarks.detection import boxes, records
from benchmarks.detection.detector import Detector, Leaves, restored
from benchmarks.detection.ssd import input_pipeline, losses, models, weights
from benchmarks.detection.ssd.settings import Maps, Settings
from benchmarks.detection.ssd.use import SsdUses
from benchmarks.detection.weights import FOLLOWS, follow, read_foreign_settings
from benchmarks.uses import Uses
from common import foreign
from common.keys import read_config
from common.layers import gram_resnet
from input_pipeline import normalize
from models import BatchNorm

MODEL = Model(
    keys=("max_pool", "clip_boxes"),
    body_keys=("antialias", "resnet_stages", "num_filters", *Maps.__dataclass_fields__),
    whole_keys=("num_classes",),
    follows=FOLLOWS,
    follow=follow,
    restored=restored,
    foreign_settings=functools.partial(read_foreign_settings, weights),
    library=weights,
)


class Ssd(Detector[records.Source]):
    """An SSD that finds objects in images."""

    larger_windows = True
    library = weights
    settings: Settings

    def __init__(self, settings: Settings, cache_dir: str):
        super().__init__(settings, cache_dir)
        self.bn_span = settings.backbone.bn_span
        self._default_boxes = settings.maps.default_boxes
        self._anchors = models.box_corners(self._default_boxes.boxes()).astype(np.float32)

    # Data.

    @property
    def image_shapes(self) -> tuple[tuple[int, ...], ...]:
        side = self.settings.images.image_size
        return ((side, side, 3),)

    def extra_leaves(self, split: str) -> Leaves:
        if split == "train":
            return {"augment": ((), np.int32)}
        return {"size": ((2,), np.float32)}

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        images, order = self.settings.images, self.order(batch_size)
        return input_pipeline.train_batches(
            self.source("train"), images, order, shard, num_shards, start_step
        )

    def image_batches(
        self, source: records.Source, batch_size: int, shard: int, num_shards: int
    ) -> Iterator[HostBatch]:
        images = self.settings.images
        return input_pipeline.eval_batches(source, images, batch_size, shard, num_shards)

    # Forward pass and loss.

    @functools.cached_property
    def _model(self) -> models.SSD:
        keys = self.settings.backbone
        backbone = models.backbone(
            keys.resnet_stages,
            keys.pool_padding,
            num_filters=keys.num_filters,
            dtype=keys.dtype,
            norm=functools.partial(
                BatchNorm,
                momentum=keys.bn_momentum,
                axis_name=None if keys.bn_span == 1 else BATCH_NORM_AXIS,
            ),
        )
        if keys.batch_norm == "gram":
            backbone = gram_resnet.compose_basic(backbone, keys.pool_padding)
        extras, per_cell = self.settings.maps.extras, self._default_boxes.boxes_per_cell
        return models.SSD(backbone, extras, per_cell, self.classes)

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        images = jnp.zeros((1, *self.image_shapes[0]), self.settings.backbone.dtype)
        variables = self._model.init(rng, images, train=False)
        return variables["params"], {"batch_stats": variables["batch_stats"]}

    @property
    def published(self) -> str:
        return foreign.RESNET.format(depth=34)

    def label(self, path: str) -> str:
        """All parameters are decayed, as in MLPerf's reference."""
        return "head decayed" if path.startswith("head") else "decayed"

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """The mean over images of both parts of SSD's loss; `rng` is not used."""
        del rng
        images, true = input_pipeline.augment(
            batch["image"],
            batch["boxes"],
            batch["augment"],
            self.settings.images.random_flip,
            self.settings.backbone.dtype,
            preset.colours if (preset := self.settings.images.preset) else 1.0,
        )
        variables, learns = {"params": params, **model_state}, not self.keeps_statistics
        outputs, changed = self._model.apply(
            variables, images, train=learns, mutable=["batch_stats"]
        )
        deltas, truth = models.deltas(outputs, 1 + self.classes), (true, batch["classes"])
        box_loss, class_loss = losses.detection_loss(
            *(deltas, outputs, *truth, self._anchors, 1 + self.classes), self.keys.empty_images
        )
        count = jnp.float32(len(images))
        terms = {"box_loss": (jnp.sum(box_loss), count), "class_loss": (jnp.sum(class_loss), count)}
        return terms, {}, changed if learns else model_state

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        images = normalize(batch["image"], None, self.settings.backbone.dtype)
        outputs: Any = self._model.apply({"params": params, **model_state}, images, train=False)
        deltas, logits = models.join(outputs, 1 + self.classes)
        keys = self.settings.detection
        decoded = boxes.decode_boxes(deltas, self._anchors)
        detections = boxes.postprocess_detections(
            boxes.clip(decoded, 1, 1) if keys.clip_boxes else decoded,
            jax.nn.softmax(logits)[..., 1:],
            keys.min_score,
            keys.nms_iou,
            keys.max_detections,
        )
        pixels = jnp.tile(batch["size"], 2)[:, None]
        kept = {name: detections[name] for name in ("score", "class")}
        return kept | {"boxes": detections["boxes"] * pixels, "image_id": batch["image_id"]}

    @property
    def uses(self) -> Uses:
        return SsdUses(self)


def make(config: Any, cache_dir: str) -> Ssd:
    return Ssd(read_config(Settings, config), cache_dir)
