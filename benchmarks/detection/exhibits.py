"""Shows how good the detections of each class are, and where they are wrong.

Detections are drawn on their images, with the true boxes beside them.
"""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.detection import coco, mistakes
from benchmarks.detection.coco import Annotations
from benchmarks.detection.mistakes import Judgement, Mistake
from benchmarks.detection.records import Source
from benchmarks.detection.scoring import Quality
from benchmarks.uses import Exhibit, Matrix, Picture
from common.data import shards
from common.images import pixels
from common.text import csv_text, percent

_MATRIX = 50  # classes; of more, the commonest confusions are listed
_PAIRS = 30
_CLASSES = 50  # rows of the table
_LINES = 10  # classes that have a curve of their own
_WORST = 9  # images
_SIDE = 480  # of their pixels
_NAMED = 5  # mistakes below an image
_COLUMNS = 3  # pairs of images beside each other
_INCHES = 2.4  # the width of an image


def classes(
    annotations: Annotations, quality: Quality, judgement: Judgement, min_score: float
) -> Exhibit:
    """Average precision and the numbers of mistakes of each class, and curves of precision.

    The curves are a PNG in `pictures`; drawing it may fail.
    """
    names = [name for _, name in annotations.categories]
    ids = np.asarray([number for number, _ in annotations.categories])
    single = annotations.category_ids[~annotations.crowd]
    counts = np.bincount(np.searchsorted(ids, single), minlength=len(names))
    # The same for each category as COCO's mean over all of them: -1 says that it has no object.
    known = np.flatnonzero((quality.precision > -1).any(axis=(0, 1)))
    precision = quality.precision[:, :, known]
    ap, ap50 = precision.mean(axis=(0, 1)), precision[0].mean(axis=0)
    taken = judgement.counts
    found = np.diag(taken)[:-1]
    columns = {"found": found, "missed": counts - found, "false": taken.sum(axis=0)[:-1] - found}
    order = np.lexsort((known, ap)).tolist()
    rows = []
    for place in order:
        i = int(known[place])
        numbers = [f"{int(column[i]):,}" for column in columns.values()]
        shares = [percent(float(ap[place])), percent(float(ap50[place]))]
        rows.append([names[i], f"{counts[i]:,}", *shares, *numbers])
    shown = rows[:_CLASSES]
    if len(known):
        totals = [f"{int(column.sum()):,}" for column in columns.values()]
        means = [percent(ap.mean()), percent(ap50.mean())]
        shown.append(["mean over classes", f"{counts.sum():,}", *means, *totals])
    head = ["class", "objects", "AP", "AP50", *columns]
    table = [
        [names[i := int(known[p])], counts[i], f"{ap[p]:.6f}", f"{ap50[p]:.6f}"]
        + [int(column[i]) for column in columns.values()]
        for p in order
    ]
    many = (
        f"The {_CLASSES} worst of {len(known):,} classes"
        if len(known) > _CLASSES
        else "All classes"
    )
    return Exhibit(
        title="Classes",
        text=f"{many}, the lowest average precision of boxes first. AP is COCO's, the mean over "
        f"IoU thresholds from 0.5 to 0.95; AP50 is that at 0.5. The numbers of objects found and "
        f"missed and of false detections are those at a score of {min_score} or more.",
        columns=head,
        rows=shown,
        has_mean=True,
        files={"per_class.csv": csv_text([head, *table]).encode()},
    )


def curves(annotations: Annotations, quality: Quality) -> Exhibit:
    """Precision over recall at the IoU thresholds 0.5 and 0.75, as a picture; it may fail."""
    from matplotlib.figure import Figure

    names = [name for _, name in annotations.categories]
    known = np.flatnonzero((quality.precision > -1).any(axis=(0, 1)))
    precision = quality.precision[:, :, known]
    worst = np.argsort(precision.mean(axis=(0, 1)), kind="stable")[:_LINES]
    figure = Figure(figsize=(9.2, 4.0), layout="constrained")
    recall = np.linspace(0, 1, precision.shape[1])
    for axis, (threshold, label) in zip(
        figure.subplots(1, 2), ((0, "0.5"), (5, "0.75")), strict=True
    ):
        for place in worst if len(known) > 1 else []:
            line = axis.plot(recall, precision[threshold, :, place], linewidth=1)[0]
            line.set_label(names[known[place]].replace("$", r"\$").lstrip("_"))
        if len(known):
            mean = precision[threshold].mean(axis=1)
            axis.plot(recall, mean, color="black", linewidth=2.5, label="all classes")
            axis.legend(fontsize=7, loc="lower left")
        axis.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", title=f"IoU {label}")
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("precision")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    several = f" and the {_LINES} classes with the lowest AP" if len(known) > _LINES else ""
    return Exhibit(
        title="Precision and recall",
        text=f"The precision of the boxes at each recall, as COCO's AP averages it: all classes"
        f"{several or ', and each'}. A lower score brings more recall and less precision.",
        pictures=[Picture(file.getvalue(), (), wide=True)],
    )


def confusion(annotations: Annotations, judgement: Judgement, min_score: float) -> Exhibit:
    """What the objects of each class were taken for."""
    names, counts = [name for _, name in annotations.categories], judgement.counts
    rows = [f"true: {name}" for name in names] + ["no object"]
    table = [["true class \\ detection", *names, "missed"]]
    table += [[name, *row] for name, row in zip(rows, counts.tolist(), strict=True)]
    files = {"confusion.csv": csv_text(table).encode()}
    wrong = int(counts[:-1, :-1].sum() - np.trace(counts[:-1, :-1]))
    text = (
        f"What objects were taken for by detections with a score of {min_score} or more whose "
        f"boxes overlap theirs (IoU {mistakes.IOU} or more): {wrong:,} for another class, "
        f"{int(counts[:-1, -1].sum()):,} were missed, and {int(counts[-1].sum()):,} detections are "
        "of no object or repeat one."
    )
    if len(names) <= _MATRIX:
        matrix = Matrix([*names, "none"], counts)
        text += " Each row is a true class, each column a detection's; “none” is no object, and "
        text += "in a row that the object was missed."
        return Exhibit(title="Confusion", text=text, matrix=matrix, files=files)
    totals = counts.sum(axis=1)
    pairs = mistakes.confused(counts, _PAIRS)
    return Exhibit(
        title="Confusion",
        text=f"{text} The {len(pairs)} commonest confusions; confusion.csv has all classes.",
        columns=("true class", "taken for", "objects", "of the class"),
        rows=[(names[a], names[b], f"{n:,}", percent(n / totals[a])) for a, b, n in pairs],
        files=files,
    )


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
    for mistake in sorted(judgement.mistakes, key=lambda mistake: -mistake.cost):
        of_image[mistake.image_id].append(mistake)
    costs = {image_id: sum(m.cost for m in some) for image_id, some in of_image.items()}
    chosen = sorted(costs, key=lambda image_id: -costs[image_id])[:_WORST]
    file_names = dict(zip(annotations.image_ids.tolist(), annotations.file_names, strict=True))
    names = [name for _, name in annotations.categories]
    pictures = []
    for image_id, image in zip(chosen, _read_images(source, chosen), strict=True):
        size = annotations.sizes[annotations.image_ids == image_id][0]
        drawn = draw_examples([make_example(image_id, image, size, detections, annotations)])
        some = of_image[image_id]
        caption = [f"{file_names[image_id]}, cost {costs[image_id]:.2f}"]
        caption += [_in_words(mistake, names) for mistake in some[:_NAMED]]
        caption += [f"and {len(some) - _NAMED:,} more"] if len(some) > _NAMED else []
        pictures.append(Picture(drawn, caption, wide=True))
    count = len(judgement.mistakes)
    text = "There is no mistake."
    if count:
        text = (
            f"{count:,} mistakes in {len(of_image):,} images. These images cost most: a false "
            "detection costs its score, and a missed object 1 less the best score of its class at "
            "its place. mistakes.csv has all, the most costly first."
        )
    return Exhibit(title="Worst images", text=text, pictures=pictures)


def mistakes_table(annotations: Annotations, judgement: Judgement) -> bytes:
    """mistakes.csv: a line for each mistake, the most costly first."""
    file_names = dict(zip(annotations.image_ids.tolist(), annotations.file_names, strict=True))
    names = [name for _, name in annotations.categories] + [""]  # the last for -1
    head = ["image_id", "file", "mistake", "true_class", "detected_class", "score", "cost"]
    rows: list[list[Any]] = [[*head, "x", "y", "width", "height"]]
    for one in sorted(judgement.mistakes, key=lambda mistake: -mistake.cost):
        numbers = [f"{one.score:.6f}" if one.guess >= 0 else "", f"{one.cost:.6f}"]
        what = [one.image_id, file_names[one.image_id], one.kind, names[one.true], names[one.guess]]
        rows.append([*what, *numbers, *(f"{x:.2f}" for x in one.box.tolist())])
    return csv_text(rows).encode()


def _in_words(mistake: Mistake, names: Sequence[str]) -> str:
    """A mistake in words."""
    if mistake.kind == mistakes.MISSED:
        return f"{names[mistake.true]} missed"
    guess = f"{names[mistake.guess]} {mistake.score:.2f}"
    if mistake.kind == mistakes.CLASS:
        return f"{names[mistake.true]} taken for {guess}"
    return f"{guess}: {mistake.kind}"


def _read_images(source: Any, image_ids: Sequence[int]) -> list[np.ndarray]:
    """Images of records, uint8[h, w, 3] with at most 480 pixels a side."""
    from PIL import Image

    number = {image_id: i for i, image_id in enumerate(source.image_ids)}
    read = Source(source.shards, ())
    images = []
    for record in shards.read_some(source.shards, [number[i] for i in image_ids]):
        image = Image.fromarray(pixels.decode(read.image(record).encoded).numpy())
        image.thumbnail((_SIDE, _SIDE))
        images.append(np.asarray(image))
    return images


@dataclasses.dataclass(frozen=True)
class Boxes:
    """Boxes with a text for each.

    Attributes:
      corners: float[n, 4], (y0, x0, y1, x1) in pixels of the original image.
      texts: such as "cat 0.93".
      colours: a number for each, such as its class; boxes of one number have one colour.
      masks: of each, bool[height, width] in pixels of the original image; or ().
    """

    corners: np.ndarray
    texts: Sequence[str]
    colours: Sequence[int]
    masks: Sequence[np.ndarray] = ()


@dataclasses.dataclass(frozen=True)
class Example:
    """One image, what was found on it, and what is on it.

    Attributes:
      title: such as the image's id.
      image: uint8[h, w, 3], in any size.
      size: (height, width) of the original image in pixels.
    """

    title: str
    image: np.ndarray
    size: tuple[float, float]
    found: Boxes
    true: Boxes


def make_example(
    image_id: int,
    image: np.ndarray,
    size: np.ndarray,
    found: Mapping[str, np.ndarray],
    annotations: Annotations,
) -> Example:
    """An image with its detections and its true boxes.

    Args:
      image, size: see `Example`.
      found: the detections of all images, as `scoring.score` takes them; outlines if there are any.
      annotations: the true boxes of all images.
    """
    mine = found["image_id"] == image_id
    true = annotations.image_ids[annotations.rows] == image_id
    height, width = size
    predicted = _named_boxes(
        found["bbox"][mine], found["category_id"][mine], annotations, found["score"][mine]
    )
    actual = _named_boxes(annotations.boxes[true], annotations.category_ids[true], annotations)
    if "segmentation" in found:
        predicted = dataclasses.replace(
            predicted, masks=_pixel_masks(found["segmentation"][mine], size)
        )
        own = [annotations.outlines[i] for i in np.flatnonzero(true)]
        actual = dataclasses.replace(actual, masks=_pixel_masks(own, size))
    title, sides = f"image {image_id}", (float(height), float(width))
    return Example(title, image, sides, predicted, actual)


def draw_examples(examples: Sequence[Example]) -> bytes:
    """A PNG with a pair of images for each example: what was found, and the true boxes."""
    from matplotlib.figure import Figure  # takes a second to import

    columns = min(_COLUMNS, len(examples))
    rows = -(-len(examples) // columns)
    figure = Figure(figsize=(2 * columns * _INCHES, rows * (_INCHES + 0.3)), layout="constrained")
    axes = figure.subplots(rows, 2 * columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for i, example in enumerate(examples):
        row, column = divmod(i, columns)
        pair = axes[row, 2 * column], axes[row, 2 * column + 1]
        for axis, boxes, kind in zip(
            pair, (example.found, example.true), ("found", "true"), strict=True
        ):
            _draw_one(axis, example, boxes)
            axis.set_title(f"{example.title}: {kind}", fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def _named_boxes(
    boxes: np.ndarray,
    categories: np.ndarray,
    annotations: Annotations,
    scores: np.ndarray | None = None,
) -> Boxes:
    """Boxes x, y, width, height as `Boxes`, with their names and scores."""
    names = dict(annotations.categories)
    texts = [names[int(category)] for category in categories]
    if scores is not None:
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, scores, strict=True)]
    x, y, width, height = boxes.reshape(-1, 4).T
    corners = np.stack([y, x, y + height, x + width], axis=1)
    return Boxes(corners, texts, [int(category) for category in categories])


def _pixel_masks(shapes: Iterable[Any], size: np.ndarray) -> list[np.ndarray]:
    height, width = map(int, size)
    return [coco.outline_mask(shape, height, width).astype(bool) for shape in shapes]


def _draw_one(axis: Any, example: Example, boxes: Boxes) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    height, width = example.size
    axis.imshow(example.image, extent=(0, width, height, 0))
    palette = colormaps["tab10"]
    for mask, number in zip(boxes.masks, boxes.colours, strict=False):
        overlay = np.zeros((*mask.shape, 4))
        overlay[mask] = palette(number % 10, alpha=0.55)
        axis.imshow(overlay, extent=(0, width, height, 0))
    for (y0, x0, y1, x1), text, number in zip(
        boxes.corners, boxes.texts, boxes.colours, strict=True
    ):
        colour = palette(number % 10)
        axis.add_patch(
            Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, color=colour, linewidth=1.5)
        )
        axis.text(
            *(x0, y0, text),
            **{"fontsize": 6, "color": "white", "verticalalignment": "bottom", "clip_on": True},
            parse_math=False,  # a name may have dollar signs
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.8},
        )
