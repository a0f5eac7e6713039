"""Labelled images in TFRecords: the ImageNet schema in a folder of shards, or a TFDS set."""

from __future__ import annotations

import dataclasses
from typing import Any

from errors import one_line
from ops import files
from ops import shards as records
from ops.images.manifest import Manifest
from ops.shards import DataError, tensorflow

_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"GIF8")  # what tf.io.decode_image reads


@dataclasses.dataclass(frozen=True)
class Source:
    """One split of labelled images in TFRecords.

    `label_offset` is subtracted from the stored label; ImageNet records count from 1 because the
    tutorial keeps 0 for a background class.
    """

    shards: records.Shards
    image_key: str
    label_key: str
    label_offset: int
    num_classes: int
    class_names: tuple[str, ...]

    def parse(self, serialized: Any) -> tuple[Any, Any]:
        """(encoded image, label from 0) of one serialized tf.train.Example, as tensors."""
        tf = tensorflow()
        features = {
            self.image_key: tf.io.FixedLenFeature([], tf.string),
            self.label_key: tf.io.FixedLenFeature([], tf.int64),
        }
        parsed = tf.io.parse_single_example(serialized, features)
        return parsed[self.image_key], parsed[self.label_key] - self.label_offset

    def where(self, example: int) -> str:
        """The place of an example in words."""
        path, record = self.shards.place(example)
        return f"{path}, record {record} (counted from 0)"

    def wrong_label(self, place: str) -> str:
        """What to say of a label that is out of range."""
        return _wrong_label(place, self.label_offset, self.num_classes)


def open_records(
    data_dir: str,
    patterns: str,
    num_classes: int,
    cache: str,
    split: str,
    manifest: Manifest | None = None,
) -> Source:
    """TFRecords in the ImageNet schema, each file read once to count and to check it.

    Args:
      data_dir: folder, local or gs://.
      patterns: comma-separated file patterns, relative to `data_dir` or absolute.
      num_classes: labels are 1..num_classes; with 1001, 0..1000 (0 = background) as stored,
        unless the manifest names 1001 classes.
      cache: file that keeps the counts for the next start.
      split: "train" or "eval", for messages.
      manifest: the folder's, if it has one; files that are as it says are not read.

    Raises:
      DataError: no file matches; a key is missing, a label out of range, a record damaged or not
        an image (the file and record are named).
    """
    try:
        paths = files.find(data_dir, patterns, f"{split} records")
        if "-*" in patterns:  # the whole set is meant, not a part of it by name
            files.check_complete(paths)
    except DataError as error:
        hint = f"set --config.data_dir (or --config.{split}_files) to where the TFRecords are"
        raise DataError(f"{error}; {hint}") from error
    own = manifest is not None and len(manifest.class_names) == num_classes
    offset = 0 if num_classes == 1001 and not own else 1
    keys = "image/encoded", "image/class/label", offset, num_classes
    if manifest and (known := manifest.counts(data_dir, paths)) and sum(known):
        labels = range(offset, offset + num_classes)
        described = dict(enumerate(manifest.class_names, 1))
        names = tuple(described.get(label, "") for label in labels)
        return Source(records.Shards(paths, known), *keys, names)

    def scan(path: str) -> dict[str, Any]:
        return _scan_file(path, offset, num_classes)

    results = files.index(paths, scan, cache, {"num_classes": num_classes})
    counts = tuple(result["count"] for result in results)
    if not sum(counts):
        raise DataError(f"no {split} records: the {len(paths)} files {paths[0]} ... are empty")
    found = {int(k): v for result in results for k, v in result["names"].items()}
    names = tuple(found.get(label, "") for label in range(num_classes)) if found else ()
    return Source(records.Shards(paths, counts), *keys, names)


def open_tfds(name: str, data_dir: str, split: str) -> Source:
    """A prepared TFDS image-classification set; evaluation uses "validation", else "test".

    Args:
      name: as in `tfds.load`, e.g. "imagenet2012" or "imagenet2012:5.1.0".
      data_dir: TFDS data folder, local or gs://; "" is TFDS's default.
      split: "train" or "eval".

    Raises:
      DataError: unknown, not prepared, not image classification, or not stored as TFRecord.
    """
    tensorflow()
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=data_dir or None)
    except (tfds.core.DatasetNotFoundError, AssertionError, ImportError, ValueError) as error:
        fault = one_line(error)
        raise DataError(f"config.dataset='tfds:{name}' cannot be opened: {fault}") from error
    info, where = builder.info, f"config.dataset='tfds:{name}' in {builder.data_dir}"
    wanted = ("train",) if split == "train" else ("validation", "test")
    chosen = next((s for s in wanted if s in info.splits), None)
    if chosen is None:
        raise DataError(
            f"{where} has no split {' or '.join(wanted)} (found: {sorted(info.splits) or 'none'}); "
            f"prepare it with: tfds build {name} --data_dir={data_dir or '~/tensorflow_datasets'}"
        )
    named: Any = info.features if isinstance(info.features, tfds.features.FeaturesDict) else {}
    features = dict(named.items())
    label: Any = features.get("label")
    if "image" not in features or not getattr(label, "num_classes", None):
        raise DataError(f"{where} is not image classification: its features are {list(features)}")
    if info.file_format != tfds.core.FileFormat.TFRECORD:
        raise DataError(f"{where} is stored as {info.file_format}; build it with tfrecord")
    found = info.splits[chosen]
    shards = records.Shards(tuple(map(str, found.filepaths)), tuple(found.shard_lengths))
    if not shards.total:
        raise DataError(f"{where}: its split {chosen} is empty")
    return Source(shards, "image", "label", 0, label.num_classes, tuple(label.names))


def _wrong_label(place: str, offset: int, num_classes: int) -> str:
    return (
        f"{place}: its label is outside {offset}..{num_classes - 1 + offset}; "
        f"set --config.num_label_classes to what the data hold, or mend the record"
    )


def _scan_file(path: str, offset: int, num_classes: int) -> dict[str, Any]:
    """{"count", "names": {label from 0: name}} of one file; DataError names its first fault."""
    tf = tensorflow()
    optional = tf.io.FixedLenFeature([], tf.string, default_value="")
    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
        "image/class/text": optional,
        "image/class/synset": optional,
    }
    count, size, names = 0, 0, {}

    def check(chunk: Any) -> None:
        parsed = {k: v.numpy() for k, v in tf.io.parse_example(chunk, features).items()}
        heads = tf.strings.substr(parsed["image/encoded"], 0, 4).numpy()
        labels = parsed["image/class/label"] - offset
        for i, (label, head) in enumerate(zip(labels, heads, strict=True)):
            place = f"{path}, record {count + i} (counted from 0)"
            if not 0 <= label < num_classes:
                raise DataError(_wrong_label(place, offset, num_classes))
            if not head.startswith(_MAGIC):
                raise DataError(f"{place} is not a JPEG, PNG, BMP or GIF image")
            name = parsed["image/class/text"][i] or parsed["image/class/synset"][i]
            if name:
                names[str(label)] = name.decode(errors="replace")

    dataset, fault = tf.data.TFRecordDataset(path, buffer_size=4 << 20), ""
    for rows in (256, 1):  # after a fault again, one by one, to name the record
        try:
            for chunk in dataset.skip(count).batch(rows):
                check(chunk)
                count += len(chunk)
                size += sum(16 + len(record) for record in chunk.numpy())
            if size != files.sizes([path])[0]:  # TensorFlow takes a torn length for the end
                raise DataError(f"{path}, record {count} (counted from 0) is cut short")
            return {"count": count, "names": names}
        except (
            tf.errors.DataLossError,
            tf.errors.InvalidArgumentError,
            UnicodeDecodeError,
        ) as error:
            fault = one_line(error)
        except tf.errors.OpError as error:
            raise DataError(f"cannot read {path}: {one_line(error)}") from error
    raise DataError(
        f"{path}, record {count} (counted from 0) is damaged or not in the ImageNet schema "
        f"(keys image/encoded and image/class/label): {fault}"
    )
