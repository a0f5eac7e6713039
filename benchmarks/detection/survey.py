"""Looks for what spoils a training or a score although all records can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from common.errors import count, some

FIT = 0.5  # the IoU from which on an anchor fits an object
_MANY = 0.5  # of the objects
_TINY, _FEW_TINY = 8, 0.05  # pixels, and the share of the objects that may be smaller
_FEW = 20  # objects of a category
_SSD_SIDE, _MASK_SIDES = 300, np.array([800, 1333])  # of the recipes' images
_FACTORS = (0.125, 0.25, 0.5, 2.0, 4.0)  # other sizes of anchors to try

Finding = tuple[str, str, str]  # see `benchmarks.base.Hints.remarks`
# Anchors around each point of a square grid: float64[n], the points along a side in pixels, and
# float64[k, 2], height and width of the anchors of a point.
Grid = tuple[np.ndarray, np.ndarray]


class Objects(NamedTuple):
    """The m objects of n images; `coco.Annotations` has the same columns.

    Attributes:
      rows: int64[m], the image of each.
      category_ids: int64[m].
      boxes: float64[m, 4]; only `unfit` asks for (y0, x0, y1, x1) as shares of the image.
      crowd: bool[m].
      sizes: int64[n, 2], height and width of the images in pixels.
      file_names: the names of the images, or their records.
    """

    rows: np.ndarray
    category_ids: np.ndarray
    boxes: np.ndarray
    crowd: np.ndarray
    sizes: np.ndarray
    file_names: Sequence[str]


def oddities(objects: Any) -> list[Finding]:
    """Labels that cannot be meant: categories whose objects are all crowds, and copies of boxes.

    `objects` are `Objects` or `coco.Annotations`.
    """
    findings: list[Finding] = []
    total, labels = len(objects.rows), objects.category_ids
    lost = np.setdiff1d(labels, labels[~objects.crowd])
    if len(lost):
        number = int(np.isin(labels, lost).sum())
        whose = "" if number == total else f" of {len(lost):,} categories, such as {lost[0]},"
        text = f"all {number:,} objects{whose} are crowds (iscrowd 1): no score counts them"
        fix = "set iscrowd to 0 where an annotation is of one object"
        findings.append(("warn", text + ", and Mask R-CNN does not learn them", fix))
    single = np.flatnonzero(~objects.crowd)
    columns = np.column_stack([objects.rows, labels, objects.boxes])[single]
    _, first, times = np.unique(columns, axis=0, return_index=True, return_counts=True)
    if copies := len(single) - len(first):
        image = objects.file_names[objects.rows[single[first[times > 1].min()]]]
        text = f"{copies:,} of {total:,} boxes are copies of others, with the same image, "
        text += f"category and bbox, first in {image}: even a perfect detector misses them"
        findings.append(("warn", text, "remove the copies from the annotations"))
    return findings


def weaknesses(annotations: Any, masks: bool) -> list[Finding]:
    """What makes a training weak: tiny objects, and categories with few.

    `annotations` are `coco.Annotations` of a training; with `masks` Mask R-CNN will see the images,
    else SSD.
    """
    findings: list[Finding] = []
    if masks:
        size = "Mask R-CNN's 800x1333"
        sides = np.sort(annotations.sizes, axis=1)
        factors = (_MASK_SIDES / sides).min(axis=1, keepdims=True)
    else:
        size, factors = f"SSD's {_SSD_SIDE}x{_SSD_SIDE}", _SSD_SIDE / annotations.sizes
    seen = annotations.boxes[:, 3:1:-1] * factors[annotations.rows]
    tiny = int((np.sqrt(seen.prod(axis=1).clip(0)) < _TINY).sum())
    if tiny > _FEW_TINY * len(seen):
        text = f"{tiny:,} of {len(seen):,} objects are smaller than {_TINY} pixels in {size}"
        findings.append(("warn", text, "cut the images into parts, or train on larger ones"))
    names, labels = dict(annotations.categories), annotations.category_ids[~annotations.crowd]
    numbers, counts = np.unique(labels, return_counts=True)
    if few := np.flatnonzero(counts < _FEW).tolist():
        listed = some(f"{names[numbers[i]]} ({counts[i]})" for i in few)
        kinds = count(len(few), "category has", "categories have")
        text = f"{kinds} fewer than {_FEW} objects: {listed}"
        findings.append(("warn", text, "label more of them"))
    return findings


def unfit(detector: Any, objects: Objects) -> Finding:
    """How many of the objects, crowds apart, fit no anchor of a `detector.Detector`."""
    pixels = objects.boxes * np.tile(detector.seen(objects.sizes)[objects.rows], 2)
    pixels = pixels[~objects.crowd]

    def count(factor: float) -> int:
        return int((best_overlap(pixels, detector.grids(factor)[0]) < FIT).sum())

    number, total = count(1), len(pixels)
    text = f"{number:,} of {total:,} objects to train on fit no anchor (IoU {FIT})"
    if number <= _MANY * total:
        return "ok", text, ""
    fewest, factor = min((count(factor), factor) for factor in _FACTORS)
    sides = np.sqrt((pixels[:, 2:] - pixels[:, :2]).prod(axis=1))
    text += f": their sides are about {np.median(sides):.0f} pixels, as the network sees them"
    if fewest < number:
        return "warn", text, f"{detector.grids(factor)[1]} leaves {fewest:,} of them"
    return "warn", text, f"give larger images, see config.{detector.image_key}"


def best_overlap(boxes: np.ndarray, grids: Sequence[Grid]) -> np.ndarray:
    """float64[m], the highest IoU of boxes float64[m, 4] (y0, x0, y1, x1) with anchors.

    Of anchors of one shape, the one whose centre is nearest shares most, in each direction.
    """
    low, high = boxes[:, :2], boxes[:, 2:]
    areas, best = (high - low).prod(axis=1), np.zeros(len(boxes))
    for points, shapes in grids:
        nearest = points[np.searchsorted((points[1:] + points[:-1]) / 2, (low + high) / 2)]
        for shape in shapes:
            shared = np.minimum(high, nearest + shape / 2) - np.maximum(low, nearest - shape / 2)
            both = shared.clip(0).prod(axis=1)
            best = np.maximum(best, both / (areas + shape.prod() - both))
    return best
