"""Counts and checks labelled images that no data manifest describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from errors import DataError
from input_pipeline import wrong_label
from ops import counting
from ops.images import pixels
from ops.shards import record_name, tensorflow


def scan(
    paths: Sequence[str], offset: int, num_classes: int, cache: str
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Counts and checks the images of files: (images of each file, names of classes by label).

    `offset` is subtracted from the stored labels; `cache` is that of `ops.counting.index`.

    Raises:
      DataError: a key is missing, a label out of range, a record damaged or not an image.
    """
    settings = {"num_classes": num_classes}
    rows = counting.index(
        paths, lambda path: _scan_file(path, offset, num_classes), cache, settings
    )
    names = {int(label): name for row in rows for label, name in row["names"].items()}
    return tuple(row["count"] for row in rows), names


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
                raise wrong_label(record, offset, num_classes)
            if not encoded.startswith(pixels.MAGIC):
                raise DataError(f"{record} is not a JPEG, PNG, BMP or GIF image")
            if name := parsed["image/class/text"][i] or parsed["image/class/synset"][i]:
                names[str(label)] = name.decode(errors="replace")

    schema = "the ImageNet schema (keys image/encoded and image/class/label)"
    return {"count": counting.scan(path, check, schema), "names": names}
