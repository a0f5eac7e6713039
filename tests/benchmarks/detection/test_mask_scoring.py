"""Pasted masks against a paste into the whole image with PIL and pycocotools' encoder."""

import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from pycocotools import mask as coco_masks

from benchmarks.detection import coco, scoring
from benchmarks.detection.scoring import paste_mask


def pasted(mask: np.ndarray, box: np.ndarray, height: int, width: int) -> np.ndarray:
    """The object's pixels uint8[height, width]: PIL moves the whole mask onto the whole image."""
    side, border = len(mask), 2
    padded = Image.fromarray(np.pad(mask, border))
    (y_scale, y_shift), (x_scale, x_shift) = (
        (side / (last - first), border - first * side / (last - first))
        for first, last in (box[::2], box[1::2])
    )
    affine = (x_scale, 0, x_shift, 0, y_scale, y_shift)
    bilinear = Image.Resampling.BILINEAR
    image = padded.transform((width, height), Image.Transform.AFFINE, affine, bilinear)
    return (np.asarray(image) >= 0.5).astype(np.uint8)


def encoded(image: np.ndarray) -> Any:
    return coco_masks.encode(np.asfortranarray(image))


def blobs(rng: np.random.Generator, side: int) -> np.ndarray:
    """A mask float32[side, side] with holes, from 0 to almost 1."""
    coarse = rng.random((4, 4, 1)).astype(np.float32)
    return np.clip(3 * tf.image.resize(coarse, (side, side)).numpy()[..., 0] - 1, 0, 0.97)


@pytest.mark.parametrize("side", [1, 14, 28])
def test_runs_are_those_of_a_paste_into_the_image(side):
    """Boxes within the image, over its borders, larger than it, and outside.

    No mask has ones, of which bilinear shares are 0.5 where roundings decide.
    """
    rng = np.random.default_rng(side)
    empty = 0
    for i in range(150):
        height, width = rng.integers(1, 60, 2)
        size = np.array([height, width, height, width])
        box = np.sort(rng.uniform(-0.5, 1.5, (2, 2)), 0).ravel() * size
        box = np.clip(box, 0, size) if i % 3 == 0 else box
        box = np.round(box) if i % 5 == 0 else box
        box = (box * 3 - size if i % 7 == 0 else box).astype(np.float32)
        box[2:] = np.maximum(box[2:], box[:2] + 0.1)
        mask = np.full((side, side), 0.97, np.float32) if i % 4 == 0 else blobs(rng, side)
        found = paste_mask(mask, box, int(height), int(width))
        expected = encoded(pasted(mask, box.astype(np.float64), height, width))
        assert found == expected, (mask.shape, box, height, width)
        empty += int(coco_masks.area(found) == 0)
    assert 5 < empty < 100


def test_runs_that_touch_the_borders_are_joined():
    """The whole image is one run, and full columns beside each other are one run."""
    full = paste_mask(np.ones((8, 8), np.float32), (-50, -50, 50, 50), 7, 9)
    assert full == encoded(np.ones((7, 9), np.uint8))
    mask = np.zeros((28, 28), np.float32)
    mask[:, 10:] = 1
    expected = np.zeros((20, 33), np.uint8)
    expected[:, 12:30] = 1
    assert paste_mask(mask, (-40, 2, 60, 30), 20, 33) == encoded(expected)


@pytest.mark.parametrize(
    "box", [(0, 0, 0, 0), (4.5, 4.5, 4.5, 4.5), (3, 3, 2, 8), (4.1, 4.1, 4.2, 4.2)]
)
def test_a_box_that_has_no_pixel_is_empty(box):
    nothing = encoded(np.zeros((10, 10), np.uint8))
    assert paste_mask(np.ones((5, 5), np.float32), box, 10, 10) == nothing


def shape(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """An object uint8[height, width]: an ellipse of which an end is cut off."""
    y, x = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    angle = rng.uniform(0, 2 * np.pi)
    return ((y**2 + x**2 <= 1) & (np.cos(angle) * y + np.sin(angle) * x < 0.6)).astype(np.uint8)


def test_perfect_masks_of_28_cells_score_one(tmp_path):
    """True masks of objects of any size, cut to 28 x 28 cells, reach an mAP of .99."""
    rng = np.random.default_rng(0)
    truth, found = [], []
    for number in range(1, 41):
        image = np.zeros((200, 240), np.uint8)
        height, width = (8 + 170 * rng.random(2) ** 2).astype(int)
        y, x = rng.integers(0, 200 - height + 1), rng.integers(0, 240 - width + 1)
        image[y : y + height, x : x + width] = shape(rng, height, width)
        rows, columns = np.flatnonzero(image.any(1)), np.flatnonzero(image.any(0))
        y0, x0, y1, x1 = rows[0], columns[0], rows[-1] + 1, columns[-1] + 1
        outline = encoded(image)
        truth.append(
            {"id": number, "image_id": number, "category_id": 1, "iscrowd": 0}
            | {"area": float(coco_masks.area(outline))}
            | {"bbox": [int(x0), int(y0), int(x1 - x0), int(y1 - y0)]}
            | {"segmentation": {"size": [200, 240], "counts": outline["counts"].decode()}}
        )
        true = image[y0:y1, x0:x1, None].astype(np.float32)
        small = tf.image.resize(true, (28, 28), antialias=True).numpy()[..., 0]
        found.append(
            {"image_id": number, "category_id": 1, "score": 0.9}
            | {"segmentation": paste_mask(small, (y0, x0, y1, x1), 200, 240)}
        )
    content = {
        "images": [
            {"id": row["id"], "file_name": f"{row['id']}.png", "height": 200, "width": 240}
            for row in truth
        ],
        "annotations": truth,
        "categories": [{"id": 1, "name": "blob"}],
    }
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(content))
    columns = {key: [row[key] for row in found] for key in found[0]}
    scores = scoring.quality(coco.Annotations.load(str(path), masks=True), columns, "segm").scores
    assert scores["mAP"] >= 0.99, scores


def test_a_pixel_of_a_half_is_the_objects():
    expected = np.zeros((10, 12), np.uint8)
    expected[1:9, 2:10] = 1
    box = (1, 2, 9, 10)
    assert paste_mask(np.full((8, 8), 0.5, np.float32), box, 10, 12) == encoded(expected)
    below = np.full((8, 8), np.nextafter(np.float32(0.5), np.float32(0)))
    assert paste_mask(below, box, 10, 12) == encoded(0 * expected)
