"""What a trained SSD can be used for: as any detector, and as plain steps.

Plain steps are for formats that have none of jax's operations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from benchmarks.detection import boxes
from benchmarks.detection.records import Image
from benchmarks.detection.settings import PIXEL_MEAN, PIXEL_STD
from benchmarks.detection.ssd import input_pipeline, models
from benchmarks.detection.ssd.models import PADDING
from benchmarks.detection.ssd.settings import Settings
from benchmarks.detection.use import DetectorUses, photo_sides, scaled_photo
from common import portable
from common.data.shards import tensorflow
from common.portable import Network, SingleShot
from models import EPSILON


class SsdUses(DetectorUses):
    """The uses of an SSD."""

    def leaves(self, image: Image, upright: bool) -> dict[str, Any]:
        del upright
        tf = tensorflow()
        window = tf.concat([[0, 0], image.size], axis=0)
        keys = self._benchmark.settings.images
        pixels = input_pipeline.resized(image, window, keys, True)
        return {"image": pixels, "size": tf.cast(image.size, tf.float32)}

    def resized(self, photo: jax.Array, upright: bool) -> dict[str, jax.Array]:
        del upright
        keys, size = self._benchmark.settings.images, photo_sides(photo)
        shape = (keys.image_size, keys.image_size)
        image = scaled_photo(photo, shape, keys.image_size / size, keys.antialias)
        return {"image": image, "size": size}

    def single_shot(self, params: Any, model_state: Any) -> SingleShot:
        return plain_steps(self._benchmark.settings, params, model_state)


def plain_steps(settings: Settings, params: Any, model_state: Any) -> SingleShot:
    """The plain form of an SSD; BatchNorm is folded into the convolutions.

    Args:
      settings: of the recipe.
      params, model_state: NumPy arrays.
    """
    keys, layout = settings.detection, settings.maps.layout
    corners = models.box_corners(models.default_boxes(layout)).astype(np.float32)
    steps = _StepBuilder(settings, params, model_state["batch_stats"]["backbone"])
    y, x, height, width = (np.asarray(each) for each in boxes.centred(corners))
    return SingleShot(
        network=steps.network,
        maps=steps.maps(),
        logits=len(params["head1"]["bias"]) // layout.boxes_per_cell[0] - 4,
        centres=np.stack([y, x], -1),
        sides=np.stack([height, width], -1),
        weights=boxes.WEIGHTS,
        largest_log=boxes.LARGEST_LOG,
        clips=keys.clip_boxes,
        antialias=settings.images.antialias,
        min_score=keys.min_score,
        iou=keys.nms_iou,
        most=keys.max_detections,
    )


class _StepBuilder:
    """Adds the steps of one model."""

    def __init__(self, settings: Settings, params: Any, statistics: Any):
        self._settings, self._params, self._statistics = settings, params, statistics
        self.network = Network(settings.images.image_size)

    def maps(self) -> list[str]:
        """Adds all steps; returns the names of the heads."""
        x = self._backbone()
        maps = [x]
        for i, extra in enumerate(self._settings.maps.extras, 1):
            names = f"extra{i}_conv1", f"extra{i}_conv2"
            x = self._relu(self._biased(names[0], x, 1, 0))
            x = self._relu(self._biased(names[1], x, extra.stride, extra.padding))
            maps.append(x)
        return [self._biased(f"head{i}", x, 1, PADDING[0][0]) for i, x in enumerate(maps, 1)]

    def _backbone(self) -> str:
        mean, std = np.asarray(PIXEL_MEAN), np.asarray(PIXEL_STD)
        arrays = {"scale": 1 / std, "bias": -mean / std}
        x = self.network.add("affine", "normalised", portable.INPUT, arrays=arrays)
        x = self._relu(self._folded("", "conv_stem", "bn_stem", x, 2))
        padding = self._settings.backbone.pool_padding
        if isinstance(padding, str):
            padding = portable.same_padding(-(-self.network.size // 2), 3, 2)
        x = self.network.add("max_pool", "max_pool", x, window=3, stride=2, padding=padding)
        blocks = [name for name in self._params["backbone"] if name.startswith("stage")]
        for name in sorted(blocks, key=lambda name: [*map(int, re.findall(r"\d+", name))]):
            x = self._block(name, x, 2 if name == "stage2_block1" else 1)
        return x

    def _block(self, block: str, x: str, stride: int) -> str:
        """A basic block, see `models.BasicBlock`."""
        shortcut = x
        if "conv_proj" in self._params["backbone"][block]:
            shortcut = self._folded(block, "conv_proj", "bn_proj", x, stride)
        y = self._relu(self._folded(block, "conv1", "bn1", x, stride))
        y = self._folded(block, "conv2", "bn2", y, 1)
        return self._relu(self.network.add("add", f"{block}/sum", y, shortcut))

    def _folded(self, block: str, name: str, norm: str, x: str, stride: int) -> str:
        """A convolution of the backbone and the BatchNorm that follows it."""
        params, statistics = self._params["backbone"], self._statistics
        if block:
            params, statistics = params[block], statistics[block]
        learned, running = _wide(params[norm]), _wide(statistics[norm])
        scale = learned["scale"] / np.sqrt(running["var"] + EPSILON)
        kernel = np.asarray(params[name]["kernel"], np.float64)
        arrays = {"kernel": kernel * scale, "bias": learned["bias"] - running["mean"] * scale}
        return self._conv(f"{block}/{name}" if block else name, x, arrays, stride, len(kernel) // 2)

    def _biased(self, name: str, x: str, stride: int, padding: int) -> str:
        return self._conv(name, x, self._params[name], stride, padding)

    def _conv(self, name: str, x: str, arrays: Mapping[str, Any], stride: int, edge: int) -> str:
        values: dict[str, Any] = {"stride": stride, "padding": ((edge, edge), (edge, edge))}
        return self.network.add("conv", name, x, arrays=arrays, **values)

    def _relu(self, x: str) -> str:
        return self.network.add("relu", f"{x}/relu", x)


def _wide(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x, np.float64) for name, x in arrays.items()}
