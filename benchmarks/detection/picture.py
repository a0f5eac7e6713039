"""Draws detections on images, with the true boxes beside them."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.detection import outlines
from benchmarks.detection.coco import Annotations

_COLUMNS = 3  # pairs of images beside each other
_INCHES = 2.4  # the width of an image


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


def example(
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
    predicted = _boxes(
        found["bbox"][mine], found["category_id"][mine], annotations, found["score"][mine]
    )
    actual = _boxes(annotations.boxes[true], annotations.category_ids[true], annotations)
    if "segmentation" in found:
        predicted = dataclasses.replace(predicted, masks=_masks(found["segmentation"][mine], size))
        own = [annotations.outlines[i] for i in np.flatnonzero(true)]
        actual = dataclasses.replace(actual, masks=_masks(own, size))
    title, sides = f"image {image_id}", (float(height), float(width))
    return Example(title, image, sides, predicted, actual)


def draw(examples: Sequence[Example]) -> bytes:
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


def _boxes(
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


def _masks(shapes: Iterable[Any], size: np.ndarray) -> list[np.ndarray]:
    height, width = map(int, size)
    return [outlines.mask(shape, height, width).astype(bool) for shape in shapes]


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
