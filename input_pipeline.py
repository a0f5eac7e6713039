"""ImageNet input: TFRecords on disk or gs://, or TFDS -> uint8 batches, sharded by arguments.

Which files and labels there are is `ops.image_records`. The host decodes, crops and resizes; what
is left (flip, normalisation, cast) is `normalize`, which runs on the device. Training order and
augmentation are functions of (seed, step): see `ops.records`. Preprocessing follows the TensorFlow
TPU tutorial's ResNet code, with TF2's bicubic kernel (half-pixel centres, a = -0.5, no antialias),
rounded to uint8.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ops import files, records
from ops.image_records import Source
from ops.records import DataError, first_line, tensorflow

# Mean and standard deviation of ImageNet's training images, RGB, in 0..255.
MEAN_RGB = (123.675, 116.28, 103.53)
STDDEV_RGB = (58.395, 57.12, 57.375)

_CROP_PADDING = 1 / 0.875 - 1  # evaluation keeps the central 87.5 % of the shorter side


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How an image becomes [size, size, 3]; `crop_area_min` bounds the area of train crops."""

    size: int
    crop_area_min: float
    random_flip: bool


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
    host_seconds float32[h], the time that decoding took.

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

    def decode(serialized: Any, example: Any, seeds: Any) -> dict[str, Any]:
        tf = tensorflow()
        encoded, label = source.parse(serialized)
        flip = tf.equal(seeds[2] % 2, 1) if preprocessing.random_flip else tf.constant(False)
        return {
            "image": _train_image(encoded, seeds[:2], preprocessing),
            "label": tf.cast(label, tf.int32),
            "flip": flip,
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

    def decode(serialized: Any, example: Any) -> dict[str, Any]:
        tf = tensorflow()
        encoded, label = source.parse(serialized)
        return {
            "image": _eval_image(encoded, size),
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


def normalize(images: jax.Array, flip: jax.Array | None, dtype: Any) -> jax.Array:
    """uint8[b, H, W, 3] -> dtype[b, H, W, 3] of zero mean and unit variance, on the device.

    `flip` bool[b] mirrors images left to right; None mirrors none.
    """
    if flip is not None:
        images = jnp.where(flip[:, None, None, None], images[:, :, ::-1], images)
    mean, stddev = (jnp.asarray(v, jnp.float32) for v in (MEAN_RGB, STDDEV_RGB))
    return ((images.astype(jnp.float32) - mean) / stddev).astype(dtype)


def _train_image(encoded: Any, seed: Any, preprocessing: Preprocessing) -> Any:
    """Random crop of 8 to 100 % of the area, aspect 3/4 to 4/3; the centre where none fits."""
    tf = tensorflow()

    def window(height: Any, width: Any) -> Any:
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            [height, width, 3],
            bounding_boxes=tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            seed=seed,
            min_object_covered=0.1,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(preprocessing.crop_area_min, 1.0),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        whole = tf.logical_and(tf.equal(size[0], height), tf.equal(size[1], width))
        crop = tf.stack([begin[0], begin[1], size[0], size[1]])
        return tf.cond(
            whole, lambda: _centre_window(height, width, preprocessing.size), lambda: crop
        )

    return _crop_and_resize(encoded, window, preprocessing.size)


def _eval_image(encoded: Any, size: int) -> Any:
    return _crop_and_resize(encoded, lambda h, w: _centre_window(h, w, size), size)


def _centre_window(height: Any, width: Any, size: int) -> Any:
    tf = tensorflow()
    ratio = size / (size + round(size * _CROP_PADDING))
    side = tf.cast(ratio * tf.cast(tf.minimum(height, width), tf.float32), tf.int32)
    side = tf.maximum(side, 1)  # of an image of one pixel
    return tf.stack([(height - side + 1) // 2, (width - side + 1) // 2, side, side])


def _crop_and_resize(encoded: Any, window: Any, size: int) -> Any:
    """uint8[size, size, 3] of the window (y, x, height, width) that `window(h, w)` returns."""
    tf = tensorflow()

    def jpeg() -> Any:
        shape = tf.io.extract_jpeg_shape(encoded)
        # Accurate DCT costs nothing measurable; TensorFlow's default is off by 1.6 levels RMS.
        return tf.io.decode_and_crop_jpeg(
            encoded, window(shape[0], shape[1]), channels=3, dct_method="INTEGER_ACCURATE"
        )

    def other() -> Any:
        image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        y, x, height, width = tf.unstack(window(tf.shape(image)[0], tf.shape(image)[1]))
        return image[y : y + height, x : x + width]

    image = tf.cond(tf.io.is_jpeg(encoded), jpeg, other)
    image = tf.image.resize(image, [size, size], method="bicubic")
    image = tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)
    return tf.ensure_shape(image, [size, size, 3])


def _batches(
    source: Source,
    undecoded: Callable[[int], Any],
    reads: Callable[[int], np.ndarray],
    decode: Callable[..., Any],
    host_batch: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Decodes and batches `undecoded(0)` in order.

    To explain a fault: `undecoded(k)` starts at batch k, and `reads(k)` is what it reads for it.
    """
    tf = tensorflow()
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False  # nothing to tune; dropped after an error it waits a minute
    dataset = undecoded(0).map(_timed(decode), num_parallel_calls=os.cpu_count())
    iterator = dataset.batch(host_batch).prefetch(2).with_options(options).as_numpy_iterator()
    number = 0

    def waited_for() -> list[str]:
        return [source.shards.paths[file] for file in np.unique(reads(number)[:, 0])]

    while True:
        try:
            with files.reading(waited_for):
                batch = next(iterator)
        except StopIteration:
            return
        except records.read_errors() as error:
            found = records.unreadable(source.shards, reads(number))
            found = found or _undecodable(undecoded(number).take(host_batch), decode)
            if not found:  # the second time it was all right
                raise DataError(f"reading the records failed: {first_line(error)}") from error
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
    for serialized, example, *seeds in batch:
        try:
            decode(serialized, example, *seeds)
        except records.read_errors() as error:
            return int(example), first_line(error)
    return None
