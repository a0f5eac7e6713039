"""Opens labelled images: TFRecords of the ImageNet schema, counted and checked, or sets of TFDS.

Also counts the images of each class, for the weights of the loss.
"""

from typing import Any

import numpy as np

from benchmarks.base import distinct
from benchmarks.records import RecordFiles, labels_and_groups
from benchmarks.resnet.settings import Data
from common.data import caches, data_manifest, decoding, files
from common.data.shards import Shards, record_name
from common.errors import ConfigError, DataError, one_line, some
from common.tensorflow import tensorflow
from input_pipeline import Source, wrong_label

_FEW_CLASSES = 50  # scores of more classes would be too many curves
IMAGENET_COUNTS = {"train": 1_281_167, "eval": 50_000, "classes": 1_000}  # Russakovsky et al. 2015


def load_data_manifest(keys: Data) -> data_manifest.DataManifest | None:
    """The data manifest in the folder of the records, if there is one."""
    has_data = keys.dataset == "records" and keys.data_dir
    return data_manifest.load(keys.data_dir) if has_data else None


def open_records(where: RecordFiles, num_classes: int, several: bool = False) -> Source:
    """Opens TFRecords in the ImageNet schema.

    Each file is read through once to count and check its records, unless the folder's data manifest
    describes it. `num_classes` is the config's number; 0 takes the number of the data. `several`
    says whether a record has a list of labels.

    ConfigError: the data hold more than `num_classes` classes. DataError: no file matches; or names
    the record that lacks a key, has a label out of range, is damaged or not an image.
    """
    data_dir, patterns, split, cache, trust_manifest = where
    paths = files.find_shards(data_dir, patterns, split)
    content = data_manifest.load(data_dir) if data_dir else None
    labels = valid_labels(num_classes, len(content.class_names) if content else 0)
    offset, num_classes = labels.start, len(labels)
    if trust_manifest and content and (counts := content.counts(data_dir, paths)):
        names = dict(enumerate(content.class_names, 1 - offset))
    else:
        key = {"num_classes": num_classes} | ({"several": True} if several else {})
        rows = caches.scan_files(
            paths, lambda path: _scan_file(path, offset, num_classes, several), cache, key
        )
        names = {int(label): name for row in rows for label, name in row["names"].items()}
        counts = tuple(row["count"] for row in rows)
    files.check_not_empty(paths, counts, split)
    class_names = tuple(names.get(label, "") for label in range(num_classes)) if names else ()
    image_and_label = "image/encoded", "image/class/label"
    shards = Shards(paths, counts)
    return Source(shards, *image_and_label, offset, num_classes, class_names, several)


def valid_labels(num_classes: int, data_classes: int) -> range:
    """The labels that records may have: 1..K; of 1001 classes 0..1000, where 0 is the background.

    `num_classes` is `config.num_label_classes`; 0 takes `data_classes`, else ImageNet's 1,000. The
    data manifest names `data_classes`; 0 without one. If it names 1001 classes, none of them is a
    background. ConfigError: it names more than `num_classes`.
    """
    num_classes = num_classes or data_classes or IMAGENET_COUNTS["classes"]
    if num_classes < data_classes:
        raise ConfigError(
            f"config.num_label_classes={num_classes}, but the data manifest names {data_classes} "
            "classes: leave it at 0, which takes the number of the data"
        )
    first = 0 if num_classes == 1001 != data_classes else 1
    return range(first, first + num_classes)


def _scan_file(path: str, offset: int, num_classes: int, several: bool = False) -> dict[str, Any]:
    """{"count", "names": {label from 0: name}} of a file; DataError names its first bad record."""
    tf = tensorflow()
    number, optional = tf.io.FixedLenFeature([], tf.int64), tf.io.FixedLenFeature([], tf.string, "")
    if several:
        number, optional = tf.io.RaggedFeature(tf.int64), tf.io.RaggedFeature(tf.string)
    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": number,
        "image/class/text": optional,
        "image/class/synset": optional,
    }
    names = {}

    def check(chunk: Any, first: int) -> None:
        parsed = {k: v.numpy() for k, v in tf.io.parse_example(chunk, features).items()}
        keys = ("image/class/label", "image/class/text", "image/class/synset")
        for i, encoded in enumerate(parsed["image/encoded"]):
            record = record_name(path, first + i)
            labels, texts, synsets = (np.atleast_1d(parsed[key][i]) for key in keys)
            for label in (labels - offset).tolist():
                if not 0 <= label < num_classes:
                    raise wrong_label(record, label, offset, num_classes)
            if not encoded.startswith(decoding.IMAGE_MAGIC):
                raise DataError(f"{record} is not a JPEG, PNG, BMP or GIF image")
            known = texts if any(texts) else synsets
            for label, name in zip(labels - offset, filter(None, known), strict=False):
                names[str(label)] = name.decode(errors="replace")

    schema = "the ImageNet schema (keys image/encoded and image/class/label)"
    return {"count": caches.count_records(path, check, schema), "names": names}


def open_tfds(name: str, data_dir: str, split: str, num_classes: int = 0) -> Source:
    """Opens a prepared set; evaluation ("eval") uses "validation", else "test".

    `name` is as in `tfds.load`, such as "imagenet2012:5.1.0"; `data_dir` is TFDS's data folder,
    local or gs://, "" for the default; `num_classes` is the config's number, 0 for the set's
    number. Raises ConfigError if the set has another number of classes, and DataError if it is
    unknown, not prepared, not image classification, or not stored as TFRecord.
    """
    tensorflow()
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=data_dir or None)
    except (tfds.core.DatasetNotFoundError, AssertionError, ImportError, ValueError) as error:
        reason = one_line(error)
        raise DataError(f"config.dataset='tfds:{name}' cannot be opened: {reason}") from error
    info, dataset = builder.info, f"config.dataset='tfds:{name}' in {builder.data_dir}"
    names = ("train",) if split == "train" else ("validation", "test")
    stored = next((info.splits[s] for s in names if s in info.splits), None)
    if stored is None:
        raise DataError(
            f"{dataset} has no split {' or '.join(names)} (found: {sorted(info.splits) or 'none'})"
            f"; prepare it with: tfds build {name} --data_dir={data_dir or '~/tensorflow_datasets'}"
        )
    features: dict[str, Any] = {}
    if isinstance(info.features, tfds.features.FeaturesDict):
        features = dict(info.features.items())
    label: Any = features.get("label")
    if "image" not in features or not getattr(label, "num_classes", None):
        raise DataError(f"{dataset} is not image classification: its features are {list(features)}")
    if info.file_format != tfds.core.FileFormat.TFRECORD:
        raise DataError(f"{dataset} is stored as {info.file_format}; build it with tfrecord")
    shards = Shards(tuple(map(str, stored.filepaths)), tuple(stored.shard_lengths))
    if not shards.total:
        raise DataError(f"{dataset}: its split {stored.name} is empty")
    if num_classes not in (0, label.num_classes):
        raise ConfigError(
            f"config.num_label_classes={num_classes}, but {name} has {label.num_classes}: leave it "
            "at 0, which takes the number of the data"
        )
    return Source(shards, "image", "label", 0, label.num_classes, tuple(label.names))


def class_weights(source: Source, keys: Data, cache: str) -> np.ndarray:
    """The weight of each class, f32[K]: n / (K * count), whose mean over the n images is 1.

    ConfigError: a class has no image. See `_class_counts`.
    """
    number, counts = source.num_classes, _class_counts(source, keys, cache)
    if empty := [class_name(source.class_names, i) for i in np.flatnonzero(counts == 0)]:
        raise ConfigError(
            f"config.class_weights='auto': {len(empty)} ({some(empty)}) of {number} classes "
            "have no training image and so no weight; set --config.class_weights='', or "
            "prepare the data again without them"
        )
    return (counts.sum() / (number * counts)).astype(np.float32)


def _class_counts(source: Source, keys: Data, cache: str) -> np.ndarray:
    """The images of each class, int[K]: the data manifest's, which are of complete splits.

    Else the records are read; `benchmarks.records.labels_and_groups` explains `cache`. DataError: a
    label is out of range.
    """
    offset, number, shards = source.label_offset, source.num_classes, source.shards
    content = None if shards.left_out else load_data_manifest(keys)
    if content and (listed := content.class_counts(keys.data_dir, shards.paths)):
        return np.pad(listed, (1 - offset, number - len(listed) - 1 + offset))
    labels = labels_and_groups(shards, cache, source.label_key)[0]
    assert labels is not None
    wrong = (labels < offset) | (labels >= offset + number)
    if wrong.any():
        example = int(wrong.argmax())
        record, label = shards.where(example), int(labels[example]) - offset
        raise wrong_label(record, label, offset, number)
    return np.bincount(labels - offset, minlength=number)


def shown_classes(source: Source | None, keys: Data, number: int) -> list[str]:
    """The names of `number` classes if so few that each has scores of its own; else [].

    Before the data are opened, `source` is None, and the names are the data manifest's.
    """
    if number > _FEW_CLASSES:
        return []
    content = source or load_data_manifest(keys)
    names = content.class_names if content else ()
    return distinct([(i, class_name(names, i)) for i in range(number)])


def class_name(names: tuple[str, ...], i: Any) -> str:
    """The name of class i, or its number where the data have no names."""
    return (names[i] if i < len(names) else "") or f"class {i}"
