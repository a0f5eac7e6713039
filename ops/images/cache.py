"""Keeps decoded images in memory: the first epoch decodes them, every epoch crops them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ops.decoding import Batch, Reader, fixed_options
from ops.images import pixels
from ops.images.labelled import Source
from ops.order import Order, numbers
from ops.progress import Progress
from ops.shards import tensorflow

_log = logging.getLogger("tpu_suite")


def train_batches(
    source: Source,
    side: int,
    order: Order,
    streams: range,
    start_step: int,
    draw: Callable[[Any, Any], dict[str, Any]],
) -> Iterator[Batch]:
    """Endless training batches of some streams, whose images are decoded into memory first.

    Yields image uint8[h, side, side, 3], label int32[h], id int32[h], host_seconds float32[h] and
    the tensors of `draw(shape, seeds)`, where `shape` int32[2] has an image's height and width. Of
    these, "window" (y, x, height, width) is scaled to the image in memory, float32[h, 4].
    """
    tf, cores = tensorflow(), os.cpu_count() or 1
    cache = ImageCache.fill(source, side, order, streams)

    def plan() -> Iterator[Any]:
        for ids, seeds in order.steps(streams, start_step):
            yield ids, seeds, cache.shapes[cache.rows(ids)]

    def row(example: Any, seeds: Any, shape: Any) -> dict[str, Any]:
        drawn, scale = draw(shape, seeds), side / tf.cast(shape, tf.float32)
        window = tf.cast(drawn["window"], tf.float32) * tf.concat([scale, scale], 0)
        return drawn | {"window": window, "id": tf.cast(example, tf.int32)}

    kinds = ([None], tf.int64), ([None, 3], tf.int32), ([None, 2], tf.int32)
    signature = tuple(tf.TensorSpec(*kind) for kind in kinds)
    host_batch = len(streams) * order.rows
    draws = tf.data.Dataset.from_generator(plan, output_signature=signature).unbatch()
    draws = draws.map(row, num_parallel_calls=cores).batch(host_batch).prefetch(2)
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for batch in draws.with_options(fixed_options()).as_numpy_iterator():
            begin, rows = time.monotonic(), cache.rows(batch["id"])
            batch |= {"image": cache.gather(rows, pool), "label": cache.labels[rows]}
            seconds = (time.monotonic() - begin) * cores / host_batch
            yield batch | {"host_seconds": np.full(host_batch, seconds, np.float32)}


@dataclasses.dataclass(frozen=True)
class ImageCache:
    """n decoded images, in the order of their ids."""

    ids: np.ndarray  # int64[n], ascending
    images: np.ndarray  # uint8[n, side, side, 3]
    shapes: np.ndarray  # int32[n, 2], height and width before the image was made square
    labels: np.ndarray  # int32[n]

    @classmethod
    def fill(cls, source: Source, side: int, order: Order, streams: range) -> ImageCache:
        """Decodes every example of some streams, which must be fixed."""

        def decode(serialized: Any, seeds: Any, only_jpeg: bool) -> dict[str, Any]:
            del seeds  # nothing is cropped
            encoded, label = source.parse(serialized)
            image = pixels.decode(encoded, only_jpeg=only_jpeg)
            shape = tensorflow().shape(image)[:2]
            return {"image": pixels.shrink(image, side), "shape": shape, "label": label}

        ids = [numbers(order.counts, order.runs(stream, 0)) for stream in streams]
        count, longest = sum(map(len, ids)), max(map(len, ids))
        cache = cls(
            np.sort(np.concatenate(ids)),
            np.empty((count, side, side, 3), np.uint8),
            np.empty((count, 2), np.int32),
            np.empty(count, np.int32),
        )
        size, progress = cache.images.nbytes / 1e9, Progress(count)
        _log.info("decoding %s training images into memory, %.1f GB", f"{count:,}", size)
        # An epoch of all streams in small blocks; shorter streams begin their next one.
        reader = Reader(source.shards, pixels.jpegs_first(decode), source.check)
        once = dataclasses.replace(order, block=order.rows, repeats=1)
        batches = reader.train_batches(once, streams, 0)
        for step, batch in enumerate(itertools.islice(batches, -(-longest // order.rows)), 1):
            rows = cache.rows(batch["id"])
            cache.images[rows], cache.labels[rows] = batch["image"], batch["label"]
            cache.shapes[rows] = batch["shape"]
            done = min(step * len(rows), count)
            progress.at(done, f"decoding images into memory: {done:,} of {count:,}")
        return cache

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """int64[k]: the rows of the arrays that hold examples `ids`."""
        return np.searchsorted(self.ids, ids)

    def gather(self, rows: np.ndarray, pool: concurrent.futures.Executor) -> np.ndarray:
        """uint8[k, side, side, 3]: the images in `rows`, copied by the pool's threads."""
        images = np.empty((len(rows), *self.images.shape[1:]), np.uint8)

        def copy(part: slice) -> None:
            np.take(self.images, rows[part], axis=0, out=images[part], mode="clip")

        size = max(1, -(-len(rows) // (os.cpu_count() or 1)))
        list(pool.map(copy, [slice(i, i + size) for i in range(0, len(rows), size)]))
        return images
