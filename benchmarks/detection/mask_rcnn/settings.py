"""The config's keys that only Mask R-CNN reads; those of anchors are in `AnchorGenerator`."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from benchmarks.detection import settings
from benchmarks.detection.mask_rcnn.losses import Sampling
from benchmarks.detection.mask_rcnn.models import AnchorGenerator
from benchmarks.detection.settings import Channels
from common.errors import ConfigError
from common.keys import Share
from common.tensorflow import tensorflow

Side = Annotated[int, "[1, 16384]"]
Overlap = Annotated[float, "(0, 1]"]
Samples = Annotated[int, "[1, 20000]"]  # boxes of an image; suppression compares all pairs
Pool = Annotated[int, "[1, 64]"]  # cells of a region, high and wide


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing(settings.Preprocessing):
    """How an image and its objects become arrays of fixed shapes."""

    image_short: Side  # pixels of the short side
    image_long: Side  # the most pixels of the long side; where they are exceeded, both get fewer
    image_shape: Sequence[Side]  # padded height and width of the images that are not upright
    mask_size: Annotated[int, "[4, 1024]"]  # side of a mask, which spans the box of its object

    def __post_init__(self):
        shape = tuple(self.image_shape)
        if len(shape) != 2 or shape[0] > shape[1]:
            raise ConfigError(
                f"config.image_shape={shape}: must be a height and a width that is not less; "
                "upright images have the same turned round"
            )
        for key, side in (("image_short", shape[0]), ("image_long", shape[1])):
            if getattr(self, key) > side:
                raise ConfigError(
                    f"config.image_shape={shape}: is too small for images of "
                    f"config.{key}={getattr(self, key)}"
                )
        if self.image_short > self.image_long:
            raise ConfigError(
                f"config.image_short={self.image_short}: must not be above "
                f"config.image_long={self.image_long}"
            )
        if self.mask_size % 4:
            raise ConfigError(
                f"config.mask_size={self.mask_size}: must be a multiple of 4, as 8 pixels of a "
                "mask make a byte"
            )

    @property
    def side(self) -> int:
        """The side of a square image that is not resized."""
        return self.image_short

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of the padded wide images, then of the upright ones, if they differ."""
        height, width = self.image_shape
        return ((height, width),) if height == width else ((height, width), (width, height))

    def resized(self, size: Any, zoom: Any = 1.0) -> Any:
        """int32[2], height and width without padding, of an image's int32[2], times `zoom`."""
        tf = tensorflow()
        sides = tf.cast(size, tf.float64)
        short, long = tf.reduce_min(sides), tf.reduce_max(sides)
        scale = tf.minimum(self.image_short / short, self.image_long / long)
        return tf.maximum(tf.cast(tf.round(sides * scale * tf.cast(zoom, tf.float64)), tf.int32), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone(settings.Backbone):
    """The ResNet, whose stages the pyramid takes."""

    resnet_bottleneck: bool
    bn_epsilon: Annotated[float, "[0, 1]"] = 1e-5
    space_to_depth: bool

    @property
    def level(self) -> int:
        """The level of the last stage in the pyramid."""
        return 1 + len(self.resnet_stages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnchorSampling:
    """The anchors that the loss counts."""

    anchor_samples: Samples
    anchor_positive_share: Share
    anchor_positive_iou: Overlap
    anchor_negative_iou: Share

    def __post_init__(self):
        if self.anchor_negative_iou > self.anchor_positive_iou:
            raise ConfigError(
                f"config.anchor_negative_iou={self.anchor_negative_iou}: must not be above "
                f"config.anchor_positive_iou={self.anchor_positive_iou}"
            )
        _check_sampling("anchor", self.rule)

    @property
    def rule(self) -> Sampling:
        ious = self.anchor_positive_iou, self.anchor_negative_iou
        return Sampling(self.anchor_samples, self.anchor_positive_share, *ious)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposals:
    """Which boxes of the first stage the second one gets."""

    proposals_before_nms: Samples
    proposals_after_nms: Samples
    eval_proposals_before_nms: Samples
    eval_proposals_after_nms: Samples
    proposal_nms_iou: Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regions:
    """The regions that the heads are trained on."""

    region_samples: Samples
    region_positive_share: Share
    region_iou: Overlap

    def __post_init__(self):
        _check_sampling("region", self.rule)

    @property
    def rule(self) -> Sampling:
        ious = self.region_iou, self.region_iou
        return Sampling(self.region_samples, self.region_positive_share, *ious)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """The pyramid's maps, and what the heads take from them."""

    pyramid_filters: Channels
    region_scale: Annotated[float, "[1, 65536]"]
    box_pool: Pool
    box_features: Annotated[Sequence[Channels], "[0, 20]"]
    mask_pool: Pool
    mask_features: Annotated[Sequence[Channels], "[0, 20]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection(settings.Detection):
    """Which detections an image gets, and how good boxes and masks are to become."""

    mask_target: Share
    class_candidates: Annotated[int, "[0, 1e6]"] = 0


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """All groups."""

    images: Preprocessing
    backbone: Backbone
    detection: Detection
    anchors: AnchorGenerator
    anchor_sampling: AnchorSampling
    proposals: Proposals
    regions: Regions
    heads: Heads

    def __post_init__(self):
        levels, last = tuple(self.anchors.pyramid_levels), self.backbone.level
        if not levels[0] <= last <= levels[-1]:
            raise ConfigError(
                f"config.pyramid_levels={levels}: must hold {last}, the level of the last of "
                "config.resnet_stages"
            )
        shape, cell = tuple(self.images.image_shape), 2 ** levels[-1]
        if any(side % cell for side in shape):
            raise ConfigError(
                f"config.image_shape={shape}: both sides must be multiples of {cell}, the cell of "
                f"level {levels[-1]} of config.pyramid_levels"
            )


def _check_sampling(part: str, rule: Sampling) -> None:
    if rule.positives < 1:
        raise ConfigError(
            f"config.{part}_samples={rule.count} with config.{part}_positive_share={rule.share} "
            "leaves no positive one to learn from: raise one of them"
        )
