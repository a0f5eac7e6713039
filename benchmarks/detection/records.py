"""Opens images with boxes in TFRecords of the schema of Google's TPU detectors, and checks them.

Their writer is `tools/datasets/create_coco_tf_record.py` in github.com/tensorflow/tpu.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.detection import coco
from errors import DataError
from ops import counting, files
from ops.images import manifest
from ops.images.pixels import MAGIC
from ops.shards import Shards, record_name, tensorflow

_log = logging.getLogger("tpu_suite")

LABEL = "image/object/class/label"
MASK = "image/object/mask"
NO_MASKS = "its objects have no masks: prepare the data with --masks"
_SIDES = ("ymin", "xmin", "ymax", "xmax")
_CROWD = "image/object/is_crowd"
_OUTSIDE = 0.5  # how far a box may reach beyond the image, as a share of its side


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
        parsed = tf.io.parse_single_example(serialized, _image_features())
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
                "mend the record: `python -m scripts.validate` names the value"
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


def open_records(
    data_dir: str,
    patterns: str,
    category_ids: tuple[int, ...],
    max_boxes: int,
    cache: str,
    split: str,
    *,
    masks: bool = False,
) -> Source:
    """Opens TFRecords of images with boxes, and logs what training leaves out of them.

    Training leaves out the images without a box. Each file is read through once to count and check
    its records, unless the folder's data manifest describes them.

    Args:
      data_dir: folder, local or gs://.
      patterns: see `ops.files.find`.
      category_ids: all categories of the annotations, sorted.
      max_boxes: how many boxes of an image a batch has room for.
      cache: see `ops.counting.index`.
      split: "train" or "eval".
      masks: whether objects have masks to train on; a crowd then counts as no box.

    Raises:
      DataError: no file matches; a key is missing, a category unknown, a box far outside of its
        image, a record damaged or not an image (the file and record are named); to evaluate, two
        records have the same image id; to train, no record has a box, or the masks are missing.
    """
    paths = files.find_shards(data_dir, patterns, split)
    if not masks and (source := _described(data_dir, paths, category_ids, max_boxes, split)):
        return source
    settings: dict[str, Any] = {"category_ids": list(category_ids), "split": split}
    settings |= {"masks": split == "train"} if masks else {}
    needed = masks and split == "train"
    rows = counting.index(
        paths, lambda path: _scan_file(path, category_ids, split, needed), cache, settings
    )
    boxes = [np.array(row["boxes"], np.int64) for row in rows]  # of each record, by file
    files.check_not_empty(paths, list(map(len, boxes)), split)
    examples = [(split == "eval") | (of_file > 0) for of_file in boxes]
    if not any(of_file.any() for of_file in examples):
        raise DataError(f"no train records: none of the images in {paths[0]} ... has a box")
    ids = tuple(i for row in rows for i in row["ids"])
    upright = np.array([high for row in rows for high in row["upright"]], bool)
    upright = upright[np.concatenate(examples)].tolist() if masks else ()
    source = Source(marked(paths, examples), category_ids, ids, tuple(upright))
    if split == "eval":
        _check_unique(source.image_ids, source.shards)
    else:
        _report(np.bincount(np.concatenate(boxes)), sum(row["flat"] for row in rows), max_boxes)
    return source


def marked(paths: tuple[str, ...], examples: Sequence[np.ndarray]) -> Shards:
    """Files whose examples are the marked records, bool[records] of each file."""
    left_out = tuple(tuple(np.flatnonzero(~of_file).tolist()) for of_file in examples)
    counts = tuple(int(of_file.sum()) for of_file in examples)
    return Shards(paths, counts, left_out if any(left_out) else ())


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


def object_features(single: bool = False) -> dict[str, Any]:
    """The features of the objects in a record; with `single`, also which ones are crowds."""
    tf = tensorflow()
    sides = {f"image/object/bbox/{side}": tf.io.RaggedFeature(tf.float32) for side in _SIDES}
    crowd = {_CROWD: tf.io.RaggedFeature(tf.int64)} if single else {}
    return sides | {LABEL: tf.io.RaggedFeature(tf.int64)} | crowd


def clipped_boxes(parsed: dict[str, Any]) -> tuple[Any, Any]:
    """float32[n, 4] of all objects, and bool[n]: which have an area and, if known, are no crowd."""
    tf = tensorflow()
    sides = [parsed[f"image/object/bbox/{side}"] for side in _SIDES]
    boxes = tf.clip_by_value(tf.stack(sides, axis=1), 0.0, 1.0)
    kept = tf.reduce_all(boxes[:, 2:] > boxes[:, :2], axis=1)
    if _CROWD in parsed:  # a record without crowds may lack the key
        missing = tf.size(kept) - tf.size(parsed[_CROWD])
        kept &= tf.equal(tf.pad(parsed[_CROWD], [[0, missing]]), 0)
    return boxes, kept


def _scan_file(
    path: str, category_ids: tuple[int, ...], split: str, masks: bool = False
) -> dict[str, Any]:
    """What is known of the records of a file.

    {"boxes": [of each], "upright": [whether each is higher than wide], "ids": [of each image to
    evaluate], "flat": boxes without area}. With `masks`, objects need them, and a crowd counts as
    no box. DataError names the first fault.
    """
    tf = tensorflow()
    features = _image_features() | object_features(masks)
    features |= {MASK: tf.io.RaggedFeature(tf.string)} if masks else {}
    features["image/source_id"] = tf.io.FixedLenFeature([], tf.string, default_value="")
    boxes, upright, ids, flat = [], [], [], 0

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
            has_area, single = _has_area(row), _single(row)
            boxes.append(int(np.count_nonzero(has_area & single)))
            upright.append(int(row["image/height"] > row["image/width"]))
            flat += int(np.count_nonzero(~has_area))

    schema = "the schema of detection records (image/encoded, image/object/bbox/xmin, ...)"
    counting.scan(path, check, schema)
    return {"boxes": boxes, "upright": upright, "ids": ids, "flat": flat}


def _rows(values: Any) -> list[Any]:
    """The value of each record, from a tensor or a ragged one."""
    if not hasattr(values, "row_splits"):
        return list(values.numpy())
    return np.split(values.values.numpy(), values.row_splits.numpy()[1:-1])


def _fault(row: dict[str, Any], category_ids: tuple[int, ...]) -> str:
    """The first fault of a record, with its remedy; "" if it has none."""
    if not row["image/encoded"].startswith(MAGIC):
        return "it is not a JPEG, PNG, BMP or GIF image"
    labels, sides = row[LABEL], [row[f"image/object/bbox/{side}"] for side in _SIDES]
    if len(labels) and not len(row.get(MASK, [b""])):
        return NO_MASKS
    others = [row[key] for key in (_CROWD, MASK) if len(row.get(key, ()))]
    lengths = {len(values) for values in (labels, *sides, *others)}
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


def _has_area(row: dict[str, Any]) -> np.ndarray:
    """bool[n], of the objects of a record."""
    y0, x0, y1, x1 = (np.clip(row[f"image/object/bbox/{side}"], 0, 1) for side in _SIDES)
    return (y1 > y0) & (x1 > x0)


def _single(row: dict[str, Any]) -> np.ndarray:
    """bool[n]: which objects of a record are no crowds, if that was asked and is known."""
    crowd = row.get(_CROWD, ())
    return crowd == 0 if len(crowd) else np.ones(len(row[LABEL]), bool)


def _image_id(text: bytes, record: str) -> int:
    if (number := coco.parse_id(text)) is not None:
        return number
    raise DataError(
        f"{record}: image/source_id={text.decode(errors='replace')!r} must be the image's id in "
        "the annotations, a whole number from -2^31 to 2^31 - 1"
    )
