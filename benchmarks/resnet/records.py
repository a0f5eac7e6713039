"""Opens labelled images in TFRecords of the ImageNet schema: counts and checks them."""

from __future__ import annotations

from typing import Any

from benchmarks.resnet.input import tfds
from benchmarks.resnet.settings import Data
from errors import ConfigError, DataError
from input_pipeline import Source, wrong_label
from ops import counting, files
from ops.images import manifest, pixels
from ops.shards import Shards, record_name, tensorflow


def open_split(keys: Data, split: str, cache_dir: str, described: bool = True) -> Source:
    """Opens the records, or the set of TFDS, that `config.dataset` names.

    `described` is whether the data manifest may spare the scan of records.

    Raises:
      ConfigError, DataError: see `open_records` and `tfds.open_split`.
    """
    if keys.dataset == "records":
        patterns = keys.train_files if split == "train" else keys.eval_files
        index = f"{cache_dir}/{split}.json"
        number = keys.num_label_classes
        return open_records(keys.data_dir, patterns, number, index, split, described)
    name = keys.dataset.removeprefix("tfds:")
    return tfds.open_split(name, keys.data_dir, split, keys.num_label_classes)


def data_manifest(keys: Data) -> manifest.DataManifest | None:
    """The data manifest in the folder of the records, if there is one."""
    has_data = keys.dataset == "records" and keys.data_dir
    return manifest.load(keys.data_dir) if has_data else None


def open_records(
    data_dir: str,
    patterns: str,
    num_classes: int,
    cache: str,
    split: str,
    described: bool = True,
) -> Source:
    """Opens TFRecords in the ImageNet schema.

    Each file is read through once to count and check its records, unless the folder's data manifest
    describes it.

    Args:
      data_dir: folder, local or gs://.
      patterns: see `ops.files.find`.
      num_classes: see `valid_labels`.
      cache: see `ops.counting.index`.
      split: "train" or "eval", for messages.
      described: whether the data manifest may spare that.

    Raises:
      ConfigError: the data hold more than `num_classes` classes.
      DataError: no file matches; a key is missing, a label out of range, a record damaged or not
        an image (the file and record are named).
    """
    paths = files.find_shards(data_dir, patterns, split)
    content = manifest.load(data_dir) if data_dir else None
    labels = valid_labels(num_classes, len(content.class_names) if content else 0)
    offset, num_classes = labels.start, len(labels)
    if described and content and (counts := content.counts(data_dir, paths)):
        names = dict(enumerate(content.class_names, 1 - offset))
    else:
        key = {"num_classes": num_classes}
        rows = counting.index(paths, lambda path: _scan_file(path, offset, num_classes), cache, key)
        names = {int(label): name for row in rows for label, name in row["names"].items()}
        counts = tuple(row["count"] for row in rows)
    files.check_not_empty(paths, counts, split)
    class_names = tuple(names.get(label, "") for label in range(num_classes)) if names else ()
    image_and_label = "image/encoded", "image/class/label"
    return Source(Shards(paths, counts), *image_and_label, offset, num_classes, class_names)


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
                raise wrong_label(record, int(label), offset, num_classes)
            if not encoded.startswith(pixels.MAGIC):
                raise DataError(f"{record} is not a JPEG, PNG, BMP or GIF image")
            if name := parsed["image/class/text"][i] or parsed["image/class/synset"][i]:
                names[str(label)] = name.decode(errors="replace")

    schema = "the ImageNet schema (keys image/encoded and image/class/label)"
    return {"count": counting.scan(path, check, schema), "names": names}
