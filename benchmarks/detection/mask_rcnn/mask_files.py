"""Cuts the masks of objects out of PNGs of whole images, on the host."""

from __future__ import annotations

from typing import Any

from benchmarks.detection import records
from benchmarks.detection.records import LABEL, MASK, NO_MASKS
from ops.shards import tensorflow


def of_record(serialized: Any, size: int, mirrored: Any = False) -> Any:
    """The masks of the single objects of a serialized tf.train.Example, see `packed`."""
    tf = tensorflow()
    number = tf.io.FixedLenFeature([], tf.int64)
    features = records.object_features(single=True) | {MASK: tf.io.RaggedFeature(tf.string)}
    features |= {"image/height": number, "image/width": number}
    parsed = tf.io.parse_single_example(serialized, features)
    shape = tf.cast(tf.stack([parsed["image/height"], parsed["image/width"]]), tf.int32)
    boxes, kept = records.clipped_boxes(parsed)
    counts = tf.size(parsed[MASK]), tf.size(parsed[LABEL])
    files = tf.boolean_mask(records.if_equal(parsed[MASK], *counts, NO_MASKS), kept)
    corners = tf.boolean_mask(boxes, kept) * tf.tile(tf.cast(shape, tf.float32), [2])
    return packed(files, corners, shape, size, mirrored)


def packed(files: Any, boxes: Any, shape: Any, size: int, mirrored: Any = False) -> Any:
    """uint8[n, size * size / 8]: masks that each span the box of their object.

    The size x size pixels of a mask are sampled bilinearly at their centres, and set where that
    gives 0.5 or more. They are packed row by row, 8 to a byte, the first into its highest bit.

    Args:
      files: string[n], PNGs of the whole image; the pixels of the object are not 0.
      boxes: float32[n, 4] (y0, x0, y1, x1) in pixels.
      shape: int32[2], the height and width of the image.
      size: a multiple of 4.
      mirrored: a scalar bool, whether all masks are mirrored left to right.
    """
    tf = tensorflow()
    bits = 2 ** tf.range(7, -1, -1)

    @tf.autograph.experimental.do_not_convert  # it would hide what errors say
    def one(row: Any) -> Any:
        inside = _sampled(row[0], row[1], shape, size, mirrored) >= 0.5
        numbers = tf.reduce_sum(tf.where(tf.reshape(inside, [-1, 8]), bits, 0), axis=1)
        return tf.cast(numbers, tf.uint8)

    spec = tf.TensorSpec([size * size // 8], tf.uint8)
    return tf.map_fn(one, (files, boxes), fn_output_signature=spec)


def _sampled(file: Any, box: Any, shape: Any, size: int, mirrored: Any) -> Any:
    """float32[size, size]: the pixels of an object inside its box, at the centres of its parts."""
    tf = tensorflow()
    pixels = tf.io.decode_png(file, channels=1)[..., 0]
    words = "a mask has not the size of the image"
    pixels = records.if_equal(pixels, tf.shape(pixels), shape, words)
    shares = (tf.range(size, dtype=tf.float32) + 0.5) / size
    columns = tf.where(mirrored, shares[::-1], shares)
    for axis, place in ((0, shares), (1, columns)):
        length = tf.shape(pixels)[axis]
        # Pixel k has its centre at k + 0.5; beyond the outermost centres nothing changes.
        at = box[axis] + place * (box[axis + 2] - box[axis]) - 0.5
        at = tf.clip_by_value(at, 0.0, tf.cast(length - 1, tf.float32))
        low = tf.cast(at, tf.int32)
        first = tf.gather(pixels, low, axis=axis)
        second = tf.gather(pixels, tf.minimum(low + 1, length - 1), axis=axis)
        if axis == 0:  # only now, of few rows
            first, second = (tf.cast(rows > 0, tf.float32) for rows in (first, second))
        share = tf.reshape(at - tf.cast(low, tf.float32), [-1, 1] if axis == 0 else [1, -1])
        pixels = first + share * (second - first)
    return pixels
