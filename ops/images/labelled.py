"""Opens labelled images in TFRecords of the ImageNet schema, and checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from errors import ConfigError, DataError
from ops import files, scanning
from ops.images import manifest
from ops.shards import Shards, record_name, tensorflow

MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"GIF8")  # of the formats of tf.io.decode_image
_NAME_KEYS = ("image/filename", "file_name")  # of the schema, and of TFDS


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

    def image(self, serialized: bytes) -> tuple[bytes, str]:
        """(encoded image, the name of its file or "") of one serialized tf.train.Example."""
        features = tensorflow().train.Example.FromString(serialized).features.feature
        names = [features[key].bytes_list.value for key in _NAME_KEYS if key in features]
        name = names[0][0].decode(errors="replace") if names and names[0] else ""
        return features[self.image_key].bytes_list.value[0], name

    def check(self, batch: dict[str, np.ndarray]) -> None:
        """Raises DataError if a label is out of range.

        TFDS records are not read through before, and files may change during a long run.
        """
        wrong = (batch["label"] < 0) | (batch["label"] >= self.num_classes)
        if wrong.any():
            record = self.shards.where(int(batch["id"][wrong][0]))
            raise DataError(_wrong_label(record, self.label_offset, self.num_classes))


def open_records(data_dir: str, patterns: str, num_classes: int, cache: str, split: str) -> Source:
    """Opens TFRecords in the ImageNet schema.

    Each file is read through once to count and check its records, unless the folder's data manifest
    describes it.

    Args:
      data_dir: folder, local or gs://.
      patterns: see `ops.files.find`.
      num_classes: labels are 1..num_classes; with 1001, 0..1000 (0 = background) as stored,
        unless the data manifest names 1001 classes.
      cache: see `ops.files.index`.
      split: "train" or "eval", for messages.

    Raises:
      ConfigError: the data hold more than `num_classes` classes.
      DataError: no file matches; a key is missing, a label out of range, a record damaged or not
        an image (the file and record are named).
    """
    try:
        paths = find_shards(data_dir, patterns, split)
    except DataError as error:
        remedy = f"set --config.data_dir (or --config.{split}_files) to where the TFRecords are"
        raise DataError(f"{error}; {remedy}") from error
    content = manifest.load(data_dir) if data_dir else None
    offset = valid_labels(num_classes, len(content.class_names) if content else 0).start
    if content and (counts := content.counts(data_dir, paths)):
        names = dict(enumerate(content.class_names, 1 - offset))
    else:
        settings = {"num_classes": num_classes}
        rows = files.index(
            paths, lambda path: _scan_file(path, offset, num_classes), cache, settings
        )
        counts = tuple(row["count"] for row in rows)
        names = {int(label): name for row in rows for label, name in row["names"].items()}
    check_not_empty(paths, counts, split)
    class_names = tuple(names.get(label, "") for label in range(num_classes)) if names else ()
    keys = "image/encoded", "image/class/label"
    return Source(Shards(paths, counts), *keys, offset, num_classes, class_names)


def find_shards(data_dir: str, patterns: str, split: str) -> tuple[str, ...]:
    """The files of a split, sorted.

    Raises:
      DataError: no file matches, a shard is missing, or two sets of shards are in one folder.
    """
    paths = files.find(data_dir, patterns, f"{split} records")
    if "-*" in patterns:  # the pattern means all shards, not some by name
        files.check_complete(paths)
    return paths


def check_not_empty(paths: Sequence[str], counts: Sequence[int], split: str) -> None:
    """Raises DataError if the files of a split hold no record at all."""
    if not sum(counts):
        raise DataError(f"no {split} records: the {len(paths)} files {paths[0]} ... are empty")


def label_counts(source: Source, cache: str) -> np.ndarray:
    """How many examples each class has, int64[num_classes].

    The files are read through once; `cache` is that of `ops.files.index`.

    Raises:
      DataError: a label is out of range, or a record is damaged.
    """
    tf = tensorflow()
    features = {source.label_key: tf.io.FixedLenFeature([], tf.int64)}

    def scan(path: str) -> dict[str, Any]:
        counts = np.zeros(source.num_classes, np.int64)

        def add(chunk: Any, first: int) -> None:
            labels = tf.io.parse_example(chunk, features)[source.label_key].numpy()
            labels = labels - source.label_offset
            wrong = (labels < 0) | (labels >= source.num_classes)
            if wrong.any():
                record = record_name(path, first + int(wrong.argmax()))
                raise DataError(_wrong_label(record, source.label_offset, source.num_classes))
            np.add.at(counts, labels, 1)

        scanning.scan(path, add, f"a schema with {source.label_key}")
        return {"counts": counts.tolist()}

    settings = {"labels": source.label_key, "from": source.label_offset, "n": source.num_classes}
    rows = files.index(source.shards.paths, scan, cache, settings)
    return np.sum([row["counts"] for row in rows], axis=0)


def valid_labels(num_classes: int, data_classes: int) -> range:
    """The labels that records may have: 1..K; of 1001 classes 0..1000, where 0 is the background.

    Args:
      num_classes: `config.num_label_classes`; 0 takes `data_classes`, else ImageNet's 1,000.
      data_classes: how many the data manifest names; 0 without one. If it names 1001 itself, none
        of them is a background.

    Raises:
      ConfigError: the data manifest names more than `num_classes` classes.
    """
    num_classes = num_classes or data_classes or 1000
    if num_classes < data_classes:
        raise ConfigError(
            f"config.num_label_classes={num_classes}, but the data manifest names {data_classes} "
            "classes: leave it at 0, which takes the number of the data"
        )
    first = 0 if num_classes == 1001 != data_classes else 1
    return range(first, first + num_classes)


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
    names = {}

    def check(chunk: Any, first: int) -> None:
        parsed = {k: v.numpy() for k, v in tf.io.parse_example(chunk, features).items()}
        labels = parsed["image/class/label"] - offset
        for i, (label, encoded) in enumerate(zip(labels, parsed["image/encoded"], strict=True)):
            record = record_name(path, first + i)
            if not 0 <= label < num_classes:
                raise DataError(_wrong_label(record, offset, num_classes))
            if not encoded.startswith(MAGIC):
                raise DataError(f"{record} is not a JPEG, PNG, BMP or GIF image")
            if name := parsed["image/class/text"][i] or parsed["image/class/synset"][i]:
                names[str(label)] = name.decode(errors="replace")

    schema = "the ImageNet schema (keys image/encoded and image/class/label)"
    return {"count": scanning.scan(path, check, schema), "names": names}
