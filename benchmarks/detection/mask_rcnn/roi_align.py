"""RoIAlign: the features of regions (RoIs), each sampled from the FPN's level that fits it.

He et al. 2017 (arXiv:1703.06870), section 3; the level of a region is that of Lin et al. 2017
(arXiv:1612.03144), section 4.2.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.detection.boxes import area

_Maps = tuple[jax.Array, ...]
_Terms = list[tuple[jax.Array, jax.Array]]
_SAMPLES = 2  # points of a bin along an axis, torchvision's sampling_ratio
_SIDE = 128  # the side of a TPU's matrix unit


def map_levels(boxes: jax.Array, lowest: int, highest: int, canonical: float = 224.0) -> jax.Array:
    """The level of the pyramid that each RoI is pooled from: int32[..., R], `lowest` to `highest`.

    `boxes` are f32[..., R, 4] in pixels. Those without area, or with nan, are of level `lowest`. A
    square box with a side of `canonical` pixels is of level 4.
    """
    side = jnp.sqrt(area(boxes))
    level = jnp.floor(4 + jnp.log2(side / canonical + 1e-6))
    return jnp.where(level > lowest, jnp.minimum(level, highest), lowest).astype(jnp.int32)


def align(
    maps: Mapping[int, jax.Array],
    groups: Sequence[tuple[jax.Array, int]],
    *,
    canonical: float = 224.0,
) -> list[jax.Array]:
    """The features of groups of regions, each float[b, R, size, size, c] in the dtype of the maps.

    A region, at least one cell high and wide, is cut into size x size bins, the means of 2x2
    points, interpolated between the four cells around each. The value of a cell is that
    of its first corner, as in the paper's code, not that of its centre. A point more than a cell
    beyond the first or last one is 0; one nearer has the value of the border. Sums are float32.
    Gradients go to the maps only; the gradients of all groups are added up together, which is
    faster than one call for each.

    Args:
        maps: float[b, h, w, c] by level, levels that follow each other. Level l has a cell for
            2**l x 2**l pixels.
        groups: (boxes, size): f32[b, R, 4] in pixels of the image; one that is not finite has zeros
            or nan.
        canonical: the side in pixels of a square box that is of level 4.
    """
    lowest = min(maps)
    in_order = tuple(maps[level] for level in range(lowest, lowest + len(maps)))
    heights, widths = (np.array([x.shape[i] for x in in_order], np.int32) for i in (1, 2))
    starts = len(in_order[0]) * (np.cumsum(heights * widths) - heights * widths)
    terms = []
    for boxes, size in groups:
        boxes = lax.stop_gradient(boxes)
        level = map_levels(boxes, lowest, lowest + len(maps) - 1, canonical) - lowest  # [b, R]
        scaled = boxes / jnp.exp2((level + lowest).astype(jnp.float32))[..., None]
        (y, y_weight), (x, x_weight) = (
            _points(scaled[..., i::2], jnp.asarray(cells)[level], size)
            for i, cells in enumerate((heights, widths))
        )  # each [t, b, R, size], with t = 4 terms of a bin
        image = jnp.arange(len(boxes), dtype=jnp.int32)[:, None]
        first = jnp.asarray(starts)[level] + image * jnp.asarray(heights * widths)[level]
        row = first[..., None] + y * jnp.asarray(widths)[level][..., None]
        index = row[:, None, ..., None] + x[None, :, ..., None, :]  # [t, t, b, R, size, size]
        weight = y_weight[:, None, ..., None] * x_weight[None, :, ..., None, :]
        count = len(index) ** 2
        terms.append((index.reshape(count, -1), weight.reshape(count, -1)))
    pooled = _weighted_sums(in_order, terms)
    return [
        rows.reshape(*boxes.shape[:2], size, size, -1)
        for rows, (boxes, size) in zip(pooled, groups, strict=True)
    ]


def _points(spans: jax.Array, cells: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The cells along an axis whose weighted sum is the mean over the points of each bin.

    `spans` f32[b, R, 2] are the first and last coordinate of the regions, in cells, of which there
    are `cells` int32[b, R]. Returns the two neighbours of each point: (index int32, weight f32),
    [4, b, R, size].
    """
    first, length = spans[..., 0, None], spans[..., 1, None] - spans[..., 0, None]
    length = jnp.maximum(length, 1)
    offsets = (np.arange(_SAMPLES)[:, None, None, None] + 0.5) / _SAMPLES + np.arange(size)
    points = first + length * jnp.asarray(offsets / size, jnp.float32)  # [2, b, R, size]
    last = (cells - 1)[..., None]
    inside = (points >= -1) & (points <= last + 1)
    points = jnp.where(inside, jnp.clip(points, 0, last.astype(jnp.float32)), 0)
    low = jnp.floor(points).astype(jnp.int32)
    share = points - low
    weights = jnp.where(inside, jnp.stack([1 - share, share]), 0) / _SAMPLES
    index = jnp.stack([low, jnp.minimum(low + 1, last)])
    shape = (2 * _SAMPLES, *low.shape[1:])
    return index.reshape(shape), weights.reshape(shape)


@jax.custom_vjp
def _weighted_sums(maps: _Maps, terms: _Terms) -> list[jax.Array]:
    """For each (index int32[K, N], weight f32[K, N]) the sums [N, c] of K weighted cells each.

    Cells are numbered by level, image, row and column. They must exist: no operation checks them.
    """
    cells = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in maps])
    return [
        lax.platform_dependent(cells, *term, cpu=_term_by_term, default=_products) for term in terms
    ]


def _term_by_term(cells: jax.Array, index: jax.Array, weight: jax.Array) -> jax.Array:
    """The sums that `_products` computes, in half the time on a CPU."""
    total = jnp.zeros((), jnp.float32)
    for rows, factors in zip(index, weight, strict=True):
        total += cells.at[rows].get(mode="promise_in_bounds") * factors[:, None]
    return total.astype(cells.dtype)


def _products(cells: jax.Array, index: jax.Array, weight: jax.Array) -> jax.Array:
    """The sums [N, c] of K cells each, index int32[K, N], with the weights f32[K, N].

    A matrix product makes several sums at once; its matrix of weights has a block for each. TPUs
    multiply term by term more slowly, because each weight must be spread over a row of channels. A
    cell that is not finite spoils the other sums of its product too.
    """
    count, length = index.shape
    group = max(1, _SIDE // count)
    rows, factors = (jnp.pad(x.T, ((0, -length % group), (0, 0))) for x in (index, weight))
    gathered = cells.at[rows.reshape(-1, group * count)].get(mode="promise_in_bounds")
    is_member = np.arange(group * count) // count == np.arange(group)[:, None]
    matrix = jnp.where(is_member, factors.reshape(-1, 1, group * count), 0)
    options: Any = {"preferred_element_type": jnp.float32, "precision": "highest"}
    multiply = functools.partial(jnp.einsum, "irk,ikc->irc", **options)
    if cells.dtype == jnp.float32:
        sums = multiply(matrix, gathered)
    else:  # two parts of a weight in bfloat16 lose less than the rounding of the result
        high = lax.reduce_precision(matrix, 8, 7)
        parts = jnp.concatenate([high, matrix - high], 1).astype(cells.dtype)
        sums = multiply(parts, gathered)
        sums = sums[:, :group] + sums[:, group:]
    return sums.reshape(-1, cells.shape[1])[:length].astype(cells.dtype)


def _forward(maps: _Maps, terms: _Terms):
    # Shapes and dtype of the maps are kept as arrays without channels.
    return _weighted_sums(maps, terms), (tuple(x[..., :0] for x in maps), terms)


def _backward(saved: tuple[_Maps, _Terms], gradients: list[jax.Array]):
    maps, terms = saved
    shapes = [(*x.shape[:3], gradients[0].shape[1]) for x in maps]
    ends = np.cumsum([math.prod(shape[:3]) for shape in shapes])
    total = jnp.zeros((ends[-1], gradients[0].shape[1]), jnp.float32)
    for (index, weight), gradient in zip(terms, gradients, strict=True):
        for rows, factors in zip(index, weight, strict=True):
            parts = gradient.astype(jnp.float32) * factors[:, None]
            total = total.at[rows].add(parts, mode="promise_in_bounds")
    levels = zip(jnp.split(total, ends[:-1]), shapes, maps, strict=True)
    return tuple(rows.astype(x.dtype).reshape(shape) for rows, shape, x in levels), None


_weighted_sums.defvjp(_forward, _backward)
