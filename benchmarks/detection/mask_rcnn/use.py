"""What a trained Mask R-CNN can be used for: as any detector, and its images are drawn unpadded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.base import HostBatch
from benchmarks.detection.mask_rcnn import input_pipeline
from benchmarks.detection.use import DetectorUses
from ops.layers import space_to_depth


class MaskRcnnUses(DetectorUses):
    """The uses of a Mask R-CNN."""

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
