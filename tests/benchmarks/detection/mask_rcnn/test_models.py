"""Proposals against a plain loop in float64 with TensorFlow's suppression."""

import functools

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.detection.mask_rcnn import models

PROPOSE = jax.jit(models.propose, static_argnames=("before_nms", "after_nms", "iou_threshold"))
SIZES = np.array([[90, 60], [64, 100], [100, 100]], np.float32)


def level(rng: np.random.Generator, count: int, side: float) -> tuple[np.ndarray, ...]:
    """(logits, deltas, anchors) of three images; anchors of `side` pixels, some beyond it."""
    centres = rng.uniform(-5, 105, (count, 2))
    half = side * rng.uniform(0.4, 0.6, (count, 2))
    anchors = np.concatenate([centres - half, centres + half], -1).astype(np.float32)
    logits = rng.normal(0, 2, (3, count)).astype(np.float32)
    return logits, rng.normal(0, 0.3, (3, count, 4)).astype(np.float32), anchors


def decode(deltas: np.ndarray, anchors: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Boxes float64[n, 4] of an image, cut to its size."""
    deltas, anchors = deltas.astype(np.float64), anchors.astype(np.float64)
    sides = anchors[:, 2:] - anchors[:, :2]
    centres = anchors[:, :2] + sides / 2 + deltas[:, :2] * sides
    half = sides * np.exp(deltas[:, 2:]) / 2
    return np.clip(np.concatenate([centres - half, centres + half], 1), 0, np.tile(size, 2))


def plain(levels, image: int, before: int, after: int, iou: float) -> list[np.ndarray]:
    """The boxes of an image's proposals, the best first."""
    found = []
    for logits, deltas, anchors in levels:
        order = np.argsort(-logits[image], kind="stable")[:before]
        boxes = decode(deltas[image, order], anchors[order], SIZES[image])
        real = (boxes[:, 2:] > boxes[:, :2]).all(1)
        boxes, order = boxes[real], order[real]
        ranks = np.arange(len(boxes), 0, -1, dtype=np.float32)
        kept = tf.image.non_max_suppression(boxes.astype(np.float32), ranks, len(boxes), iou)
        found += [(logits[image, order[i]], boxes[i]) for i in kept.numpy()]
    best = sorted(found, key=lambda row: -row[0])[:after]
    return [box for _, box in best]


@pytest.mark.parametrize(
    ("counts", "before", "after"),
    [((300, 300), 80, 40), ((400, 90, 20), 100, 60), ((30,), 50, 50), ((200, 50), 60, 110)],
)
def test_proposals_are_those_of_a_loop(counts, before, after):
    """Levels of equal and of different numbers, and images of which all boxes are proposed."""
    rng = np.random.default_rng(sum(counts))
    levels = [level(rng, count, 20 * 2.0**i) for i, count in enumerate(counts)]
    proposed = PROPOSE(
        *zip(*levels, strict=True), SIZES, before_nms=before, after_nms=after, iou_threshold=0.6
    )
    boxes = np.asarray(proposed)
    total = sum(min(before, count) for count in counts)
    assert boxes.shape == (3, min(after, total), 4)
    for i in range(3):
        expected = plain(levels, i, before, after, 0.6)
        assert 10 < len(expected) <= len(boxes[i])
        np.testing.assert_allclose(boxes[i, : len(expected)], expected, atol=1e-3)
        assert not boxes[i, len(expected) :].any()


def test_equal_logits_are_in_the_order_of_levels_and_anchors():
    """Far from each other, and with equal logits."""
    corner = np.array([[0, 0], [20, 0], [40, 0], [60, 0], [80, 0]], np.float32)
    anchors = np.concatenate([corner, corner + 10], 1)
    logits = [np.full((1, 3), 30, np.float32), np.full((1, 2), 30, np.float32)]
    logits[1][0, 1] = 31
    deltas = [np.zeros((1, n, 4), np.float32) for n in (3, 2)]
    boxes = PROPOSE(
        logits,
        deltas,
        [anchors[:3], anchors[3:]],
        SIZES[2:],
        before_nms=2,
        after_nms=3,
        iou_threshold=0.7,
    )
    np.testing.assert_allclose(boxes[0], anchors[[4, 0, 1]], atol=1e-4)


def test_boxes_that_are_not_finite_or_beyond_the_image_are_left_out():
    anchors = np.tile(np.array([10, 10, 30, 30], np.float32), (5, 1))
    anchors[4] += 200
    deltas = np.zeros((1, 5, 4), np.float32)
    deltas[0, 0, 0], deltas[0, 1, 2], deltas[0, 2, 1] = np.nan, np.nan, -np.inf
    logits = np.array([[5, 4, 3, 2, 1]], np.float32)
    boxes = PROPOSE(
        [logits], [deltas], [anchors], SIZES[:1], before_nms=5, after_nms=5, iou_threshold=0.7
    )
    np.testing.assert_allclose(boxes[0, 0], anchors[3], atol=1e-4)
    assert not np.asarray(boxes[0, 1:]).any()


def test_gradients_do_not_pass():
    rng = np.random.default_rng(3)
    logits, deltas, anchors = level(rng, 20, 30.0)

    def total(logits: jax.Array, deltas: jax.Array) -> jax.Array:
        boxes = models.propose(
            [logits],
            [deltas],
            [anchors],
            jnp.asarray(SIZES),
            before_nms=9,
            after_nms=5,
            iou_threshold=0.7,
        )
        return jnp.sum(boxes)

    gradients = jax.jit(jax.grad(total, (0, 1)))(logits, deltas)
    assert not any(np.asarray(each).any() for each in gradients)


@pytest.mark.parametrize("kind", ["cpu", "TPU v3"])
def test_doubling_is_flax_transposed_convolution(kind, monkeypatch):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 4, 5)), jnp.float32)
    weights = rng.normal(size=(2, 6, 8, 7))
    plain, mine = (make(7, (2, 2), (2, 2)) for make in (nn.ConvTranspose, models.ConvTranspose2x2))
    variables = plain.init(jax.random.key(0), x)
    variables = jax.tree.map(lambda v: v + rng.normal(size=v.shape), variables)
    monkeypatch.setattr(models, "device_kind", lambda: kind)

    def gradients(layer):
        loss = lambda *arguments: jnp.sum(layer.apply(*arguments) * weights)  # noqa: E731
        return layer.apply(variables, x), jax.grad(loss, (0, 1))(variables, x)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, gradients(mine), gradients(plain))
