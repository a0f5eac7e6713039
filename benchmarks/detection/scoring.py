"""COCO's score (mAP) of boxes and masks, by pycocotools; evaluations load it, training does not."""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.detection.coco import Annotations, outline_lists
from benchmarks.detection.tiles import Parts
from common.progress import Progress

PRECISIONS = ("mAP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
NAMES = (*PRECISIONS, "AR_1", "AR_10", "AR_100", "AR_small", "AR_medium", "AR_large")


class Match(NamedTuple):
    """How pycocotools matches the n objects and m detections of an image and a category.

    A match needs an IoU of 0.5 or more; the detection with the highest score chooses first. A crowd
    is no object to find, and matches any number of detections.
    """

    image_id: int
    category_id: int
    scores: np.ndarray  # float[m], of the detections
    is_matched: np.ndarray  # bool[m]
    object_scores: np.ndarray  # float[n], of the detection of each object, 0 without one


class Quality(NamedTuple):
    """How good the detections of K categories are by COCO's rules."""

    # COCO's 12 numbers by their NAMES, as fractions. A number is nan if no object of the truth
    # counts for it, as AP_large without a large object; without detections the others are 0.
    scores: dict[str, float]
    # float64[10, 101, K] at the IoU thresholds 0.5, 0.55 ... 0.95 and the recalls 0, 0.01 ... 1,
    # for objects of all sizes; -1 for a category without an object
    precision: np.ndarray
    # For each image and category with an object or a detection, for objects of all sizes
    matches: list[Match]

    @property
    def ap(self) -> np.ndarray:
        """float64[K], the mean `precision` of each category; -1 for one without an object."""
        return self.precision.mean(axis=(0, 1))


def quality(
    annotations: Annotations, detections: Mapping[str, Any], iou_type: str = "bbox"
) -> Quality:
    """COCO's mAP and recalls, by pycocotools; any thread may call it, and it prints nothing.

    All images of the annotations count, with or without detections. pycocotools takes the best 100
    detections of each image and category.

    Args:
      annotations: the truth; for `segm` loaded with `masks`.
      detections: columns image_id int[n], category_id int[n], score float[n], and bbox
        float[n, 4] (x, y, width, height in pixels) or, for `segm`, segmentation object[n] (run
        lengths as pycocotools compresses them). Numbers that are not finite make a detection void.
      iou_type: "bbox" or "segm".
    """
    rows = _detections(annotations, detections, iou_type)
    truth = index(annotations)
    others = {key: truth.dataset[key] for key in ("images", "categories")}
    predicted = _index({**others, "annotations": rows})
    evaluation = _pycocotools()[1].COCOeval(truth, predicted, iou_type)
    _log_progress(evaluation)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    stats = np.where(evaluation.stats < 0, math.nan, evaluation.stats).tolist()  # -1: not defined
    scores: dict[str, float] = dict(zip(NAMES, stats, strict=True))
    precision = evaluation.eval["precision"][:, :, :, 0, -1].copy()
    return Quality(scores, precision, _matches(evaluation))


def _matches(evaluation: Any) -> list[Match]:
    matches, all_sizes = [], evaluation.params.areaRng[0]
    for row in evaluation.evalImgs:
        if row and row["aRng"] == all_sizes:
            score_of = dict(zip(row["dtIds"], row["dtScores"], strict=True))
            objects = zip(row["gtMatches"][0], row["gtIgnore"], strict=True)
            object_scores = [score_of.get(number, 0.0) for number, crowd in objects if not crowd]
            where, is_matched = (row["image_id"], row["category_id"]), row["dtMatches"][0] > 0
            scores = np.array(row["dtScores"])
            matches.append(Match(*where, scores, is_matched, np.array(object_scores)))
    return matches


class Scorer:
    """Scores what a detector predicts for all images of the annotations.

    Class k is the k-th category, or, `by_id`, the category whose id is k. With `parts`, the rows
    are those of the images' parts, which are joined.
    """

    def __init__(self, annotations: Annotations, by_id: bool = False, parts: Parts | None = None):
        self.annotations, self._by_id, self._parts = annotations, by_id, parts
        self._last: tuple[list[Any], dict[str, np.ndarray]] = [], {}
        self._judged: tuple[dict[str, np.ndarray], Quality] | None = None

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """COCO's average precisions and recalls of the boxes."""
        return self.quality(self.columns(rows)).scores

    def quality(self, columns: dict[str, np.ndarray]) -> Quality:
        """The quality of the boxes of `columns`; the result for the last columns is cached."""
        if self._judged is None or self._judged[0] is not columns:
            self._judged = columns, quality(self.annotations, columns)
        return self._judged[1]

    def columns(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The detections of all images, in the columns that `quality` takes.

        The result for the last rows is cached: --mode=eval scores and then shows the same rows.
        """
        outputs = list(rows)
        cached, columns = self._last
        if [id(score()) for score in cached] != [id(row["score"]) for row in outputs]:
            found = [*map(self._in_order, outputs)] if self._by_id else outputs
            columns = self.make(self._parts.joined(found) if self._parts else found)
            self._last = [weakref.ref(row["score"]) for row in outputs], columns
        return columns

    def _in_order(self, row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A row of `predict` with the columns of all categories, where classes are ids."""
        ids = np.asarray([category for category, _ in self.annotations.categories])
        index = np.searchsorted(ids, row["class"]).clip(max=len(ids) - 1)
        is_category = ids[index] == row["class"]
        return row | {"class": index + 1, "score": np.where(is_category, row["score"], 0)}

    def make(self, rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The columns of detections in `rows`, the outputs of `predict`."""
        ids = np.asarray([category for category, _ in self.annotations.categories])
        parts = []
        for row in rows:
            image, index = np.nonzero(row["score"] > 0)
            y0, x0, y1, x1 = np.moveaxis(row["boxes"][image, index].astype(np.float64), -1, 0)
            parts.append(
                {
                    "image_id": row["image_id"][image],
                    "category_id": ids[row["class"][image, index] - 1],
                    "score": row["score"][image, index],
                    "bbox": np.stack([x0, y0, x1 - x0, y1 - y0], axis=1),
                }
            )
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def headline(scores: Mapping[str, float]) -> dict[str, float]:
    """The precisions that a line shows: mAP, and the others that are defined.

    With masks, it shows the precisions for objects of all sizes, of boxes and of masks.
    """
    names = PRECISIONS
    if "mask_mAP" in scores:
        names = tuple(f"{k}{name}" for k in ("", "mask_") for name in PRECISIONS[:3])
    kept = [n for n in names if n.endswith("mAP") or not math.isnan(scores[n])]
    return {name: scores[name] for name in kept}


def index(annotations: Annotations) -> Any:
    """A new `pycocotools.coco.COCO` of the annotations.

    It numbers the objects from 1, because pycocotools takes the number 0 for "no match".
    """
    image_ids = annotations.image_ids.tolist()
    images = [
        {"id": image_id, "height": height, "width": width}
        for image_id, (height, width) in zip(image_ids, annotations.sizes.tolist(), strict=True)
    ]
    columns = {
        "image_id": annotations.image_ids[annotations.rows].tolist(),
        "category_id": annotations.category_ids.tolist(),
        "bbox": annotations.boxes.tolist(),
        "area": annotations.areas.tolist(),
        "iscrowd": annotations.crowd.astype(int).tolist(),
    }
    if annotations.outlines:
        columns["segmentation"] = [outline_lists(outline) for outline in annotations.outlines]
    rows = zip(*columns.values(), strict=True)
    objects = [dict(zip(columns, row, strict=True), id=i) for i, row in enumerate(rows, 1)]
    categories = [{"id": number, "name": name} for number, name in annotations.categories]
    return _index({"images": images, "categories": categories, "annotations": objects})


def _detections(
    annotations: Annotations, detections: Mapping[str, Any], iou_type: str
) -> list[dict[str, Any]]:
    """All detections whose numbers are finite, as pycocotools' dicts."""
    images, categories = set(annotations.image_ids.tolist()), dict(annotations.categories)
    columns = [np.asarray(detections[n]).tolist() for n in ("image_id", "category_id", "score")]
    shapes = detections["segmentation" if iou_type == "segm" else "bbox"]
    masks, rows = _pycocotools()[2], []
    for image_id, category, confidence, shape in zip(*columns, shapes, strict=True):
        if image_id not in images or category not in categories:
            raise ValueError(
                f"a detection of category {category} in image {image_id} does not fit the "
                f"annotations {annotations.path}"
            )
        box = [float(x) for x in (masks.toBbox(shape) if iou_type == "segm" else shape)]
        if not all(map(math.isfinite, (confidence, *box))):
            continue  # pycocotools would match it with any object, because nan < 0.5 is false
        row = {"id": len(rows) + 1, "image_id": image_id, "category_id": category, "bbox": box}
        row |= {"score": confidence, "iscrowd": 0, "area": box[2] * box[3]}
        if iou_type == "segm":
            row |= {"area": float(masks.area(shape)), "segmentation": shape}
        rows.append(row)
    return rows


def _log_progress(evaluation: Any) -> None:
    """Makes a `COCOeval` log how many categories of the images it has matched."""
    params, match = evaluation.params, evaluation.evaluateImg
    per_category = len(params.areaRng) * len(params.imgIds)
    total, done = len(params.catIds), itertools.count(1)
    progress = Progress(total)

    def match_and_log(*arguments: Any) -> Any:
        if (number := next(done)) % per_category == 0:
            categories = number // per_category
            progress.log(categories, f"scoring: {categories:,} of {total:,} categories")
        return match(*arguments)

    evaluation.evaluateImg = match_and_log


def _index(dataset: dict[str, Any]) -> Any:
    index = _pycocotools()[0].COCO()
    index.dataset = dataset
    index.createIndex()
    return index


@functools.cache
def _pycocotools() -> tuple[Any, Any, Any]:
    """pycocotools' modules coco, cocoeval and mask, which print nothing here.

    Redirecting stdout instead would take away what other threads print meanwhile.
    """
    from pycocotools import coco, cocoeval, mask

    silent: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    for module in (coco, cocoeval):
        vars(module)["print"] = silent  # in their modules only; the built-in stays
    return coco, cocoeval, mask


_THRESHOLD = 0.5  # the least value of a mask at an object's pixel


class MaskScorer(Scorer):
    """Scores boxes and outlines; the names of the outlines' scores begin with "mask_".

    A pixel of the image is of the object if the mask at its centre is at least 0.5. Between the
    centres of the mask's cells the values are bilinear, and around the mask there is a border of
    zeros. This is Detectron2's rule for boxes in continuous coordinates; docs/mask_rcnn.md compares
    an older one.
    """

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        columns = self.columns(rows)
        outlined = quality(self.annotations, columns, "segm").scores
        named = {f"mask_{name}": value for name, value in outlined.items()}
        return self.quality(columns).scores | named

    def make(self, rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The columns of `Scorer`, and "segmentation" object[n], the run lengths of each object."""
        truth, progress, outlines = self.annotations, Progress(len(rows)), []
        size_of = dict(zip(truth.image_ids.tolist(), truth.sizes.tolist(), strict=True))
        for done, row in enumerate(rows, 1):
            for i, k in zip(*np.nonzero(row["score"] > 0), strict=True):
                size = size_of[int(row["image_id"][i])]
                outlines.append(encode_mask(row["masks"][i, k], row["boxes"][i, k], *size))
            progress.log(done, f"outlining objects: {done:,} of {len(rows):,} batches")
        column = np.empty(len(outlines), object)
        column[:] = outlines
        return super().make(rows) | {"segmentation": column}


def encode_mask(
    mask: np.ndarray, box: Sequence[float] | np.ndarray, height: int, width: int
) -> dict[str, Any]:
    """The run lengths of an object, with "counts" as a str, from its mask uint8[S, S]."""
    outline = paste_mask(mask.astype(np.float32) / 255, box, height, width)
    return outline | {"counts": outline["counts"].decode()}


def paste_mask(mask: np.ndarray, box: Sequence[float] | np.ndarray, height: int, width: int) -> Any:
    """The run lengths of an object in an image; no array of the image's size is made.

    `mask` float[S, S] is the probability, 0 to 1, that a cell of the box is the object; `box` is
    (y0, x0, y1, x1) in pixels, finite, and may reach beyond the image. Returns {"size": [height,
    width], "counts": bytes}, compressed as pycocotools does.
    """
    y0, x0, y1, x1 = (float(each) for each in box)
    first_row, y, y_share = _cells(y0, y1, len(mask), height)
    first_column, x, x_share = _cells(x0, x1, len(mask), width)
    padded = np.pad(np.asarray(mask, np.float32), 1).T  # columns first, as COCO's runs go
    lines = padded[:, y] * (1 - y_share) + padded[:, y + 1] * y_share
    values = lines[x] * (1 - x_share)[:, None] + lines[x + 1] * x_share[:, None]
    return _encode(values >= _THRESHOLD, first_row, first_column, height, width)


def _cells(first: float, last: float, side: int, length: int) -> tuple[int, np.ndarray, np.ndarray]:
    """The positions of a box's pixels between the cells of its mask, along an axis of the image.

    `first` and `last` are the box's coordinates, `side` is the number of the mask's cells, `length`
    that of the image's pixels. Returns the first pixel whose centre is in the box (outside of it a
    mask with a border is below 0.5), and for each pixel from there on the cell before its centre,
    int[n], counted with the border, and the weight of the cell after it, float32[n].
    """
    start = max(math.ceil(first - 0.5), 0)
    stop = min(math.floor(last - 0.5) + 1, length) if last > first else start
    centres = np.arange(start, stop) + 0.5
    cells = (centres - first) * (side / (last - first or 1)) + 0.5
    before = np.floor(cells).astype(np.intp).clip(0, side)
    return start, before, (cells - before).astype(np.float32)


def _encode(inside: np.ndarray, first_row: int, first_column: int, height: int, width: int) -> Any:
    """Run lengths from bool[columns, rows], the part of an image that begins at a pixel."""
    from pycocotools import mask as masks

    # A column's first and last pixel have a zero beside them, so that every run has two ends.
    columns, rows = inside.shape
    padded = np.zeros((columns, rows + 2), bool)
    padded[:, 1:-1] = inside
    column, row = np.divmod(np.flatnonzero(padded[:, 1:] != padded[:, :-1]), rows + 1)
    ends = (column + first_column) * height + row + first_row
    # A run that ends at the bottom of a column goes on where the next one begins at the top.
    meets = np.flatnonzero(ends[1:] == ends[:-1])
    ends = np.delete(ends, np.concatenate([meets, meets + 1]))
    counts = np.diff(ends, prepend=0, append=height * width)
    if counts[-1] == 0:  # the last pixel is the object's
        counts = counts[:-1]
    runs: Any = {"size": [height, width], "counts": counts.tolist()}
    return masks.frPyObjects(runs, height, width)
