"""Shows how good the detections of each class are, and where they are wrong.

`judge` compares the detections of each image with its true objects. Unlike COCO's score, which
ranks all detections, it takes the ones that a user would look at: those from a least score on.
Detections are drawn on their images, with the true boxes beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.detection import coco
from benchmarks.detection.coco import Annotations
from benchmarks.detection.records import Source
from benchmarks.detection.scoring import Quality
from benchmarks.exhibits import CLASSES, MATRIX, confused_classes, csv_file, png, thumbnail
from benchmarks.uses import Exhibit, Matrix, Picture
from common.data import shards
from common.text import percent

MIN_SCORE = 0.5  # weaker detections are no mistakes, and would hide the image
_IOU = 0.5  # from which on a detection is of an object
_NEAR = 0.1  # from which IoU on it is a misplaced one
_LINES = 10  # classes that have a curve of their own
_WORST = 9  # images
_SIDE = 480  # of their pixels
_NAMED = 5  # mistakes below an image
_COLUMNS = 3  # pairs of images beside each other
_INCHES = 2.4  # the width of an image


# What is missed, and what is false. The kinds of false detections follow TIDE (Bolya et al. 2020,
# arXiv:2008.08115).


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


def judge(annotations: Annotations, detections: Mapping[str, np.ndarray]) -> Judgement:
    """Compares all images; objects and detections are paired by their boxes.

    As in COCO's score, the detection with the highest score chooses first, and takes the object of
    its class with the highest IoU, from 0.5 on. What remains is paired with objects of other
    classes. A crowd is no object to find, and takes any number of detections of its class.

    `detections` are the columns of `scoring.score`; those with a score below `MIN_SCORE` only lower
    the cost of missed objects.
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
        _judge(image, judgement)
    judgement.mistakes.sort(key=lambda mistake: -mistake.cost)
    return judgement


def _grouped(values: np.ndarray, keys: np.ndarray) -> Iterator[np.ndarray]:
    """For each key the indices of the values that equal it, in their order."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first, last = (np.searchsorted(ordered, keys, side) for side in ("left", "right"))
    return (order[i:j] for i, j in zip(first.tolist(), last.tolist(), strict=True))


def _judge(image: _Image, judgement: Judgement) -> None:
    """Adds the pairs and the mistakes of an image."""
    from pycocotools import mask

    # The IoU of detections and objects; for a crowd, the share of the detection.
    overlap = np.zeros((len(image.boxes), len(image.true)))
    if overlap.size:
        crowd = image.crowd.astype(np.uint8).tolist()
        overlap[:] = mask.iou(image.boxes, image.true_boxes, crowd)
    same = image.guesses[:, None] == image.true
    strong = int(np.count_nonzero(image.scores >= MIN_SCORE))
    partner = _pairs(overlap[:strong], same[:strong], ~image.crowd)
    weak = np.where(same & (overlap >= _IOU), image.scores[:, None], 0)[strong:]
    lost = 1 - weak.max(axis=0, initial=0)  # [n], the cost of missing each object
    mistakes, counts = judgement
    for d, (g, guess) in enumerate(zip(partner.tolist(), image.guesses.tolist(), strict=False)):
        true, score, kind = -1, float(image.scores[d]), ""
        cost = score
        if g >= 0:
            true = int(image.true[g])
            if true != guess:
                kind, cost = "another class", score + float(lost[g])
        elif (same[d] & image.crowd & (overlap[d] >= _IOU)).any():
            continue
        else:
            near = overlap[d][same[d] & ~image.crowd].max(initial=0)
            kind = "misplaced" if near >= _NEAR else "no object"
            kind = "found twice" if near >= _IOU else kind
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
            if len(near) and near[best := int(near.argmax())] >= _IOU:
                partner[d], free[best] = best, False
    return partner


# What the page shows.


def classes(annotations: Annotations, quality: Quality, judgement: Judgement) -> Exhibit:
    """Average precision and the numbers of mistakes of each class."""
    names = [name for _, name in annotations.categories]
    single = annotations.category_ids[~annotations.crowd]
    ids = np.asarray([number for number, _ in annotations.categories])
    objects = np.bincount(np.searchsorted(ids, single), minlength=len(names))
    known, precision = _known(quality)
    ap, ap50 = precision.mean(axis=(0, 1)), precision[0].mean(axis=0)
    found = np.diag(judgement.counts)[:-1]
    false = judgement.counts.sum(axis=0)[:-1] - found
    columns = {"found": found, "missed": objects - found, "false": false}
    rows, table = [], []
    for place in np.argsort(ap, kind="stable").tolist():
        name, own, values = names[known[place]], objects[known[place]], (ap[place], ap50[place])
        numbers = [int(column[known[place]]) for column in columns.values()]
        rows.append([name, f"{own:,}", *map(percent, values), *(f"{n:,}" for n in numbers)])
        table.append([name, own, *(f"{x:.6f}" for x in values), *numbers])
    rows = rows[:CLASSES]
    if len(known):
        totals = [f"{int(column.sum()):,}" for column in columns.values()]
        means = percent(ap.mean()), percent(ap50.mean())
        rows.append(["mean over classes", f"{objects.sum():,}", *means, *totals])
    head = ["class", "objects", "AP", "AP50", *columns]
    several = len(known) > CLASSES
    many = f"The {CLASSES} worst of {len(known):,} classes" if several else "All classes"
    return Exhibit(
        title="Classes",
        text=f"{many}, the lowest average precision of boxes first. AP is COCO's, the mean over "
        f"IoU thresholds from 0.5 to 0.95; AP50 is that at 0.5. The numbers of objects found and "
        f"missed and of false detections are those at a score of {MIN_SCORE} or more.",
        columns=head,
        rows=rows,
        has_mean=True,
        files={"per_class.csv": csv_file(head, table)},
    )


def _known(quality: Quality) -> tuple[np.ndarray, np.ndarray]:
    """The K categories with an object, and their precision float64[10, 101, K].

    The same for each as COCO's mean over all of them: -1 says that a category has no object.
    """
    known = np.flatnonzero((quality.precision > -1).any(axis=(0, 1)))
    return known, quality.precision[:, :, known]


def curves(annotations: Annotations, quality: Quality) -> Exhibit:
    """Precision over recall at the IoU thresholds 0.5 and 0.75, as a picture; it may fail."""
    from matplotlib.figure import Figure

    known, precision = _known(quality)
    worst = np.argsort(precision.mean(axis=(0, 1)), kind="stable")[:_LINES]
    figure = Figure(figsize=(9.2, 4.0), layout="constrained")
    recall, both = np.linspace(0, 1, precision.shape[1]), figure.subplots(1, 2)
    for axis, threshold, label in zip(both, (0, 5), ("0.5", "0.75"), strict=True):
        for place in worst if len(known) > 1 else []:
            line = axis.plot(recall, precision[threshold, :, place], linewidth=1)[0]
            _, name = annotations.categories[known[place]]
            line.set_label(name.replace("$", r"\$").lstrip("_"))
        if len(known):
            mean = precision[threshold].mean(axis=1)
            axis.plot(recall, mean, color="black", linewidth=2.5, label="all classes")
            axis.legend(fontsize=7, loc="lower left")
        axis.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", title=f"IoU {label}")
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("precision")
    several = f" and the {_LINES} classes with the lowest AP" if len(known) > _LINES else ""
    return Exhibit(
        title="Precision and recall",
        text=f"The precision of the boxes at each recall, as COCO's AP averages it: all classes"
        f"{several or ', and each'}. A lower score brings more recall and less precision.",
        pictures=[Picture(png(figure), (), wide=True)],
    )


def confusion(annotations: Annotations, judgement: Judgement) -> Exhibit:
    """What the objects of each class were taken for."""
    names, counts = [name for _, name in annotations.categories], judgement.counts
    labels = [f"true: {name}" for name in names] + ["no object"]
    table = [[label, *row] for label, row in zip(labels, counts.tolist(), strict=True)]
    files = {"confusion.csv": csv_file(["true class \\ detection", *names, "missed"], table)}
    wrong = int(counts[:-1, :-1].sum() - np.trace(counts[:-1, :-1]))
    text = (
        f"What objects were taken for by detections with a score of {MIN_SCORE} or more whose "
        f"boxes overlap theirs (IoU {_IOU} or more): {wrong:,} for another class, "
        f"{int(counts[:-1, -1].sum()):,} were missed, and {int(counts[-1].sum()):,} detections are "
        "of no object or repeat one."
    )
    if len(names) <= MATRIX:
        text += " Each row is a true class, each column a detection's; “none” is no object, and "
        text += "in a row that the object was missed."
        matrix = Matrix([*names, "none"], counts)
        return Exhibit(title="Confusion", text=text, matrix=matrix, files=files)
    rows = confused_classes(counts, names)
    return Exhibit(
        title="Confusion",
        text=f"{text} The {len(rows)} commonest confusions; confusion.csv has all classes.",
        columns=("true class", "taken for", "objects", "of the class"),
        rows=rows,
        files=files,
    )


class Photo(NamedTuple):
    """An image to draw detections on.

    Attributes:
      image_id: of the annotations.
      pixels: uint8[h, w, 3], in any size.
      size: (height, width) of the original image in pixels.
    """

    image_id: int
    pixels: np.ndarray
    size: np.ndarray


def worst(
    annotations: Annotations,
    source: Any,
    detections: Mapping[str, np.ndarray],
    judgement: Judgement,
) -> Exhibit:
    """The images whose mistakes cost most, as pictures; drawing and reading them may fail.

    Args:
      source: the images to evaluate, with `shards` and `image_ids`.
      detections: those to draw, as `scoring.score` takes them.
    """
    of_image: defaultdict[int, list[Mistake]] = defaultdict(list)
    for mistake in judgement.mistakes:
        of_image[mistake.image_id].append(mistake)
    costs = {image_id: sum(m.cost for m in some) for image_id, some in of_image.items()}
    chosen = sorted(costs, key=lambda image_id: -costs[image_id])[:_WORST]
    row_of = {image_id: i for i, image_id in enumerate(annotations.image_ids.tolist())}
    example_of = {image_id: i for i, image_id in enumerate(source.image_ids)}
    records = shards.read_some(source.shards, [example_of[image_id] for image_id in chosen])
    names, pictures = [name for _, name in annotations.categories], []
    for image_id, record in zip(chosen, records, strict=True):
        encoded = Source(source.shards, ()).image(record).encoded
        pixels, row = np.asarray(thumbnail(encoded, _SIDE)), row_of[image_id]
        drawn = draw([Photo(image_id, pixels, annotations.sizes[row])], detections, annotations)
        some = of_image[image_id]
        caption = [f"{annotations.file_names[row]}, cost {costs[image_id]:.2f}"]
        caption += [_in_words(mistake, names) for mistake in some[:_NAMED]]
        caption += [f"and {len(some) - _NAMED:,} more"] if len(some) > _NAMED else []
        pictures.append(Picture(drawn, caption, wide=True))
    text = "There is no mistake."
    if count := len(judgement.mistakes):
        text = (
            f"{count:,} mistakes in {len(of_image):,} images. These images cost most: a false "
            "detection costs its score, and a missed object 1 less the best score of its class at "
            "its place. mistakes.csv has all, the most costly first."
        )
    return Exhibit(title="Worst images", text=text, pictures=pictures)


def _in_words(mistake: Mistake, names: Sequence[str]) -> str:
    if mistake.guess < 0:
        return f"{names[mistake.true]} missed"
    guess = f"{names[mistake.guess]} {mistake.score:.2f}"
    if mistake.true >= 0:
        return f"{names[mistake.true]} taken for {guess}"
    return f"{guess}: {mistake.kind}"


def mistakes_table(annotations: Annotations, judgement: Judgement) -> bytes:
    """mistakes.csv: a line for each mistake, the most costly first."""
    file_names = dict(zip(annotations.image_ids.tolist(), annotations.file_names, strict=True))
    names = [name for _, name in annotations.categories] + [""]  # the last for -1
    head = ["image_id", "file", "mistake", "true_class", "detected_class", "score", "cost"]
    rows: list[list[Any]] = []
    for one in judgement.mistakes:
        numbers = [f"{one.score:.6f}" if one.guess >= 0 else "", f"{one.cost:.6f}"]
        what = [one.image_id, file_names[one.image_id], one.kind, names[one.true], names[one.guess]]
        rows.append([*what, *numbers, *(f"{x:.2f}" for x in one.box.tolist())])
    return csv_file([*head, "x", "y", "width", "height"], rows)


def draw(
    photos: Sequence[Photo], found: Mapping[str, np.ndarray], annotations: Annotations
) -> bytes:
    """A PNG with a pair of images for each photo: what was found, and the true boxes.

    `found` are the detections of all images, as `scoring.score` takes them; with outlines, the
    true ones are drawn, too.
    """
    from matplotlib.figure import Figure  # takes a second to import

    columns = min(_COLUMNS, len(photos))
    rows = -(-len(photos) // columns)
    figure = Figure(figsize=(2 * columns * _INCHES, rows * (_INCHES + 0.3)), layout="constrained")
    axes = figure.subplots(rows, 2 * columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    names = dict(annotations.categories)
    for photo, left, right in zip(photos, axes.flat[::2], axes.flat[1::2], strict=False):
        mine = found["image_id"] == photo.image_id
        own = annotations.image_ids[annotations.rows] == photo.image_id
        true: dict[str, Any] = {"bbox": annotations.boxes[own]}
        true["category_id"] = annotations.category_ids[own]
        if "segmentation" in found:
            true["segmentation"] = [annotations.outlines[i] for i in np.flatnonzero(own)]
        _draw_objects(left, photo, {key: values[mine] for key, values in found.items()}, names)
        _draw_objects(right, photo, true, names)
        left.set_title(f"image {photo.image_id}: found", fontsize=8)
        right.set_title(f"image {photo.image_id}: true", fontsize=8)
    return png(figure)


def _draw_objects(
    axis: Any, photo: Photo, objects: Mapping[str, Any], names: Mapping[int, str]
) -> None:
    """Draws a photo with the outlines and boxes on it; those of one category have one colour."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    height, width = map(int, photo.size)
    axis.imshow(photo.pixels, extent=(0, width, height, 0))
    palette = colormaps["tab10"]
    categories = [int(category) for category in objects["category_id"]]
    for outline, category in zip(objects.get("segmentation", ()), categories, strict=False):
        overlay = np.zeros((height, width, 4))
        mask = coco.outline_mask(outline, height, width).astype(bool)
        overlay[mask] = palette(category % 10, alpha=0.55)
        axis.imshow(overlay, extent=(0, width, height, 0))
    scores = [f" {score:.2f}" for score in objects["score"]] if "score" in objects else []
    for i, (category, (x, y, w, h)) in enumerate(zip(categories, objects["bbox"], strict=True)):
        colour = palette(category % 10)
        axis.add_patch(Rectangle((x, y), w, h, fill=False, color=colour, linewidth=1.5))
        axis.text(
            *(x, y, names[category] + (scores[i] if scores else "")),
            **{"fontsize": 6, "color": "white", "verticalalignment": "bottom", "clip_on": True},
            parse_math=False,  # a name may have dollar signs
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.8},
        )
