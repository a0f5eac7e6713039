"""Matching against a plain loop, and values taken without a gather."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.detection import boxes as boxes_
from benchmarks.detection import matching
from tests.benchmarks.detection.test_boxes import random_boxes

MATCH, TAKE = jax.jit(matching.match), jax.jit(matching.take)
NEAREST = jax.jit(partial(matching.match, for_every_box=False))
IOU = jax.jit(boxes_.iou)


def match(
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


def grid(step: float, size: float) -> np.ndarray:
    """Anchors f32[N, 4] at the cells of a grid, of two shapes: IoUs with them often tie."""
    centres = np.arange(step / 2, 1, step)
    y, x = np.meshgrid(centres, centres, indexing="ij")
    shapes = [(size, size), (size / 2, size)]
    boxes = [np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1) for h, w in shapes]
    return np.stack(boxes, 2).reshape(-1, 4).astype(np.float32)


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("anchors", ["grid", "random", "few"])
def test_matches_are_those_of_a_loop(anchors, count):
    """Over 100 images, with padding among the boxes and boxes that occur twice."""
    rng = np.random.default_rng(count)
    places = {
        "grid": grid(0.125, 0.25),
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
        box, positive = match(overlaps, valid, 0.5)
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


def test_the_later_of_two_boxes_wins_their_best_anchor():
    anchors = np.array([[0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1]], np.float32)
    boxes = np.array([[0, 0, 0.5, 0.4], [0.1, 0.1, 0.2, 0.2], [0, 0, 0.5, 0.5]], np.float32)
    found = MATCH(boxes, np.array([True, True, False]), anchors, 0.5)
    np.testing.assert_array_equal(found.box, [1, 0])
    np.testing.assert_array_equal(found.positive, [True, False])


def test_an_image_without_boxes_has_no_positive_anchor():
    real, empty = random_boxes(np.random.default_rng(0), 4), np.zeros((4, 4), np.float32)
    for boxes, is_valid in ((real, False), (empty, True)):
        found = MATCH(boxes, np.full(4, is_valid), grid(0.25, 0.25), 0.5)
        assert not np.asarray(found.positive).any()
        np.testing.assert_array_equal(found.overlap, 0)


def test_a_batch_is_matched_image_by_image():
    rng = np.random.default_rng(3)
    boxes, valid = random_boxes(rng, 6, 5), rng.random((6, 5)) < 0.7
    anchors = grid(0.0625, 0.2)  # 512: more than one row of the table of anchors
    batched = jax.jit(jax.vmap(matching.match, (0, 0, None, None)))(boxes, valid, anchors, 0.5)
    for i in range(6):
        alone = MATCH(boxes[i], valid[i], anchors, 0.5)
        np.testing.assert_array_equal(batched.box[i], alone.box)
        np.testing.assert_array_equal(batched.positive[i], alone.positive)


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
    matching.take(jnp.asarray(values), jnp.zeros(1, jnp.int32))
    for array in map(np.asarray, operands):
        np.testing.assert_array_equal(array, array.astype(jnp.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(operands[1].sum(0), values)
