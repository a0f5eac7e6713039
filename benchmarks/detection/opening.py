"""Opens records of images with boxes, and says what training leaves out of them."""

from __future__ import annotations

import logging

import numpy as np

from benchmarks.detection.records import Source
from errors import DataError
from ops import files

_log = logging.getLogger("tpu_suite")


def open_records(
    data_dir: str,
    patterns: str,
    category_ids: tuple[int, ...],
    max_boxes: int,
    cache: str,
    split: str,
    *,
    masks: bool = False,
) -> Source:
    """Opens TFRecords of images with boxes, and logs what training leaves out of them.

    Training leaves out the images without a box. Each file is read through once to count and check
    its records, unless the folder's data manifest describes them.

    Args:
      data_dir: folder, local or gs://.
      patterns: see `ops.files.find`.
      category_ids: all categories of the annotations, sorted.
      max_boxes: how many boxes of an image a batch has room for.
      cache: see `ops.counting.index`.
      split: "train" or "eval".
      masks: whether objects have masks to train on; a crowd then counts as no box.

    Raises:
      DataError: no file matches; a key is missing, a category unknown, a box far outside of its
        image, a record damaged or not an image (the file and record are named); to evaluate, two
        records have the same image id; to train, no record has a box, or the masks are missing.
    """
    paths = files.find_shards(data_dir, patterns, split)
    read = None
    if not masks:  # the manifest knows no orientation
        from benchmarks.detection import described

        read = described.read(data_dir, paths, category_ids, split)
    if read is None:
        from benchmarks.detection import scanning

        read = scanning.read(paths, category_ids, cache, split, masks)
    source, images, flat = read
    if split == "eval":
        _check_unique(source)
    else:
        _report(images, flat, max_boxes)
    return source


def _report(images: np.ndarray, flat: int, max_boxes: int) -> None:
    """Logs what training leaves out; `images[k]` train images have k boxes."""
    total = images.sum()
    if images[0]:
        _log.info("%d of %d train images have no box and are left out", images[0], total)
    if flat:
        _log.info("%d boxes of train images have no area and are left out", flat)
    if crowded := images[max_boxes + 1 :].sum():
        _log.warning(
            "%d of %d train images have more than config.max_boxes=%d boxes, up to %d: training "
            "keeps the largest",
            *(crowded, total, max_boxes, np.flatnonzero(images)[-1]),
        )


def _check_unique(source: Source) -> None:
    """Raises DataError if two records have the same image id."""
    values, first, number = np.unique(source.image_ids, return_index=True, return_counts=True)
    if len(twice := np.flatnonzero(number > 1)):
        value = values[twice[0]]
        record = source.shards.where(int(first[twice[0]]))
        raise DataError(
            f"{record}: image/source_id={value} is also the id of another record; an evaluation "
            "must have every image once: write the records again"
        )
