"""The config's keys that only SSD reads; configs/ssd.py explains them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from benchmarks.detection import settings
from benchmarks.detection.settings import Channels
from benchmarks.detection.ssd.models import DefaultBoxes, Extra
from common.errors import ConfigError
from common.images import pixels
from common.tensorflow import tensorflow

Side = Annotated[int, "[1, 4096]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing(settings.Preprocessing):
    """How an image becomes [image_size, image_size, 3]."""

    image_size: Side
    crop_side_min: Annotated[float, "(0, 1]"]  # the least side of a crop, as a share of the image's
    max_samples: Annotated[int, "[1, 1e3]"]  # windows that a round of a crop tries; MLPerf: 1, 50
    antialias: bool  # whether resizing averages over the pixels, to train and to evaluate

    @property
    def side(self) -> int:
        """The side of a square image that is not resized."""
        return self.image_size

    def resize(self, image: Any) -> Any:
        """uint8[image_size, image_size, 3] of uint8[h, w, 3], bilinear."""
        if self.antialias:
            return pixels.shrink(image, self.image_size)
        size = [self.image_size, self.image_size]
        return tensorflow().ensure_shape(pixels.sample(image, size, "bilinear"), [*size, 3])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone(settings.Backbone):
    """The ResNet, whose last map has an eighth of the image's side."""

    bn_span: Annotated[int, "[0, 1e6]"] | str
    batch_norm: Literal["gram", "plain"]

    def __post_init__(self):
        _check_lengths(self, {"resnet_stages": 3}, "the stages before the extra layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maps:
    """The maps that boxes are predicted from, and the default boxes of each."""

    image_size: Side
    extra_squeezed: Sequence[Channels]
    extra_filters: Sequence[Channels]
    extra_strides: Sequence[Annotated[int, "[1, 2]"]]
    extra_paddings: Sequence[Annotated[int, "[0, 1]"]]
    box_steps: Sequence[Annotated[float, "(0, 4096]"]]
    box_sides: Annotated[Sequence[Annotated[float, "(0, 4096]"]], "[2, 51] rising"]
    box_ratios: Sequence[Annotated[int, "[1, 10]"]]

    def __post_init__(self):
        extras = len(self.extra_filters)
        lengths = {f"extra_{key}": extras for key in ("squeezed", "strides", "paddings")}
        lengths |= {"box_steps": extras + 1, "box_ratios": extras + 1, "box_sides": extras + 2}
        _check_lengths(self, lengths, f"the {extras} layers of config.extra_filters")
        side, steps, maps = self.image_size, tuple(self.box_steps), self.default_boxes.feature_sizes
        shares = [cells * step / side for cells, step in zip(maps, steps, strict=True)]
        if not 0.5 <= min(shares) <= max(shares) <= 1.5:
            fitting = tuple(side // max(cells, 1) for cells in maps)
            raise ConfigError(
                f"config.box_steps={steps}: the {maps} cells of the maps do not cover the "
                f"config.image_size={side} pixels; use about {fitting}"
            )
        if self.box_sides[0] > side:
            raise ConfigError(
                f"config.box_sides={self.box_sides}: none fits config.image_size={side}"
            )

    @property
    def extras(self) -> tuple[Extra, ...]:
        """The layers behind the backbone."""
        columns = self.extra_squeezed, self.extra_filters, self.extra_strides, self.extra_paddings
        return tuple(Extra(*values) for values in zip(*columns, strict=True))

    @property
    def default_boxes(self) -> DefaultBoxes:
        """The sides of the maps, and their default boxes."""
        ratios = [range(2, ratio + 1) for ratio in self.box_ratios]
        sides = [-(-self.image_size // 8)]
        for extra in self.extras:
            sides.append(extra.side(sides[-1]))
        return DefaultBoxes(self.image_size, sides, self.box_steps, self.box_sides, ratios)


def _check_lengths(group: Any, lengths: Mapping[str, int], reason: str) -> None:
    for key, length in lengths.items():
        if len(values := getattr(group, key)) != length:
            raise ConfigError(f"config.{key}={values}: must have {length} entries for {reason}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection(settings.Detection):
    """Which detections an image gets, and how good they are to become."""

    clip_boxes: bool = True


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """All groups."""

    images: Preprocessing
    backbone: Backbone
    detection: Detection
    maps: Maps
