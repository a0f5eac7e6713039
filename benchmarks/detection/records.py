"""Images with boxes in TFRecords: opens a split's files, and reads their images and objects.

The schema is that of Google's TPU detectors, whose writer is
`tools/datasets/create_coco_tf_record.py` in github.com/tensorflow/tpu. The first run in a workdir
reads all files once to count and check the records, unless their data manifest describes them.
"""

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.records import RecordFiles
from common.data import caches, data_manifest, files
from common.data.decoding import IMAGE_MAGIC
from common.data.shards import Shards, record_name
from common.errors import DataError
from common.images import pixels
from common.tensorflow import tensorflow

LABEL = "image/object/class/label"
MASK = "image/object/mask"
NO_MASKS = "its objects have no masks: prepare the data with --masks"
SIDES = ("ymin", "xmin", "ymax", "xmax")
CROWD = "image/object/is_crowd"
_OUTSIDE = 0.5  # how far a box may reach beyond the image, as a share of its side
_log = logging.getLogger("tpu_suite")


class Image(NamedTuple):
    """An image of a record, as tensors."""

    encoded: Any  # string
    size: Any  # int32[2], height and width in pixels

    def checked(self, value: Any, decoded: Any) -> Any:
        """`value`, once TensorFlow has checked that `size` is the int32[2] of the decoded image."""
        message = "image/height and image/width are not the size of the image"
        return if_equal(value, decoded, self.size, message)


class RecordObjects(NamedTuple):
    """The n objects of a record that have an area, as tensors."""

    boxes: Any  # float32[n, 4] (y0, x0, y1, x1) as shares of the image, inside of it
    classes: Any  # int32[n] from 1, or -1 of an unknown category


@dataclasses.dataclass(frozen=True)
class Source:
    """One split of images with boxes in TFRecords.

    Class i + 1 is the category `category_ids[i]`; the ids are sorted. `image_ids` and `upright`
    have a value for each example, in file order.
    """

    shards: Shards
    category_ids: tuple[int, ...]
    image_ids: tuple[int, ...] = ()  # to evaluate; () to train
    upright: tuple[bool, ...] = ()  # whether it is higher than wide; () unless masks are read

    def objects(self, serialized: Any, crowds: bool = True) -> RecordObjects:
        """The objects of a serialized tf.train.Example; without `crowds`, only single ones."""
        tf = tensorflow()
        parsed = tf.io.parse_single_example(serialized, object_features(not crowds))
        boxes, kept = clipped_boxes(parsed)
        ids, labels = tf.constant(self.category_ids, tf.int64), parsed[LABEL]
        place = tf.minimum(tf.searchsorted(ids, labels), len(self.category_ids) - 1)
        classes = tf.where(tf.equal(tf.gather(ids, place), labels), place + 1, -1)
        return RecordObjects(tf.boolean_mask(boxes, kept), tf.boolean_mask(classes, kept))

    def check(self, batch: dict[str, np.ndarray]) -> None:
        """Raises DataError if a category is unknown: files may change during a long run."""
        if "classes" in batch and (wrong := (batch["classes"] < 0).any(axis=1)).any():
            record = self.shards.where(int(batch["id"][wrong][0]))
            raise DataError(
                f"{record}: a category is none of the {len(self.category_ids)} in the annotations; "
                "`--mode=doctor --full` names the value"
            )


def read_image(serialized: Any) -> Image:
    """The image of a serialized tf.train.Example."""
    tf = tensorflow()
    parsed = tf.io.parse_single_example(serialized, _image_features())
    size = tf.stack([parsed["image/height"], parsed["image/width"]])
    return Image(parsed["image/encoded"], tf.cast(size, tf.int32))


def read_window(image: Image, window: Any, only_jpeg: bool) -> Any:
    """uint8[h, w, 3]: the window int32[4] (y, x, height, width) of an image."""

    def checked(height: Any, width: Any) -> Any:
        return image.checked(window, tensorflow().stack([height, width]))

    return pixels.decode(image.encoded, checked, only_jpeg=only_jpeg)


def read_image_id(serialized: Any) -> Any:
    """The id int32 of an image in the annotations, from a serialized tf.train.Example."""
    tf = tensorflow()
    features = {"image/source_id": tf.io.FixedLenFeature([], tf.string)}
    parsed = tf.io.parse_single_example(serialized, features)
    return tf.strings.to_number(parsed["image/source_id"], tf.int32)


def if_equal(value: Any, x: Any, y: Any, message: str) -> Any:
    """The tensor `value`; TensorFlow raises InvalidArgumentError if `x` differs from `y`."""
    tf = tensorflow()
    same = tf.debugging.assert_equal(x, y, message)
    with tf.control_dependencies([same] if same is not None else []):  # None: checked eagerly
        return tf.identity(value)


def keep_largest(leaves: Mapping[str, Any], boxes: Any, most: int) -> dict[str, Any]:
    """Keeps the `most` objects with the largest boxes in leaves [n, ...], in their order.

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


def _image_features() -> dict[str, Any]:
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


def open_records(
    where: RecordFiles,
    category_ids: tuple[int, ...],
    max_boxes: int,
    masks: bool = False,
    keep_empty: bool = False,
) -> Source:
    """Opens TFRecords of images with boxes, and logs what training leaves out of them.

    Training leaves out the images whose objects have no box. DataError names the file and the
    record of the first error.

    Args:
      category_ids: all categories of the annotations, sorted.
      max_boxes: how many boxes of an image a batch holds.
      masks: whether objects have masks to train on; a crowd then counts as no box.
      keep_empty: whether training has the images without objects, too.
    """
    data_dir, patterns, split, cache, trust_manifest = where
    paths = files.find_shards(data_dir, patterns, split)
    opened = None
    if trust_manifest:
        opened = _from_manifest(data_dir, paths, category_ids, split, masks, keep_empty)
    source, images = opened or _from_scan(paths, category_ids, cache, split, masks, keep_empty)
    if split == "train":
        _report(images, source.shards.total, max_boxes)
        return source
    values, first, number = np.unique(source.image_ids, return_index=True, return_counts=True)
    if len(twice := np.flatnonzero(number > 1)):
        record = source.shards.where(int(first[twice[0]]))
        raise DataError(
            f"{record}: image/source_id={values[twice[0]]} is also the id of another record; an "
            "evaluation must have every image once: write the records again"
        )
    return source


def _from_manifest(
    data_dir: str,
    paths: tuple[str, ...],
    category_ids: tuple[int, ...],
    split: str,
    masks: bool,
    keep_empty: bool,
) -> tuple[Source, np.ndarray] | None:
    """The source from the data manifest; None without one, or if it says too little.

    int64[n] counts the train images with k boxes, as in `_from_scan`.
    """
    content = data_manifest.load(data_dir) if data_dir else None
    if not content or content.category_ids != category_ids:
        return None
    counts = content.counts(data_dir, paths)
    images = content.single_boxes if masks else content.boxes.get("train", ())
    if not counts:
        return None
    ids, upright, others = content.image_ids, content.upright.get("val", ()), ()
    is_complete = len(ids) == sum(counts)
    if split == "train":
        ids, upright, others = (), content.upright.get("train", ()), content.only_crowds * masks
        is_complete = sum(counts) == sum(images)
        is_complete &= keep_empty or images[:1] == (len(others),)
    if not is_complete or (masks and len(upright) != sum(counts)):
        return None
    kept = ~np.isin(np.arange(sum(counts)), others)
    shards = Shards(paths, counts)
    shards = shards.only(kept) if others else shards
    upright = tuple(np.array(upright)[kept].tolist()) if masks else ()
    return Source(shards, category_ids, ids, upright), np.array(images)


def _report(images: np.ndarray, used: int, max_boxes: int) -> None:
    """Logs what training leaves out; `images[k]` train images have k boxes, `used` are examples."""
    total = images.sum()
    if left_out := total - used:
        _log.info("%d of %d train images have no box and are left out", left_out, total)
    if empty := images[0] - left_out:
        text = "%d of %d train images have no objects; config.empty_images=False leaves them out"
        _log.info(text, empty, used)
    if crowded := images[max_boxes + 1 :].sum():
        _log.warning(
            "%d of %d train images have more than config.max_boxes=%d boxes, up to %d: training "
            "keeps the largest",
            crowded,
            total,
            max_boxes,
            np.flatnonzero(images)[-1],
        )


def _from_scan(
    paths: tuple[str, ...],
    category_ids: tuple[int, ...],
    cache: str,
    split: str,
    masks: bool,
    keep_empty: bool,
) -> tuple[Source, np.ndarray]:
    """Opens files whose records it has checked; int64[n]: how many train images have k boxes."""
    settings: dict[str, Any] = {"category_ids": list(category_ids), "split": split}
    settings |= {"masks": split == "train"} if masks else {}
    settings |= {"empty": True} if keep_empty else {}  # older results do not tell the two apart
    needed = masks and split == "train"
    rows = caches.scan_files(
        paths, lambda path: _scan_file(path, category_ids, split, needed), cache, settings
    )
    boxes = [np.array(row["boxes"], np.int64) for row in rows]  # boxes in each record, by file
    files.check_not_empty(paths, list(map(len, boxes)), split)
    least = 0 if keep_empty else 1
    examples = [(split == "eval") | (of_file >= least) for of_file in boxes]
    if not any((split == "eval") | (of_file > 0).any() for of_file in boxes):
        single = " that is not a crowd" if masks else ""
        raise DataError(f"no train records: none of the images in {paths[0]} ... has a box{single}")
    ids = tuple(i for row in rows for i in row["ids"])
    upright = np.array([high for row in rows for high in row["upright"]], bool)
    upright = upright[np.concatenate(examples)].tolist() if masks else ()
    source = Source(Shards.marked(paths, examples), category_ids, ids, tuple(upright))
    return source, np.bincount(np.concatenate(boxes).clip(0))


def _scan_file(
    path: str, category_ids: tuple[int, ...], split: str, masks: bool = False
) -> dict[str, Any]:
    """Facts about the records of a file; DataError names the first error.

    {"boxes": [their number in each record, or -1 if it has objects and no box], "upright": [whether
    each image is higher than wide], "ids": [the id of each image to evaluate]}. With `masks`,
    objects need masks, and crowds do not count as boxes.
    """
    tf = tensorflow()
    features = _image_features() | object_features(masks)
    features |= {MASK: tf.io.RaggedFeature(tf.string)} if masks else {}
    features["image/source_id"] = tf.io.FixedLenFeature([], tf.string, default_value="")
    boxes, upright, ids = [], [], []

    def check(chunk: Any, first: int) -> None:
        parsed = tf.io.parse_example(chunk, features)
        columns: dict[str, Any] = {
            name: np.split(x.values.numpy(), x.row_splits.numpy()[1:-1])
            if isinstance(x, tf.RaggedTensor)
            else x.numpy()
            for name, x in parsed.items()
        }
        for i in range(len(chunk)):
            row, record = {k: v[i] for k, v in columns.items()}, record_name(path, first + i)
            if error := _record_error(row, category_ids):
                raise DataError(f"{record}: {error}")
            if split == "eval":
                ids.append(_image_id(row["image/source_id"], record))
            y0, x0, y1, x1 = (np.clip(row[f"image/object/bbox/{side}"], 0, 1) for side in SIDES)
            has_area = (y1 > y0) & (x1 > x0)
            if len(row.get(CROWD, ())):
                has_area = has_area & (row[CROWD] == 0)
            boxes.append(int(np.count_nonzero(has_area)) or -min(1, len(row[LABEL])))
            upright.append(int(row["image/height"] > row["image/width"]))

    schema = "the schema of detection records (image/encoded, image/object/bbox/xmin, ...)"
    caches.count_records(path, check, schema)
    return {"boxes": boxes, "upright": upright, "ids": ids}


def _record_error(row: dict[str, Any], category_ids: tuple[int, ...]) -> str:
    """The first error in a record, with its fix; "" if it has none."""
    if not row["image/encoded"].startswith(IMAGE_MAGIC):
        return "it is not a JPEG, PNG, BMP or GIF image"
    labels, sides = row[LABEL], [row[f"image/object/bbox/{side}"] for side in SIDES]
    if len(labels) and not len(row.get(MASK, [b""])):
        return NO_MASKS
    others = [row[key] for key in (CROWD, MASK) if len(row.get(key, ()))]
    lengths = {len(values) for values in (labels, *sides, *others)}
    if len(lengths) > 1:
        return f"its objects differ in number from key to key ({sorted(lengths)})"
    unknown = labels[~np.isin(labels, category_ids)]
    if len(unknown):
        few = ", ".join(map(str, category_ids[:4])) + ", ..." * (len(category_ids) > 4)
        return (
            f"category {unknown[0]} is none of the {len(category_ids)} in the annotations ({few}); "
            "the records and the annotations must be of one data set, and number categories alike"
        )
    outside = ~(np.abs(np.array(sides) - 0.5) <= 0.5 + _OUTSIDE)  # also where it is not a number
    if outside.any():
        return (
            f"a box has the coordinate {np.array(sides)[outside][0]:g}, far outside of the image; "
            "coordinates must be shares of its sides (0..1), not pixels"
        )
    return ""


def _image_id(text: bytes, record: str) -> int:
    number = int(text) if re.fullmatch(rb"-?[0-9]{1,20}", text) else 2**31
    if -(2**31) <= number < 2**31:
        return number
    name = text.decode(errors="backslashreplace")
    raise DataError(
        f"{record}: image/source_id={name!r} must be the image's id in "
        "the annotations, an integer from -2^31 to 2^31 - 1; TensorFlow's Object Detection API "
        "writes file names there: such records can be trained on, to evaluate write the ids"
    )
