"""Uses a trained Mask R-CNN as any detector, with the outlines of its masks."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.detection import coco
from benchmarks.detection.mask_rcnn import input_pipeline
from benchmarks.detection.scoring import encode_mask
from benchmarks.detection.use import DetectorUses, photo_sides, scaled_photo
from benchmarks.uses import Detection
from common.layers import space_to_depth
from common.tensorflow import tensorflow


class MaskRcnnUses(DetectorUses):
    """The uses of a Mask R-CNN."""

    at_once = 1

    def leaves(self, image: Any, upright: bool) -> dict[str, Any]:
        tf, keys = tensorflow(), self._benchmark.settings.images
        pixels, size = input_pipeline.padded(image, keys.shapes[-1 if upright else 0], keys)
        original = tf.cast(tf.shape(image)[:2], tf.float32)
        return {"image": pixels, "size": size, "original": original}

    def resized(self, photo: jax.Array, upright: bool) -> dict[str, jax.Array]:
        keys, original = self._benchmark.settings.images, photo_sides(photo)
        short, long = keys.image_short / original.min(), keys.image_long / original.max()
        size = jnp.maximum(jnp.round(original * jnp.minimum(short, long)), 1)
        height, width = keys.shapes[-1 if upright else 0]
        image = scaled_photo(photo, (height, width), size)
        inside = (jnp.arange(height)[:, None] < size[0]) & (jnp.arange(width) < size[1])
        image = space_to_depth.rearrange(jnp.where(inside[..., None], image, 0)[None])[0]
        return {"image": image, "size": size, "original": original}

    def detections(self, row: Mapping[str, np.ndarray], height: int, width: int) -> list[Detection]:
        masks = row["masks"][np.argsort(-row["score"], kind="stable")]
        boxes = super().detections(row, height, width)
        return [outlined(*each, height, width) for each in zip(boxes, masks, strict=False)]


def outlined(detection: Detection, mask: np.ndarray, height: int, width: int) -> Detection:
    """A detection with the outline of its mask uint8[S, S] on a photo of this size."""
    outline = encode_mask(mask, detection.box, height, width)

    def inside() -> np.ndarray:
        return coco.outline_mask(outline, height, width).astype(bool)

    return detection._replace(outline=outline, inside=inside)
