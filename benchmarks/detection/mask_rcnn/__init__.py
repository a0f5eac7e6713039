"""Mask R-CNN, a two-stage detector that outlines objects (He et al. 2017, arXiv:1703.06870).

This file joins the other files of this folder into a benchmark: `input_pipeline` makes batches of
one orientation, `models` has the network, its anchors and proposals, `losses` the targets and the
loss.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models as resnets
from benchmarks.base import Benchmark, Group, HostBatch, Model, Target, Terms
from benchmarks.detection import boxes
from benchmarks.detection.detector import Detector, Leaves, restored
from benchmarks.detection.mask_rcnn import input_pipeline, losses, models, roi_align, weights
from benchmarks.detection.mask_rcnn.aspect_ratio_groups import AspectRatioGroups, GroupedOrder
from benchmarks.detection.mask_rcnn.losses import Objects
from benchmarks.detection.mask_rcnn.settings import Heads, Settings
from benchmarks.detection.mask_rcnn.use import MaskRcnnUses
from benchmarks.detection.scoring import MaskScorer
from benchmarks.detection.weights import FOLLOWS, follow, read_foreign_settings
from benchmarks.records import RecordFiles
from benchmarks.uses import Uses
from common import foreign
from common.keys import read_config
from common.layers import space_to_depth

MODEL = Model(
    keys=("max_pool", "space_to_depth", "bn_epsilon"),
    body_keys=(
        "resnet_stages",
        "resnet_bottleneck",
        "num_filters",
        *models.AnchorGenerator.__dataclass_fields__,
        *Heads.__dataclass_fields__,
    ),
    whole_keys=("num_classes", "class_numbers", "class_candidates"),
    follows=FOLLOWS,
    follow=follow,
    restored=restored,
    foreign_settings=functools.partial(read_foreign_settings, weights),
    library=weights,
)


class MaskRcnn(Detector[AspectRatioGroups]):
    """A Mask R-CNN that finds and outlines objects in images."""

    settings: Settings
    library = weights
    reads_masks = True
    image_key = "image_shape"
    # The rate of Caffe's detectors and of MLPerf's reference
    groups = {**Benchmark.groups, "biases": Group(rate=2.0)}

    def __init__(self, settings: Settings, cache_dir: str):
        super().__init__(settings, cache_dir)
        self.targets += (Target("mask_mAP", settings.detection.mask_target),)
        self._dtype = settings.backbone.dtype

    @property
    def score_names(self) -> tuple[str, ...]:
        names = super().score_names
        return *names, *(f"mask_{name}" for name in names)

    @property
    def published(self) -> str:
        """torchvision's detector where the classes are new, else MLPerf's kind of backbone."""
        new = self.settings.tuning.new_classes
        return foreign.MASK_RCNN if new else foreign.RESNET.format(depth=50)

    # Data.

    @property
    def image_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(space_to_depth.blocked(*shape) for shape in self.settings.images.shapes)

    def extra_leaves(self, split: str) -> Leaves:
        size: Leaves = {"size": ((2,), np.float32)}
        if split == "eval":
            return size | {"original": ((2,), np.float32)}
        images = self.settings.images
        masks = (images.max_boxes, images.mask_size**2 // 8)
        return size | {"masks": (masks, np.uint8), "draw": ((), np.int32)}

    def open_records(self, where: RecordFiles) -> AspectRatioGroups:
        source = super().open_records(where)
        if len(self.settings.images.shapes) == 1:
            return AspectRatioGroups((source,))
        return AspectRatioGroups.by_orientation(source)

    def take(self, source: AspectRatioGroups, kept: np.ndarray) -> AspectRatioGroups:
        return source.only(kept)

    def decode_all(self, source: AspectRatioGroups) -> None:
        for part in source.sources:
            super().decode_all(part)

    def _order(self, batch_size: int) -> GroupedOrder:
        return GroupedOrder.make(self.source("train"), self.keys, batch_size)

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        return self._order(batch_size).batch_ids(step).tolist()

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        groups, grouped = self.source("train"), self._order(batch_size)
        images = self.settings.images
        return input_pipeline.train_batches(groups, images, grouped, shard, num_shards, start_step)

    def image_batches(
        self, source: AspectRatioGroups, batch_size: int, shard: int, num_shards: int
    ) -> Iterator[HostBatch]:
        images = self.settings.images
        return input_pipeline.eval_batches(source, images, batch_size, shard, num_shards)

    # Forward pass, loss and score.

    @functools.cached_property
    def _model(self) -> models.MaskRCNN:
        keys, anchors, heads = self.settings.backbone, self.settings.anchors, self.settings.heads
        stem = functools.partial(resnets.stem, padding=keys.pool_padding)
        # The images come in blocks of 2x2 pixels.
        fold = space_to_depth.stem if keys.space_to_depth else models.blocked_stem
        backbone = resnets.ResNet(
            tuple(keys.resnet_stages),
            resnets.BottleneckBlock if keys.resnet_bottleneck else resnets.BasicBlock,
            strides=(1, *[2] * (len(keys.resnet_stages) - 1)),
            num_filters=keys.num_filters,
            dtype=self._dtype,
            norm=functools.partial(
                resnets.BatchNorm, momentum=keys.bn_momentum, epsilon=keys.bn_epsilon
            ),
            stem=fold(stem),
        )
        return models.MaskRCNN(
            backbone,
            levels=tuple(anchors.pyramid_levels),
            num_anchors=len(anchors.anchor_ratios),
            filters=heads.pyramid_filters,
            box_features=tuple(heads.box_features),
            mask_features=tuple(heads.mask_features),
            num_classes=self.classes,
        )

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        images = jnp.zeros((1, *self.image_shapes[0]), self._dtype)
        pools = self.settings.heads.box_pool, self.settings.heads.mask_pool
        variables = self._model.init(rng, images, pools)
        return variables["params"], {"batch_stats": variables["batch_stats"]}

    def label(self, path: str) -> str:
        """Biases have the double rate and no decay; a BatchNorm that is frozen never changes."""
        layer, _, leaf = path.rpartition("/")
        if "/bn" in layer and self.keeps_statistics:
            return "frozen"
        head = "head " if layer in ("box_head/class", "box_head/code", "mask_head/mask") else ""
        return head + {"kernel": "decayed", "bias": "biases"}.get(leaf, "not decayed")

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """Five terms: class and box of the proposals (RPN), class and box of the RoIs, and masks.

        The samples are a function of the leaf "draw"; `rng` is not used.
        """
        del rng
        heads, rule = self.settings.heads, self.settings.regions.rule
        objects = Objects(batch["boxes"], batch["classes"])
        key, preset = batch["draw"], self.settings.images.preset
        images = input_pipeline.normalized(batch, self._dtype, preset.colours if preset else 0.0)

        def forward(network: models.MaskRCNN) -> dict[str, tuple[jax.Array, jax.Array]]:
            maps = network.maps(images, train=not self.keeps_statistics)
            logits, deltas = network.proposal_head(maps)
            anchors = self._anchors(images)
            with jax.named_scope("losses"):
                anchor_losses = losses.rpn_loss(
                    logits, deltas, anchors, objects, self.settings.anchor_sampling.rule, key
                )
            with jax.named_scope("proposals"):
                proposals = self._propose(logits, deltas, batch, train=True)
                regions = losses.sample_regions(proposals, objects, rule, key)
            with_masks = regions.first(rule.positives)
            small, large = self._align(
                maps, (regions.boxes, heads.box_pool), (with_masks.boxes, heads.mask_pool)
            )
            predicted, masks = network.box_head(small), network.mask_head(large)
            with jax.named_scope("losses"):
                region_losses = losses.box_head_loss(*predicted, regions, objects)
                true = losses.unpack_masks(batch["masks"], self.settings.images.mask_size)
                total, pixels = losses.mask_loss(masks, with_masks, objects, true)
            count = jnp.float32(len(images))
            names = "proposal_class", "proposal_box", "class", "box"
            parts = zip(names, (*anchor_losses, *region_losses), strict=True)
            terms = {f"{name}_loss": (jnp.sum(value), count) for name, value in parts}
            return terms | {"mask_loss": (jnp.sum(total), jnp.sum(pixels))}

        terms, changed = self._model.apply(
            {"params": params, **model_state}, method=forward, mutable=["batch_stats"]
        )
        return terms, {}, model_state if self.keeps_statistics else changed

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The best detections of each image, in pixels of the original; score 0 is padding.

        "masks" are uint8[b, D, s, s]: the probability of each pixel of the box, times 255.
        """
        keys, heads = self.settings.detection, self.settings.heads
        images, size = input_pipeline.normalized(batch, self._dtype), batch["size"]

        def forward(network: models.MaskRCNN) -> dict[str, jax.Array]:
            maps = network.maps(images, train=False)
            proposals = self._propose(*network.proposal_head(maps), batch, train=False)
            (pooled,) = self._align(maps, (proposals, heads.box_pool))
            logits, deltas = network.box_head(pooled)
            scores = jax.nn.softmax(logits)[..., 1:]
            valid = boxes.area(proposals) > 0
            detections = boxes.postprocess_detections(
                boxes.clip(
                    boxes.decode_boxes(deltas[:, :, 1:], proposals[:, :, None]),
                    *(size[:, i, None, None] for i in (0, 1)),
                ),
                jnp.where(valid[..., None], scores, 0),
                keys.min_score,
                keys.nms_iou,
                keys.max_detections,
                # a crowd may lose more than half to suppression
                keys.class_candidates or 2 * keys.max_detections,
            )
            (pooled,) = self._align(maps, (detections["boxes"], heads.mask_pool))
            logits = network.mask_head(pooled)
            is_class = jnp.arange(logits.shape[-1]) == detections["class"][..., None, None, None]
            masks = jax.nn.sigmoid(jnp.sum(jnp.where(is_class, logits, 0), -1))
            return detections | {"masks": jnp.round(255 * masks).astype(jnp.uint8)}

        detections: Any = self._model.apply({"params": params, **model_state}, method=forward)
        scale = jnp.tile(batch["original"] / jnp.maximum(size, 1), 2)[:, None]  # 0 in padding
        kept = {name: detections[name] for name in ("score", "class", "masks")}
        return kept | {"boxes": detections["boxes"] * scale, "image_id": batch["image_id"]}

    @functools.cached_property
    def scorer(self) -> MaskScorer:
        return MaskScorer(self.annotations, self.keys.class_numbers == "ids", self.parts)

    def _anchors(self, blocks: jax.Array) -> list[np.ndarray]:
        """The anchors of each level, for images in blocks of 2x2 pixels."""
        return self.settings.anchors.boxes(2 * blocks.shape[1], 2 * blocks.shape[2])

    def _propose(
        self, logits: Sequence[jax.Array], deltas: Sequence[jax.Array], batch: Any, train: bool
    ) -> jax.Array:
        """The proposals f32[b, P, 4] of what the head has predicted for the images of a batch."""
        keys, prefix = self.settings.proposals, "" if train else "eval_"
        return models.propose(
            logits,
            deltas,
            self._anchors(batch["image"]),
            batch["size"],
            before_nms=getattr(keys, f"{prefix}proposals_before_nms"),
            after_nms=getattr(keys, f"{prefix}proposals_after_nms"),
            iou_threshold=keys.proposal_nms_iou,
        )

    def _align(self, maps: models.Maps, *groups: tuple[jax.Array, int]) -> list[jax.Array]:
        """Features [b, R, s, s, c] of groups (f32[b, R, 4], s), by `roi_align.align`."""
        last = self.settings.backbone.level  # further levels are for proposals only
        usable = {level: x for level, x in maps.items() if level <= last}
        with jax.named_scope("roi_align"):
            return roi_align.align(usable, groups, canonical=self.settings.heads.region_scale)

    @property
    def uses(self) -> Uses:
        return MaskRcnnUses(self)


def make(config: Any, cache_dir: str) -> MaskRcnn:
    return MaskRcnn(read_config(Settings, config), cache_dir)
