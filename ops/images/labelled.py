"""Labelled images in TFRecords: the ImageNet schema in a folder of shards, or a TFDS set."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from errors import DataError, one_line
from ops import files
from ops.images.manifest import DataManifest
from ops.shards import READ_BUFFER, Shards, read_fault, record_name, tensorflow

_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"GIF8")  # of the formats of tf.io.decode_image


@dataclasses.dataclass(frozen=True)
class Source:
    """One split of labelled images in TFRecords.

    `label_offset` is subtracted from the stored label; ImageNet records count from 1 because the
    tutorial keeps 0 for a background class.
    """

    shards: Shards
    image_key: str
    label_key: str
    label_offset: int
    num_classes: int
    class_names: tuple[str, ...]

    def parse(self, serialized: Any) -> tuple[Any, Any]:
        """(encoded image, label int32 from 0) of one serialized tf.train.Example, as tensors."""
        tf = tensorflow()
        features = {
            self.image_key: tf.io.FixedLenFeature([], tf.string),
            self.label_key: tf.io.FixedLenFeature([], tf.int64),
        }
        parsed = tf.io.parse_single_example(serialized, features)
        label = parsed[self.label_key] - self.label_offset
        return parsed[self.image_key], tf.cast(label, tf.int32)

    def check(self, batch: dict[str, np.ndarray]) -> None:
        """Raises DataError if a label is out of range.

        TFDS records are not read through before, and files may change during a long run.
        """
        wrong = (batch["label"] < 0) | (batch["label"] >= self.num_classes)
        if wrong.any():
            record = self.shards.where(int(batch["id"][wrong][0]))
            raise DataError(_wrong_label(record, self.label_offset, self.num_classes))


def open_records(
    data_dir: str,
    patterns: str,
    num_classes: int,
    cache: str,
    split: str,
    manifest: DataManifest | None = None,
) -> Source:
    """TFRecords in the ImageNet schema, each file read once to count and to check it.

    Args:
      data_dir: folder, local or gs://.
      patterns: comma-separated file patterns, relative to `data_dir` or absolute.
      num_classes: labels are 1..num_classes; with 1001, 0..1000 (0 = background) as stored,
        unless the manifest names 1001 classes.
      cache: file that keeps the counts for the next start.
      split: "train" or "eval", for messages.
      manifest: the folder's data manifest, if it has one; files as it lists them are not read.

    Raises:
      DataError: no file matches; a key is missing, a label out of range, a record damaged or not
        an image (the file and record are named).
    """
    try:
        paths = files.find(data_dir, patterns, f"{split} records")
        if "-*" in patterns:  # the pattern means all shards, not some by name
            files.check_complete(paths)
    except DataError as error:
        hint = f"set --config.data_dir (or --config.{split}_files) to where the TFRecords are"
        raise DataError(f"{error}; {hint}") from error
    has_background = num_classes == 1001 and (
        manifest is None or len(manifest.class_names) != num_classes
    )
    offset = 0 if has_background else 1
    keys = "image/encoded", "image/class/label", offset, num_classes
    if manifest and (counts := manifest.counts(data_dir, paths)) and sum(counts):
        named = dict(enumerate(manifest.class_names, 1 - offset))
        names = tuple(named.get(label, "") for label in range(num_classes))
        return Source(Shards(paths, counts), *keys, names)

    def scan(path: str) -> dict[str, Any]:
        return _scan_file(path, offset, num_classes)

    results = files.index(paths, scan, cache, {"num_classes": num_classes})
    counts = tuple(result["count"] for result in results)
    if not sum(counts):
        raise DataError(f"no {split} records: the {len(paths)} files {paths[0]} ... are empty")
    named = {int(k): v for result in results for k, v in result["names"].items()}
    names = tuple(named.get(label, "") for label in range(num_classes)) if named else ()
    return Source(Shards(paths, counts), *keys, names)


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
    info, dataset = builder.info, f"config.dataset='tfds:{name}' in {builder.data_dir}"
    wanted = ("train",) if split == "train" else ("validation", "test")
    chosen = next((s for s in wanted if s in info.splits), None)
    if chosen is None:
        raise DataError(
            f"{dataset} has no split {' or '.join(wanted)} (found: {sorted(info.splits) or 'none'})"
            f"; prepare it with: tfds build {name} --data_dir={data_dir or '~/tensorflow_datasets'}"
        )
    is_dict = isinstance(info.features, tfds.features.FeaturesDict)
    connectors: Any = info.features if is_dict else {}
    features: dict[str, Any] = dict(connectors.items())
    label: Any = features.get("label")
    if "image" not in features or not getattr(label, "num_classes", None):
        raise DataError(f"{dataset} is not image classification: its features are {list(features)}")
    if info.file_format != tfds.core.FileFormat.TFRECORD:
        raise DataError(f"{dataset} is stored as {info.file_format}; build it with tfrecord")
    stored = info.splits[chosen]
    shards = Shards(tuple(map(str, stored.filepaths)), tuple(stored.shard_lengths))
    if not shards.total:
        raise DataError(f"{dataset}: its split {chosen} is empty")
    return Source(shards, "image", "label", 0, label.num_classes, tuple(label.names))


def _wrong_label(record: str, offset: int, num_classes: int) -> str:
    return (
        f"{record}: its label is outside {offset}..{num_classes - 1 + offset}; "
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
        labels = parsed["image/class/label"] - offset
        for i, (label, encoded) in enumerate(zip(labels, parsed["image/encoded"], strict=True)):
            record = record_name(path, count + i)
            if not 0 <= label < num_classes:
                raise DataError(_wrong_label(record, offset, num_classes))
            if not encoded.startswith(_MAGIC):
                raise DataError(f"{record} is not a JPEG, PNG, BMP or GIF image")
            if name := parsed["image/class/text"][i] or parsed["image/class/synset"][i]:
                names[str(label)] = name.decode(errors="replace")

    dataset, fault = tf.data.TFRecordDataset(path, buffer_size=READ_BUFFER), ""
    for rows in (256, 1):  # after a fault again, one by one, to name the record
        try:
            for chunk in dataset.skip(count).batch(rows):
                check(chunk)
                count += len(chunk)
                size += sum(16 + len(record) for record in chunk.numpy())
            if size != files.sizes([path])[0]:  # TensorFlow takes a torn length for the end
                raise DataError(f"{record_name(path, count)} is cut short")
            return {"count": count, "names": names}
        except (
            tf.errors.DataLossError,
            tf.errors.InvalidArgumentError,
            UnicodeDecodeError,
        ) as error:
            fault = read_fault(error)
        except tf.errors.OpError as error:
            raise DataError(f"cannot read {path}: {one_line(error)}") from error
    raise DataError(
        f"{record_name(path, count)} is damaged or not in the ImageNet schema "
        f"(keys image/encoded and image/class/label): {fault}"
    )
