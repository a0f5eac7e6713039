"""SSD's random crop against a plain loop over the same random numbers."""

import math

import numpy as np
import pytest

from benchmarks.detection.ssd import input_pipeline
from common.tensorflow import tensorflow

MIN_IOU = (-1, 0.1, 0.3, 0.5, 0.7, 0.9)


def boxes_of(draw, count):
    """float32[count, 4] boxes inside of the image."""
    sides = draw.uniform(0.05, 0.8, (count, 2)) ** draw.choice([1, 2])
    corner = draw.uniform(0, 1, (count, 2)) * (1 - sides)
    return np.concatenate([corner, np.minimum(corner + sides, 1)], axis=1).astype(np.float32)


def iou(box, y0, x0, y1, x1):
    height, width = min(box[2], y1) - max(box[0], y0), min(box[3], x1) - max(box[1], x0)
    shared = max(height, 0) * max(width, 0)
    area = (box[2] - box[0]) * (box[3] - box[1])
    return shared / (area + (y1 - y0) * (x1 - x0) - shared)


def is_inside(box, y0, x0, y1, x1):
    return y0 < (box[0] + box[2]) / 2 < y1 and x0 < (box[1] + box[3]) / 2 < x1


def plain_window(boxes, height, width, conditions, numbers):
    """[y, x, height, width] of the crop, window by window in float64."""
    boxes = boxes.astype(float)
    for condition, windows in zip(conditions, numbers.astype(float), strict=True):
        for u in windows:
            h, w = 0.3 + 0.7 * u[0], 0.3 + 0.7 * u[1]
            y, x = u[2] * (1 - h), u[3] * (1 - w)
            if not 0.5 < w / h < 2:
                continue
            top, left = math.floor(y * height), math.floor(x * width)
            bottom, right = math.ceil((y + h) * height), math.ceil((x + w) * width)
            window = top / height, left / width, bottom / height, right / width
            least = MIN_IOU[condition]
            if all(iou(box, *window) > least for box in boxes) and any(
                is_inside(box, *window) for box in boxes
            ):
                return [top, left, bottom - top, right - left]
    return [0, 0, height, width]


def plain_cut(boxes, classes, height, width, window, max_boxes):
    """[(y0, x0, y1, x1, class), ...] of the boxes in a crop, in order."""
    top, left, high, wide = (
        value / side for value, side in zip(window, (height, width, height, width), strict=True)
    )
    rows = []
    for box, label in zip(boxes.astype(float), classes, strict=True):
        if is_inside(box, top, left, top + high, left + wide):
            ys = [min(max((y - top) / high, 0), 1) for y in box[::2]]
            xs = [min(max((x - left) / wide, 0), 1) for x in box[1::2]]
            rows.append((ys[0], xs[0], ys[1], xs[1], label))
    areas = [(row[2] - row[0]) * (row[3] - row[1]) for row in rows]
    largest = sorted(range(len(rows)), key=lambda i: (-areas[i], i))[:max_boxes]
    return [rows[i] for i in sorted(largest)]


@pytest.fixture(scope="module")
def compiled():
    tf = tensorflow()
    number = tf.TensorSpec([], tf.int32)

    @tf.function(
        input_signature=[
            *(tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int32)),
            *(tf.TensorSpec([2], tf.int32), tf.TensorSpec([3], tf.int32), number),
        ]
    )
    def cropped(boxes, classes, size, seeds, max_samples):
        draws = input_pipeline.draw_crop(seeds, max_samples)
        window = input_pipeline.crop_window(boxes, size, draws, 0.3)
        return draws, window, input_pipeline.cut_boxes(boxes, classes, size, window, 6)

    return cropped


@pytest.mark.parametrize("max_samples", [1, 3, 50])
def test_as_a_plain_loop(compiled, max_samples):
    draw, sizes = np.random.default_rng(max_samples), set()
    for trial in range(300):
        boxes = boxes_of(draw, draw.integers(1, 12))
        classes = draw.integers(1, 81, len(boxes)).astype(np.int32)
        height, width = (int(side) for side in draw.integers(1, 700, 2))
        seeds = draw.integers(0, 2**31, 3).astype(np.int32)
        size = [height, width]
        cropped = compiled(boxes, classes, size, seeds, max_samples)
        draws, window, (kept, labels) = cropped
        expected = plain_window(boxes, height, width, *(d.numpy() for d in draws))
        assert window.numpy().tolist() == expected, trial
        rows = plain_cut(boxes, classes, height, width, expected, 6)
        count = len(rows)
        assert labels.numpy().tolist() == [int(row[4]) for row in rows] + [0] * (6 - count)
        expected_boxes = np.reshape([row[:4] for row in rows], (-1, 4))
        np.testing.assert_allclose(kept.numpy()[:count], expected_boxes, atol=2e-6)
        assert not kept.numpy()[count:].any()
        assert count >= 1 and kept.numpy().min() >= 0 and kept.numpy().max() <= 1
        sizes.add((count, expected[2:] == size))
    assert {count for count, _ in sizes} >= {1, 2, 3, 4, 5, 6}
    assert {is_whole for _, is_whole in sizes} == {True, False}


def test_draws_are_of_seven_choices_with_equal_chances():
    draws = [input_pipeline.draw_crop(np.array([9, i, 77 * i], np.int32), 2) for i in range(1000)]
    rounds = np.array([len(d.conditions) for d in draws])
    # Before the first whole image, at 1/7 each: geometric, of mean 6 and variance 42.
    assert abs(rounds.mean() - 6) < 5 * (42 / 1000) ** 0.5
    assert abs(np.mean(rounds == 0) - 1 / 7) < 5 * (6 / 49 / 1000) ** 0.5
    conditions = np.concatenate([d.conditions.numpy() for d in draws])
    counts = np.bincount(conditions, minlength=6)
    share = len(conditions) / 6
    assert len(counts) == 6 and np.abs(counts - share).max() < 5 * share**0.5
    numbers = np.concatenate([d.numbers.numpy().reshape(-1, 4) for d in draws])
    assert numbers.shape == (2 * len(conditions), 4)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert np.abs(numbers.mean(axis=0) - 0.5).max() < 5 / (12 * len(numbers)) ** 0.5
    assert np.abs(np.corrcoef(numbers.T)[np.triu_indices(4, 1)]).max() < 5 / len(numbers) ** 0.5


def test_of_equal_boxes_the_first_are_kept():
    boxes = np.tile(np.array([0.2, 0.2, 0.4, 0.4], np.float32), (5, 1))
    boxes[3] += [0, 0, 0.1, 0.1]
    kept, classes = input_pipeline.cut_boxes(boxes, [1, 2, 3, 4, 5], [10, 10], [0, 0, 10, 10], 3)
    assert classes.numpy().tolist() == [1, 2, 4]
    np.testing.assert_array_equal(kept, boxes[[0, 1, 3]])


@pytest.mark.parametrize(
    ("numbers", "condition", "expected"),
    [
        ((0.0, 0.99, 0, 0), 0, [0, 0, 32, 64]),
        ((0.0, 1.0, 0, 0), 0, [0, 0, 64, 64]),  # twice as wide as high: the whole image instead
        ((1.0, 0.0, 0, 0), 0, [0, 0, 64, 64]),
        ((0.0, 0.0, 0, 0), 2, [0, 0, 32, 32]),  # the IoU is 1/2, above 0.3
        ((0.0, 0.0, 0, 0), 3, [0, 0, 64, 64]),  # and not above 0.5
    ],
)
def test_the_limits_of_ratio_and_iou_are_not_valid(numbers, condition, expected):
    boxes = np.array([(0, 0, 0.5, 0.25)], np.float32)
    draws = input_pipeline.CropDraws(
        np.array([condition], np.int32), np.array([[numbers]], np.float32)
    )
    assert input_pipeline.crop_window(boxes, [64, 64], draws, 0.5).numpy().tolist() == expected


def test_a_centre_on_the_edge_of_a_window_is_outside():
    """Centres (y, x) on each edge of the window 1/4 to 3/4, and just inside."""
    centres = [(0.25, 0.5), (0.75, 0.5), (0.5, 0.25), (0.5, 0.75), (0.26, 0.74)]
    boxes = np.array([(y - 0.125, x - 0.125, y + 0.125, x + 0.125) for y, x in centres], np.float32)
    low, high = (np.full(2, side, np.float32) for side in (0.25, 0.75))
    assert input_pipeline._inside(boxes, low, high).numpy().tolist() == [False] * 4 + [True]
