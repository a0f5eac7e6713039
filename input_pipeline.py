"""ImageNet input: TFRecords on disk or gs://, or TFDS -> uint8 batches, sharded by arguments.

Which files and labels there are is `ops.images.labelled`, the pixels are `ops.images.pixels`. The
host decodes, crops and resizes; what is left (flip, normalisation, cast) is `normalize`, which
runs on the device. With decoded images in memory (`ops.images.cache`) the host only copies, and the
device crops and resizes as well. Training order and augmentation are functions of (seed, step): see
`ops.shards`. Windows follow the TensorFlow TPU tutorial's ResNet code.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from errors import one_line
from ops import files
from ops import shards as records
from ops.images import cache as image_cache
from ops.images import pixels as images
from ops.images.labelled import Source
from ops.shards import DataError, tensorflow

# Mean and standard deviation of ImageNet's training images, RGB, in 0..255.
MEAN_RGB = (123.675, 116.28, 103.53)
STDDEV_RGB = (58.395, 57.12, 57.375)

_FILES = 16  # read at once while images are decoded into memory
_ROWS = 256  # and images in a batch of them


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How an image becomes [size, size, 3].

    `crop_area_min` bounds the area of train crops, `mode` is one of `images.MODES`; with `cached`
    above 0, training images are kept in memory with so many pixels squared.
    """

    size: int
    crop_area_min: float
    random_flip: bool
    mode: str = "exact"
    cached: int = 0


def train_batches(
    source: Source,
    preprocessing: Preprocessing,
    order: records.Order,
    shard: int,
    num_shards: int,
    start_step: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Endless training batches: see `base.Benchmark.train_batches`.

    Yields image uint8[h, size, size, 3], label int32[h], flip bool[h], id int32[h], and
    host_seconds float32[h], the time that decoding took. Images kept in memory are not cropped:
    image uint8[h, cached, cached, 3] comes with window float32[h, 4], see `images.crop_on_device`.

    Raises:
      DataError: the streams cannot be shared by so many hosts; or a record cannot be decoded (the
        file and record are named).
    """
    if order.streams % num_shards:
        raise DataError(
            f"{order.streams} input streams cannot be shared by {num_shards} hosts: set "
            f"--config.input_streams to a multiple of the hosts that divides the batch"
        )
    share = order.streams // num_shards
    streams = range(shard * share, (shard + 1) * share)
    if preprocessing.cached:
        return _cached_batches(source, preprocessing, order, streams, start_step)

    def decode(
        block: Any, example: Any, row: Any, seeds: Any, only_jpeg: bool = False
    ) -> dict[str, Any]:
        tf = tensorflow()
        encoded, label = source.parse(tf.gather(block, row))
        return {
            "image": _train_image(encoded, seeds[:2], preprocessing, only_jpeg),
            "label": tf.cast(label, tf.int32),
            "flip": _flip(seeds, preprocessing),
            "id": tf.cast(example, tf.int32),
        }

    def undecoded(batch: int) -> Any:
        return records.train_stream(order, streams, start_step + batch)

    def reads(batch: int) -> np.ndarray:
        return np.concatenate([order.reads(stream, start_step + batch) for stream in streams])

    return _batches(source, undecoded, reads, decode, share * order.rows)


def eval_batches(
    source: Source, preprocessing: Preprocessing, batch_size: int, shard: int, num_shards: int
) -> Iterator[dict[str, np.ndarray]]:
    """Every example once over all shards: see `base.Benchmark.eval_batches`.

    Yields image uint8[h, size, size, 3], label int32[h], id int32[h], mask float32[h]; h is
    batch_size / num_shards.

    Raises:
      DataError: a record cannot be decoded; the file and record are named.
    """
    size, total, host_batch = preprocessing.size, source.shards.total, batch_size // num_shards
    begin, end = shard * total // num_shards, (shard + 1) * total // num_shards
    every_file = np.arange(len(source.shards.paths))

    def decode(serialized: Any, example: Any, only_jpeg: bool = False) -> dict[str, Any]:
        tf = tensorflow()
        encoded, label = source.parse(serialized)
        return {
            "image": _eval_image(encoded, size, preprocessing.mode, only_jpeg),
            "label": tf.cast(label, tf.int32),
            "id": tf.cast(example, tf.int32),
        }

    def undecoded(batch: int) -> Any:
        first = begin + batch * host_batch
        return records.read(source.shards, source.shards.segments(every_file, first, end))

    def reads(batch: int) -> np.ndarray:
        first = begin + batch * host_batch
        return source.shards.segments(every_file, first, min(first + host_batch, end))

    found = _batches(source, undecoded, reads, decode, host_batch)
    empty = {
        "image": np.zeros((0, size, size, 3), np.uint8),
        "label": np.zeros(0, np.int32),
        "id": np.zeros(0, np.int32),
    }
    for _ in range(math.ceil(math.ceil(total / num_shards) / host_batch)):
        batch = next(found, empty)
        batch.pop("host_seconds", None)
        here = len(batch["label"])
        widths = {k: [(0, host_batch - here)] + [(0, 0)] * (v.ndim - 1) for k, v in batch.items()}
        padded = {k: np.pad(v, widths[k]) for k, v in batch.items()}
        yield padded | {"mask": (np.arange(host_batch) < here).astype(np.float32)}


def _cached_batches(
    source: Source,
    preprocessing: Preprocessing,
    order: records.Order,
    streams: range,
    start_step: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Training batches from memory, which is filled first."""
    tf, side = tensorflow(), preprocessing.cached
    files_in_order = order.files(0)
    segments = np.concatenate(
        [source.shards.segments(files_in_order, *order.bounds(stream)) for stream in streams]
    )
    ids = source.shards.ids(segments)
    cache = image_cache.ImageCache.fill(ids, side, _whole_images(source, segments, side))

    def window(example: Any, seeds: Any, shape: Any) -> dict[str, Any]:
        where = images.random_window(
            shape[0], shape[1], seeds[:2], preprocessing.crop_area_min, preprocessing.size
        )
        scale = side / tf.cast(shape, tf.float32)
        return {
            "window": tf.cast(where, tf.float32) * tf.concat([scale, scale], 0),
            "flip": _flip(seeds, preprocessing),
            "id": tf.cast(example, tf.int32),
        }

    options = tf.data.Options()
    options.autotune.enabled = False
    host_batch = len(streams) * order.rows
    plan = cache.plan(order, streams, start_step)
    windows = plan.map(window, num_parallel_calls=os.cpu_count()).batch(host_batch)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for batch in windows.prefetch(2).with_options(options).as_numpy_iterator():
            begun = time.monotonic()
            rows = cache.rows(batch["id"])
            batch |= {"image": cache.gather(rows, pool), "label": cache.labels[rows]}
            spent = (time.monotonic() - begun) * (os.cpu_count() or 1)
            yield batch | {"host_seconds": np.full(host_batch, spent / host_batch, np.float32)}


def _whole_images(
    source: Source, segments: np.ndarray, side: int
) -> Iterator[dict[str, np.ndarray]]:
    """Batches of every example of `segments` (see `Shards`), made square: `ImageCache.fill`."""

    def decode(serialized: Any, example: Any, only_jpeg: bool = False) -> dict[str, Any]:
        tf = tensorflow()
        encoded, label = source.parse(serialized)
        image = images.decode(encoded, only_jpeg=only_jpeg)
        return {
            "image": images.shrink(image, side),
            "shape": tf.shape(image)[:2],
            "label": tf.cast(label, tf.int32),
            "id": tf.cast(example, tf.int32),
        }

    for first in range(0, len(segments), _FILES):
        group = segments[first : first + _FILES]

        def undecoded(batch: int, group: np.ndarray = group) -> Any:
            return records.read(source.shards, group, _FILES).skip(batch * _ROWS)

        def reads(batch: int, group: np.ndarray = group) -> np.ndarray:
            del batch
            return group

        yield from _batches(source, undecoded, reads, decode, _ROWS)


def crop(pixels: jax.Array, window: jax.Array, flip: jax.Array, size: int, dtype: Any) -> jax.Array:
    """Batches from memory -> dtype[b, size, size, 3] of zero mean and unit variance.

    See `images.crop_on_device` for the arguments.
    """
    return _standardize(images.crop_on_device(pixels, window, flip, size, dtype), dtype)


def normalize(pixels: jax.Array, flip: jax.Array | None, dtype: Any) -> jax.Array:
    """uint8[b, H, W, 3] -> dtype[b, H, W, 3] of zero mean and unit variance, on the device.

    `flip` bool[b] mirrors images left to right; None mirrors none.
    """
    if flip is not None:
        pixels = jnp.where(flip[:, None, None, None], pixels[:, :, ::-1], pixels)
    return _standardize(pixels.astype(jnp.float32), dtype)


def _standardize(pixels: jax.Array, dtype: Any) -> jax.Array:
    mean, stddev = (jnp.asarray(v, jnp.float32) for v in (MEAN_RGB, STDDEV_RGB))
    return ((pixels - mean) / stddev).astype(dtype)


def _flip(seeds: Any, preprocessing: Preprocessing) -> Any:
    tf = tensorflow()
    return tf.equal(seeds[2] % 2, 1) if preprocessing.random_flip else tf.constant(False)


def _train_image(
    encoded: Any, seed: Any, preprocessing: Preprocessing, only_jpeg: bool = False
) -> Any:
    size, area_min = preprocessing.size, preprocessing.crop_area_min

    def window(height: Any, width: Any) -> Any:
        return images.random_window(height, width, seed, area_min, size)

    image = images.decode(encoded, window, only_jpeg=only_jpeg)
    return images.resize(image, size, preprocessing.mode)


def _eval_image(encoded: Any, size: int, mode: str = "exact", only_jpeg: bool = False) -> Any:
    def window(height: Any, width: Any) -> Any:
        return images.centre_window(height, width, size)

    return images.resize(images.decode(encoded, window, only_jpeg=only_jpeg), size, mode)


def _batches(
    source: Source,
    undecoded: Callable[[int], Any],
    reads: Callable[[int], np.ndarray],
    decode: Callable[..., Any],
    host_batch: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Decodes and batches `undecoded(0)` in order.

    `undecoded(k)` starts at batch k, and `reads(k)` is what it reads for it. All images are taken
    for JPEGs until one cannot be decoded so.
    """
    tf = tensorflow()
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False  # nothing to tune; dropped after an error it waits a minute
    number, only_jpeg = 0, True

    def start() -> Iterator[dict[str, np.ndarray]]:
        map_to = _timed(functools.partial(decode, only_jpeg=only_jpeg))
        dataset = undecoded(number).map(map_to, num_parallel_calls=os.cpu_count())
        return dataset.batch(host_batch).prefetch(2).with_options(options).as_numpy_iterator()

    def waited_for() -> list[str]:
        return [source.shards.paths[file] for file in np.unique(reads(number)[:, 0])]

    iterator = start()
    while True:
        try:
            with files.reading(waited_for):
                batch = next(iterator)
        except StopIteration:
            return
        except records.read_errors() as error:
            # The second kind is of messages that quote bytes: see `records.read_errors`.
            if only_jpeg and isinstance(error, (tf.errors.InvalidArgumentError, UnicodeError)):
                only_jpeg = False
                iterator = start()
                continue
            found = records.unreadable(source.shards, reads(number))
            found = found or _undecodable(undecoded(number).take(host_batch), decode)
            if not found:  # the second time it was all right
                raise DataError(f"reading the records failed: {one_line(error)}") from error
            raise DataError(f"{source.where(found[0])} cannot be used: {found[1]}") from error
        wrong = (batch["label"] < 0) | (batch["label"] >= source.num_classes)
        if wrong.any():  # TFDS records are not scanned, and files may change under a long run
            place = source.where(int(batch["id"][wrong][0]))
            raise DataError(source.wrong_label(place))
        yield batch
        number += 1


def _timed(decode: Callable[..., Any]) -> Callable[..., Any]:
    """`decode` with one entry more: host_seconds, which one of the threads spent in it."""
    tf = tensorflow()

    def timed(serialized: Any, *rest: Any) -> dict[str, Any]:
        begun = tf.timestamp()
        with tf.control_dependencies([begun]):
            row = decode(tf.identity(serialized), *rest)
        with tf.control_dependencies([row["image"]]):
            return row | {
                # The wall clock may be set back meanwhile.
                "host_seconds": tf.cast(tf.maximum(tf.timestamp() - begun, 0.0), tf.float32)
            }

    return timed


def _undecodable(batch: Any, decode: Callable[..., Any]) -> tuple[int, str] | None:
    """The first example of `batch` that cannot be decoded, and why."""
    for serialized, example, *rest in batch:
        try:
            decode(serialized, example, *rest)
        except records.read_errors() as error:
            return int(example), one_line(error)
    return None
