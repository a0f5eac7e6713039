"""Counts and checks the records of images with boxes: the first run in a workdir reads all once."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from benchmarks.detection.records import (
    CROWD,
    LABEL,
    MASK,
    NO_MASKS,
    SIDES,
    Source,
    image_features,
    marked,
    object_features,
)
from errors import DataError
from ops import counting, files
from ops.images.pixels import MAGIC
from ops.shards import record_name, tensorflow

_OUTSIDE = 0.5  # how far a box may reach beyond the image, as a share of its side


def read(
    paths: tuple[str, ...], category_ids: tuple[int, ...], cache: str, split: str, masks: bool
) -> tuple[Source, np.ndarray, int]:
    """Opens files whose records it has checked.

    Arguments are those of `opening.open_records`.

    Returns:
      (source, int64[n]: how many train images have k boxes, the number of boxes without an area).

    Raises:
      DataError: the first fault, with its file and record.
    """
    settings: dict[str, Any] = {"category_ids": list(category_ids), "split": split}
    settings |= {"masks": split == "train"} if masks else {}
    needed = masks and split == "train"
    rows = counting.index(
        paths, lambda path: _scan_file(path, category_ids, split, needed), cache, settings
    )
    boxes = [np.array(row["boxes"], np.int64) for row in rows]  # of each record, by file
    files.check_not_empty(paths, list(map(len, boxes)), split)
    examples = [(split == "eval") | (of_file > 0) for of_file in boxes]
    if not any(of_file.any() for of_file in examples):
        raise DataError(f"no train records: none of the images in {paths[0]} ... has a box")
    ids = tuple(i for row in rows for i in row["ids"])
    upright = np.array([high for row in rows for high in row["upright"]], bool)
    upright = upright[np.concatenate(examples)].tolist() if masks else ()
    source = Source(marked(paths, examples), category_ids, ids, tuple(upright))
    return source, np.bincount(np.concatenate(boxes)), sum(row["flat"] for row in rows)


def _scan_file(
    path: str, category_ids: tuple[int, ...], split: str, masks: bool = False
) -> dict[str, Any]:
    """What is known of the records of a file.

    {"boxes": [of each], "upright": [whether each is higher than wide], "ids": [of each image to
    evaluate], "flat": boxes without area}. With `masks`, objects need them, and a crowd counts as
    no box. DataError names the first fault.
    """
    tf = tensorflow()
    features = image_features() | object_features(masks)
    features |= {MASK: tf.io.RaggedFeature(tf.string)} if masks else {}
    features["image/source_id"] = tf.io.FixedLenFeature([], tf.string, default_value="")
    boxes, upright, ids, flat = [], [], [], 0

    def check(chunk: Any, first: int) -> None:
        nonlocal flat
        parsed = tf.io.parse_example(chunk, features)
        columns = {name: _rows(values) for name, values in parsed.items()}
        for i in range(len(chunk)):
            row, record = {k: v[i] for k, v in columns.items()}, record_name(path, first + i)
            if fault := _fault(row, category_ids):
                raise DataError(f"{record}: {fault}")
            if split == "eval":
                ids.append(_image_id(row["image/source_id"], record))
            has_area, single = _has_area(row), _single(row)
            boxes.append(int(np.count_nonzero(has_area & single)))
            upright.append(int(row["image/height"] > row["image/width"]))
            flat += int(np.count_nonzero(~has_area))

    schema = "the schema of detection records (image/encoded, image/object/bbox/xmin, ...)"
    counting.scan(path, check, schema)
    return {"boxes": boxes, "upright": upright, "ids": ids, "flat": flat}


def _rows(values: Any) -> list[Any]:
    """The value of each record, from a tensor or a ragged one."""
    if not hasattr(values, "row_splits"):
        return list(values.numpy())
    return np.split(values.values.numpy(), values.row_splits.numpy()[1:-1])


def _fault(row: dict[str, Any], category_ids: tuple[int, ...]) -> str:
    """The first fault of a record, with its remedy; "" if it has none."""
    if not row["image/encoded"].startswith(MAGIC):
        return "it is not a JPEG, PNG, BMP or GIF image"
    labels, sides = row[LABEL], [row[f"image/object/bbox/{side}"] for side in SIDES]
    if len(labels) and not len(row.get(MASK, [b""])):
        return NO_MASKS
    others = [row[key] for key in (CROWD, MASK) if len(row.get(key, ()))]
    lengths = {len(values) for values in (labels, *sides, *others)}
    if len(lengths) > 1:
        return f"its objects differ in number from key to key ({sorted(lengths)}); mend the record"
    unknown = labels[~np.isin(labels, category_ids)]
    if len(unknown):
        return (
            f"category {unknown[0]} is none of the {len(category_ids)} in the annotations; the "
            "records and the annotations must be of one data set"
        )
    outside = ~(np.abs(np.array(sides) - 0.5) <= 0.5 + _OUTSIDE)  # also where it is not a number
    if outside.any():
        return (
            f"a box has the coordinate {np.array(sides)[outside][0]:g}, far outside of the image; "
            "coordinates must be shares of its sides (0..1), not pixels"
        )
    return ""


def _has_area(row: dict[str, Any]) -> np.ndarray:
    """bool[n], of the objects of a record."""
    y0, x0, y1, x1 = (np.clip(row[f"image/object/bbox/{side}"], 0, 1) for side in SIDES)
    return (y1 > y0) & (x1 > x0)


def _single(row: dict[str, Any]) -> np.ndarray:
    """bool[n]: which objects of a record are no crowds, if that was asked and is known."""
    crowd = row.get(CROWD, ())
    return crowd == 0 if len(crowd) else np.ones(len(row[LABEL]), bool)


def parse_id(text: bytes) -> int | None:
    """The id of an image in a record's image/source_id; None if it is no number of 32 bits."""
    number = int(text) if re.fullmatch(rb"-?[0-9]{1,20}", text) else 2**31
    return number if -(2**31) <= number < 2**31 else None


def _image_id(text: bytes, record: str) -> int:
    if (number := parse_id(text)) is not None:
        return number
    raise DataError(
        f"{record}: image/source_id={text.decode(errors='replace')!r} must be the image's id in "
        "the annotations, a whole number from -2^31 to 2^31 - 1"
    )
