"""Opens images with boxes in TFRecords of the schema of Google's TPU detectors, and checks them.

Their writer is `tools/datasets/create_coco_tf_record.py` in github.com/tensorflow/tpu.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import numpy as np

from errors import DataError
from ops import files, scanning
from ops.detection import coco
from ops.images import manifest
from ops.images.labelled import MAGIC, check_not_empty, find_shards
from ops.shards import Shards, record_name, tensorflow

_log = logging.getLogger("tpu_suite")

_SIDES = ("ymin", "xmin", "ymax", "xmax")
_LABEL = "image/object/class/label"
_OUTSIDE = 0.5  # how far a box may reach beyond the image, as a share of its side


class Image(NamedTuple):
    """An image of a record, as tensors."""

    encoded: Any  # string
    size: Any  # int32[2], height and width in pixels


class Objects(NamedTuple):
    """The n objects of a record that have an area, as tensors."""

    boxes: Any  # float32[n, 4] (y0, x0, y1, x1) as shares of the image, inside of it
    classes: Any  # int32[n] from 1, or -1 of an unknown category


@dataclasses.dataclass(frozen=True)
class Source:
    """One split of images with boxes in TFRecords.

    Class i + 1 is the category `category_ids[i]`; the ids are sorted. `image_ids` are those of the
    examples to evaluate, in file order; () for training.
    """

    shards: Shards
    category_ids: tuple[int, ...]
    image_ids: tuple[int, ...] = ()

    def image(self, serialized: Any) -> Image:
        """The image of a serialized tf.train.Example."""
        tf = tensorflow()
        parsed = tf.io.parse_single_example(serialized, _image_features())
        size = tf.stack([parsed["image/height"], parsed["image/width"]])
        return Image(parsed["image/encoded"], tf.cast(size, tf.int32))

    def image_id(self, serialized: Any) -> Any:
        """The id int32 of the image in the annotations, of a serialized tf.train.Example."""
        tf = tensorflow()
        features = {"image/source_id": tf.io.FixedLenFeature([], tf.string)}
        parsed = tf.io.parse_single_example(serialized, features)
        return tf.strings.to_number(parsed["image/source_id"], tf.int32)

    def objects(self, serialized: Any) -> Objects:
        """The objects of a serialized tf.train.Example, crowds included."""
        tf = tensorflow()
        parsed = tf.io.parse_single_example(serialized, _object_features())
        sides = [parsed[f"image/object/bbox/{side}"] for side in _SIDES]
        boxes = tf.clip_by_value(tf.stack(sides, axis=1), 0.0, 1.0)
        ids, labels = tf.constant(self.category_ids, tf.int64), parsed[_LABEL]
        place = tf.minimum(tf.searchsorted(ids, labels), len(self.category_ids) - 1)
        classes = tf.where(tf.equal(tf.gather(ids, place), labels), place + 1, -1)
        has_area = tf.reduce_all(boxes[:, 2:] > boxes[:, :2], axis=1)
        return Objects(tf.boolean_mask(boxes, has_area), tf.boolean_mask(classes, has_area))

    def check(self, batch: dict[str, np.ndarray]) -> None:
        """Raises DataError if a category is unknown: files may change during a long run."""
        if "classes" in batch and (wrong := (batch["classes"] < 0).any(axis=1)).any():
            record = self.shards.where(int(batch["id"][wrong][0]))
            raise DataError(
                f"{record}: a category is none of the {len(self.category_ids)} in the annotations; "
                "mend the record: scripts/validate_records.py names the value"
            )


def open_records(
    data_dir: str,
    patterns: str,
    category_ids: tuple[int, ...],
    max_boxes: int,
    cache: str,
    split: str,
) -> Source:
    """Opens TFRecords of images with boxes, and logs what training leaves out of them.

    Training leaves out the images without a box. Each file is read through once to count and check
    its records, unless the folder's data manifest describes them.

    Args:
      data_dir: folder, local or gs://.
      patterns: see `ops.files.find`.
      category_ids: all categories of the annotations, sorted.
      max_boxes: how many boxes of an image a batch has room for.
      cache: see `ops.files.index`.
      split: "train" or "eval".

    Raises:
      DataError: no file matches; a key is missing, a category unknown, a box far outside of its
        image, a record damaged or not an image (the file and record are named); to evaluate, two
        records have the same image id; to train, no record has a box.
    """
    try:
        paths = find_shards(data_dir, patterns, split)
    except DataError as error:
        remedy = f"set --config.data_dir (or --config.{split}_files) to where the TFRecords are"
        raise DataError(f"{error}; {remedy}") from error
    if source := _described(data_dir, paths, category_ids, max_boxes, split):
        return source
    settings = {"category_ids": list(category_ids), "split": split}
    rows = files.index(paths, lambda path: _scan_file(path, category_ids, split), cache, settings)
    boxes = [np.array(row["boxes"], np.int64) for row in rows]  # of each record, by file
    check_not_empty(paths, list(map(len, boxes)), split)
    if split == "eval":
        shards = Shards(paths, tuple(map(len, boxes)))
        ids = tuple(i for row in rows for i in row["ids"])
        _check_unique(ids, shards)
        return Source(shards, category_ids, ids)
    left_out = tuple(tuple(np.flatnonzero(of_file == 0).tolist()) for of_file in boxes)
    kept = tuple(len(b) - len(out) for b, out in zip(boxes, left_out, strict=True))
    if not sum(kept):
        raise DataError(f"no train records: none of the images in {paths[0]} ... has a box")
    _report(np.bincount(np.concatenate(boxes)), sum(row["flat"] for row in rows), max_boxes)
    return Source(Shards(paths, kept, left_out), category_ids)


def _described(
    data_dir: str,
    paths: tuple[str, ...],
    category_ids: tuple[int, ...],
    max_boxes: int,
    split: str,
) -> Source | None:
    """The images as the data manifest describes them; those of training must all have a box."""
    content = manifest.load(data_dir) if data_dir else None
    if not content or content.category_ids != category_ids:
        return None
    counts = content.counts(data_dir, paths)
    if not counts:
        return None
    if split == "eval":
        if len(content.image_ids) != sum(counts):
            return None
        shards = Shards(paths, counts)
        _check_unique(content.image_ids, shards)
        return Source(shards, category_ids, content.image_ids)
    images = content.boxes.get("train")
    if not images or images[0] or sum(counts) != sum(images):
        return None
    _report(np.array(images), 0, max_boxes)
    return Source(Shards(paths, counts), category_ids)


def _report(images: np.ndarray, flat: int, max_boxes: int) -> None:
    """Logs what training leaves out; `images[k]` train images have k boxes."""
    total = images.sum()
    if images[0]:
        _log.info("%d of %d train images have no box and are left out", images[0], total)
    if flat:
        _log.info("%d boxes of train images have no area and are left out", flat)
    if crowded := images[max_boxes + 1 :].sum():
        _log.warning(
            "%d of %d train images have more than config.max_boxes=%d boxes, up to %d: training "
            "keeps the largest",
            *(crowded, total, max_boxes, np.flatnonzero(images)[-1]),
        )


def _check_unique(ids: tuple[int, ...], shards: Shards) -> None:
    """Raises DataError if two records have the same image id."""
    values, first, number = np.unique(ids, return_index=True, return_counts=True)
    if len(twice := np.flatnonzero(number > 1)):
        value = values[twice[0]]
        record = shards.where(int(first[twice[0]]))
        raise DataError(
            f"{record}: image/source_id={value} is also the id of another record; an evaluation "
            "must have every image once: write the records again"
        )


def _image_features() -> dict[str, Any]:
    tf = tensorflow()
    number = tf.io.FixedLenFeature([], tf.int64)
    encoded = tf.io.FixedLenFeature([], tf.string)
    return {"image/encoded": encoded, "image/height": number, "image/width": number}


def _object_features() -> dict[str, Any]:
    tf = tensorflow()
    sides = {f"image/object/bbox/{side}": tf.io.RaggedFeature(tf.float32) for side in _SIDES}
    return sides | {_LABEL: tf.io.RaggedFeature(tf.int64)}


def _scan_file(path: str, category_ids: tuple[int, ...], split: str) -> dict[str, Any]:
    """{"boxes": [of each record], "flat": boxes without area, "ids": [of each image to evaluate]}.

    DataError names the first fault.
    """
    tf = tensorflow()
    features = _image_features() | _object_features()
    features["image/source_id"] = tf.io.FixedLenFeature([], tf.string, default_value="")
    boxes, ids, flat = [], [], 0

    def check(chunk: Any, first: int) -> None:
        nonlocal flat
        parsed = tf.io.parse_example(chunk, features)
        columns = {name: _rows(values) for name, values in parsed.items()}
        for i in range(len(chunk)):
            row, record = {k: v[i] for k, v in columns.items()}, record_name(path, first + i)
            if fault := _fault(row, category_ids):
                raise DataError(f"{record}: {fault}")
            if split == "eval":
                ids.append(_image_id(row["image/source_id"], record))
            count = _count(row)
            boxes.append(count)
            flat += len(row[_LABEL]) - count

    schema = "the schema of detection records (image/encoded, image/object/bbox/xmin, ...)"
    scanning.scan(path, check, schema)
    return {"boxes": boxes, "flat": flat, "ids": ids}


def _rows(values: Any) -> list[Any]:
    """The value of each record, from a tensor or a ragged one."""
    if not hasattr(values, "row_splits"):
        return list(values.numpy())
    return np.split(values.values.numpy(), values.row_splits.numpy()[1:-1])


def _fault(row: dict[str, Any], category_ids: tuple[int, ...]) -> str:
    """The first fault of a record, with its remedy; "" if it has none."""
    if not row["image/encoded"].startswith(MAGIC):
        return "it is not a JPEG, PNG, BMP or GIF image"
    labels, sides = row[_LABEL], [row[f"image/object/bbox/{side}"] for side in _SIDES]
    lengths = {len(values) for values in (labels, *sides)}
    if len(lengths) > 1:
        return f"its objects differ in number from key to key ({sorted(lengths)}); mend the record"
    unknown = labels[~np.isin(labels, category_ids)]
    if len(unknown):
        return (
            f"category {unknown[0]} is none of the {len(category_ids)} in the annotations; the "
            "records and the annotations must be of one data set"
        )
    outside = ~(np.abs(np.array(sides) - 0.5) <= 0.5 + _OUTSIDE)  # also where it is not a number
    if outside.any():
        return (
            f"a box has the coordinate {np.array(sides)[outside][0]:g}, far outside of the image; "
            "coordinates must be shares of its sides (0..1), not pixels"
        )
    return ""


def _count(row: dict[str, Any]) -> int:
    """The objects of a record that `Source.objects` returns."""
    y0, x0, y1, x1 = (np.clip(row[f"image/object/bbox/{side}"], 0, 1) for side in _SIDES)
    return int(np.count_nonzero((y1 > y0) & (x1 > x0)))


def _image_id(text: bytes, record: str) -> int:
    if (number := coco.parse_id(text)) is not None:
        return number
    raise DataError(
        f"{record}: image/source_id={text.decode(errors='replace')!r} must be the image's id in "
        "the annotations, a whole number from -2^31 to 2^31 - 1"
    )
