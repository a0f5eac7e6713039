"""Counts the training images of each class, for the weights of the loss."""

from typing import Any

import numpy as np

from common.data import caches
from common.data.shards import record_name, tensorflow
from common.errors import ConfigError, some
from input_pipeline import Source, wrong_label


def class_weights(source: Source, cache: str) -> np.ndarray:
    """The weight of each class, f32[K]: n / (K * count), whose mean over the n images is 1.

    The files are read through once; `common.data.caches.scan_files` keeps the counts in `cache`.

    Raises:
      ConfigError: a class has no image.
      DataError: a label is out of range, or a record is damaged.
    """
    key, offset, number = source.label_key, source.label_offset, source.num_classes
    tf = tensorflow()
    features = {key: tf.io.FixedLenFeature([], tf.int64)}

    def scan(path: str) -> dict[str, Any]:
        counts = np.zeros(number, np.int64)

        def add(chunk: Any, first: int) -> None:
            labels = tf.io.parse_example(chunk, features)[key].numpy() - offset
            wrong = (labels < 0) | (labels >= number)
            if wrong.any():
                record = record_name(path, first + int(wrong.argmax()))
                raise wrong_label(record, int(labels[wrong][0]), offset, number)
            np.add.at(counts, labels, 1)

        caches.count_records(path, add, f"a schema with {key}")
        return {"counts": counts.tolist()}

    settings = {"labels": key, "from": offset, "n": number}
    rows = caches.scan_files(source.shards.paths, scan, cache, settings)
    counts = np.sum([row["counts"] for row in rows], axis=0)
    if empty := [class_name(source.class_names, i) for i in np.flatnonzero(counts == 0)]:
        raise ConfigError(
            f"config.class_weights='auto': {len(empty)} ({some(empty)}) of {number} classes "
            "have no training image and so no weight; set --config.class_weights='', or "
            "prepare the data again without them"
        )
    return (counts.sum() / (number * counts)).astype(np.float32)


def class_name(names: tuple[str, ...], i: Any) -> str:
    """The name of class i, or its number where the data have no names."""
    return (names[i] if i < len(names) else "") or f"class {i}"
