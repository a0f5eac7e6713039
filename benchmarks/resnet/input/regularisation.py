"""Augments training batches on the device: RandAugment, mixup, cutmix, random erasing.

Images are float[b, h, w, c] after normalisation, or uint8 before it for RandAugment. All draws are
hashes of the leaf "draw" int32[b] of a batch, a seed for each row in this step: what a row draws
belongs to the example, and is the same on any number of devices and after a resume.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import HostBatch
from benchmarks.resnet.input import augment, image_ops
from common.data.order import hash64
from common.hashing import uniform

_DRAW_SITE = 31  # hashed with the seed, apart from the order of the images
_GROUP = 32  # images of a device that get the same operation of `augmentation`
_BOTH, _MIXUP, _CUTMIX, _ERASE = range(0x6D6978, 0x6D697C)  # sites of the draws
_INTERVALS = 4096  # intervals in the table of quantiles
_ATTEMPTS = 10  # windows that `erase` draws until one fits
_AREAS, _RATIOS = (0.02, 0.33), (0.3, 3.3)  # share of the area, height / width of a window


class Mixed(NamedTuple):
    """Images, and two labels for each."""

    images: jax.Array  # float[b, h, w, c]
    labels: jax.Array  # int32[b], or several for each image: bool[b, K]
    others: jax.Array | None  # the labels of the images mixed in; None: nothing was mixed in
    share: jax.Array | None  # float32[b], in [0, 1]: of the first label


def add_draws(batches: Iterator[HostBatch], seed: int, start_step: int) -> Iterator[HostBatch]:
    """Training batches from a step on, with the leaf "draw".

    It is a function of (seed, step, id) and, of an example that is repeated, of how often its id
    came before; the copies of an example are on one host.
    """

    def draw(step: int, ids: np.ndarray) -> np.ndarray:
        order = np.argsort(ids, kind="stable")
        copies = np.empty(len(ids), np.int64)
        copies[order] = np.arange(len(ids)) - np.searchsorted(ids[order], ids[order])
        mixed = hash64(seed, _DRAW_SITE, step, ids, copies)
        return (mixed >> np.uint64(33)).astype(np.int32)

    steps = zip(itertools.count(start_step), batches, strict=False)
    return ({**batch, "draw": draw(step, batch["id"])} for step, batch in steps)


def augment_images(policy: str, images: jax.Array, seeds: jax.Array) -> jax.Array:
    """Training images uint8[b, h, w, 3] after the operations of `config.augmentation`."""
    groups = len(images) // math.gcd(len(images), _GROUP)
    return augment.apply(augment.Policy.parse(policy), images, seeds, groups)


@jax.named_scope("mix")
def mix(
    images: jax.Array, labels: jax.Array, seeds: jax.Array, *, mixup: float, cutmix: float
) -> Mixed:
    """Mixes row i with row i - 1, and row 0 with the last, by mixup, cutmix or either per row.

    mixup adds share * row i and (1 - share) * row i - 1. cutmix puts a box of row i - 1 into row i:
    sqrt(1 - share) of each side, the centre anywhere, cut at the edges; the share then becomes the
    share of row i's pixels that are left. Each row draws its share from Beta(alpha, alpha).

    Sources: Zhang et al. 2017 (arXiv:1710.09412); Yun et al. 2019 (arXiv:1905.04899); timm for the
    choice between both, half of the rows each. There all rows have one share by default.

    `images` are float[b, h, w, c], `labels` int32[b] or bool[b, K], `seeds` int32[b]; in a
    `shard_map` b is one device's share, and rows mix with rows of the same device. `mixup` and
    `cutmix` are their alpha; 0 turns one off.
    """
    if not mixup and not cutmix:
        return Mixed(images, labels, None, None)
    ways = []  # share float32[b], and the weight of the first image float32[b, h, w, 1] or less
    if mixup:
        share = _beta(uniform(seeds, _MIXUP), mixup)
        ways.append((share, image_ops.expand(share)))
    if cutmix:
        inside = _box(images.shape[1:3], seeds, _beta(uniform(seeds, _CUTMIX, 0), cutmix))
        ways.append((1 - jnp.mean(inside, (1, 2)), jnp.where(inside[..., None], 0.0, 1.0)))
    share, weight = ways[-1]
    if len(ways) == 2:
        is_cut = uniform(seeds, _BOTH) < 0.5
        share = jnp.where(is_cut, share, ways[0][0])
        weight = jnp.where(image_ops.expand(is_cut), weight, ways[0][1])
    others = jnp.roll(images, 1, axis=0)
    dtype = jnp.promote_types(images.dtype, jnp.float32)
    mixed = weight * images.astype(dtype) + (1 - weight) * others.astype(dtype)
    return Mixed(mixed.astype(images.dtype), labels, jnp.roll(labels, 1, axis=0), share)


def _box(shape: tuple[int, ...], seeds: jax.Array, share: jax.Array) -> jax.Array:
    """bool[b, h, w]: a box of 1 - share of the area, as far as it is in the image."""
    lines = []
    for i, size in enumerate(shape, 1):
        half = jnp.floor(size * jnp.sqrt(1 - share)) // 2
        centre = jnp.floor(uniform(seeds, _CUTMIX, i) * size)
        lines.append(_interval(size, centre - half, centre + half))
    return lines[0][:, :, None] & lines[1][:, None, :]


def _interval(size: int, begin: jax.Array, end: jax.Array) -> jax.Array:
    """bool[b, size]: whether begin <= i < end, of float32[b] each."""
    indices = jnp.arange(size, dtype=jnp.float32)
    return (indices >= begin[:, None]) & (indices < end[:, None])


def _beta(u: jax.Array, alpha: float) -> jax.Array:
    """The quantiles float32 of Beta(alpha, alpha) at u float32 in [0, 1).

    They come from a table of x^alpha, in which the distribution is almost linear towards x = 0. The
    error is below 1e-6 for alpha from 0.05 to 1. For alpha 4 it reaches 3e-4, in 1e-5 of all draws.
    """
    alpha = max(alpha, 1e-6)  # all draws are 0 or 1 from there on
    table = jnp.asarray(_quantiles(alpha))
    position = jnp.minimum(u, 1 - u) * (2 * _INTERVALS)
    below = jnp.minimum(position.astype(jnp.int32), _INTERVALS - 1)
    left, right = table[below], table[below + 1]
    power = left + (position - below) * (right - left)
    x = jnp.minimum(power ** (1 / alpha), 0.5)
    return jnp.where(u < 0.5, x, 1 - x)


@functools.lru_cache
def _quantiles(alpha: float) -> np.ndarray:
    """float32[_INTERVALS + 1]: x^alpha where Beta(alpha, alpha) has 0 to 0.5 below x, evenly.

    With t = x^alpha the density is (1 - t^(1 / alpha))^(alpha - 1), finite down to x = 0.
    """
    t = np.linspace(0, 0.5**alpha, 1 << 18)
    density = (1 - t ** (1 / alpha)) ** (alpha - 1)
    below = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    quantiles = np.linspace(0, 1, _INTERVALS + 1)
    return np.interp(quantiles, below / below[-1], t).astype(np.float32)


@jax.named_scope("erase")
def erase(images: jax.Array, seeds: jax.Array, probability: float) -> jax.Array:
    """Sets a random window to 0, the mean, in a share `probability` of the images.

    The window has 0.02 to 0.33 of the area, and a height of 0.3 to 3.3 times its width, even in the
    logarithm. Of ten windows the first one that is smaller than the image is taken.

    Sources: Zhong et al. 2017 (arXiv:1708.04896), and torchvision for these numbers. `images` are
    float[b, h, w, c], `seeds` int32[b].
    """
    height, width = images.shape[1:3]
    draws = _draws(seeds, _ERASE, (_ATTEMPTS, 2))
    area = height * width * (_AREAS[0] + (_AREAS[1] - _AREAS[0]) * draws[..., 0])
    low, high = np.log(_RATIOS)
    ratio = jnp.exp(low + (high - low) * draws[..., 1])
    sides = jnp.stack([jnp.sqrt(area * ratio), jnp.sqrt(area / ratio)], -1).round()
    fits = jnp.all(sides < np.array([height, width]), -1)
    sides = jnp.take_along_axis(sides, jnp.argmax(fits, 1)[:, None, None], 1)[:, 0]
    u = _draws(seeds, _ERASE, (3,), _ATTEMPTS * 2)
    chosen = (u[:, 0] < probability) & jnp.any(fits, 1)
    y = jnp.floor(u[:, 1] * (height - sides[:, 0] + 1))
    x = jnp.floor(u[:, 2] * (width - sides[:, 1] + 1))
    rows = _interval(height, y, y + sides[:, 0])
    columns = _interval(width, x, x + sides[:, 1])
    inside = rows[:, :, None] & columns[:, None, :] & chosen[:, None, None]
    return jnp.where(inside[..., None], 0, images)


def _draws(seeds: jax.Array, site: int, shape: tuple[int, ...], first: int = 0) -> jax.Array:
    """float32[b, *shape] in [0, 1): draws number `first` and so on of a site."""
    numbers = first + np.arange(math.prod(shape)).reshape(shape)
    return uniform(seeds.reshape(-1, *([1] * len(shape))), site, numbers)
