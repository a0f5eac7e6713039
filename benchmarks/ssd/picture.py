"""Takes the detections on the first evaluated images together with the true boxes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ops.detection import picture
from ops.detection.coco import Annotations

COUNT = 9  # images
MIN_SCORE = 0.5  # weaker detections would hide the image


def examples(
    batch: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], annotations: Annotations
) -> list[picture.Example]:
    """What `ops.detection.picture` draws.

    Args:
      batch: a batch to evaluate; its images are taken.
      found: the detections of all images, as `coco.score` takes them.
      annotations: the true boxes.
    """
    taken = []
    for i in np.flatnonzero(batch["mask"] > 0):
        image_id = batch["image_id"][i]
        mine = (found["image_id"] == image_id) & (found["score"] >= MIN_SCORE)
        true = annotations.image_ids[annotations.rows] == image_id
        height, width = batch["size"][i]
        taken.append(
            picture.Example(
                title=f"image {image_id}",
                image=batch["image"][i],
                size=(float(height), float(width)),
                found=_boxes(
                    found["bbox"][mine],
                    found["category_id"][mine],
                    annotations,
                    found["score"][mine],
                ),
                true=_boxes(annotations.boxes[true], annotations.category_ids[true], annotations),
            )
        )
    return taken


def _boxes(
    boxes: np.ndarray,
    categories: np.ndarray,
    annotations: Annotations,
    scores: np.ndarray | None = None,
) -> picture.Boxes:
    """Boxes x, y, width, height as `picture.Boxes`, with their names and scores."""
    names = dict(annotations.categories)
    texts = [names[int(category)] for category in categories]
    if scores is not None:
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, scores, strict=True)]
    x, y, width, height = boxes.reshape(-1, 4).T
    corners = np.stack([y, x, y + height, x + width], axis=1)
    return picture.Boxes(corners, texts, [int(category) for category in categories])
