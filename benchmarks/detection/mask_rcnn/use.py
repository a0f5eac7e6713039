"""What a trained Mask R-CNN can be used for: as any detector, with outlines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import HostBatch
from benchmarks.detection import program
from benchmarks.detection.mask_rcnn import input_pipeline, pasting
from benchmarks.detection.records import Image
from benchmarks.detection.use import Detections, DetectorUses
from ops.layers import space_to_depth
from ops.shards import tensorflow


class MaskRcnnUses(DetectorUses):
    """The uses of a Mask R-CNN."""

    at_once = 1

    def leaves(self, image: Image, upright: bool) -> dict[str, Any]:
        keys = self._benchmark.settings.images
        pixels, size = input_pipeline.padded(image, keys.shapes[-1 if upright else 0], keys, True)
        return {"image": pixels, "size": size, "original": tensorflow().cast(image.size, "float32")}

    def resized(self, photo: jax.Array, upright: bool) -> dict[str, jax.Array]:
        keys, original = self._benchmark.settings.images, program.sides(photo)
        short, long = keys.image_short / original.min(), keys.image_long / original.max()
        size = jnp.maximum(jnp.round(original * jnp.minimum(short, long)), 1)
        height, width = keys.shapes[-1 if upright else 0]
        image = program.scaled(photo, (height, width), size / original, antialias=False)
        inside = (jnp.arange(height)[:, None] < size[0]) & (jnp.arange(width) < size[1])
        image = space_to_depth.rearrange(jnp.where(inside[..., None], image, 0)[None])[0]
        return {"image": image, "size": size, "original": original}

    def detections(self, row: Mapping[str, np.ndarray], height: int, width: int) -> Detections:
        found = super().detections(row, height, width)
        order = np.argsort(-row["score"], kind="stable")[: len(found.scores)]
        outlines = []
        for mask, box in zip(row["masks"][order], found.boxes, strict=True):
            outline = pasting.paste(mask.astype(np.float32) / 255, box, height, width)
            outlines.append(outline | {"counts": outline["counts"].decode()})
        return dataclasses.replace(found, outlines=outlines)

    def first_batches(self, batch_size: int) -> list[HostBatch]:
        benchmark = self._benchmark
        images = benchmark.settings.images
        kinds = zip(benchmark.source("eval").sources, images.shapes, strict=True)
        how = images, batch_size, 0, 1
        batches = [next(input_pipeline.pool_batches(*kind, *how), None) for kind in kinds]
        return [batch for batch in batches if batch]

    def shown(self, batch: Mapping[str, np.ndarray], i: int) -> tuple[np.ndarray, np.ndarray]:
        height, width = batch["size"][i].astype(int)
        pixels = space_to_depth.restore(batch["image"][i])
        return pixels[:height, :width], batch["original"][i]
