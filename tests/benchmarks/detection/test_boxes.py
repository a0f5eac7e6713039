"""Boxes against NumPy in float64: areas, overlaps, offsets, matches, and suppression."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.detection import boxes as module
from benchmarks.detection.boxes import (
    CODER_WEIGHTS,
    area,
    decode_boxes,
    encode_boxes,
    iou,
    match,
    nms,
    postprocess_detections,
    take_by_product,
)

AREA, IOU = jax.jit(area), jax.jit(iou)
ENCODE, DECODE = (jax.jit(each, static_argnums=2) for each in (encode_boxes, decode_boxes))
MATCH, TAKE = jax.jit(match), jax.jit(take_by_product)
NEAREST = jax.jit(partial(match, allow_low_quality_matches=False))
KEEP = jax.jit(nms, static_argnames=("threshold", "inclusive"))
BEST = jax.jit(postprocess_detections, static_argnums=(2, 3, 4, 5))


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


def offsets(box: np.ndarray, anchor: np.ndarray, weights: Any) -> np.ndarray:
    """Those that R-CNN learns (arXiv:1311.2524, appendix C), y before x, in float64."""
    (y, x, h, w), (ay, ax, ah, aw) = (
        ((b[0] + b[2]) / 2, (b[1] + b[3]) / 2, b[2] - b[0], b[3] - b[1])
        for b in (box.astype(np.float64), anchor.astype(np.float64))
    )
    return np.array([(y - ay) / ah, (x - ax) / aw, np.log(h / ah), np.log(w / aw)]) * weights


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


@pytest.mark.parametrize("weights", [CODER_WEIGHTS, (1.0, 1.0, 1.0, 1.0)])
@pytest.mark.parametrize("scale", [1, 1344])
def test_offsets_are_those_of_the_formula_and_lead_back(weights, scale):
    rng = np.random.default_rng(1)
    boxes = scale * random_boxes(rng, 3, 1000, least=0.02)
    anchors = scale * random_boxes(rng, 1000, least=0.02)
    deltas = np.asarray(ENCODE(boxes, anchors, weights))
    exact_boxes, exact = boxes.astype(np.float64), anchors.astype(np.float64)
    sides, anchor_sides = exact_boxes[..., 2:] - exact_boxes[..., :2], exact[:, 2:] - exact[:, :2]
    shifts = (exact_boxes[..., :2] + exact_boxes[..., 2:] - exact[:, :2] - exact[:, 2:]) / 2
    expected = np.concatenate([shifts / anchor_sides, np.log(sides / anchor_sides)], -1) * weights
    np.testing.assert_allclose(deltas, expected, rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(
        DECODE(deltas, anchors, weights), boxes, atol=1e-5 * scale, rtol=1e-4
    )


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


def plain_match(
    overlaps: np.ndarray, valid: np.ndarray, threshold: float
) -> tuple[list[int], list[bool]]:
    """(box, positive) of each anchor, from the IoUs [G, N]."""
    box, positive = [], []
    for n in range(overlaps.shape[1]):
        best, value = 0, -1.0
        for g in range(len(valid)):
            overlap = overlaps[g, n] if valid[g] else 0
            if overlap > value:
                best, value = g, overlap
        box.append(best)
        positive.append(bool(value >= threshold))
    for g in range(len(valid)):
        best = max(range(overlaps.shape[1]), key=lambda n, g=g: (overlaps[g, n], -n))
        if valid[g] and overlaps[g, best] > 0:
            box[best], positive[best] = g, True
    return box, positive


def anchor_grid(step: float, size: float) -> np.ndarray:
    """Anchors f32[N, 4] at the cells of a grid, of two shapes: IoUs with them often tie."""
    centres = np.arange(step / 2, 1, step)
    y, x = np.meshgrid(centres, centres, indexing="ij")
    shapes = [(size, size), (size / 2, size)]
    boxes = [np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1) for h, w in shapes]
    return np.stack(boxes, 2).reshape(-1, 4).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 1])
def test_all_devices_find_the_first_of_the_highest(axis, monkeypatch):
    values = np.random.default_rng(0).integers(-2, 3, (20, 300)).astype(np.float32)
    values[3], values[:, 4] = -np.inf, -np.inf
    for kind in ("cpu", "TPU v3"):
        monkeypatch.setattr(module, "device_kind", lambda kind=kind: kind)
        maximum, position = module._highest(jnp.asarray(values), axis)
        np.testing.assert_array_equal(maximum, values.max(axis))
        np.testing.assert_array_equal(position, values.argmax(axis))


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("anchors", ["grid", "random", "few"])
def test_matches_are_those_of_a_loop(anchors, count):
    """Over 100 images, with padding among the boxes and boxes that occur twice."""
    rng = np.random.default_rng(count)
    places = {
        "grid": anchor_grid(0.0625, 0.25),  # 512: more than one row of the table of anchors
        "random": random_boxes(rng, 300),
        "few": random_boxes(rng, 3),  # many boxes share their best anchor
    }[anchors]
    forced = 0
    for _ in range(50):
        boxes = random_boxes(rng, count)
        boxes[rng.random(count) < 0.3] = boxes[0]
        if rng.random() < 0.3:
            boxes = (np.round(boxes * 8) / 8).astype(np.float32)  # ties; some without area
        valid = rng.random(count) < 0.8
        overlaps = np.asarray(IOU(boxes, places))
        box, positive = plain_match(overlaps, valid, 0.5)
        found = MATCH(boxes, valid, places, 0.5)
        np.testing.assert_array_equal(found.box, box)
        np.testing.assert_array_equal(found.positive, positive)
        highest = np.where(valid[:, None], overlaps, 0).max(0)
        np.testing.assert_allclose(found.overlap, highest, atol=1e-6)
        forced += int(((highest < 0.5) & positive).sum())
        nearest = NEAREST(boxes, valid, places, 0.5)
        np.testing.assert_array_equal(nearest.box, np.where(valid[:, None], overlaps, 0).argmax(0))
        np.testing.assert_array_equal(nearest.positive, highest >= 0.5)
        np.testing.assert_allclose(nearest.overlap, highest, atol=1e-6)
    assert forced > 10


def test_values_are_taken_exactly():
    rng = np.random.default_rng(4)
    values = (rng.normal(size=(100, 2, 3)) * 10.0 ** rng.integers(-6, 6, (100, 2, 3))).astype(
        np.float32
    )
    index = rng.integers(0, 100, 5000).astype(np.int32)
    taken = np.asarray(TAKE(values, index))
    np.testing.assert_array_equal(taken, values[index])
    np.testing.assert_array_equal(TAKE(values, np.array([-1, 100], np.int32)), np.zeros((2, 2, 3)))


def test_an_overlap_at_the_threshold_is_positive():
    """The first box has IoUs of 1 and 1/2 with the anchors, the second of 0 and 1/8."""
    anchors = np.array([[0, 0, 1, 0.5], [0, 0, 1, 1]], np.float32)
    boxes = np.array([[0, 0, 1, 0.5], [0, 0.5, 0.25, 1]], np.float32)
    first = np.array([True, False])
    for matched in (MATCH, NEAREST):
        assert matched(boxes, first, anchors, 0.5).positive.tolist() == [True, True]
        assert matched(boxes, first, anchors, np.float32(0.50001)).positive.tolist() == [
            True,
            False,
        ]
    found = MATCH(boxes, np.array([True, True]), anchors, 0.75)
    assert (found.box.tolist(), found.positive.tolist()) == ([0, 1], [True, True])
    found = NEAREST(boxes, np.array([True, True]), anchors, 0.75)
    assert (found.box.tolist(), found.positive.tolist()) == ([0, 0], [True, False])


def test_the_parts_of_taken_values_are_those_of_bfloat16(monkeypatch):
    operands = []

    def einsum(equation, *arrays):
        operands.extend(arrays)
        return jnp.zeros((3, 1))

    monkeypatch.setattr(jnp, "einsum", einsum)
    values = np.random.default_rng(5).normal(size=100).astype(np.float32)
    take_by_product(jnp.asarray(values), jnp.zeros(1, jnp.int32))
    for array in map(np.asarray, operands):
        np.testing.assert_array_equal(array, array.astype(jnp.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(operands[1].sum(0), values)


def clusters(rng: np.random.Generator, n: int) -> np.ndarray:
    """f32[n, 4]: boxes around a few centres, so that many overlap."""
    centres = random_boxes(rng, max(1, n // 8), least=0.1)
    boxes = centres[rng.integers(0, len(centres), n)] + rng.normal(0, 0.03, (n, 4))
    boxes = np.clip(boxes, 0, 1).astype(np.float32)
    boxes[:, 2:] = np.maximum(boxes[:, :2] + 0.01, boxes[:, 2:])
    return boxes


def greedy(overlaps: np.ndarray, threshold: float, inclusive: bool) -> list[int]:
    """The kept boxes, from the IoUs [n, n]."""
    kept: list[int] = []
    for i in range(len(overlaps)):
        near = [overlaps[j, i] for j in kept]
        if not any(o >= threshold if inclusive else o > threshold for o in near):
            kept.append(i)
    return kept


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("n", [1, 2, 60])
def test_kept_boxes_are_tensorflows(n, threshold):
    rng = np.random.default_rng(n)
    rows = np.stack([clusters(rng, n) for _ in range(40)])
    scores = np.linspace(1, 0.5, n, dtype=np.float32)
    kept = np.asarray(KEEP(rows, threshold, inclusive=False))
    for boxes, row in zip(rows, kept, strict=True):
        expected = tf.image.non_max_suppression(boxes, scores, n, threshold).numpy()
        assert np.flatnonzero(row).tolist() == sorted(expected)
    assert n < 60 or 40 < kept.sum() < kept.size  # some are dropped


@pytest.mark.parametrize("inclusive", [False, True])
def test_kept_boxes_are_those_of_the_greedy_loop_where_overlaps_tie(inclusive):
    """IoUs of 1/3 and 1/2 exactly, over 1,000 rows of boxes on a coarse grid."""
    rng = np.random.default_rng(7)
    corners = rng.integers(0, 6, (1000, 12, 2))
    sides = rng.integers(1, 4, (1000, 12, 2))
    rows = (np.concatenate([corners, corners + sides], -1) / 8).astype(np.float32)
    overlaps, other = [np.asarray(IOU(boxes, boxes)) for boxes in rows], 0
    for threshold in (0.5, 1.0, 0.0):
        kept = np.asarray(KEEP(rows, threshold, inclusive=inclusive))
        opposite = np.asarray(KEEP(rows, threshold, inclusive=not inclusive))
        other += int((kept != opposite).any(-1).sum())
        for table, row in zip(overlaps, kept, strict=True):
            assert np.flatnonzero(row).tolist() == greedy(table, threshold, inclusive)
    assert other > 100  # ties matter here


def test_a_long_chain_of_suppression_alternates():
    """Each box suppresses the next one only: the longest possible way to the result."""
    start = np.arange(50, dtype=np.float32)
    boxes = np.stack([np.zeros_like(start), start, np.ones_like(start), start + 2], -1)
    kept = np.asarray(KEEP(boxes, 0.3, inclusive=False))
    np.testing.assert_array_equal(kept, np.arange(50) % 2 == 0)


def test_padding_is_not_kept_and_suppresses_nothing():
    rng = np.random.default_rng(8)
    for threshold, inclusive in ((0.0, True), (0.5, True), (0.5, False)):
        rows = np.stack([clusters(rng, 20) for _ in range(30)])
        alone = np.asarray(KEEP(rows, threshold, inclusive=inclusive))
        padded = np.zeros((30, 43, 4), np.float32)
        places = np.sort(rng.random((30, 43)).argsort(1)[:, :20], 1)
        np.put_along_axis(padded, places[..., None], rows, 1)
        kept = np.asarray(KEEP(padded, threshold, inclusive=inclusive))
        np.testing.assert_array_equal(np.take_along_axis(kept, places, 1), alone)
        assert kept.sum() == alone.sum() > 0
    assert not np.asarray(KEEP(np.zeros((7, 4), np.float32), 0.5, inclusive=True)).any()


def plain_detections(
    boxes: np.ndarray, scores: np.ndarray, most: int, candidates: int
) -> list[tuple[float, int, int]]:
    """The detections (score, class, row) of one image by loops, the best first.

    Boxes are f32[N, C, 4]; those with a score of .05 or less or an IoU of .5 or more are dropped.
    """
    found = []
    for number in range(scores.shape[1]):
        order = sorted(range(len(boxes)), key=lambda i: (-scores[i, number], i))[:candidates]
        kept: list[int] = []
        for i in order:
            near = (overlap(boxes[i, number], boxes[k, number]) for k in kept)
            if scores[i, number] > 0.05 and all(each < 0.5 for each in near):
                kept.append(i)
        found += [(scores[i, number], number + 1, i) for i in kept]
    return sorted(found, key=lambda row: -row[0])[:most]


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize(("most", "candidates"), [(5, None), (40, None), (20, 90), (200, None)])
def test_the_best_detections_are_those_of_loops(most, candidates, per_class):
    draw = np.random.default_rng(most)
    shape = (4, 90, 4) if per_class else (4, 90, 1)
    corner = draw.uniform(0, 0.7, (*shape, 2))
    boxes = np.concatenate([corner, corner + draw.uniform(0.1, 0.3, (*shape, 2))], -1)
    boxes = boxes.astype(np.float32)
    scores = draw.dirichlet([0.3] * 5, (4, 90)).astype(np.float32)[..., :4]
    given = boxes if per_class else boxes[:, :, 0]
    found = jax.tree.map(np.asarray, BEST(given, scores, 0.05, 0.5, most, candidates))
    every = np.broadcast_to(boxes, (4, 90, 4, 4))
    for i in range(4):
        expected = plain_detections(every[i], scores[i], most, candidates or most)
        real = found["score"][i] > 0
        assert real.sum() == len(expected) > 3 and not real[len(expected) :].any()
        for k, (score, number, row) in enumerate(expected):
            named = found["score"][i, k], found["class"][i, k], found["index"][i, k]
            assert named == (score, number, row)
            np.testing.assert_array_equal(found["boxes"][i, k], every[i, row, number - 1])


def test_more_candidates_find_what_is_hidden_behind_many_better_boxes():
    """Of a class, 30 boxes of one object are better than the box of another object."""
    boxes = np.tile(np.array([0, 0, 0.5, 0.5], np.float32), (1, 31, 1))
    boxes[:, 30] = 0.5, 0.5, 1, 1
    scores = np.linspace(0.9, 0.2, 31, dtype=np.float32)[None, :, None]
    counts = [
        int((np.asarray(BEST(boxes, scores, 0, 0.5, 5, n)["score"]) > 0).sum()) for n in (5, 31)
    ]
    assert counts == [1, 2]
    scored = np.asarray(BEST(boxes, scores, 0.2, 0.5, 5, 31)["score"])
    np.testing.assert_array_equal(
        scored, np.array([[0.9, 0, 0, 0, 0]], np.float32)
    )  # 0.2 is not higher
