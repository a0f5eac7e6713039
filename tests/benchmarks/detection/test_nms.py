"""Non-maximum suppression against a greedy loop and TensorFlow's."""

import jax
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.detection import boxes as boxes_
from benchmarks.detection import nms
from tests.benchmarks.detection.test_boxes import overlap, random_boxes

KEEP = jax.jit(nms.keep, static_argnames=("threshold", "inclusive"))
IOU = jax.jit(boxes_.iou)
BEST = jax.jit(nms.best, static_argnums=(2, 3, 4, 5))


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


def test_boxes_left_and_above_of_the_origin_are_boxes():
    boxes = np.array([[-2, -2, -1, -1], [-2, -2, -1, -1.1], [-5, -5, -4, -4]], np.float32)
    np.testing.assert_array_equal(KEEP(boxes, 0.5, inclusive=True), [True, False, True])


def test_rows_are_problems_of_their_own_under_any_leading_dimensions():
    rng = np.random.default_rng(9)
    rows = np.stack([clusters(rng, 30) for _ in range(12)]).reshape(3, 4, 30, 4)
    kept = np.asarray(KEEP(rows, 0.5, inclusive=True))
    for i in range(3):
        for j in range(4):
            np.testing.assert_array_equal(kept[i, j], KEEP(rows[i, j], 0.5, inclusive=True))
    mapped = jax.vmap(lambda x: nms.keep(x, 0.5, inclusive=True))(rows)
    np.testing.assert_array_equal(mapped, kept)


def plain(
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
        expected = plain(every[i], scores[i], most, candidates or most)
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
