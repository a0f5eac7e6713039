"""Decoded images in memory: each is decoded once, and cropped from there in every epoch."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ops import files
from ops.shards import Order, tensorflow

_log = logging.getLogger("tpu_suite")


@dataclasses.dataclass(frozen=True)
class ImageCache:
    """n decoded images: `ids` int64[n] ascending, and of each its pixels, first size and label."""

    ids: np.ndarray
    images: np.ndarray  # uint8[n, side, side, 3]
    shapes: np.ndarray  # int32[n, 2], height and width before it was made square
    labels: np.ndarray  # int32[n]

    @classmethod
    def fill(cls, ids: np.ndarray, side: int, batches: Iterator[dict[str, Any]]) -> ImageCache:
        """Takes every example of `ids` from batches with leaves image, shape, label and id."""
        ids = np.sort(ids)
        count = len(ids)
        cache = cls(
            ids,
            np.empty((count, side, side, 3), np.uint8),
            np.empty((count, 2), np.int32),
            np.empty(count, np.int32),
        )
        size = cache.images.nbytes / 1e9
        _log.info("decoding %s training images into memory, %.1f GB", f"{count:,}", size)
        done, begun = 0, time.monotonic()
        told = begun
        for batch in batches:
            rows = cache.rows(batch["id"])
            cache.images[rows], cache.labels[rows] = batch["image"], batch["label"]
            cache.shapes[rows] = batch["shape"]
            done += len(rows)
            if files.on_progress:
                files.on_progress(f"decoding images into memory, {done:,} of {count:,}")
            now = time.monotonic()
            if now - told > 10:
                rate = done / (now - begun)
                left = (count - done) / rate
                words = f"{done:,} of {count:,}", rate, left
                _log.info("decoding into memory: %s images, %.0f images/s, %.0f s left", *words)
                told = now
        if done != count:
            raise RuntimeError(f"{done} images came, {count} were to come")
        _log.info("%s images are in memory after %.1f s", f"{count:,}", time.monotonic() - begun)
        return cache

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """int64[k]: where such examples are."""
        return np.searchsorted(self.ids, ids)

    def plan(self, order: Order, streams: range, start_step: int) -> Any:
        """Endless tf.data of (id, seeds int32[3], shape int32[2]) in training order."""
        tf = tensorflow()
        position = start_step * order.rows

        def steps() -> Iterator[Any]:
            parts = [_chunks(order, stream, position) for stream in streams]
            while True:
                found = [next(part) for part in parts]
                ids, seeds = (np.concatenate(columns) for columns in zip(*found, strict=True))
                yield ids, seeds, self.shapes[self.rows(ids)]

        signature = (
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None, 3], tf.int32),
            tf.TensorSpec([None, 2], tf.int32),
        )
        return tf.data.Dataset.from_generator(steps, output_signature=signature).unbatch()

    def gather(self, rows: np.ndarray, pool: concurrent.futures.Executor) -> np.ndarray:
        """uint8[k, side, side, 3] of rows, copied by a pool's threads."""
        found = np.empty((len(rows), *self.images.shape[1:]), np.uint8)

        def copy(part: slice) -> None:
            np.take(self.images, rows[part], axis=0, out=found[part], mode="clip")

        size = max(1, -(-len(rows) // (os.cpu_count() or 1)))
        list(pool.map(copy, [slice(i, i + size) for i in range(0, len(rows), size)]))
        return found


def _chunks(order: Order, stream: int, position: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, seeds) of a stream's rows of each step."""
    ids, seeds = np.zeros(0, np.int64), np.zeros((0, 3), np.int32)
    for _, more, draws in order.blocks(stream, position):
        ids, seeds = np.concatenate([ids, more]), np.concatenate([seeds, draws])
        while len(ids) >= order.rows:
            yield ids[: order.rows], seeds[: order.rows]
            ids, seeds = ids[order.rows :], seeds[order.rows :]
