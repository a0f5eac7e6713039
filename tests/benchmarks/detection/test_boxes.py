"""Boxes: areas, overlaps and offsets against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.detection import boxes as boxes_

AREA, IOU, CLIP = jax.jit(boxes_.area), jax.jit(boxes_.iou), jax.jit(boxes_.clip)
ENCODE, DECODE = (jax.jit(each, static_argnums=2) for each in (boxes_.encode, boxes_.decode))


def random_boxes(rng: np.random.Generator, *shape: int, least: float = 0.0) -> np.ndarray:
    """f32[*shape, 4] within 0 .. 1 whose sides are at least `least`."""
    sides = rng.uniform(least, 1, (*shape, 2))
    first = rng.uniform(0, 1 - sides)
    return np.concatenate([first, first + sides], -1).astype(np.float32)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """IoU of two boxes, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    height = min(a[2], b[2]) - max(a[0], b[0])
    width = min(a[3], b[3]) - max(a[1], b[1])
    shared = height * width if height > 0 and width > 0 else 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return shared / (sum(areas) - shared) if shared else 0.0


def test_iou_is_that_of_each_two_boxes():
    rng = np.random.default_rng(0)
    a, b = random_boxes(rng, 5, 20), random_boxes(rng, 5, 30)
    overlaps = np.asarray(IOU(a, b))
    expected = [[[overlap(x, y) for y in b[i]] for x in a[i]] for i in range(5)]
    assert overlaps.shape == (5, 20, 30) and overlaps.dtype == np.float32
    np.testing.assert_allclose(overlaps, expected, rtol=1e-4, atol=1e-6)
    assert overlaps.max() > 0.7 and (overlaps == 0).any()


def test_iou_of_boxes_that_agree_touch_or_are_empty():
    square = np.array([0.1, 0.2, 0.5, 0.6], np.float32)
    others = np.array(
        [
            square,
            [0.5, 0.2, 0.9, 0.6],  # shares a side
            [0, 0, 0, 0],
            [0.2, 0.3, 0.2, 0.4],  # a line inside
            [0.4, 0.5, 0.2, 0.3],  # upside down
        ],
        np.float32,
    )
    overlaps = np.asarray(IOU(others, others))
    assert overlaps[0, 0] == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(overlaps[2:], 0)  # also with themselves: no nan
    assert overlaps[0, 1] == 0
    np.testing.assert_array_equal(AREA(others[2:]), 0)
    np.testing.assert_allclose(AREA(others[:2]), [0.16, 0.16], rtol=1e-6)


@pytest.mark.parametrize("weights", [boxes_.WEIGHTS, (1.0, 1.0, 1.0, 1.0)])
@pytest.mark.parametrize("scale", [1, 1344])
def test_offsets_are_those_of_the_formula_and_lead_back(weights, scale):
    rng = np.random.default_rng(1)
    boxes = scale * random_boxes(rng, 3, 1000, least=0.02)
    anchors = scale * random_boxes(rng, 1000, least=0.02)
    codes = np.asarray(ENCODE(boxes, anchors, weights))
    exact_boxes, exact = boxes.astype(np.float64), anchors.astype(np.float64)
    sides, anchor_sides = exact_boxes[..., 2:] - exact_boxes[..., :2], exact[:, 2:] - exact[:, :2]
    shifts = (exact_boxes[..., :2] + exact_boxes[..., 2:] - exact[:, :2] - exact[:, 2:]) / 2
    expected = np.concatenate([shifts / anchor_sides, np.log(sides / anchor_sides)], -1) * weights
    np.testing.assert_allclose(codes, expected, rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(DECODE(codes, anchors, weights), boxes, atol=1e-5 * scale, rtol=1e-4)


def test_an_empty_box_has_finite_offsets_and_gradients():
    anchors = np.array([[0.1, 0.1, 0.3, 0.4], [0, 0, 1, 1]], np.float32)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(ENCODE(x, anchors))))(
        jnp.zeros((2, 4))
    )
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_decoded_sides_are_at_most_62_times_the_anchors():
    anchor = np.array([0.4, 0.4, 0.6, 0.8], np.float32)
    box = np.asarray(DECODE(np.array([0, 0, 1e4, 1e4], np.float32), anchor))
    np.testing.assert_allclose(box[2:] - box[:2], [0.2 * 62.5, 0.4 * 62.5], rtol=1e-5)
    small = np.asarray(DECODE(np.array([0, 0, -1e4, -1e4], np.float32), anchor))
    np.testing.assert_allclose(small, [0.5, 0.6, 0.5, 0.6], rtol=1e-6)


def test_clipping_cuts_at_the_borders_of_each_image():
    boxes = np.array([[[-1, -2, 5, 6], [3, 3, 4, 9]], [[1, 1, 2, 2], [-5, -5, -1, -1]]], np.float32)
    clipped = CLIP(boxes, np.array([[4], [8]], np.float32), np.array([[7], [8]], np.float32))
    expected = [[[0, 0, 4, 6], [3, 3, 4, 7]], [[1, 1, 2, 2], [0, 0, 0, 0]]]
    np.testing.assert_array_equal(clipped, expected)
    np.testing.assert_array_equal(CLIP(boxes[0], 1, 1), [[0, 0, 1, 1], [1, 1, 1, 1]])
