"""SSD's default boxes: the paper's 8,732, and other layouts."""

import math

import numpy as np
import pytest

from benchmarks.detection.ssd import anchors


def original() -> np.ndarray:
    """The 8,732 boxes (cx, cy, w, h) by map, shape, row and column, as MLPerf's code has them."""
    cells_of, steps = [38, 19, 10, 5, 3, 1], [8, 16, 32, 64, 100, 300]
    scales = [21, 45, 99, 153, 207, 261, 315]
    ratios = [(2,), (2, 3), (2, 3), (2, 3), (2,), (2,)]
    boxes = []
    for k, (cells, step) in enumerate(zip(cells_of, steps, strict=True)):
        small, between = scales[k] / 300, math.sqrt(scales[k] / 300 * scales[k + 1] / 300)
        shapes = [(small, small), (between, between)]
        for ratio in ratios[k]:
            w, h = small * math.sqrt(ratio), small / math.sqrt(ratio)
            shapes += [(w, h), (h, w)]
        for w, h in shapes:
            for i in range(cells):
                for j in range(cells):
                    centre = ((j + 0.5) * step / 300, (i + 0.5) * step / 300)
                    boxes.append([min(max(each, 0), 1) for each in (*centre, w, h)])
    return np.array(boxes)


def test_the_boxes_of_300_pixels_have_the_published_check_sums():
    boxes = anchors.default_boxes(anchors.SSD300)
    assert boxes.shape == (8732, 4) and anchors.SSD300.count == 8732
    np.testing.assert_allclose(
        boxes.sum(0), [4443.1466667, 4443.1466667, 1171.9676687, 1171.9676687], atol=1e-7
    )
    assert (boxes**2).sum() == pytest.approx(6586.2625778, abs=1e-7)
    np.testing.assert_allclose(boxes[0], [0.0133333, 0.0133333, 0.07, 0.07], atol=1e-7)
    assert boxes[:, :2].max() == 1  # the centres of the last cells at a step of 8


def test_the_boxes_are_the_originals_in_the_order_of_a_convolutions_output():
    expected, start = [], 0
    layout = anchors.SSD300
    for cells, shapes in zip(layout.feature_sizes, layout.boxes_per_cell, strict=True):
        part = original()[start : start + cells**2 * shapes]
        expected.append(part.reshape(shapes, cells, cells, 4).transpose(1, 2, 0, 3).reshape(-1, 4))
        start += len(part)
    ours = anchors.default_boxes(layout)[:, [1, 0, 3, 2]]
    np.testing.assert_allclose(ours, np.concatenate(expected), rtol=1e-12)


def test_corners_lie_half_a_side_from_the_centre():
    boxes = np.array([[0.5, 0.25, 0.5, 0.25], [0, 1, 0.5, 0.5]], np.float32)
    corners = anchors.corners(boxes)
    np.testing.assert_array_equal(corners, [[0.25, 0.125, 0.75, 0.375], [-0.25, 0.75, 0.25, 1.25]])
    assert corners.dtype == np.float32


def test_a_small_layout():
    layout = anchors.Layout(
        image_size=64, feature_sizes=(2,), steps=(32,), scales=(16, 25), aspect_ratios=((4,),)
    )
    boxes = 64 * anchors.default_boxes(layout)
    assert layout.boxes_per_cell == (4,) and layout.count == len(boxes) == 16
    shapes = [[16, 16], [20, 20], [8, 32], [32, 8]]  # height, width
    np.testing.assert_allclose(boxes[:, 2:], shapes * 4)
    centres = [[16, 16], [16, 48], [48, 16], [48, 48]]
    np.testing.assert_allclose(boxes[::4, :2], centres)
