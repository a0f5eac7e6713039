"""RoIAlign: the features of regions, sampled from the level of a feature pyramid that fits each.

He et al. 2017 (arXiv:1703.06870), section 3; the level of a region is that of Lin et al. 2017
(arXiv:1612.03144), section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ops.detection import boxes as boxes_


def levels(boxes: jax.Array, least: int, most: int, canonical: float = 224.0) -> jax.Array:
    """The level of the pyramid for each box: int32[..., R] from `least` to `most`.

    Args:
        boxes: f32[..., R, 4] in pixels. Those without area, or with nan, are of level `least`.
        canonical: the side in pixels of a square box that is of level 4.
    """
    side = jnp.sqrt(boxes_.area(boxes))
    level = jnp.floor(4 + jnp.log2(side / canonical + 1e-6))
    return jnp.where(level > least, jnp.minimum(level, most), least).astype(jnp.int32)


def align(
    maps: Mapping[int, jax.Array],
    boxes: jax.Array,
    size: int,
    *,
    canonical: float = 224.0,
    samples: int = 2,
    aligned: bool = False,
) -> jax.Array:
    """The features of regions: float[b, R, size, size, c] in the dtype of the maps.

    A region is cut into size x size bins, and a bin is the mean of samples x samples points, which
    are interpolated between the four cells around them. A point more than a cell beyond the first
    or last one is 0; one nearer has the value of the border. Sums are float32. Gradients go to the
    maps only.

    Args:
        maps: float[b, h, w, c] by level, levels that follow each other. Level l has a cell for
            2**l x 2**l pixels.
        boxes: f32[b, R, 4] in pixels of the image; one that is not finite has zeros or nan.
        canonical: see `levels`.
        aligned: whether a cell's value is that of its centre (Detectron2), which makes a region's
            features exact, or that of its first corner (the paper's code). In the second case a
            region is at least one cell high and wide.
    """
    least = min(maps)
    every = [maps[level] for level in range(least, least + len(maps))]
    boxes = lax.stop_gradient(boxes)
    batch, count, _ = boxes.shape
    channels = every[0].shape[-1]
    heights, widths = (np.array([x.shape[i] for x in every], np.int32) for i in (1, 2))
    ends = np.cumsum(heights * widths)
    place = levels(boxes, least, least + len(maps) - 1, canonical) - least  # [b, R]

    scaled = boxes / jnp.exp2((place + least).astype(jnp.float32))[..., None]
    if aligned:
        scaled = scaled - 0.5
    (y, y_weight), (x, x_weight) = (
        _points(scaled[..., i::2], jnp.asarray(cells)[place], size, samples, aligned)
        for i, cells in enumerate((heights, widths))
    )  # each [t, b, R, size], with t = 2 * samples terms of a bin
    first = jnp.asarray(ends - heights * widths)[place]
    first = first + ends[-1] * jnp.arange(batch, dtype=jnp.int32)[:, None]
    row = first[..., None] + y * jnp.asarray(widths)[place][..., None]
    index = row[:, None, ..., None] + x[None, :, ..., None, :]  # [t, t, b, R, size, size]
    weight = y_weight[:, None, ..., None] * x_weight[None, :, ..., None, :]

    cells = jnp.concatenate([each.reshape(batch, -1, channels) for each in every], 1)
    terms = (2 * samples) ** 2
    pooled = _weighted_sum(
        cells.reshape(-1, channels), index.reshape(terms, -1), weight.reshape(terms, -1)
    )
    return pooled.reshape(batch, count, size, size, channels)


def _points(
    spans: jax.Array, cells: jax.Array, size: int, samples: int, aligned: bool
) -> tuple[jax.Array, jax.Array]:
    """The cells along an axis whose weighted sum is the mean over the points of each bin.

    Args:
        spans: f32[b, R, 2], first and last coordinate of the regions, in cells.
        cells: int32[b, R], how many there are.

    Returns:
        (index int32, weight f32), [2 * samples, b, R, size]: the two neighbours of each point.
    """
    first, length = spans[..., 0, None], spans[..., 1, None] - spans[..., 0, None]
    length = length if aligned else jnp.maximum(length, 1)
    offsets = (np.arange(samples)[:, None, None, None] + 0.5) / samples + np.arange(size)
    points = first + length * jnp.asarray(offsets / size, jnp.float32)  # [samples, b, R, size]
    last = (cells - 1)[..., None]
    inside = (points >= -1) & (points <= last + 1)
    points = jnp.where(inside, jnp.clip(points, 0, last.astype(jnp.float32)), 0)
    low = jnp.floor(points).astype(jnp.int32)
    share = points - low
    weights = jnp.where(inside, jnp.stack([1 - share, share]), 0) / samples
    index = jnp.stack([low, jnp.minimum(low + 1, last)])
    shape = (2 * samples, *low.shape[1:])
    return index.reshape(shape), weights.reshape(shape)


@jax.custom_vjp
def _weighted_sum(cells: jax.Array, index: jax.Array, weight: jax.Array) -> jax.Array:
    """The weighted sums [N, c] of K of the cells [M, c] each: `index` and `weight` are [K, N].

    The terms are added one after the other, because all cells of a column at once would be K times
    the size of the result. The rows of `index` must exist: no operation checks them.
    """

    def add(total: jax.Array, term: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        rows, factors = term
        found = cells.at[rows].get(mode="promise_in_bounds")
        return total + found * factors[:, None], None

    zeros = jnp.zeros((index.shape[1], cells.shape[1]), jnp.float32)
    return lax.scan(add, zeros, (index, weight))[0].astype(cells.dtype)


def _forward(cells: jax.Array, index: jax.Array, weight: jax.Array):
    # The dtype and the number of the cells are kept as an array without columns.
    return _weighted_sum(cells, index, weight), (cells[:, :0], index, weight)


def _backward(saved: tuple[jax.Array, ...], slopes: jax.Array):
    cells, index, weight = saved

    def add(total: jax.Array, term: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        rows, factors = term
        parts = slopes.astype(jnp.float32) * factors[:, None]
        return total.at[rows].add(parts, mode="promise_in_bounds"), None

    zeros = jnp.zeros((len(cells), slopes.shape[1]), jnp.float32)
    return lax.scan(add, zeros, (index, weight))[0].astype(cells.dtype), None, None


_weighted_sum.defvjp(_forward, _backward)
