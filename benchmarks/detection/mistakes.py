"""Compares the detections of each image with its true objects: what is missed, and what is false.

The kinds of false detections follow TIDE (Bolya et al. 2020, arXiv:2008.08115). Unlike COCO's
score, which ranks all detections, this takes the ones that a user would look at: those from a
least score on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.detection.coco import Annotations

IOU = 0.5  # from which on a detection is of an object
_NEAR = 0.1  # from which IoU on it is a misplaced one


class Mistake(NamedTuple):
    """An object that was missed, or a detection that is false.

    Attributes:
      image_id: of the annotations.
      kind: "missed", "another class", "found twice", "misplaced" or "no object".
      true: the index of the object's category, -1 if there is no object.
      guess: the index of the detection's category, -1 if there is no detection.
      score: of the detection; 0 without one.
      cost: of a false detection its score, and of a missed object 1 - the best score of its class
        at its place; of another class both.
      box: float64[4], x, y, width and height in pixels: of the detection, else of the object.
    """

    image_id: int
    kind: str
    true: int
    guess: int
    score: float
    cost: float
    box: np.ndarray


class Judgement(NamedTuple):
    """The mistakes, the most costly first, and how often a category was taken for another one.

    In int64[K + 1, K + 1] a row is the true category and a column that of the detection. The last
    row counts detections where no object was left, the last column missed objects.
    """

    mistakes: list[Mistake]
    counts: np.ndarray


class _Image(NamedTuple):
    """The n objects and m detections of an image, the detections with the highest score first."""

    image_id: int
    true: np.ndarray  # int[n], indices of categories
    true_boxes: np.ndarray  # float64[n, 4], x, y, width, height
    crowd: np.ndarray  # bool[n]
    guesses: np.ndarray  # int[m]
    boxes: np.ndarray  # float64[m, 4]
    scores: np.ndarray  # float[m]


def judge(
    annotations: Annotations, detections: Mapping[str, np.ndarray], min_score: float
) -> Judgement:
    """Compares all images; objects and detections are paired by their boxes.

    As in COCO's score, the detection with the highest score chooses first, and takes the object of
    its class with the highest IoU, from 0.5 on. What remains is paired with objects of other
    classes. A crowd is no object to find, and takes any number of detections of its class.

    Args:
      detections: the columns of `scoring.score`.
      min_score: weaker detections only lower the cost of missed objects.
    """
    ids = np.asarray([number for number, _ in annotations.categories])
    judgement = Judgement([], np.zeros((len(ids) + 1, len(ids) + 1), np.int64))
    true = np.searchsorted(ids, annotations.category_ids)
    guesses = np.searchsorted(ids, np.asarray(detections["category_id"]))
    boxes = np.asarray(detections["bbox"], np.float64).reshape(-1, 4)
    scores = np.asarray(detections["score"])
    usable = np.flatnonzero(np.isfinite(scores) & np.isfinite(boxes).all(axis=1))
    usable = usable[np.argsort(-scores[usable], kind="stable")]
    image_ids = annotations.image_ids
    objects = _grouped(image_ids[annotations.rows], image_ids)
    found = _grouped(np.asarray(detections["image_id"])[usable], image_ids)
    for image_id, own, mine in zip(image_ids.tolist(), objects, found, strict=True):
        mine = usable[mine]
        truth = true[own], annotations.boxes[own], annotations.crowd[own]
        image = _Image(image_id, *truth, guesses[mine], boxes[mine], scores[mine])
        _judge(image, min_score, judgement)
    judgement.mistakes.sort(key=lambda mistake: -mistake.cost)
    return judgement


def _grouped(values: np.ndarray, keys: np.ndarray) -> Iterator[np.ndarray]:
    """For each key the indices of the values that equal it, in their order."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first, last = (np.searchsorted(ordered, keys, side) for side in ("left", "right"))
    return (order[i:j] for i, j in zip(first.tolist(), last.tolist(), strict=True))


def _judge(image: _Image, min_score: float, judgement: Judgement) -> None:
    """Adds the pairs and the mistakes of an image."""
    from pycocotools import mask

    # The IoU of detections and objects; for a crowd, the share of the detection.
    overlap = np.zeros((len(image.boxes), len(image.true)))
    if overlap.size:
        crowd = image.crowd.astype(np.uint8).tolist()
        overlap[:] = mask.iou(image.boxes, image.true_boxes, crowd)
    same = image.guesses[:, None] == image.true
    strong = int(np.count_nonzero(image.scores >= min_score))
    partner = _pairs(overlap[:strong], same[:strong], ~image.crowd)
    weak = np.where(same & (overlap >= IOU), image.scores[:, None], 0)[strong:]
    lost = 1 - weak.max(axis=0, initial=0)  # [n], the cost of missing each object
    mistakes, counts = judgement
    for d, (g, guess) in enumerate(zip(partner.tolist(), image.guesses.tolist(), strict=False)):
        true, score, kind = -1, float(image.scores[d]), ""
        cost = score
        if g >= 0:
            true = int(image.true[g])
            if true != guess:
                kind, cost = "another class", score + float(lost[g])
        elif (same[d] & image.crowd & (overlap[d] >= IOU)).any():
            continue
        else:
            near = overlap[d][same[d] & ~image.crowd].max(initial=0)
            kind = "misplaced" if near >= _NEAR else "no object"
            kind = "found twice" if near >= IOU else kind
        counts[true, guess] += 1
        if kind:
            row = Mistake(image.image_id, kind, true, guess, score, cost, image.boxes[d])
            mistakes.append(row)
    for g in np.setdiff1d(np.flatnonzero(~image.crowd), partner).tolist():
        true, box = int(image.true[g]), image.true_boxes[g]
        mistakes.append(Mistake(image.image_id, "missed", true, -1, 0.0, float(lost[g]), box))
        counts[true, -1] += 1


def _pairs(overlap: np.ndarray, same: np.ndarray, free: np.ndarray) -> np.ndarray:
    """int[m]: the object of each detection, or -1; those of its own class come first."""
    partner, free = np.full(len(overlap), -1), free.copy()
    for allowed in (same, ~same):
        for d in np.flatnonzero(partner < 0).tolist():
            near = np.where(allowed[d] & free, overlap[d], 0)
            if len(near) and near[best := int(near.argmax())] >= IOU:
                partner[d], free[best] = best, False
    return partner
