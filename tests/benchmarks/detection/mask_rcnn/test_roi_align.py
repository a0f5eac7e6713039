"""RoIAlign against a loop written from its definition."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.detection.mask_rcnn import roi_align
from tests.benchmarks.detection.test_boxes import random_boxes

# Optimising for speed takes longer than these small programs run.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def one(maps, boxes, size, **how):
    """The features of a single group of regions."""
    return roi_align.align(maps, [(jnp.asarray(boxes), size)], **how)[0]


ALIGN = jit(one, static_argnums=2, static_argnames="canonical")
LEVELS = jit(roi_align.map_levels, static_argnums=(1, 2, 3))
SHAPES = {3: (11, 14), 4: (6, 7), 5: (3, 4)}  # of an image of 88 x 112 pixels


def level_of(box: np.ndarray, least: int, most: int, canonical: float) -> int:
    y0, x0, y1, x1 = (float(each) for each in box)
    area = max(y1 - y0, 0) * max(x1 - x0, 0)
    return min(max(math.floor(4 + math.log2(math.sqrt(area) / canonical + 1e-6)), least), most)


def neighbours(place: float, count: int) -> list[tuple[int, float]]:
    """(cell, share) of the two cells around a point on an axis; none for a point outside."""
    if place < -1 or place > count:
        return []
    place = max(place, 0.0)
    low = int(place)
    if low >= count - 1:
        return [(count - 1, 1.0)]
    return [(low, 1 - (place - low)), (low + 1, place - low)]


def weights(box, shape, level, size) -> list[np.ndarray]:
    """For y and x the share of each cell in each bin, float64[size, cells], by loops."""
    found = []
    for axis in (0, 1):
        first, last = (float(box[axis + k]) / 2**level for k in (0, 2))
        length = max(last - first, 1.0)
        table = np.zeros((size, shape[axis]))
        for i in range(size):
            for s in (0.25, 0.75):
                place = first + (i + s) * length / size
                for cell, share in neighbours(place, shape[axis]):
                    table[i, cell] += share / 2
        found.append(table)
    return found


def plain(maps, boxes, size, canonical=224.0) -> np.ndarray:
    """The features of the regions of one image, float64[R, size, size, c]."""
    pooled = []
    for box in boxes:
        level = level_of(box, min(maps), max(maps), canonical)
        y, x = weights(box, maps[level].shape, level, size)
        pooled.append(np.einsum("ip,pqc,jq->ijc", y, maps[level].astype(np.float64), x))
    return np.stack(pooled)


def pyramid(rng: np.random.Generator, batch: int, channels: int) -> dict[int, np.ndarray]:
    return {
        level: rng.normal(size=(batch, *shape, channels)).astype(np.float32)
        for level, shape in SHAPES.items()
    }


def regions(rng: np.random.Generator, batch: int, count: int) -> np.ndarray:
    """Boxes f32[batch, count, 4] of all levels: within, over the border, outside, and odd ones."""
    size = np.tile(np.array([88, 112], np.float32), 2)
    boxes = random_boxes(rng, batch, count) ** rng.choice([1, 3], (batch, count, 1)) * size
    kind = rng.integers(0, 8, (batch, count))
    boxes[kind == 0] += rng.uniform(-120, 120, (np.sum(kind == 0), 1))
    boxes[kind == 1] = np.round(boxes[kind == 1] / 8) * 8  # points on cells and on borders
    boxes[kind == 2, 2:] = boxes[kind == 2, :2]  # without sides
    boxes[kind == 3, 3] = boxes[kind == 3, 1] + 0.01  # a line
    boxes[kind == 4] = boxes[kind == 4][:, [2, 3, 0, 1]]  # upside down
    return boxes.astype(np.float32)


def test_levels_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    boxes = regions(rng, 2, 1000) * rng.choice([1, 4, 16], (2, 1000, 1)).astype(np.float32)
    sides = [(0, 0), (112, 112), (224, 224), (448, 448), (447.9, 448), (224, 448), (1344, 1344)]
    boxes[0, : len(sides)] = [(10, 20, 10 + h, 20 + w) for h, w in sides]
    found = np.asarray(LEVELS(boxes, 2, 5, 224.0))
    assert found[0, : len(sides)].tolist() == [2, 3, 4, 5, 4, 4, 5]
    expected = [[level_of(box, 2, 5, 224.0) for box in row] for row in boxes]
    np.testing.assert_array_equal(found, expected)
    assert {*found.ravel()} == {2, 3, 4, 5} and found.dtype == np.int32


@pytest.mark.parametrize("size", [7, 1])
def test_features_are_those_of_a_loop(size):
    """1,200 regions of two images; the scale is such that they are of all three levels."""
    rng = np.random.default_rng(size)
    maps, boxes = pyramid(rng, 2, 3), regions(rng, 2, 600)
    found = np.asarray(ALIGN(maps, boxes, size, canonical=40.0))
    assert found.shape == (2, 600, size, size, 3) and found.dtype == np.float32
    rows = [{level: x[i] for level, x in maps.items()} for i in range(2)]
    expected = [plain(rows[i], boxes[i], size, 40.0) for i in range(2)]
    np.testing.assert_allclose(found, expected, atol=2e-4)
    used = np.bincount(np.asarray(LEVELS(boxes, 3, 5, 40.0)).ravel())
    assert used[3:].min() > 20 and (found == 0).all((2, 3, 4)).sum() > 20  # some are far outside


@pytest.mark.parametrize("form", [roi_align._products, roi_align._term_by_term])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)])
@pytest.mark.parametrize("count", [4, 16, 36, 144])
def test_both_forms_of_the_sums(form, dtype, tolerance, count):
    """TPUs use products, CPUs do not; neither rounds the weights to bfloat16."""
    rng = np.random.default_rng(count)
    cells = jnp.asarray(rng.uniform(0.5, 1.5, (50, 5)), dtype)
    index = rng.integers(0, 50, (count, 19), dtype=np.int32)
    weight = rng.choice([0.25, 0.5, 1], (count, 19)) * np.float32(1 + 2**-8) / count
    weight = weight.astype(np.float32)
    found = jit(form)(cells, index, weight)
    assert found.dtype == dtype
    expected = np.einsum("knc,kn->nc", np.asarray(cells, np.float64)[index], weight)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance)


@pytest.mark.parametrize(("platform", "multiplies"), [("cpu", False), ("tpu", True)])
def test_the_form_for_a_platform(platform, multiplies):
    maps, boxes = {3: jnp.zeros((1, 8, 8, 4))}, jnp.zeros((1, 2, 4))
    traced = jax.jit(lambda maps: one(maps, boxes, 2)).trace(maps)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("dot_general" in text) == multiplies


def test_a_linear_map_is_read_at_the_centres_of_bins():
    """A cell's value is that of its first corner: half a cell, 4 pixels, from its centre."""
    y, x = np.meshgrid(np.arange(11) + 0.5, np.arange(14) + 0.5, indexing="ij")
    maps = {3: np.stack([8 * y, 8 * x], -1)[None].astype(np.float32)}  # in pixels
    box = np.array([[[20, 30, 60, 90]]], np.float32)
    found = np.asarray(ALIGN(maps, box, 4))[0, 0] - 4
    np.testing.assert_allclose(found[:, 0, 0], [25, 35, 45, 55], atol=1e-3)
    np.testing.assert_allclose(found[0, :, 1], [37.5, 52.5, 67.5, 82.5], atol=1e-3)


def test_padding_has_finite_features_and_gradients():
    maps = pyramid(np.random.default_rng(1), 1, 2)
    boxes = jnp.zeros((1, 3, 4))

    def total(maps: dict, boxes: jax.Array) -> jax.Array:
        return jnp.sum(one(maps, boxes, 2) ** 2)

    value, (gradients, of_boxes) = jit(jax.value_and_grad(total, (0, 1)))(maps, boxes)
    assert all(np.isfinite(each).all() for each in jax.tree.leaves((value, gradients)))
    np.testing.assert_array_equal(of_boxes, 0)


def test_boxes_that_are_not_finite_disturb_no_others():
    maps = pyramid(np.random.default_rng(3), 1, 2)
    boxes = np.tile(np.array([10, 10, 50, 50], np.float32), (1, 5, 1))
    boxes[0, 1], boxes[0, 2, 2:], boxes[0, 3, :2] = np.nan, np.inf, -np.inf

    def total(maps: dict) -> jax.Array:
        return jnp.sum(one(maps, boxes, 2)[:, ::4])

    pooled = np.asarray(ALIGN(maps, boxes, 2))
    np.testing.assert_array_equal(pooled[0, 0], pooled[0, 4])
    assert np.isfinite(pooled[0, 0]).all() and not pooled[0, 1].any()
    assert all(np.isfinite(each).all() for each in jit(jax.grad(total))(maps).values())


@pytest.mark.long
def test_gradients_are_those_of_the_loops_weights():
    """The features are linear in the maps, so the gradient is the product with their weights.

    Of two groups, the gradients are added.
    """
    rng = np.random.default_rng(2)
    maps, boxes = pyramid(rng, 2, 3), regions(rng, 2, 60)
    factors = rng.normal(size=(2, 60, 2, 2, 3)).astype(np.float32)

    def total(maps: dict) -> jax.Array:
        groups = [(jnp.asarray(boxes), 2), (jnp.asarray(boxes[:, :20]), 1)]
        fine, coarse = roi_align.align(maps, groups, canonical=40.0)
        return jnp.sum(fine * factors) + jnp.sum(coarse * factors[:, :20, :1, :1])

    gradients = jit(jax.grad(total))(maps)
    expected = {level: np.zeros(x.shape) for level, x in maps.items()}
    for i, r in np.ndindex(2, 60):
        level = level_of(boxes[i, r], 3, 5, 40.0)
        for size in (2, 1) if r < 20 else (2,):
            y, x = weights(boxes[i, r], SHAPES[level], level, size)
            some = factors[i, r, :size, :size].astype(float)
            expected[level][i] += np.einsum("ip,ijc,jq->pqc", y, some, x)
    for level, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[level], atol=1e-4)
        assert np.abs(expected[level]).max() > 0.5


def test_many_small_slopes_add_up_in_bfloat16():
    """Summed in bfloat16, 4,000 equal numbers would stop at 256 of them."""
    maps = {4: jnp.ones((1, 2, 2, 1), jnp.bfloat16)}
    boxes = jnp.tile(jnp.array([0.0, 0, 16, 16]), (1, 4000, 1))

    def total(maps: dict) -> jax.Array:
        features = one(maps, boxes, 1)
        assert features.dtype == jnp.bfloat16
        return jnp.sum(features.astype(jnp.float32))

    gradients = np.asarray(jit(jax.grad(total))(maps)[4], np.float32)
    np.testing.assert_allclose(gradients.ravel(), 1000, rtol=0.01)
