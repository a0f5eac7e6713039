"""SSD's loss against the formula in NumPy, float64, and its gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.detection.ssd import losses, models
from tests.benchmarks.detection.test_boxes import offsets, overlap, random_boxes

LAYOUT = models.DefaultBoxes(
    image_size=64,
    feature_sizes=(4, 2),
    steps=(16, 32),
    scales=(16, 25, 36),
    aspect_ratios=((4,), (4,)),
)  # all coordinates are exact in f32, so that equal IoUs are equal in float64 too
ANCHORS = models.box_corners(LAYOUT.boxes()).astype(np.float32)  # [80, 4]
CLASSES = 6  # with the background

LOSS = jax.jit(losses.detection_loss)


def matched(boxes: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(targets f64[N, 4], labels int[N]) of one image."""
    real = [g for g in range(len(boxes)) if classes[g] > 0]
    overlaps = np.array([[overlap(boxes[g], anchor) for anchor in ANCHORS] for g in real])
    owner = np.full(len(ANCHORS), -1)
    for n in range(len(ANCHORS) if real else 0):
        if overlaps[:, n].max() >= 0.5:
            owner[n] = real[overlaps[:, n].argmax()]
    for i, g in enumerate(real):
        owner[overlaps[i].argmax()] = g
    targets, labels = np.zeros((len(ANCHORS), 4)), np.zeros(len(ANCHORS), int)
    for n in np.flatnonzero(owner >= 0):
        targets[n] = offsets(boxes[owner[n]], ANCHORS[n], np.array([10, 10, 5, 5]))
        labels[n] = classes[owner[n]]
    return targets, labels


def formula(
    deltas: np.ndarray, logits: np.ndarray, targets: np.ndarray, labels: np.ndarray
) -> tuple[float, float]:
    """The two losses of one image in float64; ranks by sorting twice, as MLPerf's code does.

    An image without objects counts as one with a positive anchor.
    """
    positive = labels > 0
    count = positive.sum() or 1
    distance = np.abs(deltas - targets)
    box = np.where(distance < 1, distance**2 / 2, distance - 0.5).sum(1)[positive].sum()
    shares = np.exp(logits - logits.max(1, keepdims=True))
    entropy = -np.log(shares[np.arange(len(labels)), labels] / shares.sum(1))
    order = np.argsort(np.where(positive, -np.inf, entropy))[::-1]
    ranks = np.argsort(order)
    negative = ~positive & (ranks < min(3 * count, len(labels)))
    classes = entropy[positive].sum() + entropy[negative].sum()
    return box / count, classes / count


def draw(seed: int, images: int, most: int) -> tuple[np.ndarray, ...]:
    """(deltas, logits, boxes, classes) with 0 to `most` boxes per image."""
    rng = np.random.default_rng(seed)
    deltas = rng.normal(0, 2, (images, len(ANCHORS), 4)).astype(np.float32)
    logits = rng.normal(0, 3, (images, len(ANCHORS), CLASSES)).astype(np.float32)
    classes = rng.integers(1, CLASSES, (images, most)).astype(np.int32)
    classes[rng.random((images, most)) < rng.choice([0, 0.3, 1], (images, 1))] = 0
    boxes = random_boxes(rng, images, most, least=0.05) * (classes > 0)[..., None]
    return deltas, logits, boxes.astype(np.float32), classes


@pytest.mark.parametrize("most", [1, 4, 30])
def test_the_losses_are_those_of_the_formula(most):
    """Over 300 images; 30 boxes leave fewer than three negatives for a positive anchor."""
    deltas, logits, boxes, classes = draw(most, 100, most)
    box_loss, class_loss = LOSS(deltas, logits, boxes, classes, ANCHORS)
    assert box_loss.shape == class_loss.shape == (100,) and class_loss.dtype == jnp.float32
    counts = []
    for i in range(100):
        targets, labels = matched(boxes[i], classes[i])
        expected = formula(deltas[i].astype(float), logits[i].astype(float), targets, labels)
        np.testing.assert_allclose(box_loss[i], expected[0], rtol=2e-5, atol=1e-5)
        np.testing.assert_allclose(class_loss[i], expected[1], rtol=2e-5, atol=1e-5)
        counts.append((labels > 0).sum())
    assert min(counts) == 0 and (max(counts) > 20) == (most == 30)


def test_the_gradient_is_that_of_finite_differences_of_the_formula():
    deltas, logits, boxes, classes = draw(11, 3, 3)
    classes[2] = 0

    def total(deltas: jax.Array, logits: jax.Array) -> jax.Array:
        box_loss, class_loss = LOSS(deltas, logits, boxes, classes, ANCHORS)
        return jnp.sum(2 * box_loss + class_loss)

    with jax.enable_x64(True):
        inputs = deltas.astype(np.float64), logits.astype(np.float64)
        gradients = [np.asarray(each) for each in jax.jit(jax.grad(total, (0, 1)))(*inputs)]
    assert gradients[1].dtype == np.float64
    for each, exact in zip(
        jax.jit(jax.grad(total, (0, 1)))(deltas, logits), gradients, strict=True
    ):
        np.testing.assert_allclose(each, exact, atol=1e-5)
    rng = np.random.default_rng(12)
    checked = 0
    for i in range(2):
        targets, labels = matched(boxes[i], classes[i])
        positive = np.flatnonzero(labels > 0)
        used = np.flatnonzero(np.abs(gradients[1][i]).sum(1) > 0)
        assert len(used) == 4 * len(positive) and set(positive) <= set(used)
        for n in {*used, *rng.integers(0, len(ANCHORS), 5)}:
            for which, size in ((0, 4), (1, CLASSES)):
                for c in range(size):
                    values = []
                    for step in (1e-6, -1e-6):
                        moved = [deltas[i].astype(float), logits[i].astype(float)]
                        moved[which][n, c] += step
                        box, entropy = formula(moved[0], moved[1], targets, labels)
                        values.append(2 * box + entropy)
                    difference = (values[0] - values[1]) / 2e-6
                    np.testing.assert_allclose(gradients[which][i, n, c], difference, atol=2e-6)
                    checked += difference != 0
    assert checked > 50
    used = np.flatnonzero(np.abs(gradients[1][2]).sum(1) > 0)  # of an image without boxes
    entropy = jax.nn.logsumexp(logits[2], 1) - logits[2, :, 0]
    assert sorted(used) == sorted(np.argsort(-entropy)[:3]) and not gradients[0][2].any()


def test_images_without_objects_change_no_other_image():
    deltas, logits, boxes, classes = draw(17, 6, 3)
    classes[:3], classes[3:, 0] = 0, 2
    boxes[3:] = np.where(classes[3:, :, None] > 0, random_boxes(np.random.default_rng(1), 3, 3), 0)
    together = np.asarray(LOSS(deltas, logits, boxes, classes, ANCHORS))
    inputs = deltas, logits, boxes, classes
    parts = [LOSS(*(x[rows] for x in inputs), ANCHORS) for rows in (slice(3), slice(3, None))]
    np.testing.assert_allclose(together, np.concatenate(parts, 1), rtol=1e-6)
    assert (together[1] > 0).all() and (together[0] > 0).tolist() == [False] * 3 + [True] * 3


def test_of_equal_negatives_the_first_count_and_exactly_three_per_positive():
    deltas, logits, boxes, classes = draw(13, 4, 3)
    logits[:] = 0  # as in the first step of a head whose kernel is zero
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(LOSS(deltas, x, boxes, classes, ANCHORS)[1])))(
        logits
    )
    for i in range(4):
        _, labels = matched(boxes[i], classes[i])
        positive = labels > 0
        negative = np.flatnonzero(~positive)[: 3 * positive.sum()]
        used = np.flatnonzero(np.abs(gradient[i]).sum(1) > 0)
        assert used.tolist() == sorted([*np.flatnonzero(positive), *negative])


def test_boxes_without_area_and_of_class_zero_are_padding():
    deltas, logits, boxes, classes = draw(14, 8, 5)
    more_boxes = np.concatenate([np.full((8, 2, 4), 0.4, np.float32), boxes, boxes], 1)
    more_classes = np.concatenate([np.full((8, 2), 3), classes, 0 * classes], 1).astype(np.int32)
    expected = LOSS(deltas, logits, boxes, classes, ANCHORS)
    found = LOSS(deltas, logits, more_boxes, more_classes, ANCHORS)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.asarray(expected).any()


def test_large_logits_overflow_nowhere():
    logits = np.array([[1e4, -1e4, 0], [3e38, 0, -3e38], [0, 0, 0]], np.float32)
    labels = jnp.array([1, 0, 2], jnp.int32)
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(losses.cross_entropy(x, labels)))(logits)
    assert value == pytest.approx(2e4 + np.log(3), rel=1e-6)
    np.testing.assert_allclose(gradient, [[1, -1, 0], [0, 0, 0], [1 / 3, 1 / 3, -2 / 3]], atol=1e-6)


def test_the_program_neither_sorts_nor_gathers():
    deltas, logits, boxes, classes = draw(16, 2, 4)

    def total(deltas: jax.Array, logits: jax.Array) -> jax.Array:
        return jnp.sum(jnp.stack(LOSS(deltas, logits, boxes, classes, ANCHORS)))

    program = jax.jit(jax.value_and_grad(total, (0, 1))).lower(deltas, logits)
    lowered, compiled = program.as_text(), program.compile().as_text() or ""
    assert "stablehlo.while" in lowered and re.search(r" while\(", compiled)
    assert not re.search(r"stablehlo\.(sort|gather|scatter|custom_call)|top_k", lowered)
    assert not re.search(r" (sort|gather|scatter|topk)\(|TopK", compiled)
