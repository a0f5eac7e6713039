"""Reads images with boxes in TFRecords of the schema of Google's TPU detectors.

Their writer is `tools/datasets/create_coco_tf_record.py` in github.com/tensorflow/tpu.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from errors import DataError
from ops.shards import Shards, tensorflow

LABEL = "image/object/class/label"
MASK = "image/object/mask"
NO_MASKS = "its objects have no masks: prepare the data with --masks"
SIDES = ("ymin", "xmin", "ymax", "xmax")
CROWD = "image/object/is_crowd"


class Image(NamedTuple):
    """An image of a record, as tensors."""

    encoded: Any  # string
    size: Any  # int32[2], height and width in pixels

    def checked(self, value: Any, decoded: Any) -> Any:
        """`value`, once TensorFlow has checked that `size` is the int32[2] of the decoded image."""
        message = "image/height and image/width are not the size of the image"
        return if_equal(value, decoded, self.size, message)


class Objects(NamedTuple):
    """The n objects of a record that have an area, as tensors."""

    boxes: Any  # float32[n, 4] (y0, x0, y1, x1) as shares of the image, inside of it
    classes: Any  # int32[n] from 1, or -1 of an unknown category


@dataclasses.dataclass(frozen=True)
class Source:
    """One split of images with boxes in TFRecords.

    Class i + 1 is the category `category_ids[i]`; the ids are sorted. `image_ids` and `upright` are
    of each example, in file order.
    """

    shards: Shards
    category_ids: tuple[int, ...]
    image_ids: tuple[int, ...] = ()  # to evaluate; () to train
    upright: tuple[bool, ...] = ()  # whether it is higher than wide; () unless masks are read

    def image(self, serialized: Any) -> Image:
        """The image of a serialized tf.train.Example."""
        tf = tensorflow()
        parsed = tf.io.parse_single_example(serialized, image_features())
        size = tf.stack([parsed["image/height"], parsed["image/width"]])
        return Image(parsed["image/encoded"], tf.cast(size, tf.int32))

    def image_id(self, serialized: Any) -> Any:
        """The id int32 of the image in the annotations, of a serialized tf.train.Example."""
        tf = tensorflow()
        features = {"image/source_id": tf.io.FixedLenFeature([], tf.string)}
        parsed = tf.io.parse_single_example(serialized, features)
        return tf.strings.to_number(parsed["image/source_id"], tf.int32)

    def objects(self, serialized: Any, crowds: bool = True) -> Objects:
        """The objects of a serialized tf.train.Example; without `crowds`, only single ones."""
        tf = tensorflow()
        parsed = tf.io.parse_single_example(serialized, object_features(not crowds))
        boxes, kept = clipped_boxes(parsed)
        ids, labels = tf.constant(self.category_ids, tf.int64), parsed[LABEL]
        place = tf.minimum(tf.searchsorted(ids, labels), len(self.category_ids) - 1)
        classes = tf.where(tf.equal(tf.gather(ids, place), labels), place + 1, -1)
        return Objects(tf.boolean_mask(boxes, kept), tf.boolean_mask(classes, kept))

    def check(self, batch: dict[str, np.ndarray]) -> None:
        """Raises DataError if a category is unknown: files may change during a long run."""
        if "classes" in batch and (wrong := (batch["classes"] < 0).any(axis=1)).any():
            record = self.shards.where(int(batch["id"][wrong][0]))
            raise DataError(
                f"{record}: a category is none of the {len(self.category_ids)} in the annotations; "
                "mend the record: `--mode=doctor --full` names the value"
            )


def if_equal(value: Any, x: Any, y: Any, message: str) -> Any:
    """The tensor `value`; TensorFlow raises InvalidArgumentError if `x` differs from `y`."""
    tf = tensorflow()
    same = tf.debugging.assert_equal(x, y, message)
    with tf.control_dependencies([same] if same is not None else []):  # None: checked eagerly
        return tf.identity(value)


def largest(leaves: Mapping[str, Any], boxes: Any, most: int) -> dict[str, Any]:
    """Keeps, of leaves [n, ...], the `most` objects with the largest boxes, in their order.

    `boxes` are float32[n, 4] (y0, x0, y1, x1). Leaves become [most, ...], with zeros at the end.
    """
    tf = tensorflow()
    areas = tf.reduce_prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    count = tf.minimum(tf.size(areas), most)
    rows = tf.sort(tf.math.top_k(areas, count).indices)

    def padded(values: Any) -> Any:
        widths = [[0, most - count], *[[0, 0]] * (len(values.shape) - 1)]
        return tf.ensure_shape(tf.pad(tf.gather(values, rows), widths), [most, *values.shape[1:]])

    return {name: padded(values) for name, values in leaves.items()}


def marked(paths: tuple[str, ...], examples: Sequence[np.ndarray]) -> Shards:
    """Files whose examples are the marked records, bool[records] of each file."""
    left_out = tuple(tuple(np.flatnonzero(~of_file).tolist()) for of_file in examples)
    counts = tuple(int(of_file.sum()) for of_file in examples)
    return Shards(paths, counts, left_out)


def image_features() -> dict[str, Any]:
    """The features of the image in a record."""
    tf = tensorflow()
    number = tf.io.FixedLenFeature([], tf.int64)
    encoded = tf.io.FixedLenFeature([], tf.string)
    return {"image/encoded": encoded, "image/height": number, "image/width": number}


def object_features(single: bool = False) -> dict[str, Any]:
    """The features of the objects in a record; with `single`, also which ones are crowds."""
    tf = tensorflow()
    sides = {f"image/object/bbox/{side}": tf.io.RaggedFeature(tf.float32) for side in SIDES}
    crowd = {CROWD: tf.io.RaggedFeature(tf.int64)} if single else {}
    return sides | {LABEL: tf.io.RaggedFeature(tf.int64)} | crowd


def clipped_boxes(parsed: dict[str, Any]) -> tuple[Any, Any]:
    """float32[n, 4] of all objects, and bool[n]: which have an area and, if known, are no crowd."""
    tf = tensorflow()
    sides = [parsed[f"image/object/bbox/{side}"] for side in SIDES]
    boxes = tf.clip_by_value(tf.stack(sides, axis=1), 0.0, 1.0)
    kept = tf.reduce_all(boxes[:, 2:] > boxes[:, :2], axis=1)
    if CROWD in parsed:  # a record without crowds may lack the key
        missing = tf.size(kept) - tf.size(parsed[CROWD])
        kept &= tf.equal(tf.pad(parsed[CROWD], [[0, missing]]), 0)
    return boxes, kept
