"""The config's keys that both detectors read, in groups.

A group checks its values and goes to the part that reads it. The module `settings` of each detector
adds its keys. In the config all keys are on one level; configs/ssd.py explains them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax.numpy as jnp

from benchmarks.detection.augmentation import PRESETS, Preset
from benchmarks.uses import LEAST_TILE
from common.errors import ConfigError
from common.keys import Count, Positive, Seed, Share

Channels = Annotated[int, "[1, 65536]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Which images are read, and in which order."""

    seed: Seed
    data_dir: str
    dataset: Literal["", "fake"] = ""
    train_files: str
    eval_files: str
    eval_annotations: str
    num_train_images: Count
    num_eval_images: Count
    num_classes: Annotated[int, "[0, 1e6]"]
    class_numbers: Literal["order", "ids"] = "order"
    empty_images: bool = False
    shuffle_buffer_size: Annotated[int, "[1, 1e9]"]
    input_streams: Annotated[int, "[1, 1e6]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How an image and its objects become arrays of fixed shapes."""

    max_boxes: Annotated[int, "[1, 1e4]"]  # the most boxes of an image; the largest are kept
    random_flip: bool  # whether training images are mirrored at random
    augmentation: Literal["", "light", "medium", "strong"] = ""

    @property
    def preset(self) -> Preset | None:
        """The augmentation besides that of MLPerf's recipe."""
        return PRESETS.get(self.augmentation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
    """The ResNet that the detector begins with."""

    resnet_stages: Annotated[Sequence[Annotated[int, "[1, 50]"]], "[1, 11]"]
    num_filters: Annotated[int, "[1, 4096]"]
    bn_momentum: Share
    precision: Literal["bfloat16", "float32"]
    max_pool: Literal["same", "torch"] = "torch"

    @property
    def pool_padding(self) -> Any:
        """The padding of the stem's max-pool, as `models.stem` takes it."""
        return "SAME" if self.max_pool == "same" else ((1, 1), (1, 1))

    @property
    def dtype(self) -> Any:
        """The dtype of convolutions and activations."""
        return jnp.dtype(self.precision)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Which loaded weights stay, and how fast the heads change."""

    new_classes: bool = False
    bn_statistics: Literal["frozen", "batch"] = "batch"
    head_learning_rate: Positive = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection:
    """Which detections an image gets, and how good they are to become."""

    min_score: Share
    nms_iou: Share
    max_detections: Annotated[int, "[1, 10000]"]
    target: Share
    eval_tiles: Annotated[int, "[0, 65536]"] | str = 0

    def __post_init__(self):
        tiles = self.eval_tiles
        if tiles not in (0, "auto") and (isinstance(tiles, str) or tiles < LEAST_TILE):
            raise ConfigError(
                f"config.eval_tiles={tiles!r}: must be 0 (no tiles), 'auto' (as large as the "
                f"model's input) or the side of a tile, {LEAST_TILE} pixels or more"
            )


@dataclasses.dataclass(frozen=True)
class Settings:
    """The groups of both detectors."""

    data: Data
    images: Preprocessing
    backbone: Backbone
    tuning: Tuning
    detection: Detection
