"""Masks on the device against NumPy's bits, a loop and TensorFlow's resizing."""

import jax
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.detection.mask_rcnn import masks
from tests.benchmarks.detection.test_boxes import random_boxes

CROP = jax.jit(masks.crop, static_argnums=4)


@pytest.mark.parametrize("side", [4, 28])
def test_bits_are_those_of_numpy(side):
    rng = np.random.default_rng(side)
    true = rng.integers(0, 2, (3, 5, side, side)).astype(np.uint8)
    bits = np.packbits(true.reshape(3, 5, -1), -1)
    found = np.asarray(jax.jit(masks.unpack, static_argnums=1)(bits, side))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, true)


def sample(mask: np.ndarray, box: np.ndarray, y: float, x: float) -> float:
    """The mask at a point, in float64."""
    side = len(mask)
    if not (box[0] <= y <= box[2] and box[1] <= x <= box[3]) or min(box[2:] - box[:2]) <= 0:
        return 0.0
    ends = []
    for value, first, last in ((y, box[0], box[2]), (x, box[1], box[3])):
        place = min(max((value - first) / (last - first) * side - 0.5, 0), side - 1)
        low = min(int(place), side - 2)
        ends.append((low, place - low))
    (i, v), (j, u) = ends
    top = (1 - u) * mask[i, j] + u * mask[i, j + 1]
    bottom = (1 - u) * mask[i + 1, j] + u * mask[i + 1, j + 1]
    return (1 - v) * top + v * bottom


def test_cells_of_regions_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    true = rng.random((2, 4, 12, 12)).astype(np.float32)
    boxes = 100 * random_boxes(rng, 2, 4, least=0.1)
    boxes[0, 3] = 0  # padding
    regions = 110 * random_boxes(rng, 2, 30, least=0.01) - 5
    index = rng.integers(0, 4, (2, 30)).astype(np.int32)
    regions[:, :10] = np.take_along_axis(boxes, index[:, :10, None], 1) + rng.normal(
        0, 3, (2, 10, 4)
    )
    found = np.asarray(CROP(true, boxes, index, regions, 7))
    expected = np.zeros((2, 30, 7, 7))
    for b, r, i, j in np.ndindex(expected.shape):
        y0, x0, y1, x1 = regions[b, r].astype(np.float64)
        y, x = y0 + (y1 - y0) * (i + 0.5) / 7, x0 + (x1 - x0) * (j + 0.5) / 7
        g = index[b, r]
        expected[b, r, i, j] = sample(true[b, g], boxes[b, g].astype(np.float64), y, x)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert ((expected > 0).mean() > 0.2) and (expected == 0).mean() > 0.2


@pytest.mark.parametrize("size", [9, 28, 40])
def test_a_region_that_is_the_box_has_the_mask_resized(size):
    true = np.random.default_rng(1).random((1, 1, 28, 28)).astype(np.float32)
    box = np.array([[[10, 20, 66, 132]]], np.float32)
    found = CROP(true, box, np.zeros((1, 1), np.int32), box, size)
    expected = tf.image.resize(true[0, 0, ..., None], (size, size), "bilinear").numpy()
    np.testing.assert_allclose(found[0, 0], expected[..., 0], atol=1e-5)


def test_borders_belong_to_a_box_and_an_empty_one_has_no_mask():
    """Regions of one cell, whose centre is at a corner of the box, or beyond it, or at 0.5."""
    true = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
    centres = np.array([[0, 0], [8, 8], [0, 8], [-0.25, 4], [4, 8.25]], np.float32)
    regions = np.concatenate([centres - 2, centres + 2], -1)[None]
    box, index = np.array([[[0, 0, 8, 8]]], np.float32), np.zeros((1, 5), np.int32)
    found = CROP(true, box, index, regions, 1)
    np.testing.assert_array_equal(np.ravel(found), [1, 16, 4, 0, 0])
    middle = CROP(true, box / 16, index[:, :1], box / 32, 1)  # a box of half a pixel
    np.testing.assert_array_equal(np.ravel(middle), [(1 + 2 + 5 + 6) / 4])
    unit = np.array([[[0, 0, 1, 1]]], np.float32)
    for empty in ([0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]):
        assert not np.asarray(
            CROP(true, np.array([[empty]], np.float32), index[:, :1], unit, 1)
        ).any()
