"""Mask R-CNN, a two-stage detector that outlines objects (He et al. 2017, arXiv:1703.06870).

This file joins the other files of this folder into a benchmark: `input_pipeline` makes batches of
one orientation, `anchors` and `models` have the network, `losses` the targets and the loss.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import models as resnets
from benchmarks.base import Group, HostBatch, Spec, Target, Terms
from benchmarks.detection import boxes, coco, detector, nms
from benchmarks.detection.detector import Detector
from benchmarks.detection.mask_rcnn import (
    anchors,
    input_pipeline,
    losses,
    masks,
    models,
    pasting,
    proposals,
    roi_align,
)
from benchmarks.detection.mask_rcnn.input_pipeline import Preprocessing
from benchmarks.detection.mask_rcnn.losses import Objects, Sampling
from benchmarks.detection.mask_rcnn.pools import Mix
from benchmarks.detection.mask_rcnn.proposals import Proposals
from errors import ConfigError
from keys import Count, Seed, Share, read
from ops.layers import space_to_depth

_PRECISIONS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
Channels = Annotated[int, "[1, 65536]"]
Many = Annotated[int, "[1, 1e6]"]
Overlap = Annotated[float, "(0, 1]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Preprocessing):
    """The config's keys that this benchmark reads; configs/mask_rcnn.py explains them."""

    seed: Seed
    data_dir: str
    train_files: str
    eval_files: str
    eval_annotations: str
    num_train_images: Count
    num_eval_images: Count
    num_classes: Annotated[int, "[0, 1e6]"]
    shuffle_buffer_size: Annotated[int, "[1, 1e9]"]
    input_streams: Many
    resnet_stages: Sequence[Annotated[int, "[1, 1000]"]]
    resnet_bottleneck: bool
    num_filters: Annotated[int, "[1, 4096]"]
    max_pool: Literal["same", "torch"]
    space_to_depth: bool
    bn_statistics: Literal["frozen", "batch"]
    bn_momentum: Share
    precision: Literal["bfloat16", "float32"]
    pyramid_levels: Sequence[Annotated[int, "[2, 12]"]]
    pyramid_filters: Channels
    anchor_scale: Annotated[float, "(0, 4096]"]
    anchor_ratios: Sequence[Annotated[float, "(0, 100]"]]
    anchor_samples: Many
    anchor_positive_share: Share
    anchor_positive_iou: Overlap
    anchor_negative_iou: Share
    proposals_before_nms: Many
    proposals_after_nms: Many
    eval_proposals_before_nms: Many
    eval_proposals_after_nms: Many
    proposal_nms_iou: Share
    region_samples: Many
    region_positive_share: Share
    region_iou: Overlap
    region_scale: Annotated[float, "(0, 65536]"]
    box_pool: Annotated[int, "[1, 64]"]
    box_features: Sequence[Channels]
    mask_pool: Annotated[int, "[1, 64]"]
    mask_features: Sequence[Channels]
    min_score: Share
    nms_iou: Share
    max_detections: Annotated[int, "[1, 10000]"]
    target: Share
    mask_target: Share


def make(config: Any, cache_dir: str) -> MaskRcnn:
    """Makes the benchmark; see `benchmarks.load`.

    Raises:
      ConfigError: a value cannot work.
    """
    settings = read(Settings, config)
    _check(settings)
    return MaskRcnn(settings, cache_dir)


# What `benchmarks.settling.settle` takes from a detector's own checkpoint, and from a ResNet's.
MODEL_KEYS = ("max_pool", "space_to_depth")
FOLLOWS, check_followed = detector.FOLLOWS, detector.check_followed


def _check(settings: Settings) -> None:
    """Refuses values that do not fit each other."""
    levels, last = list(settings.pyramid_levels), 1 + len(settings.resnet_stages)
    if not levels or levels != list(range(levels[0], levels[-1] + 1)):
        raise ConfigError(
            f"config.pyramid_levels={tuple(levels)}: must be numbers that follow each other"
        )
    if not levels[0] <= last <= levels[-1]:
        raise ConfigError(
            f"config.pyramid_levels={tuple(levels)}: must hold {last}, the level of the last of "
            "config.resnet_stages"
        )
    for part in ("anchor", "region"):
        count, share = (getattr(settings, f"{part}_{x}") for x in ("samples", "positive_share"))
        if int(count * share) < 1:
            raise ConfigError(
                f"config.{part}_samples={count} with config.{part}_positive_share={share} leaves "
                "no positive one to learn from: raise one of them"
            )
    cell = 2 ** levels[-1]
    if any(side % cell for side in settings.image_shape):
        raise ConfigError(
            f"config.image_shape={tuple(settings.image_shape)}: both sides must be multiples of "
            f"{cell}, the cell of level {levels[-1]} of config.pyramid_levels"
        )
    if settings.anchor_negative_iou > settings.anchor_positive_iou:
        raise ConfigError(
            f"config.anchor_negative_iou={settings.anchor_negative_iou}: must not be above "
            f"config.anchor_positive_iou={settings.anchor_positive_iou}"
        )


class MaskRcnn(Detector):
    """A Mask R-CNN that finds and outlines objects in images."""

    settings: Settings
    reads_masks = True
    image_key = "image_shape"
    groups = {
        "decayed": Group(decayed=True),
        "not decayed": Group(),
        "biases": Group(rate=2.0),  # as Caffe's detectors, and MLPerf's reference, have them
        "frozen": Group(rate=0.0),
    }

    def __init__(self, settings: Settings, cache_dir: str):
        super().__init__(settings, cache_dir)
        self.targets = (
            Target("mAP", settings.target),
            Target("mask_mAP", settings.mask_target),
        )
        self._dtype = _PRECISIONS[settings.precision]
        self._layout = anchors.Layout(
            settings.pyramid_levels, settings.anchor_scale, settings.anchor_ratios
        )
        self._of_anchors = Sampling(
            settings.anchor_samples,
            settings.anchor_positive_share,
            settings.anchor_positive_iou,
            settings.anchor_negative_iou,
        )
        self._of_regions = Sampling(
            settings.region_samples,
            settings.region_positive_share,
            settings.region_iou,
            settings.region_iou,
        )

    # Data.

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        settings = self.settings
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            **{"size": ((2,), np.float32), "id": ((), np.int32)},
        }
        if split == "train":
            count, bits = settings.max_boxes, settings.mask_size**2
            shapes |= {"boxes": ((count, 4), np.float32), "classes": ((count,), np.int32)}
            shapes |= {"masks": ((count, bits // 8), np.uint8), "draw": ((), np.int32)}
        else:
            shapes |= {"original": ((2,), np.float32), "image_id": ((), np.int32)}
            shapes |= {"mask": ((), np.float32)}
        specs = []
        for height, width in settings.shapes:
            image = {"image": (space_to_depth.blocked(height, width), np.uint8)}
            specs.append(
                {
                    name: jax.ShapeDtypeStruct((batch_size, *shape), dtype)
                    for name, (shape, dtype) in (image | shapes).items()
                }
            )
        return tuple(specs)

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        return Mix.make(self._train, self.settings, batch_size).batch_ids(step).tolist()

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        mix = Mix.make(self._train, self.settings, batch_size)
        return input_pipeline.train_batches(
            self._train, self.settings, mix, shard, num_shards, start_step
        )

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        return input_pipeline.eval_batches(self._eval, self.settings, batch_size, shard, num_shards)

    def first_batches(self, batch_size: int) -> list[HostBatch]:
        how = self._eval, self.settings, batch_size, 0, 1
        pools = range(len(self._eval.pools))
        batches = [next(input_pipeline.pool_batches(pool, *how), None) for pool in pools]
        return [batch for batch in batches if batch]

    # Forward pass, loss and score.

    @functools.cached_property
    def _model(self) -> models.MaskRCNN:
        settings = self.settings
        padding = "SAME" if settings.max_pool == "same" else models.PADDING
        stem = functools.partial(resnets.stem, padding=padding)
        # The images come in blocks of 2x2 pixels.
        fold = space_to_depth.stem if settings.space_to_depth else space_to_depth.blocked_stem
        backbone = resnets.ResNet(
            tuple(settings.resnet_stages),
            resnets.BottleneckBlock if settings.resnet_bottleneck else resnets.BasicBlock,
            strides=(1, *[2] * (len(settings.resnet_stages) - 1)),
            num_filters=settings.num_filters,
            dtype=self._dtype,
            norm=functools.partial(resnets.BatchNorm, momentum=settings.bn_momentum),
            stem=fold(stem),
        )
        return models.MaskRCNN(
            backbone,
            levels=tuple(settings.pyramid_levels),
            anchors=len(settings.anchor_ratios),
            filters=settings.pyramid_filters,
            box_features=tuple(settings.box_features),
            mask_features=tuple(settings.mask_features),
            num_classes=self._classes,
        )

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        settings = self.settings
        shape = space_to_depth.blocked(*settings.image_shape)
        images = jnp.zeros((1, *shape), self._dtype)
        pools = settings.box_pool, settings.mask_pool
        variables = self._model.init(rng, images, pools)
        return variables["params"], {"batch_stats": variables["batch_stats"]}

    def label(self, path: str) -> str:
        """Biases have the double rate and no decay; a BatchNorm that is frozen never changes."""
        layer, _, kind = path.rpartition("/")
        if "/bn" in layer and self.settings.bn_statistics == "frozen":
            return "frozen"
        return {"kernel": "decayed", "bias": "biases"}.get(kind, "not decayed")

    def check_random_start(self, norm_examples: int) -> None:
        del norm_examples
        if self.settings.bn_statistics == "frozen":
            raise ConfigError(
                "config.bn_statistics='frozen' keeps the BatchNorm of config.init_from, which is "
                "no model: give --config.init_from=WORKDIR of a ResNet, or to train from random "
                "weights --config.bn_statistics=batch --config.freeze="
            )

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """Five parts: of the proposals and of the regions the class and the box, and the masks.

        The samples are a function of the leaf "draw"; `rng` is not used.
        """
        del rng
        settings = self.settings
        objects = Objects(batch["boxes"], batch["classes"])
        key, images = batch["draw"], input_pipeline.normalized(batch, self._dtype)

        def forward(network: models.MaskRCNN) -> dict[str, tuple[jax.Array, jax.Array]]:
            maps = network.maps(images, train=settings.bn_statistics == "batch")
            logits, codes = network.proposal_head(maps)
            corners = self._corners(images)
            with jax.named_scope("losses"):
                anchor_losses = losses.proposal_loss(
                    logits, codes, corners, objects, self._of_anchors, key
                )
            with jax.named_scope("proposals"):
                proposed = self._propose(logits, codes, batch, train=True)
                regions = losses.sample(proposed.boxes, objects, self._of_regions, key)
            with_masks = regions.first(self._of_regions.positives)
            small, large = self._align(
                maps, (regions.boxes, settings.box_pool), (with_masks.boxes, settings.mask_pool)
            )
            found, outlines = network.box_head(small), network.mask_head(large)
            with jax.named_scope("losses"):
                region_losses = losses.region_loss(*found, regions, objects)
                true = masks.unpack(batch["masks"], settings.mask_size)
                total, pixels = losses.mask_loss(outlines, with_masks, objects, true)
            count = jnp.float32(len(images))
            names = "proposal_class", "proposal_box", "class", "box"
            parts = zip(names, (*anchor_losses, *region_losses), strict=True)
            terms = {f"{name}_loss": (jnp.sum(value), count) for name, value in parts}
            return terms | {"mask_loss": (jnp.sum(total), jnp.sum(pixels))}

        terms, changed = self._model.apply(
            {"params": params, **model_state}, method=forward, mutable=["batch_stats"]
        )
        return terms, {}, changed if settings.bn_statistics == "batch" else model_state

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The best detections of each image, in pixels of the original; score 0 is padding.

        "masks" are uint8[b, D, s, s]: the probability of each pixel of the box, times 255.
        """
        settings = self.settings
        images, size = input_pipeline.normalized(batch, self._dtype), batch["size"]

        def forward(network: models.MaskRCNN) -> dict[str, jax.Array]:
            maps = network.maps(images, train=False)
            proposed = self._propose(*network.proposal_head(maps), batch, train=False)
            (pooled,) = self._align(maps, (proposed.boxes, settings.box_pool))
            logits, codes = network.box_head(pooled)
            scores = jax.nn.softmax(logits)[..., 1:]
            valid = boxes.area(proposed.boxes) > 0
            found = nms.best(
                boxes.clip(
                    boxes.decode(codes[:, :, 1:], proposed.boxes[:, :, None]),
                    *(size[:, i, None, None] for i in (0, 1)),
                ),
                jnp.where(valid[..., None], scores, 0),
                settings.min_score,
                settings.nms_iou,
                settings.max_detections,
                2 * settings.max_detections,  # a crowd may lose more than half to suppression
            )
            (pooled,) = self._align(maps, (found["boxes"], settings.mask_pool))
            outlines = network.mask_head(pooled)
            mine = jnp.arange(outlines.shape[-1]) == found["class"][..., None, None, None]
            shares = jax.nn.sigmoid(jnp.sum(jnp.where(mine, outlines, 0), -1))
            return found | {"masks": jnp.round(255 * shares).astype(jnp.uint8)}

        found: Any = self._model.apply({"params": params, **model_state}, method=forward)
        scale = jnp.tile(batch["original"] / jnp.maximum(size, 1), 2)[:, None]  # 0 in padding
        kept = {name: found[name] for name in ("score", "class", "masks")}
        return kept | {"boxes": found["boxes"] * scale, "image_id": batch["image_id"]}

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """COCO's average precisions and recalls of the boxes, and with "mask_" of the outlines."""
        columns = self.columns(rows)
        outlined = coco.score(self.annotations, columns, "segm")
        named = {f"mask_{name}": value for name, value in outlined.items()}
        return coco.score(self.annotations, columns) | named

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        names = [f"{kind}{name}" for kind in ("", "mask_") for name in ("mAP", "AP50", "AP75")]
        return {name: scores[name] for name in names}

    def _columns(self, rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """As `Detector` has them, with the run lengths of each object in "segmentation"."""
        outlines = pasting.paste_all(rows, self.annotations)
        return super()._columns(rows) | {"segmentation": outlines}

    def _corners(self, blocks: jax.Array) -> list[np.ndarray]:
        """The anchors of images in blocks, see `anchors.Layout.corners`."""
        return self._layout.corners(2 * blocks.shape[1], 2 * blocks.shape[2])

    def shown(self, batch: Mapping[str, np.ndarray], i: int) -> tuple[np.ndarray, np.ndarray]:
        return input_pipeline.shown(batch, i)

    def _propose(
        self, logits: Sequence[jax.Array], codes: Sequence[jax.Array], batch: Any, train: bool
    ) -> Proposals:
        """The proposals of what the head has predicted for the images of a batch."""
        settings, prefix = self.settings, "" if train else "eval_"
        corners = self._corners(batch["image"])
        return proposals.propose(
            *(logits, codes, corners, batch["size"]),
            before=getattr(settings, f"{prefix}proposals_before_nms"),
            after=getattr(settings, f"{prefix}proposals_after_nms"),
            iou=settings.proposal_nms_iou,
        )

    def _align(self, maps: models.Maps, *groups: tuple[jax.Array, int]) -> list[jax.Array]:
        """Features [b, R, s, s, c] of groups (f32[b, R, 4], s), from the levels that fit."""
        last = 1 + len(self.settings.resnet_stages)  # further levels are for proposals only
        usable = {level: x for level, x in maps.items() if level <= last}
        with jax.named_scope("roi_align"):
            return roi_align.align(usable, groups, canonical=self.settings.region_scale)
