"""Readers as a person would write them with tf.data, for scripts.bench.readers to compare with.

Each does on the host what the published input functions of its model do: whole images are decoded,
changed and normalised in float32; sentences are shuffled, padded and batched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.detection.records import LABEL, MASK, SIDES
from ops import files
from ops.images.libraries import NAMED
from ops.shards import tensorflow

Batches = Iterator[dict[str, np.ndarray]]
ROW_LENGTH = 256  # tokens of the Transformer's packed rows
_MOST = 100  # objects of an image
_PARTS = ("", "_segmentation", "_position")
_LENGTHS = (24, 32, 40, 48)  # of GNMT's buckets


def ssd(folder: str, batch: int) -> Batches:
    """SSD's: a crop that overlaps an object, flip, colours, 300 x 300 pixels."""
    tf = tensorflow()

    def one(serialized: Any) -> dict[str, Any]:
        image, boxes, classes, _ = _parsed(serialized)
        least = tf.random.shuffle([0.0, 0.1, 0.3, 0.5, 0.7, 0.9])[0]

        def crop(overlap: float) -> Any:
            return tf.image.sample_distorted_bounding_box(
                tf.shape(image),
                boxes[None],
                min_object_covered=overlap,
                aspect_ratio_range=(0.5, 2.0),
                area_range=(0.1, 1.0),
                max_attempts=50,
                use_image_if_no_bounding_boxes=True,
            )

        begin, extent, window = crop(least)
        image = tf.slice(image, begin, extent)
        y0, x0, y1, x1 = tf.unstack(window[0, 0])
        boxes = (boxes - [y0, x0, y0, x0]) / tf.stack([y1 - y0, x1 - x0, y1 - y0, x1 - x0])
        middle = (boxes[:, :2] + boxes[:, 2:]) / 2
        inside = tf.reduce_all((middle > 0) & (middle < 1), axis=1)
        boxes = tf.boolean_mask(tf.clip_by_value(boxes, 0, 1), inside)
        image = tf.image.resize(tf.image.convert_image_dtype(image, tf.float32), [300, 300])
        image = tf.image.random_brightness(image, 0.125)
        image = tf.image.random_contrast(image, 0.5, 1.5)
        image = tf.image.random_saturation(image, 0.5, 1.5)
        image = tf.image.random_hue(image, 0.05)
        mirrored = tf.random.uniform([]) < 0.5
        image = tf.where(mirrored, image[:, ::-1], image)
        boxes = tf.where(mirrored, _mirror(boxes, 1.0), boxes)
        classes = tf.boolean_mask(classes, inside)
        return {"image": _normal(image), **_padded({"boxes": boxes, "classes": classes})}

    return _images(folder, one, batch)


def mask_rcnn(folder: str, batch: int) -> Batches:
    """Mask R-CNN's: flip, 800 pixels of 1333, padding to 832 x 1344, masks in their boxes."""
    tf = tensorflow()

    def one(serialized: Any) -> dict[str, Any]:
        image, boxes, classes, files = _parsed(serialized)
        size = tf.cast(tf.shape(image)[:2], tf.float32)
        scale = tf.minimum(800 / tf.reduce_min(size), 1333 / tf.reduce_max(size))
        height, width = tf.unstack(tf.cast(tf.round(size * scale), tf.int32))
        image = tf.image.convert_image_dtype(image, tf.float32)
        image = _normal(tf.image.resize(image, tf.stack([height, width])))
        mirrored = tf.random.uniform([]) < 0.5
        image = tf.where(mirrored, image[:, ::-1], image)
        image = tf.image.pad_to_bounding_box(image, 0, 0, 832, 1344)

        def mask(row: Any) -> Any:
            pixels = tf.cast(tf.io.decode_png(row[0], channels=1) > 0, tf.float32)
            return tf.image.crop_and_resize(pixels[None], row[1][None], [0], [112, 112])[0]

        masks = tf.map_fn(mask, (files, boxes), fn_output_signature=tf.float32)
        masks = tf.reshape(masks, [-1, 112, 112])
        masks = tf.where(mirrored, masks[:, :, ::-1], masks)
        boxes = tf.where(mirrored, _mirror(boxes, 1.0), boxes)
        sides = tf.cast(tf.stack([height, width, height, width]), tf.float32)
        row = _padded({"boxes": boxes * sides, "classes": classes, "masks": masks})
        return {"image": image, **row}

    return _images(folder, one, batch)


def transformer(folder: str, batch: int) -> Batches:
    """The Transformer's: packed rows, shuffled and padded."""
    tf = tensorflow()
    sides = [f"{side}{part}" for side in ("inputs", "targets") for part in _PARTS]
    features = {name: tf.io.VarLenFeature(tf.int64) for name in sides}

    def one(serialized: Any) -> dict[str, Any]:
        parsed = tf.io.parse_single_example(serialized, features)
        return {name: tf.cast(tf.sparse.to_dense(x), tf.int32) for name, x in parsed.items()}

    rows = _shuffled(folder, "*packed-train*", 4096).map(one, tf.data.AUTOTUNE)
    return _end(rows.padded_batch(batch, dict.fromkeys(sides, [ROW_LENGTH]), drop_remainder=True))


def gnmt(folder: str, batch: int) -> Batches:
    """GNMT's: pairs in buckets of similar length, shuffled and padded."""
    tf = tensorflow()
    features = {name: tf.io.VarLenFeature(tf.int64) for name in ("inputs", "targets")}

    def one(serialized: Any) -> dict[str, Any]:
        parsed = tf.io.parse_single_example(serialized, features)
        return {name: tf.cast(tf.sparse.to_dense(x), tf.int32) for name, x in parsed.items()}

    def longer(row: Any) -> Any:
        return tf.maximum(tf.size(row["inputs"]), tf.size(row["targets"]))

    pairs = _shuffled(folder, "wmt32k-encoded-train-*", 65536).map(one, tf.data.AUTOTUNE)
    pairs = pairs.filter(lambda row: longer(row) <= _LENGTHS[-1])
    return _end(
        pairs.bucket_by_sequence_length(
            longer,
            [length + 1 for length in _LENGTHS],
            [batch] * (len(_LENGTHS) + 1),
            pad_to_bucket_boundary=True,
            drop_remainder=True,
        )
    )


def _shuffled(folder: str, pattern: str, buffer: int) -> Any:
    tf = tensorflow()
    paths = files.find(folder, pattern, "train records")
    options = tf.data.Options()
    options.deterministic = False
    names = tf.data.Dataset.from_tensor_slices(list(paths)).repeat().shuffle(len(paths))
    records = names.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE)
    return records.with_options(options).shuffle(buffer)


def _images(folder: str, one: Callable[[Any], dict[str, Any]], batch: int) -> Batches:
    tf = tensorflow()
    images = _shuffled(folder, "train-*", 1024).map(one, num_parallel_calls=tf.data.AUTOTUNE)
    return _end(images.batch(batch, drop_remainder=True))


def _end(batches: Any) -> Batches:
    return batches.prefetch(2).as_numpy_iterator()


def _parsed(serialized: Any) -> tuple[Any, Any, Any, Any]:
    """(uint8[h, w, 3], boxes float32[n, 4] as shares, classes int32[n], masks string[n])."""
    tf = tensorflow()
    sides = [f"image/object/bbox/{side}" for side in SIDES]
    features: dict[str, Any] = {side: tf.io.VarLenFeature(tf.float32) for side in sides}
    features |= {LABEL: tf.io.VarLenFeature(tf.int64), MASK: tf.io.VarLenFeature(tf.string)}
    features["image/encoded"] = tf.io.FixedLenFeature([], tf.string)
    parsed = tf.io.parse_single_example(serialized, features)
    boxes = tf.stack([parsed[side].values for side in sides], axis=1)
    image = tf.io.decode_jpeg(parsed["image/encoded"], channels=3)
    return image, boxes, tf.cast(parsed[LABEL].values, tf.int32), parsed[MASK].values


def _mirror(boxes: Any, width: Any) -> Any:
    tf = tensorflow()
    y0, x0, y1, x1 = tf.unstack(boxes, axis=1)
    return tf.stack([y0, width - x1, y1, width - x0], axis=1)


def _normal(image: Any) -> Any:
    """float32 in 0..1 -> zero mean and unit variance."""
    own = NAMED["tensorflow"]
    tf = tensorflow()
    return (image - tf.constant(own.mean) / 255) / (tf.constant(own.std) / 255)


def _padded(leaves: dict[str, Any]) -> dict[str, Any]:
    tf = tensorflow()
    rows = {name: values[:_MOST] for name, values in leaves.items()}
    return {
        name: tf.pad(x, [[0, _MOST - tf.shape(x)[0]], *[[0, 0]] * (len(x.shape) - 1)])
        for name, x in rows.items()
    }
