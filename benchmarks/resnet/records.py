"""Opens labelled images in TFRecords of the ImageNet schema, and checks them."""

from __future__ import annotations

from benchmarks.resnet.settings import Data
from errors import ConfigError
from input_pipeline import Source
from ops import files
from ops.images import manifest
from ops.shards import Shards


def open_split(keys: Data, split: str, cache_dir: str) -> Source:
    """Opens the records, or the set of TFDS, that `config.dataset` names.

    Raises:
      ConfigError, DataError: see `open_records` and `tfds.open_split`.
    """
    if keys.dataset == "records":
        patterns = keys.train_files if split == "train" else keys.eval_files
        index = f"{cache_dir}/{split}.json"
        return open_records(keys.data_dir, patterns, keys.num_label_classes, index, split)
    from benchmarks.resnet.input import tfds

    name = keys.dataset.removeprefix("tfds:")
    return tfds.open_split(name, keys.data_dir, split, keys.num_label_classes)


def data_manifest(keys: Data) -> manifest.DataManifest | None:
    """The data manifest in the folder of the records, if there is one."""
    has_data = keys.dataset == "records" and keys.data_dir
    return manifest.load(keys.data_dir) if has_data else None


def open_records(data_dir: str, patterns: str, num_classes: int, cache: str, split: str) -> Source:
    """Opens TFRecords in the ImageNet schema.

    Each file is read through once to count and check its records, unless the folder's data manifest
    describes it.

    Args:
      data_dir: folder, local or gs://.
      patterns: see `ops.files.find`.
      num_classes: see `valid_labels`.
      cache: see `ops.counting.index`.
      split: "train" or "eval", for messages.

    Raises:
      ConfigError: the data hold more than `num_classes` classes.
      DataError: no file matches; a key is missing, a label out of range, a record damaged or not
        an image (the file and record are named).
    """
    paths = files.find_shards(data_dir, patterns, split)
    content = manifest.load(data_dir) if data_dir else None
    labels = valid_labels(num_classes, len(content.class_names) if content else 0)
    offset, num_classes = labels.start, len(labels)
    if content and (counts := content.counts(data_dir, paths)):
        names = dict(enumerate(content.class_names, 1 - offset))
    else:
        from benchmarks.resnet import scanning

        counts, names = scanning.scan(paths, offset, num_classes, cache)
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
