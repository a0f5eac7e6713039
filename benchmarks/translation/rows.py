"""Checks records of pairs of sentences, packed or one pair each, as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.translation.packing import FEATURES, SIDES
from benchmarks.translation.vocabulary import EOS

Row = dict[str, np.ndarray]  # int64[n] by the names of FEATURES; [0] where a record has none


def of_example(feature: Any) -> Row:
    """The row of a tf.train.Example; `feature` is its `features.feature`."""
    return {
        name: np.array(feature[name].int64_list.value if name in feature else [], np.int64)
        for name in FEATURES
    }


def fault(row: Row, packed: bool, vocab_size: int) -> str:
    """The first fault of a record, with its remedy; "" if it has none."""
    for side in SIDES:
        ids = row[side]
        if not len(ids):
            return f"it has no {side}; mend the record"
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            return (
                f"{side} has the id {wrong}, and the vocabulary {vocab_size:,} entries: the "
                "records were made with another vocabulary"
            )
        if not packed and ids[-1] != EOS:
            return f"{side} does not end with {EOS} (EOS); write the records again"
        if not packed:
            continue
        segments, positions = row[f"{side}_segmentation"], row[f"{side}_position"]
        if not len(ids) == len(segments) == len(positions):
            return f"{side}, its segmentation and its positions differ in length"
        if ((segments > 0) != (ids > 0)).any():
            return f"the segmentation of {side} is not positive exactly where there are tokens"
    if packed and row["inputs_segmentation"].max() != row["targets_segmentation"].max():
        return "inputs and targets have different numbers of segments"
    return ""


def order_fault(row: Row) -> str:
    """The first fault of the segments and positions of a packed row; "" if it has none."""
    for side in SIDES:
        segments, positions = row[f"{side}_segmentation"], row[f"{side}_position"]
        numbers = segments[np.flatnonzero(np.diff(segments, prepend=0) != 0)]
        if numbers[numbers > 0].tolist() != list(range(1, segments.max() + 1)):
            return f"the segments of {side} do not count from 1 in order"
        for number in range(1, int(segments.max()) + 1):
            positions_here = positions[segments == number]
            if (positions_here != np.arange(len(positions_here))).any():
                return f"the positions of segment {number} of {side} do not count from 0"
    return ""


def segment_fault(row: Row) -> str:
    """As `order_fault`; the ends of the segments are checked too."""
    if wrong := order_fault(row):
        return wrong
    for side in SIDES:
        for number in range(1, int(row[f"{side}_segmentation"].max()) + 1):
            ids = row[side][row[f"{side}_segmentation"] == number]
            if ids[-1] != EOS or (ids[:-1] == EOS).any():
                return f"segment {number} of {side} has no {EOS} (EOS) at its end, or one before"
    return ""
