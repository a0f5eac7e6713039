"""Draws the random crop that SSD trains on, from the boxes of an image, before it is decoded.

Rounds follow each other until one succeeds. A round chooses one of seven with equal chances: the
whole image, which succeeds; windows without a condition; or windows whose IoU with every box is
above 0.1, 0.3, 0.5, 0.7 or 0.9. It then tries `max_samples` windows and takes the first that is
valid: its sides are `side_min` to 1 of the image's, at a ratio between 1/2 and 2, and at least one
box has its centre inside. Source: the SSD reference of MLPerf (`SSDCropping` in
mlcommons/training), which tries one window per round. Google's entries tried 50, took the last
valid one, and demanded an IoU above 0 where the reference has no condition; windows of a round are
drawn alike, so that the last is as good as the first.

All random numbers are drawn at once. The rounds before the first whole image are the only ones that
matter, 6 on average. After 64 rounds the whole image is taken, which happens to fewer than 1 of
19,000 images. A window consists of whole pixels, so that the boxes fit the pixels exactly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.detection import records
from ops.shards import tensorflow

_ROUNDS = 64
_CHOICES = 7  # number 0 is the whole image; the others have a condition on the IoU
_NO_CONDITION = -1.0
_MIN_IOU = (_NO_CONDITION, 0.1, 0.3, 0.5, 0.7, 0.9)


class Draws(NamedTuple):
    """The random numbers of a crop, for the r rounds before the whole image is chosen."""

    conditions: Any  # int32[r], the index in `_MIN_IOU`
    numbers: Any  # float32[r, max_samples, 4] in [0, 1): height, width, y, x of each window


def draw(seeds: Any, max_samples: int) -> Draws:
    """The random numbers of a crop: a function of `seeds` int32[3]."""
    tf = tensorflow()
    shape = [_ROUNDS]
    choices = tf.random.stateless_uniform(shape, seeds[:2], maxval=_CHOICES, dtype=tf.int32)
    ends = tf.concat([tf.equal(choices, 0), [True]], axis=0)
    rounds = tf.argmax(tf.cast(ends, tf.int32), output_type=tf.int32)  # the first of the largest
    numbers = tf.random.stateless_uniform([rounds, max_samples, 4], seeds[1:])
    return Draws(choices[:rounds] - 1, numbers)


def window(boxes: Any, size: Any, draws: Draws, side_min: float) -> Any:
    """int32[4] (y, x, height, width) in pixels: the crop of an image.

    Args:
      boxes: float32[n, 4] (y0, x0, y1, x1) as shares of the image, inside of it, all with an area.
      size: int32[2], height and width of the image in pixels.
      side_min: the least side of a window, as a share of the image's; 0.3 in the reference.
    """
    tf = tensorflow()
    pixels = tf.cast(size, tf.float32)
    sides = side_min + (1 - side_min) * draws.numbers[..., :2]
    corner = draws.numbers[..., 2:] * (1 - sides)
    begin = tf.floor(corner * pixels)
    end = tf.minimum(tf.math.ceil((corner + sides) * pixels), pixels)
    ratio = sides[..., 1] / sides[..., 0]
    least = tf.gather(tf.constant(_MIN_IOU), draws.conditions)[:, tf.newaxis, tf.newaxis]
    low, high = begin / pixels, end / pixels
    valid = tf.logical_and(ratio > 0.5, ratio < 2)
    valid &= tf.reduce_all(_iou(boxes, low, high) > least, axis=-1)
    valid &= tf.reduce_any(_inside(boxes, low, high), axis=-1)
    windows = tf.reshape(tf.concat([begin, end - begin], axis=-1), [-1, 4])
    whole = tf.concat([[0.0, 0.0], pixels], axis=0)[tf.newaxis]
    is_last = tf.concat([tf.reshape(valid, [-1]), [True]], axis=0)
    first = tf.argmax(tf.cast(is_last, tf.int32))
    return tf.cast(tf.concat([windows, whole], axis=0)[first], tf.int32)


def cut(boxes: Any, classes: Any, size: Any, crop: Any, max_boxes: int) -> tuple[Any, Any]:
    """The boxes and classes of a crop: float32[max_boxes, 4] and int32[max_boxes], with zeros.

    Boxes whose centre is inside are kept, in their order; their parts outside of the crop are cut
    off. Of more than `max_boxes` the largest are kept.

    Args:
      boxes, size: see `window`.
      classes: int32[n] from 1.
      crop: int32[4], from `window`.
    """
    tf = tensorflow()
    pixels, begin = tf.cast(size, tf.float32), tf.cast(crop[:2], tf.float32)
    low, high = begin / pixels, (begin + tf.cast(crop[2:], tf.float32)) / pixels
    inside = _inside(boxes, low, high)
    boxes, classes = tf.boolean_mask(boxes, inside), tf.boolean_mask(classes, inside)
    boxes = (boxes - tf.tile(low, [2])) / tf.tile(high - low, [2])
    boxes = tf.clip_by_value(boxes, 0.0, 1.0)
    leaves = records.largest({"boxes": boxes, "classes": classes}, boxes, max_boxes)
    return leaves["boxes"], leaves["classes"]


def _iou(boxes: Any, low: Any, high: Any) -> Any:
    """float32[..., n] of windows [..., 2] to [..., 2] with boxes [n, 4]."""
    tf = tensorflow()
    low, high = low[..., tf.newaxis, :], high[..., tf.newaxis, :]
    overlap = tf.minimum(high, boxes[:, 2:]) - tf.maximum(low, boxes[:, :2])
    shared = tf.reduce_prod(tf.nn.relu(overlap), axis=-1)
    areas = tf.reduce_prod(boxes[:, 2:] - boxes[:, :2], axis=-1)
    return shared / (tf.reduce_prod(high - low, axis=-1) + areas - shared)


def _inside(boxes: Any, low: Any, high: Any) -> Any:
    """bool[..., n]: whether the centre of a box [n, 4] is inside of windows [..., 2]."""
    tf = tensorflow()
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    inside = (centres > low[..., tf.newaxis, :]) & (centres < high[..., tf.newaxis, :])
    return tf.reduce_all(inside, axis=-1)
