"""The config's keys that only Mask R-CNN reads; configs/mask_rcnn.py explains them."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from benchmarks.detection import settings
from benchmarks.detection.mask_rcnn.input_pipeline import Preprocessing
from benchmarks.detection.mask_rcnn.losses import Sampling
from benchmarks.detection.mask_rcnn.models import AnchorGenerator
from benchmarks.detection.settings import Channels
from common.errors import ConfigError
from common.keys import Share

Overlap = Annotated[float, "(0, 1]"]
Samples = Annotated[int, "[1, 20000]"]  # boxes of an image; suppression compares all pairs
Pool = Annotated[int, "[1, 64]"]  # cells of a region, high and wide


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
