"""Image-classification sets of TensorFlow Datasets (TFDS), read from their TFRecords."""

from __future__ import annotations

from typing import Any

from errors import ConfigError, DataError, one_line
from input_pipeline import Source
from ops.shards import Shards, tensorflow


def open_split(name: str, data_dir: str, split: str, num_classes: int = 0) -> Source:
    """Opens a prepared set; evaluation ("eval") uses "validation", else "test".

    `name` is as in `tfds.load`, such as "imagenet2012:5.1.0"; `data_dir` is TFDS's data folder,
    local or gs://, "" for the default; `num_classes` is the config's number, 0 for the set's own.

    Raises:
      ConfigError: the set has another number of classes.
      DataError: unknown, not prepared, not image classification, or not stored as TFRecord.
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
