"""Looks for labels that spoil the training or the score although all records can be read."""

import numpy as np

from benchmarks.detection.coco import Annotations
from common.errors import count, some

_TINY, _FEW_TINY = 8, 0.05  # pixels, and the share of the objects that may be smaller
_FEW = 20  # objects of a category
_SSD_SIDE, _MASK_SIDES = 300, np.array([800, 1333])  # sides of the recipes' images

Finding = tuple[str, str, str]  # status "warn", text and fix


def oddities(annotations: Annotations) -> list[Finding]:
    """Labels that must be mistakes: categories whose objects are all crowds, and copied boxes."""
    findings: list[Finding] = []
    total, labels = len(annotations.rows), annotations.category_ids
    lost = np.setdiff1d(labels, labels[~annotations.crowd])
    if len(lost):
        number = int(np.isin(labels, lost).sum())
        kinds = count(len(lost), "category", "categories")
        text = f"all {number:,} objects of {kinds}, such as {lost[0]}, are crowds"
        text += " (iscrowd 1): no score counts them, and Mask R-CNN does not learn them"
        findings.append(("warn", text, "set iscrowd to 0 where an annotation is of one object"))
    single = np.flatnonzero(~annotations.crowd)
    columns = np.column_stack([annotations.rows, labels, annotations.boxes])[single]
    _, first, times = np.unique(columns, axis=0, return_index=True, return_counts=True)
    if copies := len(single) - len(first):
        image = annotations.file_names[annotations.rows[single[first[times > 1].min()]]]
        text = f"{copies:,} of {total:,} boxes are copies of others, with the same image, "
        text += f"category and bbox, first in {image}: even a perfect detector misses them"
        findings.append(("warn", text, "remove the copies from the annotations"))
    return findings


def weaknesses(annotations: Annotations, masks: bool) -> list[Finding]:
    """What makes the training data weak: tiny objects, and categories with few objects.

    `annotations` belong to the training images; with `masks` Mask R-CNN trains on them, else SSD.
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
