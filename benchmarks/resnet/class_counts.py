"""Counts the images of each class, for the weights of the loss and for notes on small data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.data import caches
from common.data.shards import record_name, tensorflow
from common.errors import ConfigError, some
from input_pipeline import Source, wrong_label

_FEW_PER_CLASS = 5  # validation images


def label_counts(source: Source, cache: str) -> np.ndarray:
    """How many examples each class has, int64[num_classes].

    The files are read through once; `cache` is that of `common.data.caches.scan_files`.

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
                raise wrong_label(
                    record, int(labels[wrong][0]), source.label_offset, source.num_classes
                )
            np.add.at(counts, labels, 1)

        caches.count_records(path, add, f"a schema with {source.label_key}")
        return {"counts": counts.tolist()}

    settings = {"labels": source.label_key, "from": source.label_offset, "n": source.num_classes}
    rows = caches.scan_files(source.shards.paths, scan, cache, settings)
    return np.sum([row["counts"] for row in rows], axis=0)


def class_weights(source: Source, cache: str) -> np.ndarray:
    """The weight of each class, f32[K]: n / (K * count), whose mean over the n images is 1.

    Raises:
      ConfigError: a class has no image.
    """
    counts, names = label_counts(source, cache), source.class_names
    if empty := [class_name(names, i) for i in np.flatnonzero(counts == 0)]:
        lack = f"{_subject(empty, len(counts))} no training image and so no weight"
        raise ConfigError(
            f"config.class_weights='auto': {lack}; set --config.class_weights='', or "
            "prepare the data again without them"
        )
    return (counts.sum() / (len(counts) * counts)).astype(np.float32)


def weights_note(weights: np.ndarray, names: tuple[str, ...]) -> str:
    """The smallest and the largest of the class weights, as a sentence."""
    low, high = weights.argmin(), weights.argmax()
    return (
        f"the loss weighs classes from {weights[low]:.3g} ({class_name(names, low)}) "
        f"to {weights[high]:.3g} ({class_name(names, high)})"
    )


def few_notes(source: Source, cache: str) -> list[str]:
    """A sentence about classes with few validation images; [] if there are none."""
    counts, names = label_counts(source, cache), source.class_names
    if few := [class_name(names, i) for i in np.flatnonzero(counts < _FEW_PER_CLASS)]:
        return [
            f"{_subject(few, len(counts))} fewer than {_FEW_PER_CLASS} validation images: "
            "their scores are chance, and so is the choice of the best step; prepare the "
            "data with a larger --validation_fraction"
        ]
    return []


def class_name(names: tuple[str, ...], i: Any) -> str:
    """The name of class i, or its number where the data have no names."""
    return (names[i] if i < len(names) else "") or f"class {i}"


def _subject(names: Sequence[str], total: int) -> str:
    """Subject and verb of a sentence about some of all classes."""
    return f"{len(names)} ({some(names)}) of {total} classes {'has' if len(names) == 1 else 'have'}"
